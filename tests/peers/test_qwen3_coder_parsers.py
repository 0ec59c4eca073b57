"""The qwen3_coder format against SGLang's parser for it and xgrammar's tag; every difference has a name."""

from __future__ import annotations

import pytest

from scripts.tables import compiled_on
from tests.formats.test_qwen3_coder import CALLS, CORPUS, LENIENT, MALFORMED, REFUSED, F, G
from tests.support.mutations import marker_faults
from tests.support.sglang_parsers import calls_read, calls_streamed, split_reasoning
from tests.support.streams import verdicts_on
from tests.support.xgrammar_tags import allowed_only_by_the_tag, tag_of

TERMINALS = ("<|im_end|>", "<|endoftext|>")
MARKERS = ("<tool_call>", "</tool_call>")
CODER = "qwen3_coder_detector:Qwen3CoderDetector"

WRITTEN = [
    *((CODER, name, *call) for name, call in CALLS.items()),
]
SOUND = [
    (CODER, "A⏎" + F + "⏎" + G),
    (CODER, "<think>a</think>" + F + "⏎" + G),
]

# Well-formed calls that a parser does not read, by their name in the corpus.
NOT_READ = {
    CODER: {"other markers in a value"},  # everything before the first </think> is reasoning once there is a <think>
}
READ_THOUGH_REFUSED = {
    "<tool_call> twice",  # it looks for functions anywhere between the first opener and the next closer
    "<tool_call> one place early",  # the same: text before the function is skipped
    "without </tool_call>",  # the second opener stands inside the first wrapper, which is refused as a nested one
    "text before </tool_call>",  # text behind a function without parameters is skipped
}
LOST_THOUGH_ACCEPTED = {
    # A bare function is text for the one-shot parser and a call for the streaming one; the tags are ordinary text.
    "without <tool_call>",
    "without the last <tool_call>",
}
# The tag compares strings: in text and in values it lets the id of any control token pass that it does not exclude.
ONLY_THE_TAG = {
    "text": {"<tool_response>", "</tool_response>", "<|im_start|>"},
    "call": {"<|im_start|>"},
}
# The tag is triggered by the opener with a line feed and `<function=`; whatever else follows an opener is text to it.
ALLOWED_BY_THE_TAG = {
    "hermes body",
    "empty wrapper",
    "parameter outside a function",
    "terminal right after the opener",
    "opener after an opener",
    "text before the function",
    "another turn",
    "a tool result written by the model",
}
NOT_ALLOWED_BY_THE_TAG = {
    "one leading block of reasoning at most, closed, with two line feeds behind": {
        "answer: a second closer of reasoning",
        "answer: empty reasoning, opened by the prompt",
        "answer: reasoning cut short by the end",
        "answer: reasoning twice",
        "answer: a call marker quoted in reasoning",
        "answer: a broken call in reasoning",
        "answer: a result quoted in reasoning",
        "call: from open reasoning",
        "lenient: a call in reasoning that a later closer makes part of it",
    },
    "one function in a wrapper, every tag closed; without parameters not even the template's own form": {
        "call: two calls",
        "call: three calls without white space",
        "call: text before, between, after",
        "call: two functions in one wrapper",
        "call: no parameters first, then another function",
        "call: parameter not closed",
        "call: first parameter not closed",
        "call: function not closed",
        "call: neither closed",
        "call: no parameters, not closed",
        "lenient: opener missing, then a call",
        "lenient: closer in a value",
        "lenient: end tags in a value",
        "lenient: end tags and a closer in a value",
    },
    "names of tools and parameters that it was given": {
        "lenient: blank in the name",
        "lenient: unicode names",
    },
}


def on_the_tokenizer(reasoning: str = "auto"):
    table, tokenizer = compiled_on("qwen3_coder", "qwen3")
    return table, tokenizer, tag_of("qwen_3_coder", tokenizer, TERMINALS, reasoning)


def read(detector: str, text: str) -> list:
    _, answer = split_reasoning("Qwen3Detector", text.replace("⏎", "\n"), opened=False)
    return calls_read(detector, answer)


@pytest.mark.parametrize(("detector", "name", "text", "calls"), WRITTEN)
def test_every_call_of_the_corpus_is_read(detector, name, text, calls):
    assert (read(detector, text) == calls) == (name not in NOT_READ[detector])


@pytest.mark.parametrize("name", ["opener missing", "no wrapper"])
def test_a_bare_function_is_read_from_a_stream_only(name):
    text = LENIENT[name].replace("⏎", "\n")
    assert calls_read(CODER, text) == []
    assert calls_streamed(CODER, list(text)) == [("f", {"x": 1})]


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
@pytest.mark.parametrize("name", ["reasoning before", "text before, between, after", "a value of many lines"])
def test_whatever_the_tag_allows_is_legal_but_for_named_tokens(name, reasoning):
    table, _, tag = on_the_tokenizer(reasoning)
    text, state = CALLS[name][0], table.info.start
    if reasoning == "enabled":
        text = "Sky.</think>⏎⏎" + text.rpartition("</think>⏎⏎")[2]
        state = table.host.step(state, table.info.controls["<think>"])
    for at, only in allowed_only_by_the_tag(tag, table, text, state):
        if table.host.header_open(at):
            continue  # there the tag still waits for its trigger and takes all for text
        named = ONLY_THE_TAG["call" if table.host.block_open(at) else "text"]
        assert {tag.chat.spell(token) for token in only} <= named


def test_the_tag_accepts_the_corpus_but_for_named_cases():
    *_, tag = on_the_tokenizer()
    named = set().union(*NOT_ALLOWED_BY_THE_TAG.values())
    assert CORPUS.keys() - tag.accepted(CORPUS) == named
    refused = {**MALFORMED, **{name: text for name, (text, _) in REFUSED.items()}}
    assert tag.accepted(refused) == ALLOWED_BY_THE_TAG
