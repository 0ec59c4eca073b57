"""llama_3 against SGLang's detector and xgrammar's structural tag; exceptions are named cases that must occur."""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from functools import cache

import pytest

from scripts.tables import compiled
from tests.support.damage import blocks_opened, damaged
from tests.support.sglang_parsers import Call, calls_read
from tests.support.streams import is_turn
from tests.support.tag_walks import compiled_palette, palette, tag_of, walks

logging.getLogger("sglang").setLevel(logging.CRITICAL)  # it reports every call that it drops

DETECTOR = "llama32_detector:Llama32Detector"
TURNS, DAMAGED, WALKS = 300, 1500, 150
TERMINALS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
ARGUMENTS = ({}, {"x": 1}, {"s": 'a "b" {c} ; \\ 空\n'}, {"a": {"b": [{"c": {}}, "}"]}, "d": None})


def written(choose: random.Random) -> tuple[str, list[Call]]:
    """A turn with its terminal, and the calls that it means."""
    calls = [(choose.choice("fgh"), choose.choice(ARGUMENTS)) for _ in range(choose.choice((0, 1, 1, 2, 3)))]
    spelled = []
    for name, arguments in calls:
        call: dict[str, object] = {"type": "function"} if choose.random() < 0.3 else {}
        call |= {"name": name, choose.choice(("parameters", "parameters", "arguments")): arguments}
        spelled.append(json.dumps(call, ensure_ascii=False, indent=choose.choice((None, 1))))
    tag = choose.choice(("", "<|python_tag|>", "Looking.<|python_tag|>")) if calls else "Blue."
    return tag + ";".join(spelled) + choose.choice(TERMINALS), calls


@cache
def streams() -> tuple[tuple[int, ...], ...]:
    choose = random.Random(3)
    chat = compiled("llama_3")[1]
    controls = [chat.vocabulary.controls[name] for name in ("<|python_tag|>", *TERMINALS, "<|start_header_id|>")]
    fragments = [chat.encode(piece) for piece in ("}", "{", " ", '"', "x", ";", "\n", ",")]
    found = [damaged(choose, chat.encode(written(choose)[0]), controls, fragments, most=2) for _ in range(DAMAGED)]
    return (*found, tuple(chat.encode('\n{"name": "f", "parameters": {}}<|eot_id|>')))


def text_of(ids: tuple[int, ...]) -> str:
    chat = compiled("llama_3")[1]
    names = {i: n.encode() for n, i in chat.vocabulary.controls.items()}
    spelled = b"".join(names.get(i) or chat.vocabulary.texts[i] for i in ids).decode("utf-8", "replace")
    for terminal in TERMINALS:
        spelled = spelled.removesuffix(terminal)
    return spelled


def read(text: str) -> list[Call] | None:
    """The calls that the detector reads, or None where it raises: it takes any JSON value for an object."""
    try:
        return calls_read(DETECTOR, text)
    except AttributeError:
        return None


def refused_at(ids: tuple[int, ...]) -> str:
    """The token that no turn can hold, 'end' if the turn stops too early."""
    table, chat = compiled("llama_3")
    taken = table.host.walk(ids).taken
    return chat.spell(ids[taken]) if taken < len(ids) else "end"


def test_the_detector_reads_generated_turns_as_meant():
    choose = random.Random(3)
    table, chat = compiled("llama_3")
    for _ in range(TURNS):
        text, meant = written(choose)
        ids = chat.encode(text)
        assert is_turn(table, ids)
        assert blocks_opened(table, ids) == len(meant)
        assert calls_read(DETECTOR, text_of(tuple(ids))) == meant


_HEAD = re.compile(
    r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:\s*"[^"\\]+"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{'
)

# Accepted turns in which the detector does not read as many calls as the format has blocks.


def white_space_before_a_call(text: str) -> bool:
    """A call that begins the turn behind white space is hidden from the detector; vLLM takes JSON at any `{`."""
    return "<|python_tag|>" not in text and text[:1] in (" ", "\n", ";")


def calls_not_joined_by_one_character(text: str) -> bool:
    """The detector skips one character behind a call, whatever it is, and reads the next call only right there."""
    for part in text.split("<|python_tag|>"):
        rest = part[max(part.find("{"), 0) :]
        while rest.startswith("{"):
            try:
                rest = rest[json.JSONDecoder().raw_decode(rest)[1] :]
            except ValueError:
                break
            if rest and rest[1:2] != "{":
                return True
            rest = rest[1:]
    return False


def text_behind_the_tag(text: str) -> bool:
    """Text between the tag and the first object, or between objects: the detector looks on, the format reads text."""
    return any(part.lstrip(" \n;")[:1] != "{" for part in text.split("<|python_tag|>")[1:])


def call_is_no_json(text: str) -> bool:
    """Braces and strings match, the rest is no JSON: the detector reads no call. Its inside is a grammar's task."""
    for part in text.split("<|python_tag|>"):
        rest = part[max(part.find("{"), 0) :]
        while rest.startswith("{"):
            try:
                rest = rest[json.JSONDecoder().raw_decode(rest)[1] + 1 :].lstrip(" \n;")
            except ValueError:
                return True
    return False


def object_of_another_shape(text: str) -> bool:
    """An object with damaged keys: the detector takes it for a call without arguments, the format for an answer."""
    return len(_HEAD.findall(text)) < text.count("name")


def value_that_is_no_object(text: str) -> bool:
    """A number or string where a call may stand: the detector raises, and the server answers with an error."""
    return read(text) is None


def name_is_unknown(text: str) -> bool:
    """The detector drops calls of tools that were not offered."""
    return any(part[1:2] not in "fgh" or part[2:3] != '"' for part in text.split('"name": ')[1:])


ACCEPTED_ALONE = (
    white_space_before_a_call,
    calls_not_joined_by_one_character,
    text_behind_the_tag,
    call_is_no_json,
    object_of_another_shape,
    value_that_is_no_object,
    name_is_unknown,
)

# Refused turns in which the detector reads a call all the same.


def text_after_the_terminal(ids: tuple[int, ...]) -> bool:
    """The detector never sees a terminal as such; the engine stops there."""
    ends = {compiled("llama_3")[1].vocabulary.controls[name] for name in TERMINALS}
    return bool(ends & set(ids[:-1]))


def another_call_is_open(ids: tuple[int, ...]) -> bool:
    """The detector reads the sound calls of a turn and drops the one that is not closed without a word."""
    return refused_at(ids) in ("end", *TERMINALS)


def role_opener(ids: tuple[int, ...]) -> bool:
    """The detector reads a header's opener as text."""
    return refused_at(ids) == "<|start_header_id|>"


def tag_in_a_call(ids: tuple[int, ...]) -> bool:
    """The tag where a call is open: the detector begins anew at the first tag, and what stood before is text."""
    return refused_at(ids) == "<|python_tag|>"


REFUSED_ALONE = (text_after_the_terminal, another_call_is_open, role_opener, tag_in_a_call)


def test_every_block_of_an_accepted_turn_is_read_but_for_named_cases():
    table, _ = compiled("llama_3")
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not is_turn(table, list(ids)):
            continue
        text = text_of(ids)
        calls = read(text)
        if calls is not None and len(calls) == blocks_opened(table, ids):
            agreed += 1
            continue
        named = [case.__name__ for case in ACCEPTED_ALONE if case(text)]
        assert named, f"accepted, but read otherwise: {text!r}"
        cases.update(named)
    assert agreed > 300
    assert set(cases) == {case.__name__ for case in ACCEPTED_ALONE}


def test_turns_with_calls_that_the_detector_reads_are_accepted_but_for_named_cases():
    table, _ = compiled("llama_3")
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not read(text_of(ids)):
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
    *('{"name": "', "f", "g", '", "parameters": ', '{"name": "f", "parameters": {', "{", "}", "{}", '"x"', '"s"'),
    *(": ", "1", '"', ", ", " ", ";", "Blue"),
)
# The tag knows no control tokens; in its free text, and in strings, every one passes.
STRAY = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>"}


def test_what_the_structural_tag_allows_is_accepted_but_for_stray_control_tokens():
    chat, preferred = palette("llama_3", FRAGMENTS, ("<|start_header_id|>",))
    table = compiled_palette("llama_3", chat)
    found = walks(tag_of("llama", chat, TERMINALS, "disabled"), preferred, WALKS, seed=3)
    refused = [ids for ids in found if not is_turn(table, list(ids))]
    assert len(found) == WALKS
    assert {chat.spell(ids[table.host.walk(ids).taken]) for ids in refused} <= STRAY
    assert 0 < len(refused) < WALKS
    assert sum(blocks_opened(table, ids) > 0 for ids in found if ids not in refused) > WALKS // 20
