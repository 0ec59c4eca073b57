"""Generated Harmony turns, whole and damaged, and two readings of them: openai-harmony's and the grammar's."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

import openai_harmony

from scripts.tables import compiled
from scripts.vocabularies import HARMONY_CONTROLS, harmony_encoding
from tests.support.damage import damaged
from tests.support.streams import is_turn, spell

CHANNELS = ("analysis", "commentary", "final")
TERMINALS = ("<|return|>", "<|call|>", "<|endoftext|>")
STOPS = ("<|return|>", "<|call|>", "<|end|>")
CONTROL = {name: token for name, token in HARMONY_CONTROLS.items() if name != "<|endofprompt|>"}
NAMES = {token: name for name, token in CONTROL.items()}
FRAGMENTS_PUT_IN = (
    *(" ", "x", "}", " <", "to=functions.", "to=functions.g", " json", "final", "user", "\n", " to=functions.g"),
    *(" x", "to="),
)
WELL_FORMED, DAMAGED = 1500, 4000


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a server hands it on. `content_type` as in the header, less `<|constrain|>`."""

    channel: str | None
    recipient: str | None
    content_type: str | None
    body: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Ids of a turn with its last terminal, and the messages meant."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]


class Generator:
    """Turns from a seed: same seed, same turns."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.table, self.chat = compiled("harmony")

    def turn(self) -> Turn:
        choice = self.choose
        kinds = choice.choices(
            [self.thought, self.preamble, self.call, self.built_in], (4, 1, 4, 1), k=choice.randint(0, 3)
        )
        if not kinds or choice.random() < 0.5:
            kinds.append(choice.choice([self.answer, self.structured]))
        ids: list[int] = []
        messages = []
        for kind in kinds:
            if ids:
                ids += [CONTROL["<|end|>"], CONTROL["<|start|>"], *self.text("assistant")]
            header, message = kind()
            ids += [*self.chat.encode(header), CONTROL["<|message|>"], *self.text(message.body)]
            messages.append(message)
        ending = choice.choice([*TERMINALS, "<|end|>", None])
        if ending:
            ids.append(CONTROL[ending])
        return Turn(tuple(ids), tuple(messages))

    def damaged(self) -> tuple[int, ...]:
        """A turn with one to three tokens deleted, doubled, swapped, replaced or put in."""
        fragments = [self.text(piece) for piece in FRAGMENTS_PUT_IN]
        return damaged(self.choose, self.turn().ids, list(CONTROL.values()), fragments)

    def text(self, text: str) -> list[int]:
        """`text` as ordinary tokens in a random spelling, also where it is spelled like a control token."""
        how = self.choose.choice(("bpe", "bpe", "bpe", "bytes", "longest", "random"))
        if how == "bpe":
            return [i for part in _split(text) for i in self.chat.encode(part)]
        return [i for part in _split(text) for i in spell(self.chat, part, how, self.choose.randrange(1000))]

    def body(self) -> str:
        words = (
            "Blue",
            " sky",
            "\n\n",
            "é",
            "空",
            "🌤️",
            " {",
            "}",
            '"',
            "<|end|>",
            "<|start|>assistant",
            "<",
            " to=functions.f",
            "",
        )
        return "".join(self.choose.choices(words, k=self.choose.randint(0, 6)))

    def object(self) -> str:
        return self.choose.choice(
            (
                "{}",
                '{"x":1}',
                ' {\n "x": "}"\n}\n',
                '{"s":"<|end|>","t":"空"}',
                '{"a":{"b":[1,{}]}}',
                "",
                " ",
                '{"x":"\\"{"}',
            )
        )

    def blank(self, least: int = 0) -> str:
        return "".join(
            self.choose.choices((" ", " ", " ", "\n", "\t"), k=max(least, self.choose.choice((0, 1, 1, 1, 2))))
        )

    def content_type(self, name: str) -> tuple[str, str | None]:
        return self.choose.choice(
            ((f"{self.blank()}<|constrain|>{name}", name), (f"{self.blank(1)}{name}", name), ("", None))
        )

    def thought(self) -> tuple[str, Message]:
        return f"{self.blank()}<|channel|>analysis{self.blank()}", Message("analysis", None, None, self.body())

    def preamble(self) -> tuple[str, Message]:
        return f"<|channel|>commentary{self.blank()}", Message("commentary", None, None, self.body())

    def answer(self) -> tuple[str, Message]:
        return f"<|channel|>final{self.blank()}", Message("final", None, None, self.body())

    def structured(self) -> tuple[str, Message]:
        written, named = self.content_type(self.choose.choice(("json", "json", "schema")))
        return f"<|channel|>final{written}{self.blank()}", Message("final", None, named, self.body())

    def call(self) -> tuple[str, Message]:
        name = self.choose.choice(("f", "get_weather", "a.b-c", "ü", "toto", "json"))
        return self._addressed("functions." + name, "json", self.object())

    def built_in(self) -> tuple[str, Message]:
        name = self.choose.choice(("python", "browser.search", "browser.open", "functions", "fun", "to=x"))
        return self._addressed(name, "code", self.body())

    def _addressed(self, recipient: str, kind: str, body: str) -> tuple[str, Message]:
        channel = self.choose.choice(("commentary", "commentary", "analysis"))
        written, named = self.content_type(kind)
        if self.choose.random() < 0.5:
            header = f"<|channel|>{channel}{self.blank(1)}to={recipient}{written}"
        else:
            header = f"{self.blank(1)}to={recipient}<|channel|>{channel}{written}"
        return header + self.blank(), Message(channel, recipient, named, body)


def _split(text: str) -> list[str]:
    """Parts of `text` none of which is spelled like a whole control token."""
    return re.split(r"(?<=<)(?=\|)", text) if "<|" in text else [text]


@cache
def turns() -> tuple[Turn, ...]:
    generator = Generator(17437)
    return tuple(generator.turn() for _ in range(WELL_FORMED))


@cache
def streams() -> tuple[tuple[int, ...], ...]:
    generator = Generator(16377)
    return tuple(generator.damaged() for _ in range(DAMAGED)) + tuple(t.ids for t in turns())


@cache
def parse(ids: tuple[int, ...]) -> list[openai_harmony.Message] | None:
    """What the strict parser reads, or None where it refuses."""
    try:
        return harmony_encoding().parse_messages_from_completion_tokens(
            list(ids), role=openai_harmony.Role.ASSISTANT, strict=True
        )
    except openai_harmony.HarmonyError:
        return None


@cache
def accepted(ids: tuple[int, ...]) -> bool:
    return is_turn(compiled("harmony")[0], list(ids))


def handed_on(messages: list[openai_harmony.Message]) -> tuple[Message, ...]:
    """Parsed messages in the words of this test."""
    return tuple(
        Message(
            m.channel,
            m.recipient,
            m.content_type and m.content_type.removeprefix("<|constrain|>"),
            "".join(c.text for c in m.content),
        )
        for m in messages
    )


def read(ids: tuple[int, ...]) -> tuple[Message, ...]:
    """Our own reading of an accepted turn, from the grammar of a header."""
    chat = compiled("harmony")[1]
    ids = ids[:-1] if NAMES.get(ids[-1]) in TERMINALS else ids
    found = []
    header, body, in_body = [], [], False
    for token in (*ids, CONTROL["<|end|>"]):
        if token == CONTROL["<|end|>"]:
            if in_body:
                found.append(_message(header, body))
            header, body, in_body = [], [], False
        elif token == CONTROL["<|message|>"]:
            in_body = True
        elif in_body:
            body.append(chat.vocabulary.texts.get(token) or chat.spell(token).encode())
        elif token != CONTROL["<|start|>"]:
            header.append(NAMES[token].encode() if token in NAMES else chat.vocabulary.texts[token])
    return tuple(found)


_HEADER = re.compile(
    r"(?:assistant)?\s*(?:to=(?P<first>[^\s<]+))?<\|channel\|>(?P<channel>[a-z]+)"
    r"(?:\s+to=(?P<then>[^\s<]+))?(?:\s*<\|constrain\|>(?P<type>[^\s<]+)|\s+(?P<word>[^\s<]+))?\s*"
)


def _message(header: list[bytes], body: list[bytes]) -> Message:
    match = _HEADER.fullmatch(b"".join(header).decode("utf-8", "replace"))
    assert match, f"accepted header {b''.join(header)!r} has another shape than the grammar's"
    parts = match.groupdict()
    return Message(
        parts["channel"],
        parts["first"] or parts["then"],
        parts["type"] or parts["word"],
        b"".join(body).decode("utf-8", "replace"),
    )
