"""What the compiler needs of a tokenizer: for each token id, its bytes of text or its name as a control token.

Read from a Hugging Face tokenizer, a tiktoken-like object, or a plain mapping. Bytes come from the vocabulary
itself, never from decoding a token alone: decoding would replace half characters and lose leading blanks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from .errors import VocabularyError


@dataclass(frozen=True)
class Vocabulary:
    """Token ids 0 … size−1: ordinary text, control tokens, or nothing (a hole, never legal while tracked).

    Attributes:
        size: V, at least one more than the largest id; pass the model's padded size where logits are wider.
        texts: id → bytes of an ordinary token.
        controls: name → id of each control (added, special) token.
    """

    size: int
    texts: Mapping[int, bytes]
    controls: Mapping[str, int]

    def __post_init__(self) -> None:
        top = max((*self.texts, *self.controls.values()), default=-1)
        low = min((*self.texts, *self.controls.values()), default=0)
        if low < 0 or top >= self.size:
            raise VocabularyError(f"token ids run from {low} to {top}, outside a vocabulary of size {self.size}")
        for name, token in self.controls.items():
            if token in self.texts:
                raise VocabularyError(f"id {token} is both ordinary text and the control token {name!r}")

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change whenever an id changes its meaning."""
        h = hashlib.sha256(json.dumps([self.size, sorted(self.controls.items())]).encode())
        for token in sorted(self.texts):
            h.update(b"%d %d " % (token, len(self.texts[token])))
            h.update(self.texts[token])
        return h.hexdigest()[:16]

    def spell(self, token: int) -> str:
        """A token for people: a control token's name, or its text; empty if it is neither."""
        name = self._names.get(token)
        return name if name is not None else self.texts.get(token, b"").decode("utf-8", "replace")

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token: name for name, token in self.controls.items()}

    @classmethod
    def of(cls, source: object, controls: Mapping[str, int] | None = None, size: int | None = None) -> Vocabulary:
        """Read a vocabulary.

        Args:
            source: a `Vocabulary`; a mapping id → bytes; a Hugging Face tokenizer (`transformers` fast or slow,
                or `tokenizers.Tokenizer`); or a tiktoken-like object (`n_vocab`, `decode_single_token_bytes`).
            controls: name → id; required with a mapping, added to what a tokenizer names otherwise.
            size: V, if larger than the largest id + 1.

        Raises:
            VocabularyError: the object is of no known kind, or its byte encoding is not one that is understood.
        """
        if isinstance(source, Vocabulary) and not controls and size in (None, source.size):
            return source
        if isinstance(source, Vocabulary):
            texts, named = source.texts, dict(source.controls)
            size = max(size or 0, source.size)
        elif isinstance(source, Mapping):
            texts, named = dict(source), {}
        elif hasattr(source, "decode_single_token_bytes"):
            texts, named = _from_tiktoken(source)
        else:
            texts, named = _from_hugging_face(source)
        named.update(controls or {})
        taken = set(named.values())
        texts = {int(i): bytes(b) for i, b in texts.items() if i not in taken}
        top = max((*texts, *taken), default=-1) + 1
        if size is not None and size < top:
            raise VocabularyError(f"vocabulary size {size} is smaller than the largest token id + 1 = {top}")
        return cls(size=size or top, texts=texts, controls=named)


def _from_tiktoken(source) -> tuple[dict[int, bytes], dict[str, int]]:
    named = dict(getattr(source, "_special_tokens", None) or {})
    taken = set(named.values())
    texts = {}
    for token in range(source.n_vocab):
        if token in taken:
            continue
        try:
            texts[token] = source.decode_single_token_bytes(token)
        except (KeyError, ValueError, IndexError):
            continue  # a hole in the table
    return texts, named


def _from_hugging_face(source) -> tuple[dict[int, bytes], dict[str, int]]:
    model = getattr(source, "model", None)
    if hasattr(model, "decode_single_token_bytes"):  # tiktoken behind a transformers front (Kimi)
        texts, named = _from_tiktoken(model)
        named.update({str(t): i for i, t in getattr(source, "added_tokens_decoder", {}).items()})
        return texts, named
    backend = getattr(source, "backend_tokenizer", source)
    if not hasattr(backend, "get_vocab") or not hasattr(backend, "to_str"):
        raise VocabularyError(
            f"cannot read a vocabulary from {type(source).__name__}: pass a fast Hugging Face tokenizer, a "
            "tiktoken-like object, or a mapping id → bytes with controls="
        )
    description = json.loads(backend.to_str())
    named = {t["content"]: t["id"] for t in description.get("added_tokens", ())}
    if hasattr(source, "added_tokens_decoder"):
        named.update({t.content: i for i, t in source.added_tokens_decoder.items()})
    taken = set(named.values())
    kinds = _component_types(description.get("decoder")) | _component_types(description.get("pre_tokenizer"))
    pieces = {i: p for p, i in backend.get_vocab().items() if i not in taken}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        try:
            return {i: bytes(alphabet[c] for c in p) for i, p in pieces.items()}, named
        except KeyError as error:
            raise VocabularyError(f"a token holds {error.args[0]!r}, which byte-level text cannot") from error
    if kinds & {"ByteFallback", "Metaspace"} or description["model"].get("byte_fallback"):
        return {i: _sentencepiece_bytes(p) for i, p in pieces.items()}, named
    raise VocabularyError(
        f"tokenizer model {description['model'].get('type')} with decoder {sorted(kinds)} is not understood: "
        "only byte-level and byte-fallback vocabularies map every token to bytes"
    )


def _component_types(component: dict | None) -> set[str]:
    if not component:
        return set()
    inner = component.get("decoders") or component.get("pretokenizers") or ()
    return {component["type"]}.union(*(_component_types(c) for c in inner))


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes: printable Latin-1 as itself, the others from U+0100 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(moved)}


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
