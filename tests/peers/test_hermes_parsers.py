"""The hermes format against SGLang's two parsers for it and xgrammar's tag; every difference has a name."""

from __future__ import annotations

import pytest

from scripts.tables import compiled_on
from tests.formats.test_hermes import CALLS, CORPUS, MALFORMED, NOT_SKELETON, REFUSED, F, G
from tests.support.mutations import marker_faults
from tests.support.sglang_parsers import calls_read, split_reasoning
from tests.support.streams import verdicts_on
from tests.support.xgrammar_tags import allowed_only_by_the_tag, tag_of

TERMINALS = ("<|im_end|>", "<|endoftext|>")
MARKERS = ("<tool_call>", "</tool_call>")
QWEN25, HERMES = "qwen25_detector:Qwen25Detector", "hermes_detector:HermesDetector"

# Well-formed calls that a parser does not read, by their name in the corpus.
SPLIT = {
    "reasoning between",  # everything before the first </think> is reasoning once there is a <think> anywhere
    "reasoning markers in a string",  # the same, inside the arguments
}
NOT_READ = {
    QWEN25: SPLIT | {"compact"},  # it wants a line feed on both sides of the object
    HERMES: SPLIT | {"a closer in a string"},  # it ends a call at the first closer
}

READ_THOUGH_REFUSED = {
    "<tool_call> twice",  # an opener right behind an opener: qwen25 looks for the last one with a line feed
    "</tool_call> twice",  # a closer without an opener: dropped in silence
    "without the last </tool_call>",  # hermes takes a call that the end cuts short
}
LOST_THOUGH_ACCEPTED: set[str] = set()

# The tag compares strings: in text and in strings it lets the id of any control token pass that it does not exclude.
ONLY_THE_TAG = {
    "text": {"</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>"},
    "call": {"<|im_start|>"},
}
ALLOWED_BY_THE_TAG = {
    "closer without opener",
    "closer twice",
    "closer after text",
    "another turn",
    "a tool result written by the model",
}
NOT_ALLOWED_BY_THE_TAG = {
    "one leading block of reasoning at most, closed, with two line feeds behind": {
        "answer: a second closer of reasoning",
        "answer: an opener of reasoning in text",
        "answer: reasoning cut short by the end",
        "answer: reasoning only",
        "answer: empty reasoning",
        "answer: blank before reasoning",
        "answer: reasoning twice",
        "answer: an opener in open reasoning",
        "answer: a tool result quoted in reasoning",
        "answer: a closer in open reasoning",
        "answer: a call marker quoted in reasoning",
        "answer: a call marker quoted in reasoning, never closed",
        "answer: two openers quoted in reasoning",
        "answer: a broken call in reasoning",
        "call: reasoning between",
        "call: from open reasoning",
        "call: two from open reasoning",
        "lenient: a call in reasoning that a later closer makes part of it",
        "lenient: text after calls from open reasoning",
    },
    "the object begins with the name, then the arguments, on a line of its own": {
        "call: compact",
        "call: pretty-printed",
        "call: arguments first",
        "call: parameters for arguments",
        "call: no arguments",
        "call: another key last",
        "call: a list of calls",
    },
    "arguments are JSON": {
        "lenient: a line feed in a string",
        "lenient: a quote not escaped",
        *(f"not of the skeleton: {name}" for name in NOT_SKELETON),
    },
}


def on_qwen3(reasoning: str = "auto"):
    table, tokenizer = compiled_on("hermes", "qwen3")
    return table, tokenizer, tag_of("qwen_3", tokenizer, TERMINALS, reasoning)


def read(detector: str, text: str) -> list:
    _, answer = split_reasoning("Qwen3Detector", text.replace("⏎", "\n"), opened=False)
    return calls_read(detector, answer)


@pytest.mark.parametrize("detector", [QWEN25, HERMES])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_the_corpus_is_read(name, detector):
    text, calls = CALLS[name]
    assert (read(detector, text) == calls) == (name not in NOT_READ[detector])


@pytest.mark.parametrize("detector", [QWEN25, HERMES])
@pytest.mark.parametrize("text", ["A⏎" + F + "⏎" + G, F + "B", "<think>a</think>" + F + "⏎" + G])
def test_a_fault_in_the_markers_is_refused_or_loses_nothing(text, detector):
    table, tokenizer, _ = on_qwen3()
    intended = read(detector, text)
    for kind, faulty in marker_faults(text, MARKERS):
        whole, accepted = read(detector, faulty) == intended, verdicts_on(tokenizer, table, faulty) == {True}
        assert accepted or not whole or kind in READ_THOUGH_REFUSED, kind
        assert whole or not accepted or kind in LOST_THOUGH_ACCEPTED, kind


@pytest.mark.parametrize("reasoning", ["auto", "enabled"])
@pytest.mark.parametrize(
    "name", ["reasoning before", "two calls", "braces, quotes and escapes in a string", "text after"]
)
def test_whatever_the_tag_allows_is_legal_but_for_named_tokens(name, reasoning):
    table, _, tag = on_qwen3(reasoning)
    text, state = CALLS[name][0], table.info.start
    if reasoning == "enabled":
        text = "Sky.</think>⏎⏎" + text.rpartition("</think>⏎⏎")[2]
        state = table.host.step(state, table.info.controls["<think>"])
    for at, only in allowed_only_by_the_tag(tag, table, text, state):
        named = ONLY_THE_TAG["call" if table.host.block_open(at) else "text"]
        assert {tag.chat.spell(token) for token in only} <= named


def test_the_tag_accepts_the_corpus_but_for_named_cases():
    *_, tag = on_qwen3()
    named = set().union(*NOT_ALLOWED_BY_THE_TAG.values())
    assert CORPUS.keys() - tag.accepted(CORPUS) == named
    refused = {**MALFORMED, **{name: text for name, (text, _) in REFUSED.items()}}
    assert tag.accepted(refused) == ALLOWED_BY_THE_TAG
