"""Real vocabularies without a network: o200k from bpe-openai, with the control tokens of a format added.

Also makes openai-harmony load offline, by writing the file it reads from the same ranks. Used by the demo, the
replay and the tests; the overlay knows nothing of it.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import bpe_openai
import openai_harmony

from structured_commit import Format, Vocabulary, builtin_format

HARMONY_CONTROLS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    "<|endofprompt|>": 200018,
}
HARMONY_SIZE = 201_088  # the padded vocabulary of gpt-oss


@dataclass(frozen=True, eq=False)
class ChatVocabulary:
    """o200k and the control tokens of one format."""

    vocabulary: Vocabulary

    @cached_property
    def _split(self) -> re.Pattern[str]:
        names = sorted(self.vocabulary.controls, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which control tokens stand by name."""
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.vocabulary.controls:
                ids.append(self.vocabulary.controls[piece])
            elif piece:
                ids.extend(self.encode_ordinary(piece))
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which nothing is a control token."""
        return o200k().encode_ordinary(text)

    def spell(self, token: int) -> str:
        """A token for people: a control token's name, or its text."""
        return self.vocabulary.spell(token)


@cache
def o200k() -> bpe_openai.Encoding:
    """The o200k byte-pair encoding."""
    return bpe_openai.get_encoding("o200k_base")


@cache
def o200k_texts() -> dict[int, bytes]:
    """id → bytes of the 199,998 ordinary o200k tokens."""
    return dict(Vocabulary.of(o200k(), controls={"<|endofprompt|>": 200018}).texts)


@cache
def harmony_vocabulary() -> ChatVocabulary:
    """gpt-oss: the real ids, the real padded size."""
    return ChatVocabulary(Vocabulary(HARMONY_SIZE, o200k_texts(), HARMONY_CONTROLS))


def with_controls(names: Iterable[str]) -> ChatVocabulary:
    """o200k with the control tokens of another family added behind it."""
    controls = {name: 200_000 + i for i, name in enumerate(dict.fromkeys(names))}
    texts = {i: b for i, b in o200k_texts().items() if i < 200_000}
    return ChatVocabulary(Vocabulary(200_000 + len(controls), texts, controls))


def family_vocabulary(form: Format | str) -> ChatVocabulary:
    """o200k with every control token that a format names; for harmony, the real ids."""
    form = builtin_format(form) if isinstance(form, str) else form
    if form.name == "harmony":
        return harmony_vocabulary()
    return with_controls([*form.written_controls, *form.terminals, *form.never])


@cache
def harmony_encoding() -> openai_harmony.HarmonyEncoding:
    """OpenAI's own parser and vocabulary, loaded from a file written from the same ranks."""
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="harmony-vocabulary-"))
        ranks = sorted(o200k_texts().items())
        lines = (base64.b64encode(text) + b" %d\n" % rank for rank, text in ranks)
        (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
