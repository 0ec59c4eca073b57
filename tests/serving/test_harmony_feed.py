"""Harmony streams token by token with the real parser: where nothing is wrong the same deltas, else nothing lost.

Turns are sampled with a fixed seed: 80 whole ones in three chunkings, 200 damaged ones.
"""

from __future__ import annotations

import itertools

import pytest

from scripts.vocabularies import HARMONY_CONTROLS, harmony_encoding, harmony_vocabulary
from structured_commit.serving.harmony import Controls, Watch, feed, messages, undelivered
from tests.support.harmony_turns import TERMINALS, Generator
from tests.upstream.common import harmony_state

STATES = [harmony_state.StreamState, harmony_state.MergingStreamState]
CONTROLS = Controls.of(HARMONY_CONTROLS)


def decode(token_ids):
    chat = harmony_vocabulary()
    names = {t: n.encode() for n, t in chat.vocabulary.controls.items()}
    texts = chat.vocabulary.texts
    return b"".join(names.get(t) or texts.get(t, b"") for t in token_ids).decode("utf-8", "replace")


def without_terminals(ids):
    ends = {HARMONY_CONTROLS[name] for name in TERMINALS}
    return list(itertools.takewhile(lambda t: t not in ends, ids))


def chunked(ids, size):
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.fixture
def same_ids(monkeypatch):
    def restart():
        monkeypatch.setattr(harmony_state, "_ids", itertools.count())

    return restart


@pytest.mark.parametrize("state", STATES)
def test_whole_turns_give_the_same_deltas_batch_by_batch(state, same_ids):
    generator = Generator(6)
    for _ in range(80):
        ids = without_terminals(generator.turn().ids)
        for size in (1, 5, 1000):
            same_ids()
            plain = state("r", harmony_encoding())
            expected = [plain.process_token_batch(part) for part in chunked(ids, size)]
            same_ids()
            fed, watch = state("r", harmony_encoding()), Watch()
            assert [feed(fed, part, CONTROLS, watch) for part in chunked(ids, size)] == expected
            assert watch.refused == []
            assert fed.tool_calls == plain.tool_calls
            assert watch.seen == len(ids)


@pytest.mark.parametrize("state", STATES)
def test_of_a_damaged_turn_every_text_is_delivered_or_named_as_lost(state):
    generator = Generator(7)
    broken = raised = 0
    for _ in range(200):
        ids = without_terminals(generator.damaged())
        plain = state("r", harmony_encoding())
        try:
            plain.process_token_batch(ids)
        except harmony_state.PARSE_ERRORS:
            raised += 1
        fed, watch = state("r", harmony_encoding()), Watch()
        deltas = [d for part in chunked(ids, 5) for d in feed(fed, part, CONTROLS, watch)]
        calls = [(c["name"], c["arguments"]) for c in fed.tool_calls.values()]
        delivered = ["".join(watch.content), "".join(watch.reasoning)]
        found = messages(ids, CONTROLS, decode)
        lost = undelivered(found, calls, delivered, watch.refused)
        broken += bool(lost)
        assert "".join(d.get("content", "") for d in deltas) == delivered[0]
        assert all(0 <= a < b <= len(ids) for a, b in lost)
        named = [decode(ids[a:b]) for a, b in lost]
        for message in found:
            body = (message.body or "").strip()
            if "\ufffd" in body:
                continue  # half a character: the parser spells it in its own way
            told = [*delivered, *named, *(arguments for _, arguments in calls)]
            parts = [t for t in told if body in t or (t and body.startswith(t))]
            assert not body or parts, (decode(ids), body)
    assert raised > 20
    assert broken > 50


@pytest.mark.parametrize("state", STATES)
def test_messages_around_a_refused_one_are_delivered_for_every_kind_of_fault(state):
    chat = harmony_vocabulary()
    before = "<|channel|>analysis<|message|>one<|end|>"
    after = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    faults = (
        "stray",
        "<|end|>",
        "<|message|>",
        "<|start|>",
        "<|start|>assistant",
        "<|start|>assistant<|channel|>commentary to=functions.g",
        "<|start|>assistant<|channel|>commentary to=functions.g<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>open",
        "<|start|>user<|channel|>analysis<|message|>x<|end|>",
        "<|start|>assistant<|channel|>a b c to=d<|message|>x<|end|>",
        "<|constrain|>json<|message|>{}",
    )
    for fault in faults:
        ids = chat.encode(before + fault + after)
        for size in (1, 4, 1000):
            fed, watch = state("r", harmony_encoding()), Watch()
            for part in chunked(ids, size):
                feed(fed, part, CONTROLS, watch)
            assert "".join(watch.reasoning).startswith("one"), fault
            assert [(c["name"], c["arguments"]) for c in fed.tool_calls.values()][-1:] == [("f", '{"x": 1}')], fault


def test_a_format_without_harmony_s_frame_has_no_controls():
    assert Controls.of({"<tool_call>": 1, "<|im_end|>": 2}) is None
