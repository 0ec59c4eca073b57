"""Vocabularies of checkpoints that lack some of a family's control tokens: their spelling is ordinary text there."""

from __future__ import annotations

from functools import cache

import pytest

from scripts.vocabularies import ChatVocabulary
from structured_commit import StructureTable, Vocabulary, compile_format
from structured_commit.expression import translate

from .streams import compiled


@cache
def lacking(name: str, *controls: str) -> tuple[StructureTable, ChatVocabulary]:
    """A built-in format over o200k with the family's control tokens less `controls`."""
    if r"\x78" in translate("(?:«x»|y)", {}, frozenset({"x"})).regex:
        pytest.skip("a missing control token is read as its spelling here, which makes thousands of states")
    full = compiled(name)[1].vocabulary
    named = {n: i for n, i in full.controls.items() if n not in controls}
    chat = ChatVocabulary(Vocabulary(full.size, full.texts, named))
    return compile_format(name, chat.vocabulary), chat
