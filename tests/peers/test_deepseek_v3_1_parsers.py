"""The deepseek_v3_1 format against SGLang's three parsers for it, DeepSeek's own encoder and parser of V3.2, and
xgrammar's two tags; every difference has a name."""

from __future__ import annotations

import json

import pytest

from scripts.sglang_parsers import sglang_module
from scripts.tables import compiled_on
from tests.formats.test_deepseek_v3_1 import (
    BEGIN,
    CALL,
    CALLS,
    CORPUS,
    DONE,
    END,
    EOS,
    F_FENCED,
    F_TAGS,
    FENCED_CALLS,
    G_FENCED,
    G_TAGS,
    NOT_SKELETON,
    SEP,
    TAG_CALLS,
    D,
    F,
    G,
    block,
)
from tests.support.mutations import marker_faults
from tests.support.sglang_parsers import calls_read, split_reasoning
from tests.support.streams import verdicts_on
from tests.support.xgrammar_tags import allowed_only_by_the_tag, tag_of

V3_1, V3, V3_2 = (
    "deepseekv31_detector:DeepSeekV31Detector",
    "deepseekv3_detector:DeepSeekV3Detector",
    "deepseekv32_detector:DeepSeekV32Detector",
)
SECTION_MARKERS = (BEGIN, END, CALL, SEP, DONE)
TAG_MARKERS = (f"<{D}function_calls>", f"</{D}function_calls>", f"</{D}invoke>", f"</{D}parameter>", '">', '" string="')

WRITTEN = [
    *((V3_1, name, *call) for name, call in CALLS.items()),
    *((V3, name, *call) for name, call in FENCED_CALLS.items()),
    *((V3_2, name, *call) for name, call in TAG_CALLS.items()),
]
SOUND = [
    (V3_1, "A" + BEGIN + F + G + END),
    (V3_1, "a</think>" + BEGIN + F + END + "b"),
    (V3, BEGIN + F_FENCED + "⏎" + G_FENCED + END),
    (V3_2, "A" + block(F_TAGS, G_TAGS)),
]

# Well-formed calls that a parser does not read, by their name in the corpus.
NOT_READ = {
    V3_1: {"markers in a string"},  # a </think> in the arguments ends reasoning, and all before it is lost
    V3: set(),
    V3_2: {"markers in a value"},  # the same
}
NOT_READ_BY_DEEPSEEK = {
    "two blocks",  # nothing may stand behind a block
    "text after",
    "no blank line before",
    "no line feeds",
    "arguments as JSON",
    "self-closing",
    "no block",
    "no block, two calls",
}
READ_THOUGH_REFUSED = {
    # Calls are looked for anywhere once there is an opener: a marker too many, and text between, are skipped.
    *(f"{marker} twice" for marker in SECTION_MARKERS),
    f"{BEGIN} one place early",
    f"{CALL} one place early",
    f"text before {CALL}",
    f"text before {END}",
    *(f"{tag} twice" for tag in (*TAG_MARKERS[:3], '">')),
    f"text before </{D}invoke>",
    f"text before </{D}function_calls>",
    f"<{D}function_calls> one place early",  # a bare invoke behind it is enough
    f"without the last <{D}function_calls>",  # the same; the block's end has no beginning then
}
LOST_THOUGH_ACCEPTED = {
    # Text that becomes part of a name, a key or a value: any name may be a tool's.
    f"text before {SEP}",
    'text before ">',
    'text before " string="',
    f"text before </{D}parameter>",
    '"> twice',
}

# The tags compare strings: in text and in values they let the id of any control token pass that they do not exclude,
# and a marker may be spelled with ordinary tokens.
OTHER_TURNS = {"<｜Assistant｜>", "<｜User｜>", "<｜begin▁of▁sentence｜>"}
RESULTS = {f"<｜tool▁{kind}▁{end}｜>" for kind in ("output", "outputs") for end in ("begin", "end")}
ONLY_THE_TAG = {
    "text": OTHER_TURNS | RESULTS | {END, CALL, SEP, DONE, D},
    "call": OTHER_TURNS | {"<", "｜", "\ufffd"},
}
FREE_TEXT = 100_000  # where a tag still waits for the rest of a trigger or of an end tag, everything is text to it

REASONING = {
    "answer: a second closer of reasoning",
    "answer: empty reasoning, opened by the prompt",
    "answer: reasoning opened twice",
    "answer: blank before reasoning",
    "answer: reasoning cut short by the end",
    "answer: a section in open reasoning is reasoning",
    "answer: a block in open reasoning is reasoning",
    "call: reasoning before",
}
NOT_ALLOWED_BY_THE_TAG = {
    "deepseek_v3_1": {
        "one leading block of reasoning at most, closed": REASONING,
        "no white space round markers, sections closed": {
            "call: line feeds round the markers",
            "call: a section that is not closed",
            "call: pretty-printed arguments",
            "lenient: text after a section that is not closed",
        },
        "names of tools that it was given, arguments that are JSON": {
            "lenient: blanks round a name",
            "lenient: dotted, dashed, unicode name",
            "lenient: a quote not escaped",
            "lenient: JSON not closed inside",
        },
        "the body of V3 is another format": {
            "fenced call: one call",
            "fenced call: two calls",
            "fenced call: after reasoning",
            "lenient: a quote not escaped, fenced",
        },
        "section markers in a value of tags open a section": {"tags: markers in a value"},
    },
    "deepseek_v3_2": {
        "one leading block of reasoning at most, closed": REASONING | {"call: markers in a string"},
        "line feeds where DeepSeek writes them": {"tags: no line feeds"},
        "tags for parameters and a closing tag": {
            "tags: arguments as JSON",
            "tags: self-closing",
            *(f"not of the skeleton: {name}" for name in NOT_SKELETON),
        },
    },
}


def on_the_tokenizer():
    return compiled_on("deepseek_v3_1", "deepseek_v3", D)


def the_tag(family: str, reasoning: str = "auto"):
    return tag_of(family, on_the_tokenizer()[1], (EOS,), reasoning)


def read(detector: str, text: str) -> list:
    text = text.replace("⏎", "\n")
    _, answer = split_reasoning("Qwen3Detector", text, opened="</think>" in text)
    return calls_read(detector, answer)


@pytest.mark.parametrize(("detector", "name", "text", "calls"), WRITTEN)
def test_every_call_of_the_corpus_is_read(detector, name, text, calls):
    assert (read(detector, text) == calls) == (name not in NOT_READ[detector])


@pytest.mark.parametrize(("detector", "text"), SOUND)
def test_a_fault_in_the_markers_is_refused_or_loses_nothing(detector, text):
    table, tokenizer = on_the_tokenizer()
    intended = read(detector, text)
    assert intended
    for kind, faulty in marker_faults(text, TAG_MARKERS if detector == V3_2 else SECTION_MARKERS):
        whole, accepted = read(detector, faulty) == intended, verdicts_on(tokenizer, table, faulty) == {True}
        assert accepted or not whole or kind in READ_THOUGH_REFUSED, kind
        assert whole or not accepted or kind in LOST_THOUGH_ACCEPTED, kind


# -- DeepSeek's own encoder and parser of V3.2 ------------------------------------------------------------------------


def read_by_deepseek(text: str) -> list | None:
    parse = sglang_module("entrypoints.openai.encoding_dsv32").parse_message_from_completion_text
    try:
        message = parse(text.replace("⏎", "\n") + EOS, thinking_mode="chat")
    except Exception:  # it raises for every kind of fault, of several types
        return None
    found = (call["function"] for call in message["tool_calls"])
    return [(call["name"], json.loads(call["arguments"])) for call in found]


@pytest.mark.parametrize("name", TAG_CALLS)
def test_deepseek_reads_the_canonical_tags(name):
    text, calls = TAG_CALLS[name]
    assert (read_by_deepseek(text) == calls) == (name not in NOT_READ_BY_DEEPSEEK)


def messages(*results: str) -> list[dict]:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"s": "a b", "x": 1}'}}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    if not results:
        return asked
    calling = {"role": "assistant", "content": "", "reasoning_content": "Need f.", "tool_calls": [call] * len(results)}
    return [*asked, calling, *({"role": "tool", "content": result} for result in results)]


@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("results", [(), ("1",), ("1", '{"a": "</function"}'), ("", "<b>é</b></function_x>\n\n")])
def test_deepseeks_prompts_start_a_turn_in_text_or_in_reasoning(results, mode):
    table, tokenizer = on_the_tokenizer()
    prompt = sglang_module("entrypoints.openai.encoding_dsv32").encode_messages(messages(*results), mode)
    state = table.host.locate(tokenizer.encode(prompt))
    opened = table.info.controls["<think>" if mode == "thinking" else "</think>"]
    assert state == table.host.step(table.info.start, opened)


def test_deepseeks_own_turns_are_accepted():
    table, tokenizer = on_the_tokenizer()
    encoder = sglang_module("entrypoints.openai.encoding_dsv32")
    for mode in ("chat", "thinking"):
        asked = encoder.encode_messages(messages(), mode)
        whole = encoder.encode_messages(messages("1", "2")[:3], mode)
        state = table.host.locate(tokenizer.encode(asked))
        walk = table.host.walk(tokenizer.encode(whole[len(asked) :]), state)
        assert walk.state == table.ended
        assert walk.illegal_at is None


# -- xgrammar -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reasoning", "text"),
    [
        ("deepseek_v3_1", "auto", CALLS["text before, between, after"][0]),
        ("deepseek_v3_1", "enabled", CALLS["text before, between, after"][0]),
        ("deepseek_v3_1", "disabled", CALLS["braces, quotes and escapes in a string"][0]),
        ("deepseek_v3_2", "auto", TAG_CALLS["two parameters"][0]),
        ("deepseek_v3_2", "enabled", TAG_CALLS["two calls"][0]),
    ],
)
def test_whatever_the_tag_allows_is_legal_but_for_named_tokens(family, reasoning, text):
    table, _ = on_the_tokenizer()
    tag, state = the_tag(family, reasoning), table.info.start
    if reasoning == "enabled":
        text = "Sky.</think>" + text
        state = table.host.step(state, table.info.controls["<think>"])
    for at, only in allowed_only_by_the_tag(tag, table, text, state):
        if len(only) > FREE_TEXT:
            continue
        named = ONLY_THE_TAG["call" if table.host.block_open(at) else "text"]
        assert {tag.chat.spell(token) for token in only} <= named


@pytest.mark.parametrize("family", NOT_ALLOWED_BY_THE_TAG)
def test_the_tag_accepts_the_corpus_but_for_named_cases(family):
    named = set().union(*NOT_ALLOWED_BY_THE_TAG[family].values())
    assert CORPUS.keys() - the_tag(family).accepted(CORPUS) == named
