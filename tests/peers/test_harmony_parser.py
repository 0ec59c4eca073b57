"""Harmony against OpenAI's own parser, in both directions, over thousands of generated turns.

`Generator` writes well-formed turns with the messages it means and damages some of them token by token. What the
format accepts, the strict parser must read as the same messages; what the parser reads, the format must accept.
Every exception is a named case below: a predicate, its reason, and the demand that it really occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import openai_harmony
import pytest

from scripts.tables import compiled
from tests.support.harmony_turns import (
    CHANNELS,
    CONTROL,
    NAMES,
    STOPS,
    TERMINALS,
    accepted,
    handed_on,
    parse,
    read,
    streams,
    turns,
)
from tests.support.tag_walks import compiled_palette, palette, tag_of, walks

# -- what the format accepts and the parser refuses or reads otherwise -------------------------------------------


def terminal_after_a_closed_message(ids: tuple[int, ...]) -> bool:
    """The parser wants <|start|> after <|end|>; real output sometimes ends there, and nothing is lost by it."""
    return len(ids) > 1 and ids[-2] == CONTROL["<|end|>"] and NAMES.get(ids[-1]) in TERMINALS


def end_of_text_is_text(ids: tuple[int, ...]) -> bool:
    """<|endoftext|> ends a turn for the engine; the parser, which never sees it in service, reads it as text."""
    return ids[-1] == CONTROL["<|endoftext|>"]


def content_type_without_recipient(ids: tuple[int, ...]) -> bool:
    """`final <|constrain|>json`: the parser reports the content type as the recipient; servers put it right."""
    return any(m.recipient is None and m.content_type for m in read(ids))


ACCEPTED_ALONE: tuple[Callable[[tuple[int, ...]], bool], ...] = (
    terminal_after_a_closed_message,
    end_of_text_is_text,
    content_type_without_recipient,
)


# -- what the parser reads and the format refuses ----------------------------------------------------------------


def _segments(ids: tuple[int, ...]) -> list[tuple[list[int], list[int] | None]]:
    """Header and body of each message as the parser cuts them; the body is None where no <|message|> follows."""
    found, header, body = [], [], None
    for token in ids:
        if body is None and token == CONTROL["<|message|>"]:
            body = []
        elif body is not None and NAMES.get(token) in STOPS:
            found.append((header, body))
            header, body = [], None
        else:
            (header if body is None else body).append(token)
    if header or body is not None:
        found.append((header, body))
    return found


def messages_after_a_terminal(ids: tuple[int, ...]) -> bool:
    """The parser goes on after <|return|> or <|call|>; the engine has stopped there (and I2 says it must)."""
    segments, at = _segments(ids), 0
    for header, body in segments[:-1]:
        at += len(header) + len(body or ()) + 2
        if NAMES.get(ids[at - 1]) in ("<|return|>", "<|call|>"):
            return True
    return False


def control_token_in_a_body(ids: tuple[int, ...]) -> bool:
    """The parser reads <|start|>, <|channel|>, <|message|>, <|constrain|> in a body as text: a lost message."""
    named = {CONTROL[n] for n in ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")}
    return any(named & set(body or ()) for _, body in _segments(ids))


def end_of_text_before_the_end(ids: tuple[int, ...]) -> bool:
    """The parser reads <|endoftext|> in a body as text and goes on; the engine stops there."""
    return CONTROL["<|endoftext|>"] in ids[:-1] or (ids[-1] == CONTROL["<|endoftext|>"] and open_object(ids[:-1]))


def stop_token_in_a_header(ids: tuple[int, ...]) -> bool:
    """The parser reads a stop token before <|message|> as part of a name: `to=functions.f<|end|>`, a lost call."""
    stops = {CONTROL[n] for n in (*STOPS, "<|endoftext|>")}
    return any(stops & set(header) for header, body in _segments(ids) if body is not None)


def second_channel_or_start_in_a_header(ids: tuple[int, ...]) -> bool:
    """The parser takes the last <|channel|> and reads what stood before it as a recipient."""
    for i, (header, _) in enumerate(_segments(ids)):
        starts = header.count(CONTROL["<|start|>"]) - (i > 0)
        if header.count(CONTROL["<|channel|>"]) > 1 or starts > 0:
            return True
    return False


def special_token_in_a_header(ids: tuple[int, ...]) -> bool:
    """The parser reads any other special token in a header as part of a name."""
    return any(CONTROL["<|startoftext|>"] in header for header, _ in _segments(ids))


def _headers(ids: tuple[int, ...]) -> list[str]:
    chat = compiled("harmony")[1]
    parts = []
    for header, _ in _segments(ids):
        spelled = b"".join(NAMES[t].encode() if t in NAMES else chat.vocabulary.texts[t] for t in header)
        parts.append(spelled.decode("utf-8", "replace").removeprefix("<|start|>").removeprefix("assistant"))
    return parts


def no_channel(ids: tuple[int, ...]) -> bool:
    """A header without <|channel|>: the parser reads a message of no channel, which servers drop."""
    return any("<|channel|>" not in header for header in _headers(ids))


def unknown_channel(ids: tuple[int, ...]) -> bool:
    """A channel that is none of the three: the parser passes the name on, servers drop the message."""
    names = [
        re.split(r"[\s<]", header.split("<|channel|>", 1)[1])[0] for header in _headers(ids) if "<|channel|>" in header
    ]
    return any(name not in CHANNELS for name in names)


def another_role(ids: tuple[int, ...]) -> bool:
    """<|start|> with another role: the parser reads a message that no assistant may write."""
    return any(m.author.role != openai_harmony.Role.ASSISTANT for m in parse(ids) or ())


def words_before_the_channel(ids: tuple[int, ...]) -> bool:
    """Text before <|channel|> that is no `to=` recipient: the parser takes a word for one, two for one and a type."""
    return any(
        "<|channel|>" in header and not re.fullmatch(r"\s*(to=[^\s<]+)?", header.split("<|channel|>", 1)[0])
        for header in _headers(ids)
    )


def constrain_without_a_name(ids: tuple[int, ...]) -> bool:
    """<|constrain|> with nothing or a blank after it: the parser takes the bare token for the type."""
    return any(re.search(r"<\|constrain\|>(?=[\s<]|$)", header) for header in _headers(ids))


def two_content_types(ids: tuple[int, ...]) -> bool:
    """Two words after the channel or two <|constrain|>: the parser reads the first as a recipient."""
    for header in _headers(ids):
        _, _, after = header.partition("<|channel|>")
        words = re.findall(r"<\|constrain\|>[^\s<]*|[^\s<]+", after)
        if len([w for w in words[1:] if not w.startswith("to=")]) > 1:
            return True
    return False


def angle_bracket_in_a_name(ids: tuple[int, ...]) -> bool:
    """A `<` in a name or a stray word of a header: the parser takes it; markers spelled as text begin with it."""
    return any("<" in re.sub(r"<\|[a-z]+\|>", "", header) for header in _headers(ids))


def recipient_without_a_name(ids: tuple[int, ...]) -> bool:
    """`to=` or `to=functions.` with nothing behind it, or a second `to=` read as the content type."""
    return any(
        re.search(r"to=(functions\.)?(?=[\s<]|$)", header)
        or (header.count("to=") > 1 and header.count("functions.") > 1)
        for header in _headers(ids)
    )


def open_object(ids: tuple[int, ...]) -> bool:
    """A JSON call whose object is not closed: the parser delivers the piece, and the call is lost."""
    for message in handed_on(parse(ids) or []):
        recipient = message.recipient or ""
        if recipient.startswith("functions.") and message.content_type in (None, "json"):
            body = message.body.strip(" \t\r\n")
            if body and not body.endswith("}"):
                return True
    return False


REFUSED_ALONE: tuple[Callable[[tuple[int, ...]], bool], ...] = (
    messages_after_a_terminal,
    control_token_in_a_body,
    end_of_text_before_the_end,
    stop_token_in_a_header,
    second_channel_or_start_in_a_header,
    special_token_in_a_header,
    another_role,
    no_channel,
    unknown_channel,
    words_before_the_channel,
    constrain_without_a_name,
    two_content_types,
    angle_bracket_in_a_name,
    recipient_without_a_name,
    open_object,
)


def test_generated_turns_are_accepted_and_parsed_as_meant():
    for turn in turns():
        assert accepted(turn.ids)
        assert read(turn.ids) == turn.messages
        if not any(named(turn.ids) for named in ACCEPTED_ALONE):
            assert handed_on(parse(turn.ids)) == turn.messages


def test_what_the_format_accepts_the_parser_reads_as_the_same_messages():
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not ids or not accepted(ids):
            continue
        messages = parse(ids)
        if messages is not None and handed_on(messages) == read(ids):
            agreed += 1
            continue
        named = [case.__name__ for case in ACCEPTED_ALONE if case(ids)]
        assert named, f"read otherwise: {''.join(map(compiled('harmony')[1].spell, ids))!r}"
        cases.update(named)
    assert agreed > 1000
    assert set(cases) == {case.__name__ for case in ACCEPTED_ALONE}


def test_what_the_parser_reads_the_format_accepts_but_for_named_cases():
    cases = Counter()
    agreed = 0
    for ids in streams():
        if parse(ids) is None:
            continue
        if accepted(ids):
            agreed += 1
            continue
        named = [case.__name__ for case in REFUSED_ALONE if case(ids)]
        assert named, f"refused, but read: {''.join(map(compiled('harmony')[1].spell, ids))!r}"
        cases.update(named[:1])
    assert agreed > 1000
    assert set(cases) == {case.__name__ for case in REFUSED_ALONE}


@pytest.mark.parametrize("case", ACCEPTED_ALONE + REFUSED_ALONE, ids=lambda case: case.__name__)
def test_every_named_case_says_why(case):
    assert case.__doc__


# -- xgrammar -----------------------------------------------------------------------------------------------------

FRAGMENTS = (
    *(
        "analysis",
        "commentary",
        "final",
        " to=functions.",
        "f",
        "g",
        " json",
        "json",
        " ",
        "{",
        "}",
        "{}",
        '"x"',
        '"s"',
    ),
    *(":", "1", '"', ",", "assistant", "Blue", "\n"),
)
WALKS = 150


def test_what_the_structural_tag_allows_is_accepted_but_for_named_cases():
    chat, preferred = palette("harmony", FRAGMENTS, ("<|start|>",))
    table = compiled_palette("harmony", chat)
    cases = Counter()
    for ids in walks(tag_of("harmony", chat, ("<|endoftext|>",), "auto"), preferred, WALKS, seed=1):
        walk = table.host.walk(ids)
        if walk.taken == len(ids) and table.host.may_end(walk.state):
            cases["accepted"] += 1
        elif not ids:
            cases["a turn without any message, which the parser refuses"] += 1
        elif walk.state == table.host.ended:
            cases["messages behind <|call|> or <|return|>, where the engine has stopped"] += 1
        else:
            assert chat.spell(ids[walk.taken]) in CONTROL, "".join(map(chat.spell, ids))
            cases["a control token in a body, which the tag takes for text"] += 1
    assert len(cases) == 4
    assert cases["accepted"] > WALKS // 5
