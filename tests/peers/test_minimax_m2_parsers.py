"""minimax_m2 against SGLang's detector and xgrammar's structural tag; exceptions are named cases that must occur."""

from __future__ import annotations

import logging
import random
from collections import Counter
from functools import cache

import pytest

from scripts.tables import compiled
from structured_commit import StructureTable
from tests.support.damage import blocks_opened, damaged
from tests.support.sglang_parsers import Call, calls_read
from tests.support.streams import is_turn, spell
from tests.support.tag_walks import Tag, compiled_palette, palette, tag_of, walks

logging.getLogger("sglang").setLevel(logging.CRITICAL)  # it reports every call that it drops

DETECTOR = "minimax_m2:MinimaxM2Detector"
TURNS, DAMAGED, WALKS = 300, 1500, 120
VALUES = {"1": 1, "-20": -20}
STRINGS = ("", "a < b && c", 'line\n "two"\n', "空 🌤️", '{"a": [1]}', "<p>x</p>", "1")
TEXTS = ("", "Looking.", "\n", " 空 {x} ", "a < b")
PROMPT = "]~b]ai\n<think>\n"


def written(choose: random.Random) -> tuple[str, list[Call]]:
    """A turn behind reasoning, with its terminal, and the calls that it means."""
    parts = [choose.choice(("\n</think>\n\n", "Hm.\n</think>\n\n", "</think>")), choose.choice(TEXTS)]
    meant: list[Call] = []
    for _ in range(choose.choice((0, 1, 1, 2))):
        blank = choose.choice(("", "\n", "\n  "))
        invokes = []
        for _ in range(choose.choice((1, 1, 2, 3))):
            name, arguments, parameters = choose.choice("fgh"), {}, []
            if choose.random() < 0.7:
                spelled = choose.choice(list(VALUES))
                arguments["x"] = VALUES[spelled]
                parameters.append(f'<parameter name="x">{spelled}</parameter>{blank}')
            if choose.random() < 0.7:
                arguments["s"] = choose.choice(STRINGS)
                parameters.append(f'<parameter name="s">{arguments["s"]}</parameter>{blank}')
                arguments["s"] = arguments["s"].strip("\n")
            invokes.append(f'<invoke name="{name}">{blank}{"".join(parameters)}</invoke>{blank}')
            meant.append((name, arguments))
        parts.append(f"<minimax:tool_call>{blank}{''.join(invokes)}</minimax:tool_call>")
        parts.append(choose.choice(TEXTS))
    return "".join(parts) + "[e~[", meant


@cache
def streams() -> tuple[tuple[int, ...], ...]:
    choose = random.Random(2)
    chat = compiled("minimax_m2")[1]
    controls = list(chat.vocabulary.controls.values())
    fragments = [
        chat.encode(piece) for piece in (">", '"', " ", "x", "\n", "<", "</invoke>", "</parameter>", "<invoke")
    ]
    found = [damaged(choose, chat.encode(written(choose)[0]), controls, fragments, most=2) for _ in range(DAMAGED)]
    variants = ("<invoke name='f'></invoke>", '<invoke  name="f" ></invoke>')
    return (*found, *(tuple(chat.encode(f"</think><minimax:tool_call>{v}</minimax:tool_call>[e~[")) for v in variants))


def text_of(ids: tuple[int, ...]) -> str:
    chat = compiled("minimax_m2")[1]
    names = {i: n.encode() for n, i in chat.vocabulary.controls.items()}
    spelled = b"".join(names.get(i) or chat.vocabulary.texts[i] for i in ids)
    return spelled.decode("utf-8", "replace").removesuffix("[e~[")


def refused_at(ids: tuple[int, ...]) -> tuple[str, bool]:
    """The token that no turn can hold ('end' if the turn stops too early), and whether a block is open there."""
    table, chat = compiled("minimax_m2")
    walk = table.host.walk(ids)
    token = chat.spell(ids[walk.taken]) if walk.taken < len(ids) else "end"
    return token, table.host.block_open(walk.state)


def test_the_detector_reads_generated_turns_as_meant():
    choose = random.Random(2)
    table, chat = compiled("minimax_m2")
    for _ in range(TURNS):
        text, meant = written(choose)
        ids = chat.encode(text)
        assert is_turn(table, ids)
        assert blocks_opened(table, ids) == text.count("<minimax:tool_call>")
        assert calls_read(DETECTOR, text_of(tuple(ids))) == meant


# Accepted turns with a block of which the detector reads fewer calls than there are blocks.


def quotes(text: str) -> bool:
    """A name in single quotes or none is a call for vLLM and TensorRT-LLM; the detector drops it."""
    return text.count("<invoke name=") > text.count('<invoke name="')


def name_is_unknown(text: str) -> bool:
    """The detector drops calls of tools that were not offered."""
    return any(part.split('"')[0] not in ("f", "g", "h") for part in text.split('<invoke name="')[1:])


def more_white_space(text: str) -> bool:
    """`<invoke  name=` or a blank before `>`: vLLM and TensorRT-LLM skip it, the detector wants the exact tag."""
    return any(not part.startswith(" name=") for part in text.split("<invoke")[1:]) or '" >' in text or '"\n>' in text


def markup_in_reasoning(text: str) -> bool:
    """What stands before </think> is reasoning: an opener there opens no block for a reader of the whole."""
    return "<minimax:tool_call>" in text.split("</think>")[0]


ACCEPTED_ALONE = (quotes, name_is_unknown, more_white_space, markup_in_reasoning)

# Refused turns in which the detector reads a call all the same.


def text_after_the_terminal(ids: tuple[int, ...]) -> bool:
    """The detector never sees the terminal as such; the engine stops there."""
    return compiled("minimax_m2")[1].vocabulary.controls["[e~["] in ids[:-1]


def another_block_is_lost(ids: tuple[int, ...]) -> bool:
    """The detector reads the sound blocks of a turn; one that is not closed leaks into the answer as text."""
    token, in_block = refused_at(ids)
    return token == "end" or (in_block and token == "[e~[")


def marker_leaks(ids: tuple[int, ...]) -> bool:
    """A marker where none may stand: the detector passes it on in the answer, or skips it inside a block."""
    return refused_at(ids)[0] in compiled("minimax_m2")[1].vocabulary.controls


def words_between_tags(ids: tuple[int, ...]) -> bool:
    """In a block the detector skips what it does not know, names and parameters included."""
    token, in_block = refused_at(ids)
    return in_block and token not in compiled("minimax_m2")[1].vocabulary.controls


REFUSED_ALONE = (text_after_the_terminal, another_block_is_lost, marker_leaks, words_between_tags)


def test_every_block_of_an_accepted_turn_is_read_but_for_named_cases():
    table, _ = compiled("minimax_m2")
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not is_turn(table, list(ids)):
            continue
        text = text_of(ids)
        if len(calls_read(DETECTOR, text)) >= blocks_opened(table, ids):
            agreed += 1
            continue
        named = [case.__name__ for case in ACCEPTED_ALONE if case(text)]
        assert named, f"accepted, but read otherwise: {text!r}"
        cases.update(named)
    assert agreed > 300
    assert set(cases) == {case.__name__ for case in ACCEPTED_ALONE}


def test_turns_with_calls_that_the_detector_reads_are_accepted_but_for_named_cases():
    table, _ = compiled("minimax_m2")
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not calls_read(DETECTOR, text_of(ids)):
            continue
        if is_turn(table, list(ids)):
            agreed += 1
            continue
        named = [case.__name__ for case in REFUSED_ALONE if case(ids)]
        assert named, f"refused, but read: {text_of(ids)!r} at {refused_at(ids)}"
        cases.update(named)
    assert agreed > 300
    assert set(cases) == {case.__name__ for case in REFUSED_ALONE}


@pytest.mark.parametrize("case", ACCEPTED_ALONE + REFUSED_ALONE, ids=lambda case: case.__name__)
def test_every_named_case_says_why(case):
    assert case.__doc__


# -- xgrammar -----------------------------------------------------------------------------------------------------

FRAGMENTS = (
    *("\n", '<invoke name="f">\n', '<invoke name="g">\n', '<parameter name="x">', '<parameter name="s">', "1"),
    *("</parameter>", "</invoke>\n", "Blue"),
)
MARKERS = ("]~b]", "<think>", "</think>", *["<minimax:tool_call>"] * 3, "</minimax:tool_call>")


def role_opener(tag: Tag, table: StructureTable, ids: tuple[int, ...], start: int) -> bool:
    """The tag knows no control tokens: in its free text and in values role openers pass."""
    taken = table.host.walk(ids, start).taken
    return taken < len(ids) and tag.chat.spell(ids[taken]) in ("]~b]", "]~!b[")


def closer_in_text(tag: Tag, table: StructureTable, ids: tuple[int, ...], start: int) -> bool:
    """In the tag's free text </minimax:tool_call> passes where no block is open; a parser passes it on or drops it."""
    return any(not table.host.block_open(table.host.walk(ids[:i], start).state) for i in _closers(tag, ids))


def closer_in_a_value(tag: Tag, table: StructureTable, ids: tuple[int, ...], start: int) -> bool:
    """In a value </minimax:tool_call> is data for the tag; every parser ends the block at it."""
    for i in _closers(tag, ids):
        matcher = tag.matcher()
        assert all(matcher.accept_token(token) for token in ids[: i + 1])
        if not tag.allowed(matcher)[tag.terminals[0]]:
            return True
    return False


def _closers(tag: Tag, ids: tuple[int, ...]) -> list[int]:
    closer = tag.chat.vocabulary.controls["</minimax:tool_call>"]
    return [i for i, token in enumerate(ids) if token == closer]


ONLY_THE_TAG = (role_opener, closer_in_text, closer_in_a_value)


def test_what_the_structural_tag_allows_is_accepted_but_for_named_cases():
    chat, preferred = palette("minimax_m2", FRAGMENTS, MARKERS)
    table = compiled_palette("minimax_m2", chat)
    prompted = table.host.locate(spell(chat, PROMPT, "longest"))
    assert table.host.tracks(prompted)
    cases = Counter()
    for reasoning, start in (("enabled", prompted), ("auto", table.host.start), ("disabled", prompted)):
        tag = tag_of("minimax", chat, ("[e~[",), reasoning)
        found = walks(tag, preferred, WALKS, seed=2)
        accepted = [ids for ids in found if is_turn(table, list(ids), start)]
        for ids in set(found) - set(accepted):
            named = [case.__name__ for case in ONLY_THE_TAG if case(tag, table, ids, start)]
            assert named, f"refused: {''.join(map(chat.spell, ids))!r}"
            cases.update(named)
        assert len(found) == WALKS
        assert sum(blocks_opened(table, ids, start) > 0 for ids in accepted) > WALKS // 20
    assert set(cases) == {case.__name__ for case in ONLY_THE_TAG}
