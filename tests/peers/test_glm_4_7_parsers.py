"""The glm_4_7 format against SGLang's two parsers for it and xgrammar's tag; every difference has a name."""

from __future__ import annotations

import pytest

from scripts.tables import compiled_on
from tests.formats.test_glm_4_7 import CALLS, CALLS_ON_LINES, CORPUS, F_LINES, G_LINES, MALFORMED, REFUSED, F, G
from tests.support.mutations import marker_faults
from tests.support.sglang_parsers import calls_read, split_reasoning
from tests.support.streams import verdicts_on
from tests.support.xgrammar_tags import allowed_only_by_the_tag, tag_of

TERMINALS = ("<|user|>", "<|observation|>", "<|endoftext|>")
MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM47 = "glm47_moe_detector:Glm47MoeDetector"
GLM45 = "glm4_moe_detector:Glm4MoeDetector"

WRITTEN = [
    *((GLM47, name, *call) for name, call in CALLS.items()),
    *((GLM45, name, *call) for name, call in CALLS_ON_LINES.items()),
]
SOUND = [
    (GLM47, "A" + F + G),
    (GLM47, "<think>a</think>" + F + "b"),
    (GLM45, "A⏎" + F_LINES + "⏎" + G_LINES),
]

# Well-formed calls that a parser does not read, by their name in the corpus.
NOT_READ: dict[str, set[str]] = {
    GLM47: {"markers in a value"},  # a </think> in a value ends reasoning, and all before it is lost
    GLM45: set(),
}
READ_THOUGH_REFUSED = {
    # It looks for pairs anywhere between an opener and the next closer, and for calls anywhere.
    "</arg_value> twice",
    "</tool_call> twice",
    "text before <arg_key>",
    "text before </tool_call>",
}
LOST_THOUGH_ACCEPTED = {
    # Text that becomes part of a name, a key or a value: any name may be a tool's.
    "<tool_call> one place early",
    "text before <arg_key>",
    "text before </arg_key>",
    "text before </arg_value>",
    "text before </tool_call>",
    "<arg_value> twice",  # the second one is part of the value
}
# The tag compares strings: in text and in values it lets the id of any control token pass that it does not exclude,
# and a marker may be spelled with ordinary tokens.
OTHER_TURNS = {"<|assistant|>", "<|system|>", "[gMASK]", "<sop>"}
ONLY_THE_TAG = {
    "text": OTHER_TURNS | {"<tool_response>", "</tool_response>"},
    "call": OTHER_TURNS | {"<", "<a", " <", "</", " </"},
}
ALLOWED_BY_THE_TAG = {
    "another turn",
    "a system message",
    "a tool result written by the model",
    "start of text",
}
NOT_ALLOWED_BY_THE_TAG = {
    "one leading block of reasoning at most, closed, without call markers and without white space before it": {
        "answer: a second closer of reasoning",
        "answer: reasoning opened again",
        "answer: reasoning cut short by the end",
        "answer: reasoning opened again, cut short",
        "answer: empty reasoning",
        "answer: a call marker quoted in reasoning",
        "answer: an opener quoted in reasoning",
        "answer: other markers in open reasoning",
        "answer: a broken call in reasoning",
        "call: from open reasoning",
        "call on lines: reasoning before",
        "call on lines: from open reasoning",
        "lenient: a call in reasoning that a later closer makes part of it",
    },
    "names and keys that it was given, values of their type": {
        "lenient: the closer in a value",
        "lenient: white space round the name",
        "lenient: unicode, dotted, dashed name",
        "lenient: a blank in a key",
    },
}


def on_the_tokenizer(reasoning: str = "auto"):
    table, tokenizer = compiled_on("glm_4_7", "glm4")
    return table, tokenizer, tag_of("glm_4_7", tokenizer, TERMINALS, reasoning)


def read(detector: str, text: str) -> list:
    _, answer = split_reasoning("Glm45Detector", text.replace("⏎", "\n"), opened=False)
    return calls_read(detector, answer)


@pytest.mark.parametrize(("detector", "name", "text", "calls"), WRITTEN)
def test_every_call_of_the_corpus_is_read(detector, name, text, calls):
    assert (read(detector, text) == calls) == (name not in NOT_READ[detector])


@pytest.mark.parametrize(("detector", "text"), SOUND)
def test_a_fault_in_the_markers_is_refused_or_loses_nothing(detector, text):
    table, tokenizer, _ = on_the_tokenizer()
    intended = read(detector, text)
    assert intended
    for kind, faulty in marker_faults(text, MARKERS):
        whole, accepted = read(detector, faulty) == intended, verdicts_on(tokenizer, table, faulty) == {True}
        assert accepted or not whole or kind in READ_THOUGH_REFUSED, kind
        assert whole or not accepted or kind in LOST_THOUGH_ACCEPTED, kind


@pytest.mark.parametrize("reasoning", ["auto", "enabled"])
@pytest.mark.parametrize("name", ["reasoning before", "two arguments", "a value of many lines"])
def test_whatever_the_tag_allows_is_legal_but_for_named_tokens(name, reasoning):
    table, _, tag = on_the_tokenizer(reasoning)
    text, state = CALLS[name][0], table.info.start
    if reasoning == "enabled":
        text = "Sky.</think>" + text.rpartition("</think>")[2]
        state = table.host.step(state, table.info.controls["<think>"])
    for at, only in allowed_only_by_the_tag(tag, table, text, state):
        named = ONLY_THE_TAG["call" if table.host.block_open(at) else "text"]
        assert {tag.chat.spell(token) for token in only} <= named


def test_the_tag_accepts_the_corpus_but_for_named_cases():
    *_, tag = on_the_tokenizer()
    named = set().union(*NOT_ALLOWED_BY_THE_TAG.values())
    assert CORPUS.keys() - tag.accepted(CORPUS) == named
    refused = {**MALFORMED, **{name: text for name, (text, _) in REFUSED.items()}}
    assert tag.accepted(refused) == ALLOWED_BY_THE_TAG
