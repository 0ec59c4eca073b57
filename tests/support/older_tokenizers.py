"""Checkpoints whose tokenizer lacks some of a family's control tokens: their spelling is ordinary text there."""

from __future__ import annotations

from functools import cache

from scripts.vocabularies import ChatVocabulary, family_vocabulary
from structured_commit import StructureTable, Vocabulary, compile_format

from .streams import is_turn, spell


@cache
def lacking(name: str, *controls: str) -> tuple[StructureTable, ChatVocabulary]:
    """A built-in format over single bytes and the family's control tokens less `controls`."""
    named = [n for n in family_vocabulary(name).vocabulary.controls if n not in controls]
    letters = {i: bytes([i]) for i in range(256)}
    vocabulary = Vocabulary(256 + len(named), letters, {n: 256 + i for i, n in enumerate(named)})
    return compile_format(name, vocabulary), ChatVocabulary(vocabulary)


def is_turn_lacking(name: str, text: str, *controls: str) -> bool:
    """Whether `text` is a turn where the tokenizer lacks `controls`."""
    table, chat = lacking(name, *controls)
    return is_turn(table, spell(chat, text, "bytes"))
