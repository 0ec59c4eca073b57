"""Random walks through xgrammar's structural tags: turns that a tag lets a model say."""

from __future__ import annotations

import random
from collections.abc import Sequence

import xgrammar

from scripts.vocabularies import ChatVocabulary, family_vocabulary
from structured_commit import StructureTable, Vocabulary, compile_format

from .xgrammar_tags import Tag, tag_of


def palette(form: str, fragments: Sequence[str], markers: Sequence[str]) -> tuple[ChatVocabulary, list[int]]:
    """A small vocabulary: every byte, some fragments of text, the family's control tokens.

    Also the ids that a walk prefers: the fragments and the `markers`. It takes others now and then, so that not
    every walk has a stray control token in free text, but never the first byte of one: a tag cannot tell a marker
    from its spelling, and a format can.
    """
    texts = {i: bytes([i]) for i in range(256)}
    texts |= {256 + i: text.encode() for i, text in enumerate(dict.fromkeys(fragments))}
    named = {name: len(texts) + i for i, name in enumerate(family_vocabulary(form).vocabulary.controls)}
    chat = ChatVocabulary(Vocabulary(len(texts) + len(named), texts, named))
    return chat, [*range(256, len(texts)), *(named[marker] for marker in markers)]


def walks(tag: Tag, preferred: Sequence[int], count: int, seed: int, longest: int = 60) -> list[tuple[int, ...]]:
    """`count` turns that the tag accepts, without their terminal."""
    choose = random.Random(seed)
    found: list[tuple[int, ...]] = []
    for _ in range(50 * count):
        if len(found) == count:
            break
        ids = _walk(tag, preferred, choose, longest)
        if ids is not None:
            found.append(tuple(ids))
    return found


def _walk(tag: Tag, preferred: Sequence[int], choose: random.Random, longest: int) -> list[int] | None:
    matcher: xgrammar.GrammarMatcher = tag.matcher()
    stop, stops = tag.terminals[0], set(tag.terminals)
    controls = set(tag.chat.vocabulary.controls.values())
    spells = {name.encode()[0] for name in tag.chat.vocabulary.controls}
    ids: list[int] = []
    for _ in range(longest):
        allowed = tag.allowed(matcher)
        liked = [i for i in preferred if allowed[i]]
        if allowed[stop] and (not liked or choose.random() < 0.2):
            return ids
        if not liked or choose.random() < 0.03:
            others = [i for i in allowed.nonzero().flatten().tolist() if i not in stops and i not in spells]
            liked = ([i for i in others if i in controls] if not liked else []) or others
        if not liked:
            return None
        ids.append(choose.choice(liked))
        matcher.accept_token(ids[-1])
    return None


def compiled_palette(form: str, chat: ChatVocabulary) -> StructureTable:
    """The format's table over a palette."""
    return compile_format(form, chat.vocabulary)


__all__ = ["Tag", "compiled_palette", "palette", "tag_of", "walks"]
