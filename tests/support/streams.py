"""Token streams for format tests: the same turn in several spellings, and what a table says of it."""

from __future__ import annotations

import random
from functools import cache

from scripts.tables import compiled
from scripts.vocabularies import ChatVocabulary
from structured_commit import StructureTable

SPELLINGS = ("bpe", "bytes", "longest", "random")


@cache
def _token_of(chat: ChatVocabulary) -> dict[bytes, int]:
    return {text: token for token, text in chat.vocabulary.texts.items()}


def spell(chat: ChatVocabulary, text: str, how: str = "bpe", seed: int = 0) -> list[int]:
    """`text`, in which control tokens stand by name and ⏎ is a line feed, as ids.

    `how`: `bpe` as the tokenizer does, `bytes` one token a byte, `longest` greedy longest match, `random` random
    merges.
    """
    text = text.replace("⏎", "\n")
    if how == "bpe":
        return chat.encode(text)
    ids: list[int] = []
    choose = random.Random(seed)
    for piece in chat._split.split(text):
        if piece in chat.vocabulary.controls:
            ids.append(chat.vocabulary.controls[piece])
        else:
            ids.extend(_spell_bytes(_token_of(chat), piece.encode(), how, choose))
    return ids


def _spell_bytes(token_of: dict[bytes, int], data: bytes, how: str, choose: random.Random) -> list[int]:
    ids = []
    at = 0
    while at < len(data):
        longest = 1 if how == "bytes" else min(32, len(data) - at)
        lengths = [n for n in range(longest, 0, -1) if data[at : at + n] in token_of]
        length = choose.choice(lengths) if how == "random" else lengths[0]
        ids.append(token_of[data[at : at + length]])
        at += length
    return ids


def is_turn(table: StructureTable, ids: list[int], state: int | None = None) -> bool:
    """Whether `ids` is one whole turn, with or without its terminal."""
    walk = table.host.walk(ids, state)
    return walk.taken == len(ids) and table.host.may_end(walk.state)


def is_prefix(table: StructureTable, ids: list[int], state: int | None = None) -> bool:
    """Whether `ids` could still become a turn."""
    return table.host.walk(ids, state).taken == len(ids)


def turn_verdicts(name: str, text: str, prompt: str | None = None) -> set[bool]:
    """`is_turn` of one text over all spellings; `prompt` is a generation prompt to start behind."""
    table, chat = compiled(name)
    state = None if prompt is None else table.host.locate(spell(chat, prompt))
    if state == 0:
        raise AssertionError(f"the prompt {prompt!r} is in no turn of {name}")
    return {is_turn(table, spell(chat, text, how), state) for how in SPELLINGS}


def verdicts_on(tokenizer: ChatVocabulary, table: StructureTable, text: str, prompt: str | None = None) -> set[bool]:
    """`is_turn` of one text over all spellings with a table compiled for that tokenizer."""
    state = None if prompt is None else table.host.locate(tokenizer.encode(prompt.replace("⏎", "\n")))
    if state == 0:
        raise AssertionError(f"the prompt {prompt!r} is in no turn")
    return {is_turn(table, spell(tokenizer, text, how), state) for how in SPELLINGS}
