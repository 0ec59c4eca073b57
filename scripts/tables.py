"""Built-in formats over real vocabularies, compiled once a process."""

from __future__ import annotations

from functools import cache

from structured_commit import StructureTable, compile_format

from .tokenizers import RealTokenizer, real_tokenizer, with_named
from .vocabularies import ChatVocabulary, family_vocabulary


@cache
def compiled(name: str) -> tuple[StructureTable, ChatVocabulary]:
    """A built-in format over o200k with the family's control tokens added (harmony: the real ids)."""
    chat = family_vocabulary(name)
    return compile_format(name, chat.vocabulary), chat


@cache
def compiled_on(form: str, tokenizer: str, *named: str) -> tuple[StructureTable, RealTokenizer]:
    """A built-in format over a tokenizer of splintr's, in which unused ids carry the names `named`."""
    real = real_tokenizer(tokenizer)
    if named:
        taken = {*real.vocabulary.texts, *real.vocabulary.controls.values()}
        unused = (i for i in range(real.vocabulary.size) if i not in taken)
        real = with_named(real, dict(zip(named, unused, strict=False)))
    return compile_format(form, real.vocabulary), real
