"""openai-harmony's streaming parser in every chunking: well-formed turns arrive whole, and a refused token costs its
message alone.

`Server` reads the parser as TensorRT-LLM's adapter does, a token at a time, a batch at a time. Without containment an
error drops the batch's deltas and the tokens behind it.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from openai_harmony import HarmonyError, Role, StreamableParser

from scripts.vocabularies import harmony_encoding
from structured_commit.serving.harmony import Controls, Watch, feed
from tests.support.harmony_turns import CONTROL, Message, Turn, handed_on, parse, streams, turns

WHOLE, BROKEN = 30, 25
CONTROLS = Controls.of(CONTROL)
SIZES = (1, 2, 3, 5, 8, 13, 16, 10_000)


class Server:
    """One stream, with the attributes of TensorRT-LLM's own stream state that `feed` uses."""

    def __init__(self, contained: bool) -> None:
        self.encoding = harmony_encoding()
        self.parser = StreamableParser(self.encoding, role=Role.ASSISTANT)
        self.tool_calls: dict = {}
        self.contained, self.watch = contained, Watch()
        self.message = 0

    def process_token_batch(self, tokens: list[int]) -> list[dict]:
        found = []
        for token in tokens:
            self.parser.process(token)
            if token == CONTROL["<|message|>"]:
                self.message += 1
            if self.parser.last_content_delta:
                where = self.parser.current_channel, self.parser.current_recipient
                found.append({"message": (self.message, *where), "content": self.parser.last_content_delta})
        return found

    def batch(self, tokens: list[int]) -> list[dict]:
        if self.contained:
            return feed(self, tokens, CONTROLS, self.watch)
        try:
            return self.process_token_batch(tokens)
        except (HarmonyError, UnicodeDecodeError, ValueError):
            return []


def received(ids: tuple[int, ...], size: int, contained: bool) -> list[tuple[str | None, str | None, str]]:
    """Channel, recipient and text of each message with text, when tokens come `size` at a time."""
    server = Server(contained)
    found: dict[tuple, str] = {}
    for at in range(0, len(ids), size):
        for delta in server.batch(list(ids[at : at + size])):
            found[delta["message"]] = found.get(delta["message"], "") + delta["content"]
    return [(channel, recipient, text) for (_, channel, recipient), text in found.items()]


def said(messages: tuple[Message, ...]) -> list[tuple[str | None, str | None, str]]:
    return [(m.channel, m.recipient, m.body) for m in messages if m.body]


@cache
def well_formed() -> list[Turn]:
    """Turns that the parser reads at once; text spelled in half characters is another matter, so none."""
    found = [turn for turn in turns() if parse(turn.ids) is not None and len(turn.messages) > 1]
    return found[:WHOLE]


@pytest.mark.parametrize("contained", [True, False], ids=["contained", "as it is"])
def test_well_formed_turns_arrive_whole_in_every_chunking(contained):
    assert len(well_formed()) == WHOLE
    for turn in well_formed():
        expected = said(handed_on(parse(turn.ids)))
        for size in SIZES:
            assert received(turn.ids, size, contained) == expected


def refused_at(ids: tuple[int, ...]) -> int | None:
    """The first token at which the streaming parser raises."""
    parser = StreamableParser(harmony_encoding(), role=Role.ASSISTANT)
    for i, token in enumerate(ids):
        try:
            parser.process(token)
        except HarmonyError:
            return i
    return None


@cache
def broken() -> list[tuple[tuple[int, ...], int]]:
    """Streams with a refused token that have something to lose before it, and no opener inside a body before it: there
    `feed` begins a new message where the parser reads on."""
    found = []
    for ids in streams()[:1500]:
        at = refused_at(ids)
        before = at and received(ids[:at], 1, False)
        if before and received(ids[:at], 1, True) == before:
            found.append((ids, at))
    return found[:BROKEN]


def test_an_error_costs_nothing_that_came_before_it_and_the_next_message_is_read():
    assert len(broken()) == BROKEN
    resumed = 0
    for ids, at in broken():
        before = received(ids[:at], 1, contained=False)
        expected = received(ids, 1, contained=True)
        assert expected[: len(before)] == before
        resumed += len(expected) > len(before)
        for size in SIZES:
            assert received(ids, size, contained=True) == expected
    assert resumed > 5


def test_without_containment_an_error_takes_its_batch_with_it():
    for ids, at in broken():
        before = received(ids[:at], 1, contained=False)
        assert received(ids, 10_000, contained=False) == [] != before
    differing = [ids for ids, _ in broken() if received(ids, 8, contained=False) != received(ids, 1, contained=True)]
    assert len(differing) > BROKEN // 4


def test_what_was_refused_is_named():
    for ids, _ in broken():
        server = Server(contained=True)
        for token in ids:
            server.batch([token])
        refused = server.watch.refused
        assert refused
        assert all(0 <= begin < end <= len(ids) for begin, end in refused)
        assert all(before[1] <= after[0] for before, after in pairwise(refused))
