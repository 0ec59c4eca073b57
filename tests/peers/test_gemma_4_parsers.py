"""gemma_4 against SGLang's detector and xgrammar's structural tag.

What a peer reads or says, the format accepts, and what the format accepts, the detector reads as the same calls;
every exception is a named case: a predicate, its reason, and the demand that it really occurs.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from scripts.tables import compiled
from tests.support.damage import blocks_opened, damaged
from tests.support.sglang_parsers import Call, calls_read, split_reasoning
from tests.support.streams import is_turn, spell
from tests.support.tag_walks import compiled_palette, palette, tag_of, walks

DETECTOR = "gemma4_detector:Gemma4Detector"
TURNS, DAMAGED, WALKS = 300, 1500, 120
TERMINALS = ("<turn|>", "<|tool_response>", "<eos>")

VALUES = {
    "1": 1,
    "-3": -3,
    "0.5": 0.5,
    "true": True,
    "false": False,
    '<|"|><|"|>': "",
    '<|"|>a, {b}: "c"<|"|>': 'a, {b}: "c"',
    '<|"|>空⏎🌤️<|"|>': "空\n🌤️",
    "{}": {},
    "{a:{b:1}}": {"a": {"b": 1}},
    '[1,<|"|>}<|"|>]': [1, "}"],
}
TEXTS = ("", "Looking.", "⏎", " 空 {x:1} ", "call:f{", "a < b")


def written(choose: random.Random) -> tuple[str, list[Call]]:
    """A turn with its terminal, and the calls that it means."""
    parts = [choose.choice(("", "", "<|channel>thought⏎Hm.⏎<channel|>")), choose.choice(TEXTS)]
    meant: list[Call] = []
    for _ in range(choose.choice((0, 1, 1, 2, 3))):
        keys = choose.sample(("s", "x", "größe", "two words"), choose.randint(0, 3))
        values = {key: choose.choice(list(VALUES)) for key in keys}
        name = choose.choice(("f", "g", "h"))
        parts.append(f"<|tool_call>call:{name}{{{','.join(f'{k}:{v}' for k, v in values.items())}}}<tool_call|>")
        parts.append(choose.choice(("", "", *TEXTS)))
        meant.append((name, {k: VALUES[v] for k, v in values.items()}))
    parts.append(choose.choice(TERMINALS))
    return "".join(parts).replace("⏎", "\n"), meant


@cache
def streams() -> tuple[tuple[int, ...], ...]:
    choose = random.Random(4)
    chat = compiled("gemma_4")[1]
    controls = [chat.vocabulary.controls[name] for name in chat.vocabulary.controls]
    fragments = [chat.encode(piece) for piece in ("}", "{", " ", "call:", "x:1,", "\n", "thought\n", "(")]
    return tuple(damaged(choose, chat.encode(written(choose)[0]), controls, fragments, most=2) for _ in range(DAMAGED))


def text_of(ids: tuple[int, ...]) -> str:
    chat = compiled("gemma_4")[1]
    names = {i: n.encode() for n, i in chat.vocabulary.controls.items()}
    spelled = b"".join(names.get(i) or chat.vocabulary.texts[i] for i in ids).decode("utf-8", "replace")
    for terminal in TERMINALS:
        spelled = spelled.removesuffix(terminal)
    return spelled


def hangs_the_detector(text: str) -> bool:
    """A string that is not closed inside a list: SGLang 0.5.23 never returns from it, so no test may ask."""
    return any("[" in call and call.count('<|"|>') % 2 for call in text.split("<|tool_call>call:"))


@cache
def readable_streams() -> tuple[tuple[int, ...], ...]:
    found = tuple(ids for ids in streams() if not hangs_the_detector(text_of(ids)))
    assert len(found) < len(streams())
    return found


def refused_at(ids: tuple[int, ...]) -> tuple[str, bool]:
    """The token that no turn can hold ('end' if the turn stops too early), and whether a call is open there."""
    table, chat = compiled("gemma_4")
    walk = table.host.walk(ids)
    token = chat.spell(ids[walk.taken]) if walk.taken < len(ids) else "end"
    return token, table.host.block_open(walk.state)


def test_the_detector_reads_generated_turns_as_meant():
    choose = random.Random(4)
    table, chat = compiled("gemma_4")
    for _ in range(TURNS):
        text, meant = written(choose)
        ids = chat.encode(text)
        assert is_turn(table, ids)
        assert blocks_opened(table, ids) == len(meant)
        assert calls_read(DETECTOR, text_of(tuple(ids))) == meant


# -- accepted, and read otherwise ---------------------------------------------------------------------------------


def white_space_before_the_label(text: str) -> bool:
    """`<|tool_call> call:`: one-shot the detector wants `call:` at once; streaming, and vLLM, it skips the blank."""
    return any(part[:1] in (" ", "\n") for part in text.split("<|tool_call>")[1:])


ACCEPTED_ALONE = (white_space_before_the_label,)


def test_a_closer_in_a_string_is_data_for_the_format_and_the_end_of_the_call_for_the_detector():
    text = '<|tool_call>call:f{s:<|"|>a<tool_call|>b<|"|>}<tool_call|>'
    assert is_turn(compiled("gemma_4")[0], compiled("gemma_4")[1].encode(text))
    assert calls_read(DETECTOR, text) == [("f", {"s": "a"})]


# -- refused, and read all the same -------------------------------------------------------------------------------


def another_call_is_lost(ids: tuple[int, ...]) -> bool:
    """The detector reads the sound calls of a turn and drops a broken one without a word."""
    opener = compiled("gemma_4")[1].vocabulary.controls["<|tool_call>"]
    return ids.count(opener) > len(calls_read(DETECTOR, text_of(ids)))


def marker_leaks_into_the_answer(ids: tuple[int, ...]) -> bool:
    """A marker where no call is open: the detector passes it on as text, in front of or behind good calls."""
    token, in_call = refused_at(ids)
    return not in_call and token in compiled("gemma_4")[1].vocabulary.controls


def text_after_the_terminal(ids: tuple[int, ...]) -> bool:
    """The detector never sees a terminal as such; the engine stops there."""
    chat = compiled("gemma_4")[1]
    taken = compiled("gemma_4")[0].host.walk(ids).taken
    return 0 < taken < len(ids) and chat.spell(ids[taken - 1]) in TERMINALS


def marker_in_arguments(ids: tuple[int, ...]) -> bool:
    """A marker in arguments outside strings: the detector takes it for text of a value or skips it."""
    token, in_call = refused_at(ids)
    return in_call and token in compiled("gemma_4")[1].vocabulary.controls and token not in TERMINALS


def terminal_in_an_open_call(ids: tuple[int, ...]) -> bool:
    """The engine stops at a terminal, so what follows it in the stream would never have come."""
    token, in_call = refused_at(ids)
    return in_call and token in TERMINALS


def name_with_blanks_or_parentheses(ids: tuple[int, ...]) -> bool:
    """Anything up to `{` is a name for the detector; no tool has such a name."""
    token, in_call = refused_at(ids)
    return in_call and not token.strip("{} (\n").startswith("<")


def thought_is_damaged(ids: tuple[int, ...]) -> bool:
    """The detector looks for calls anywhere; here a thought is not closed, or its label is broken."""
    token, in_call = refused_at(ids)
    broken = any(not part.startswith("thought\n") for part in text_of(ids).split("<|channel>")[1:])
    return not in_call and (token == "end" or broken)


REFUSED_ALONE = (
    text_after_the_terminal,
    another_call_is_lost,
    marker_leaks_into_the_answer,
    marker_in_arguments,
    terminal_in_an_open_call,
    name_with_blanks_or_parentheses,
    thought_is_damaged,
)


def test_every_block_of_an_accepted_turn_is_read_but_for_named_cases():
    table, _ = compiled("gemma_4")
    cases = Counter()
    for ids in readable_streams():
        text = text_of(ids)
        if is_turn(table, list(ids)) and blocks_opened(table, ids) != len(calls_read(DETECTOR, text)):
            named = [case.__name__ for case in ACCEPTED_ALONE if case(text)]
            assert named, f"accepted, but read otherwise: {text!r}"
            cases.update(named)
    assert set(cases) == {case.__name__ for case in ACCEPTED_ALONE}


def test_turns_with_calls_that_the_detector_reads_are_accepted_but_for_named_cases():
    table, _ = compiled("gemma_4")
    cases = Counter()
    agreed = 0
    for ids in readable_streams():
        if not calls_read(DETECTOR, text_of(ids)):
            continue
        if is_turn(table, list(ids)):
            agreed += 1
            continue
        named = [case.__name__ for case in REFUSED_ALONE if case(ids)]
        assert named, f"refused, but read: {text_of(ids)!r} at {refused_at(ids)}"
        cases.update(named)
    assert agreed > 100
    assert set(cases) == {case.__name__ for case in REFUSED_ALONE}


@pytest.mark.parametrize("case", ACCEPTED_ALONE + REFUSED_ALONE, ids=lambda case: case.__name__)
def test_every_named_case_says_why(case):
    assert case.__doc__


def test_reasoning_is_split_where_the_format_closes_it():
    text = "<|channel>thought\nSky.\n<channel|>Blue."
    assert is_turn(compiled("gemma_4")[0], spell(compiled("gemma_4")[1], text))
    assert split_reasoning("Gemma4Detector", text, opened=False)[1] == "Blue."


# -- xgrammar -----------------------------------------------------------------------------------------------------

FRAGMENTS = ("thought\n", "call:", "f", "g", "{", "}", "{}", "x:", "s:", "1", ",", ":", " ", "Blue", "\n")
MARKERS = ("<|channel>", "<channel|>", "<|tool_call>")
# In free text the tag excludes the markers of channels and calls alone; any other control token passes.
STRAY = {"<|turn>", "<|tool>", "<tool|>", "<|think|>", "<bos>", "<tool_response|>", '<|"|>', "<tool_call|>", "<eos>"}


def test_what_the_structural_tag_allows_is_accepted_but_for_stray_control_tokens():
    chat, preferred = palette("gemma_4", FRAGMENTS, MARKERS)
    table = compiled_palette("gemma_4", chat)
    strays = set()
    for reasoning in ("enabled", "auto", "disabled"):
        tag = tag_of("gemma_4", chat, ("<turn|>", "<|tool_response>"), reasoning)
        found = walks(tag, preferred, WALKS, seed=4)
        accepted = [ids for ids in found if is_turn(table, list(ids))]
        refused = set(found) - set(accepted)
        strays |= {chat.spell(ids[table.host.walk(ids).taken]) for ids in refused if not _goes_on(chat, ids)}
        assert len(found) == WALKS
        assert sum(blocks_opened(table, ids) > 0 for ids in accepted) > WALKS // 20
    assert strays
    assert strays <= STRAY


def _goes_on(chat, ids: tuple[int, ...]) -> bool:
    """<eos> is text for the tag, and a turn that goes on behind one is none."""
    return chat.vocabulary.controls["<eos>"] in ids[:-1]
