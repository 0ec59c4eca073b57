"""mistral against mistral-common's encoder and grammar (real Tekken table) and SGLang's detector.

What the encoder writes and the grammar allows, the format accepts; where the grammar is stricter is a list of
named turns. What the format accepts, the detector reads as the same calls, and the other way round, but for
named cases, each of which must occur.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from scripts.tables import compiled
from structured_commit import StructureTable, Vocabulary, compile_format
from tests.support.damage import blocks_opened, damaged
from tests.support.sglang_parsers import Call, calls_read
from tests.support.streams import is_turn

common = pytest.importorskip("mistral_common")
llguidance = pytest.importorskip("llguidance")

from mistral_common.guidance.grammar_factory import GrammarFactory  # noqa: E402
from mistral_common.protocol.instruct.chunk import TextChunk, ThinkChunk  # noqa: E402
from mistral_common.protocol.instruct.messages import AssistantMessage  # noqa: E402
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall, ToolChoiceEnum  # noqa: E402
from mistral_common.tokens.tokenizers import instruct  # noqa: E402
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, TokenizerVersion  # noqa: E402
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: E402
from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: E402

logging.getLogger("sglang").setLevel(logging.CRITICAL)  # it reports every call that it drops

DETECTOR = "mistral_detector:MistralDetector"
LATER = {"[ARGS]": 32, "[CALL_ID]": 33, "[THINK]": 34, "[/THINK]": 35}
VERSIONS = {
    "v3": (TokenizerVersion.v3, (), instruct.InstructTokenizerV3),
    "v11": (TokenizerVersion.v11, ("[ARGS]", "[CALL_ID]"), instruct.InstructTokenizerV11),
    "v13": (TokenizerVersion.v13, tuple(LATER), instruct.InstructTokenizerV13),
}


@cache
def tekken(version: str) -> Tekkenizer:
    """The Tekken table that mistral-common carries, with the control tokens of a later version named."""
    number, later, _ = VERSIONS[version]
    data = json.loads((Path(common.__file__).parent / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    named = [{**dict(t), "token_str": str(t["token_str"])} for t in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    ranks = {LATER[name]: name for name in later}
    last = max(ranks, default=len(named) - 1)
    named += [
        {"rank": i, "token_str": ranks.get(i, f"<SPECIAL_{i}>"), "is_control": True}
        for i in range(len(named), last + 1)
    ]
    return Tekkenizer(
        vocab=data["vocab"],
        special_tokens=named,
        pattern=data["config"]["pattern"],
        vocab_size=data["config"]["default_vocab_size"],
        num_special_tokens=data["config"]["default_num_special_tokens"],
        version=number,
    )


@cache
def table_of(version: str) -> StructureTable:
    tokenizer = tekken(version)
    special = range(tokenizer.num_special_tokens)
    names = {tokenizer.id_to_piece(i): i for i in special}
    controls = {name: i for name, i in names.items() if not name.startswith("<SPECIAL_")}
    texts = {
        i: tokenizer.id_to_byte_piece(i, SpecialTokenPolicy.RAISE)
        for i in range(tokenizer.num_special_tokens, tokenizer.n_words)
    }
    return compile_format("mistral", Vocabulary(tokenizer.n_words, texts, controls))


# -- the encoder --------------------------------------------------------------------------------------------------


def call(name: str, arguments: object) -> ToolCall:
    return ToolCall(
        id="aB3dE5gH7", function=FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    )


ARGUMENTS = ({}, {"x": 1}, {"s": 'a "b" {c} [TOOL_CALLS] \\ 空\n'}, {"a": {"b": [{"c": {}}, "}"]}, "d": None})
MESSAGES = {
    "answer": AssistantMessage(content="It is blue."),
    "unicode answer": AssistantMessage(content="空は青い 🌤️\n\n</s> [TOOL_CALLS]f[ARGS]{"),
    **{f"call {i}": AssistantMessage(tool_calls=[call("f", arguments)]) for i, arguments in enumerate(ARGUMENTS)},
    "several calls": AssistantMessage(tool_calls=[call(f"tool-{i}", a) for i, a in enumerate(ARGUMENTS)]),
}
SINCE_V11 = {"text and calls": AssistantMessage(content="Looking.", tool_calls=[call("f", a) for a in ARGUMENTS])}
SINCE_V13 = {
    "thought": AssistantMessage(content=[ThinkChunk(thinking="Sky."), TextChunk(text="Blue.")]),
    "two thoughts": AssistantMessage(
        content=[ThinkChunk(thinking="a"), TextChunk(text="b"), ThinkChunk(thinking="c"), TextChunk(text="d")]
    ),
    "thought and calls": AssistantMessage(
        content=[ThinkChunk(thinking="Need f.")], tool_calls=[call("f", a) for a in ARGUMENTS]
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_encoder_writes_is_accepted(version):
    encoder = VERSIONS[version][2](tekken(version))
    table = table_of(version)
    messages = {**MESSAGES, **(SINCE_V11 if version != "v3" else {}), **(SINCE_V13 if version == "v13" else {})}
    for name, message in messages.items():
        ids = encoder.encode_assistant_message(message, is_before_last_user_message=False)
        assert ids[-1] == tekken(version).eos_id, name
        assert is_turn(table, ids), name
        assert is_turn(table, ids[:-1]), name
        opened = blocks_opened(table, ids[:-1])
        assert opened == (bool(message.tool_calls) if version == "v3" else len(message.tool_calls or ())), name


# -- the grammar --------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}, "required": []}
PIECES = ("f", "g", "{", "}", "{}", '"', '"x"', '"s"', ":", ": ", "1", ",", " ", "\n", "Blue", "空")
WALKS = 150


@cache
def grammar(version: str) -> tuple[object, str]:
    encoder = VERSIONS[version][2](tekken(version))
    factory = GrammarFactory(MistralTokenizer(encoder, validator=None, request_normalizer=None))
    tools = [Tool(function=Function(name=name, parameters=SCHEMA, strict=True)) for name in ("f", "g")]
    text = factory.get_lark_from_jinja(
        template=factory.select_jinja_template(),
        mode=ToolChoiceEnum.auto,
        tools=tools,
        json_schema=None,
        parallel_tool_calls=True,
        json_only=False,
        force_tool_names=False,
    )
    return factory.llg_tokenizer, llguidance.grammar_from("lark", text)


def walk(version: str, choose: random.Random, preferred: list[int]) -> list[int] | None:
    """A turn that the grammar allows, without its terminal, or None where a walk leads nowhere."""
    tokenizer, text = grammar(version)
    matcher = llguidance.LLMatcher(tokenizer, text)
    eos = tekken(version).eos_id
    ids: list[int] = []
    for _ in range(50):
        mask = matcher.compute_logit_bias()
        liked = [i for i in preferred if mask[i]]
        if mask[eos] and (not liked or choose.random() < 0.2):
            return ids
        if not liked:
            return None
        ids.append(choose.choice(liked))
        matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("version", ["v11", "v13"])
def test_what_the_grammar_allows_is_accepted(version):
    tokenizer, table = tekken(version), table_of(version)
    pieces = [i for piece in PIECES for i in tokenizer.encode(piece, bos=False, eos=False)]
    marks = [tokenizer.get_special_token(name) for name in ("[TOOL_CALLS]", *VERSIONS[version][1])]
    choose = random.Random(9)
    found = [walk(version, choose, [*pieces, *marks * 3]) for _ in range(WALKS)]
    turns = [ids for ids in found if ids is not None]
    assert len(turns) > WALKS // 3
    assert sum(blocks_opened(table, ids) > 0 for ids in turns) > WALKS // 10
    for ids in turns:
        assert is_turn(table, ids)


STRICTER = {
    "call id: v13 dropped it, v11 writes it": "[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{}",
    "text after a call: the encoder writes it": "[TOOL_CALLS]f[ARGS]{} Asked.",
    "text before a thought: v13 models write it": "Wait.[THINK]Sky.[/THINK]Blue.",
    "an empty thought": "[THINK][/THINK]Blue.",
    "nothing after a thought": "[THINK]Sky.[/THINK]",
    "an empty turn": "",
    "no arguments mark: vLLM reads it": "[TOOL_CALLS]f{}",
    "a list of calls: up to v7": '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    "a call that ends a thought: vLLM reads it": "[THINK]Need f.[TOOL_CALLS]f[ARGS]{}",
}


@pytest.mark.parametrize("text", STRICTER.values(), ids=STRICTER)
def test_the_grammar_is_stricter_than_the_format_only_where_named(text):
    tokenizer, grammar_text = grammar("v13")
    table = table_of("v13")
    ids = _encode("v13", text)
    matcher = llguidance.LLMatcher(tokenizer, grammar_text)
    assert not (all(matcher.consume_token(i) for i in ids) and matcher.is_accepting())
    assert is_turn(table, ids)


def _encode(version: str, text: str) -> list[int]:
    tokenizer = tekken(version)
    names = ("[TOOL_CALLS]", *VERSIONS[version][1])
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        if piece in names:
            ids.append(tokenizer.get_special_token(piece))
        elif piece:
            ids += tokenizer.encode(piece, bos=False, eos=False)
    return ids


# -- SGLang's detector --------------------------------------------------------------------------------------------

TURNS, DAMAGED = 300, 1500
TEXTS = ("", "Looking.", "\n", " 空 {x} ", "f[ARG", "a < b")


def written(choose: random.Random) -> tuple[str, list[Call]]:
    """A turn with its terminal, in one form or the other, and the calls that it means."""
    calls = [(choose.choice("fgh"), choose.choice(ARGUMENTS)) for _ in range(choose.choice((0, 1, 1, 2, 3)))]
    spelled = [(name, json.dumps(a, ensure_ascii=False, indent=choose.choice((None, 1)))) for name, a in calls]
    if calls and choose.random() < 0.3:
        listed = ", ".join(f'{{"name": "{name}", "arguments": {a}}}' for name, a in spelled)
        body = f"[TOOL_CALLS] [{listed}]"
    else:
        blank = choose.choice(("", " ", "\n"))
        body = "".join(f"[TOOL_CALLS]{blank}{name}[ARGS]{blank}{a}" for name, a in spelled)
    return choose.choice(TEXTS) + body + choose.choice(("", " Asked.")) * bool(calls) + "</s>", calls


@cache
def streams() -> tuple[tuple[int, ...], ...]:
    choose = random.Random(9)
    chat = compiled("mistral")[1]
    names = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>", "[INST]")
    controls = [chat.vocabulary.controls[name] for name in names]
    fragments = [chat.encode(piece) for piece in ("}", "{", " ", '"', "x", "]", "[", ",")]
    found = [damaged(choose, chat.encode(written(choose)[0]), controls, fragments, most=2) for _ in range(DAMAGED)]
    return (*found, tuple(chat.encode("[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{}</s>")))


def text_of(ids: tuple[int, ...]) -> str:
    chat = compiled("mistral")[1]
    names = {i: n.encode() for n, i in chat.vocabulary.controls.items()}
    return (
        b"".join(names.get(i) or chat.vocabulary.texts[i] for i in ids).decode("utf-8", "replace").removesuffix("</s>")
    )


def refused_at(ids: tuple[int, ...]) -> tuple[str, bool]:
    """The token that no turn can hold ('end' if the turn stops too early), and whether a call is open there."""
    table, chat = compiled("mistral")
    taken = table.host.walk(ids)
    token = chat.spell(ids[taken.taken]) if taken.taken < len(ids) else "end"
    return token, table.host.block_open(taken.state)


def test_the_detector_reads_generated_turns_as_meant():
    choose = random.Random(9)
    table, chat = compiled("mistral")
    for _ in range(TURNS):
        text, meant = written(choose)
        assert is_turn(table, chat.encode(text))
        assert calls_read(DETECTOR, text.removesuffix("</s>")) == meant


# Accepted, and read otherwise.


def call_id(text: str) -> bool:
    """With [CALL_ID] the name is name and id to the detector, no tool of that name exists, and the call is lost."""
    return "[CALL_ID]" in text


def no_arguments_mark(text: str) -> bool:
    """`f{…}` without [ARGS] is a call for vLLM; the detector loses it and all that follow."""
    return any("[ARGS]" not in part.split("{")[0] for part in text.split("[TOOL_CALLS]")[1:])


def list_behind_another_blank(text: str) -> bool:
    """The detector wants exactly one blank between [TOOL_CALLS] and the list."""
    return any(p.lstrip().startswith("[") and not p.startswith(" [") for p in text.split("[TOOL_CALLS]")[1:])


def text_between_calls(text: str) -> bool:
    """The detector stops reading calls at the first text between them."""
    return text.count("[TOOL_CALLS]") > 1


def arguments_are_no_json(text: str) -> bool:
    """Braces and strings match, the rest is no JSON: the detector loses the call. Its inside is a grammar's task."""
    for part in text.split("[TOOL_CALLS]")[1:]:
        start = part.find("[" if part.lstrip().startswith("[") else "{")
        try:
            json.JSONDecoder().raw_decode(part[start:])
        except ValueError:
            return True
    return False


def name_is_unknown(text: str) -> bool:
    """The detector drops calls of tools that were not offered."""
    return any(part.split("[ARGS]")[0].strip() not in ("f", "g", "h") for part in text.split("[TOOL_CALLS]")[1:])


ACCEPTED_ALONE = (
    call_id,
    no_arguments_mark,
    list_behind_another_blank,
    text_between_calls,
    arguments_are_no_json,
    name_is_unknown,
)


# Refused, and read all the same.


def another_call_is_lost(ids: tuple[int, ...]) -> bool:
    """The detector reads the sound calls of a turn and drops a broken one, or what stands in it, without a word."""
    return text_of(ids).count("[TOOL_CALLS]") > len(calls_read(DETECTOR, text_of(ids)))


def marker_leaks(ids: tuple[int, ...]) -> bool:
    """A marker where none may stand: the detector passes it on in the answer or skips it before the name."""
    return refused_at(ids)[0] in compiled("mistral")[1].vocabulary.controls


def turn_stops_too_early(ids: tuple[int, ...]) -> bool:
    """The detector finds the calls before an open thought or an open call; a thought that never ends swallows them."""
    return refused_at(ids)[0] == "end"


def arguments_are_a_list(ids: tuple[int, ...]) -> bool:
    """`f[ARGS][…]`: the detector passes a list on as arguments, which no tool takes."""
    token, in_call = refused_at(ids)
    return in_call and token.lstrip().startswith("[") and token not in compiled("mistral")[1].vocabulary.controls


def text_after_the_terminal(ids: tuple[int, ...]) -> bool:
    """The detector never sees a terminal as such; the engine stops there."""
    return compiled("mistral")[1].vocabulary.controls["</s>"] in ids[:-1]


def name_with_brackets_or_blanks(ids: tuple[int, ...]) -> bool:
    """Anything up to [ARGS] is a name for the detector."""
    token, in_call = refused_at(ids)
    return in_call and "[ARGS]" in text_of(ids) and token not in compiled("mistral")[1].vocabulary.controls


REFUSED_ALONE = (
    text_after_the_terminal,
    turn_stops_too_early,
    another_call_is_lost,
    marker_leaks,
    arguments_are_a_list,
    name_with_brackets_or_blanks,
)


def _is_list(text: str) -> bool:
    return any(part.lstrip().startswith("[") for part in text.split("[TOOL_CALLS]")[1:])


def test_every_block_of_an_accepted_turn_is_read_but_for_named_cases():
    table, _ = compiled("mistral")
    cases = Counter()
    agreed = 0
    for ids in streams():
        if not is_turn(table, list(ids)):
            continue
        text = text_of(ids)
        opened, read = blocks_opened(table, ids), len(calls_read(DETECTOR, text))
        if read == opened or (_is_list(text) and read > opened > 0):
            agreed += 1
            continue
        named = [case.__name__ for case in ACCEPTED_ALONE if case(text)]
        assert named, f"accepted, but read otherwise: {text!r}"
        cases.update(named)
    assert agreed > 200
    assert set(cases) == {case.__name__ for case in ACCEPTED_ALONE}


def test_turns_with_calls_that_the_detector_reads_are_accepted_but_for_named_cases():
    table, _ = compiled("mistral")
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
    assert agreed > 200
    assert set(cases) == {case.__name__ for case in REFUSED_ALONE}


@pytest.mark.parametrize("case", ACCEPTED_ALONE + REFUSED_ALONE, ids=lambda case: case.__name__)
def test_every_named_case_says_why(case):
    assert case.__doc__
