"""Harmony replies as servers read them: which messages reached the client, and what a refused token may cost.

The parser reads an unfinished header on into the next message, and a body too; one token it refuses leaves it broken.
So a stream is fed token by token, a message that is not over when the next begins is given up, and the parser starts
afresh there. Knows the attributes of a stream state and of its parser; imports neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HEADER, BODY, BETWEEN, REFUSED = "header", "body", "between", "refused"


class Controls(NamedTuple):
    """Ids of the control tokens that frame messages."""

    start: int
    message: int
    closers: frozenset[int]

    @classmethod
    def of(cls, named: Mapping[str, int]) -> Controls | None:
        """From name → id; None where the format is not Harmony's."""
        if not {"<|start|>", "<|message|>", "<|end|>"} <= set(named):
            return None
        closers = (named[n] for n in ("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>") if n in named)
        return cls(named["<|start|>"], named["<|message|>"], frozenset(closers))


@dataclass
class Watch:
    """What is remembered of one stream; it lives as long as the server's own state of that stream.

    Attributes:
        where: `HEADER`, `BODY`, `BETWEEN` messages, or `REFUSED`: given up until the next message.
        seen: how many tokens were fed. began: index of the first token of the message.
        refused: spans [begin, end) of tokens of which the client got nothing.
        content, reasoning: what was delivered, piece by piece.
    """

    where: str = HEADER
    seen: int = 0
    began: int = 0
    refused: list[list[int]] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)


def feed(stream_state, tokens: Sequence[int], controls: Controls, watch: Watch) -> list[dict]:
    """In the place of `stream_state.process_token_batch(tokens)`: the same deltas, but an error costs its message only.

    Args:
        stream_state: has `parser`, `encoding`, `tool_calls` and `process_token_batch`; its parser may be replaced.
    """
    deltas: list[dict] = []
    for token in tokens:
        at, watch.seen = watch.seen, watch.seen + 1
        if token == controls.start:
            _begin(stream_state, watch, at)
        elif watch.where == REFUSED:
            watch.refused[-1][1] = at + 1
            continue
        try:
            deltas += stream_state.process_token_batch([token])
        except Exception:  # HarmonyError, and what else a parser finds to raise
            watch.refused.append([watch.began if watch.where == HEADER else at, at + 1])
            watch.where = REFUSED
            continue
        if token == controls.message and watch.where == HEADER:
            watch.where = BODY
        elif token in controls.closers and watch.where == BODY:
            watch.where = BETWEEN
    watch.content += [delta["content"] for delta in deltas if delta.get("content")]
    watch.reasoning += [delta["reasoning"] for delta in deltas if delta.get("reasoning")]
    merge = getattr(stream_state, "_merge_consecutive_deltas", None)
    return deltas if merge is None else merge(deltas)


def _begin(stream_state, watch: Watch, at: int) -> None:
    """At a message opener: give the message up that is not over, and start the parser afresh if it is of no use."""
    if watch.where == HEADER and at > watch.began:
        watch.refused.append([watch.began, at])
    if watch.where != BETWEEN and at > 0:
        stream_state.parser = type(stream_state.parser)(stream_state.encoding, role=None)
        stream_state.channel_started, stream_state.current_channel_state = False, None
        for call in stream_state.tool_calls.values():
            call["active"] = False
    watch.where, watch.began = HEADER, at


class Message(NamedTuple):
    """A message of a reply. Texts are as the model wrote them.

    Attributes:
        begin, end: its tokens, [begin, end); the opener belongs to it, a closer does not.
        header, body: body is None where no `<|message|>` ends the header.
    """

    begin: int
    end: int
    header: str
    body: str | None

    @property
    def call(self) -> str | None:
        """Name of the function that the message calls, or None."""
        found = _RECIPIENT.search(self.header)
        name = found.group(1) if found else ""
        return name.split("functions.")[-1] if name and name != "assistant" else None

    @property
    def channel(self) -> str:
        """Name of its channel, '' if it has none."""
        found = _CHANNEL.search(self.header)
        return found.group(1) if found else ""


def messages(tokens: Sequence[int], controls: Controls, decode: Callable[[Sequence[int]], str]) -> list[Message]:
    """The messages of a reply; it starts inside the first one's header. Empty ones are left out."""
    starts = [i for i, token in enumerate(tokens) if token == controls.start]
    begins = starts if starts and starts[0] == 0 else [0, *starts]
    found = []
    for begin, stop in zip(begins, [*begins[1:], len(tokens)], strict=True):
        part = tokens[begin:stop]
        at = part.index(controls.message) if controls.message in part else None
        closed = len(part)
        if at is not None:
            closed = next((i for i in range(at + 1, len(part)) if part[i] in controls.closers), closed)
        while at is None and closed and part[closed - 1] in controls.closers:
            closed -= 1
        if not closed:
            continue
        header = decode(part[: closed if at is None else at])
        body = None if at is None else decode(part[at + 1 : closed])
        found.append(Message(begin, begin + closed, header, body))
    return found


def undelivered(
    found: Iterable[Message],
    calls: Sequence[tuple[str, str]],
    delivered: Sequence[str],
    refused: Sequence[Sequence[int]] = (),
) -> list[tuple[int, int]]:
    """Spans [begin, end) of tokens that the client got nothing of.

    Args:
        found: the reply's messages.
        calls: (name, arguments) of the calls that were delivered, in order; arguments may be the beginning only.
        delivered: the texts that were delivered, content and reasoning.
        refused: spans that the parser refused, if it was fed with `feed`.
    """
    lost = [(begin, end) for begin, end in refused]
    left = list(calls)
    for message in found:
        if any(begin < message.end and message.begin < end for begin, end in refused):
            if message.call and left and left[0][0] == message.call:
                left.pop(0)  # its beginning was delivered
        elif message.body is None:
            if message.header.removeprefix("<|start|>").removeprefix("assistant").strip():
                lost.append((message.begin, message.end))
        elif message.call and left and left[0][0] == message.call and message.body.startswith(left[0][1]):
            left.pop(0)
        else:
            body = message.body.strip()
            if not any(body in text for text in delivered) if body else message.call is not None:
                lost.append((message.begin, message.end))
    return sorted(lost)
