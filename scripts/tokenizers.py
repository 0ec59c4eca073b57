"""The families' real tokenizers, as far as a package carries them, in the shape that the o200k ones have here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import splintr

from structured_commit import Vocabulary

from .vocabularies import ChatVocabulary


@dataclass(frozen=True, eq=False)
class RealTokenizer(ChatVocabulary):
    """A real vocabulary, and the real tokenizer for what stands between control tokens."""

    ordinary: Callable[[str], list[int]]

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which nothing is a control token."""
        return self.ordinary(text)


@cache
def real_tokenizer(name: str) -> RealTokenizer:
    """A tokenizer that splintr carries, less the agent tokens that it appends to every vocabulary."""
    tokenizer = splintr.Tokenizer.from_pretrained(name)
    size = splintr.base_vocab_size(name)
    special = tokenizer.special_tokens
    named = {n: i for n, i in (special() if callable(special) else special).items() if i < size}
    texts = {}
    for token in set(range(size)) - set(named.values()):
        try:
            texts[token] = tokenizer.decode_token_bytes(token)
        except ValueError:
            continue  # a reserved id
    return _real({i: b for i, b in texts.items() if b}, named, size, tokenizer.encode_ordinary)


def _real(
    texts: Mapping[int, bytes], named: Mapping[str, int], size: int, ordinary: Callable[[str], list[int]]
) -> RealTokenizer:
    return RealTokenizer(Vocabulary(size, dict(texts), dict(named)), ordinary)


def with_named(tokenizer: RealTokenizer, named: Mapping[str, int]) -> RealTokenizer:
    """The same tokenizer in a later version, which gave more of its reserved ids a name."""
    vocabulary = tokenizer.vocabulary
    taken = set(named.values())
    texts = {i: b for i, b in vocabulary.texts.items() if i not in taken}
    return _real(texts, {**vocabulary.controls, **named}, vocabulary.size, tokenizer.ordinary)
