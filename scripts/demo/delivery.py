"""What a client gets of a stream: the reply that `trtllm-serve` makes of it, and what became of each call.

The server's part is TensorRT-LLM's unstreamed Harmony path: the stop token is taken off, messages at the end that
never reached their `<|message|>` are dropped without a word, openai-harmony (strict) reads the rest, and where it
raises the client gets the raw text, markers included. Streams are real token ids here; how they were decoded, and
the project's own automaton, play no part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache

from openai_harmony import HarmonyEncoding, HarmonyError, Message, Role

from scripts.vocabularies import HARMONY_CONTROLS, harmony_encoding

from .conversations import KINDS, TOOLS, Kind

TERMINALS = ("<|return|>", "<|call|>", "<|endoftext|>")
_CHANNELS = ("analysis", "commentary")  # on which TensorRT-LLM's adapter takes a recipient for a call
# A content type without a recipient is read as a recipient, which matters to the adapter on all channels but `final`.
_TEXT_HEADER = re.compile(
    r"\s*<\|channel\|>(?:analysis|commentary|final(?:\s*<\|constrain\|>[^\s<]+|\s+(?!to=|functions)[^\s<]+)?)\s*"
)
_JSON_TYPES = (None, "json", "<|constrain|>json")


@dataclass(frozen=True, slots=True)
class Delivery:
    """The calls of one reply, or of many added up: `intended` is the sum of the five kinds after it.

    Attributes:
        planned: what the requests ask for; the target without smoothing makes exactly these.
        intended: calls that the stream began: messages that stand where the request asks for a call, unless they
            are readable as a message of text, and any other message whose header names a function. A planned call
            whose message was never begun, since the model ended its turn early, is not counted: nothing was lost.
        delivered: read as a call of a known function with a JSON object for arguments.
        silently_lost: the client gets nothing of it, or arguments that do not end in the object's brace; finish
            reason "stop", no error.
        wrong: the message was read whole, but calls no known function, or its arguments, empty or ending in a
            brace, are not a JSON object. That is content: a grammar's job, not structure's.
        in_error: of replies where the parser raised.
        unfinished: cut by the length limit, which the client is told.
        parse_errors: replies where the parser raised.
        as_text: readable messages of text where the request asks for a call. The client sees them; not intended.
    """

    planned: int = 0
    intended: int = 0
    delivered: int = 0
    silently_lost: int = 0
    wrong: int = 0
    in_error: int = 0
    unfinished: int = 0
    parse_errors: int = 0
    as_text: int = 0

    def __add__(self, other: Delivery) -> Delivery:
        return Delivery(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Client:
    """Reads replies with openai-harmony; equal streams are parsed once."""

    def __init__(self, encoding: HarmonyEncoding, controls: dict[str, int]) -> None:
        self._encoding = encoding
        self._start, self._message = controls["<|start|>"], controls["<|message|>"]
        self._known: dict[tuple[int, ...], list[Message] | None] = {}

    def receive(self, kind: Kind, tokens: Sequence[int], ended: bool) -> Delivery:
        """What became of the calls of a stream that ended by a terminal, or else by the length limit."""
        tokens = tuple(tokens[:-1] if ended else tokens)
        intended, as_text = self._intended(kind, tokens)
        messages = self.read(tokens)
        if messages is None:
            return Delivery(kind.calls, intended, in_error=intended, parse_errors=1, as_text=as_text)
        outcomes = [outcome for outcome in map(_outcome, messages) if outcome is not None]
        delivered = outcomes.count("delivered")
        wrong = min(outcomes.count("wrong"), intended - delivered)
        rest = intended - delivered - wrong
        if ended:
            return Delivery(kind.calls, intended, delivered, silently_lost=rest, wrong=wrong, as_text=as_text)
        return Delivery(kind.calls, intended, delivered, wrong=wrong, unfinished=rest, as_text=as_text)

    def read(self, tokens: tuple[int, ...]) -> list[Message] | None:
        """The messages of a completion without its terminal, or None where openai-harmony raises."""
        tokens = self._without_incomplete(tokens)
        if tokens not in self._known:
            try:
                self._known[tokens] = self._encoding.parse_messages_from_completion_tokens(
                    tokens, role=Role.ASSISTANT, strict=True
                )
            except (HarmonyError, UnicodeDecodeError, ValueError):  # what TensorRT-LLM catches
                self._known[tokens] = None
        return self._known[tokens]

    def _without_incomplete(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """As the server: cut from the last opener while no `<|message|>` follows it."""
        while self._start in tokens:
            at = len(tokens) - 1 - tokens[::-1].index(self._start)
            if self._message in tokens[at:]:
                break
            tokens = tokens[:at]
        return tokens

    def _intended(self, kind: Kind, tokens: tuple[int, ...]) -> tuple[int, int]:
        """How many messages are meant as calls, and how many are text where a call was planned."""
        calls = texts = 0
        for i, (header, whole) in enumerate(self._headers(tokens)):
            planned = i < len(kind.messages) and kind.messages[i].tool is not None
            is_text = whole and _TEXT_HEADER.fullmatch(header) is not None
            calls += not is_text and (planned or "functions." in header)
            texts += planned and is_text
        return calls, texts

    def _headers(self, tokens: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
        """For each message begun: its header behind the role, and whether `<|message|>` closes it."""
        starts = [-1, *(i for i, token in enumerate(tokens) if token == self._start)]
        for at, following in zip(starts, [*starts[1:], len(tokens)], strict=True):
            message = tokens[at + 1 : following]
            whole = self._message in message
            header = message[: message.index(self._message)] if whole else message
            text = self._encoding.decode(header)
            yield text if at < 0 else text.removeprefix("assistant"), whole


@cache
def _client() -> Client:
    return Client(harmony_encoding(), HARMONY_CONTROLS)


def receive_all(kinds: Sequence[int], streams: Sequence[tuple[list[int], bool]]) -> list[Delivery]:
    """`Client.receive` for many streams (real ids, whether a terminal ended it); for another process."""
    client = _client()
    return [client.receive(KINDS[k], tokens, ended) for k, (tokens, ended) in zip(kinds, streams, strict=True)]


def describe_reply(tokens: Sequence[int], ended: bool) -> str:
    """What the client gets of a stream, in one line."""
    messages = _client().read(tuple(tokens[:-1] if ended else tokens))
    if messages is None:
        return "raw text, markers included: openai-harmony could not read it"
    calls = [f"{m.recipient}({m.content[0].text})" for m in messages if _outcome(m) is not None]
    answers = [m.content[0].text for m in messages if m.channel == "final" and m.recipient is None]
    return "; ".join(calls + answers) or "no tool call, no content"


def _outcome(message: Message) -> str | None:
    """`delivered`, `wrong`, or None where the message is no call or its arguments stop short."""
    recipient, body = message.recipient, message.content[0].text if message.content else ""
    if recipient is None or (message.channel == "final" and not recipient.startswith("functions")):
        return None  # a content type alone is read as a recipient: `final json`
    known = recipient.startswith("functions.") and recipient.removeprefix("functions.") in TOOLS
    if not known or message.channel not in _CHANNELS or message.content_type not in _JSON_TYPES:
        return "wrong"
    if body.strip() and not body.rstrip().endswith("}"):
        return None
    try:
        return "delivered" if isinstance(json.loads(body), dict) else "wrong"
    except ValueError:
        return "wrong"
