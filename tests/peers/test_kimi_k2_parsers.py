"""The kimi_k2 format against SGLang's parser for it and xgrammar's tag; every difference has a name."""

from __future__ import annotations

import pytest

from scripts.tables import compiled_on
from tests.formats.test_kimi_k2 import ARGUMENTS, BEGIN, CALL, CALLS, CORPUS, DONE, END, MALFORMED, REFUSED, F, G
from tests.support.mutations import marker_faults
from tests.support.sglang_parsers import calls_read, split_reasoning
from tests.support.streams import verdicts_on
from tests.support.xgrammar_tags import allowed_only_by_the_tag, tag_of

TERMINALS = ("<|im_end|>", "[EOS]")
MARKERS = (BEGIN, END, CALL, ARGUMENTS, DONE)
KIMI = "kimik2_detector:KimiK2Detector"

WRITTEN = [
    *((KIMI, name, *call) for name, call in CALLS.items()),
]
SOUND = [
    (KIMI, "A" + BEGIN + F + G + END),
    (KIMI, "<think>a</think>" + BEGIN + F + END + "b"),
]

# Well-formed calls that a parser does not read, by their name in the corpus.
NOT_READ = {
    KIMI: {"markers in a string"},  # a </think> in the arguments ends reasoning, and all before it is lost
}
READ_THOUGH_REFUSED = {
    # It looks for calls anywhere once there is a section marker: a marker too many, and text between, are skipped.
    *(f"{marker} twice" for marker in (BEGIN, END, CALL, DONE)),
    f"{BEGIN} one place early",
    f"text before {CALL}",
    f"text before {END}",
}
LOST_THOUGH_ACCEPTED: set[str] = set()
# The tag compares strings: in text and in strings it lets the id of any control token pass that it does not exclude,
# and a marker may be spelled with ordinary tokens.
OTHER_TURNS = {"<|im_assistant|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>", "[BOS]"}
ONLY_THE_TAG = {
    "text": OTHER_TURNS | {ARGUMENTS, DONE, END},
    "call": OTHER_TURNS | {"<"},
}
ALLOWED_BY_THE_TAG = {
    "section closed twice",
    "argument marker outside a call",
    "another turn",
    "another turn of its own",
    "a system message",
    "a middle marker",
}
NOT_ALLOWED_BY_THE_TAG = {
    "one leading block of reasoning at most, closed": {
        "answer: a second closer of reasoning",
        "answer: an opener of reasoning in text",
        "answer: reasoning cut short by the end",
        "answer: reasoning twice",
        "answer: a closer in open reasoning",
        "call: from open reasoning",
        "lenient: text after a section from open reasoning",
    },
    "no white space round markers, ids with functions. and a number, sections closed": {
        "call: line feeds round the markers",
        "call: blanks round the id and the arguments",
        "call: an id without functions.",
        "call: a section that is not closed",
        "call: text after a section that is not closed",
        "lenient: a bare number for an id",
    },
    "names of tools that it was given, arguments that are JSON": {
        "lenient: dotted, dashed, unicode name",
        "lenient: a quote not escaped",
        "lenient: JSON not closed inside",
    },
}


def on_the_tokenizer(reasoning: str = "auto"):
    table, tokenizer = compiled_on("kimi_k2", "kimi_k2")
    return table, tokenizer, tag_of("kimi", tokenizer, TERMINALS, reasoning)


def read(detector: str, text: str) -> list:
    _, answer = split_reasoning("KimiK2Detector", text.replace("⏎", "\n"), opened=False)
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
@pytest.mark.parametrize("name", ["reasoning before", "two calls", "braces, quotes and escapes in a string"])
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
