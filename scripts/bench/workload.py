"""Harmony windows over gpt-oss's vocabulary that every contender accepts, and batches of them.

The turns are those of the demo in the spelling that xgrammar's tag for Harmony takes: one call at most, no preamble, no
blank before `<|constrain|>`. A row of a batch stands at a random place of a random turn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from scripts.demo.conversations import KINDS, Kind, write_turn
from scripts.vocabularies import ChatVocabulary, harmony_vocabulary
from structured_commit import StructureTable, compile_format

PROBABILITY_ROWS = 16  # [B, W, V] of a large batch fits no memory; each column reads one of these instead


@dataclass(frozen=True)
class Row:
    """A request in the middle of its turn: what it said and the window to commit."""

    before: list[int]
    window: list[int]


@dataclass(frozen=True)
class Batch:
    """Rows as the stage takes them.

    Attributes:
        rows: as generated. illegal: which of them hold an illegal token, one in `tokens` only.
        tokens: [B, W] int32. lengths: [B] int32. slots: [B] int64. states: [B] int32, before the window.
        source_rows: [B, W] int64 into the world's probabilities.
    """

    rows: list[Row]
    illegal: list[int]
    tokens: Tensor
    lengths: Tensor
    slots: Tensor
    states: Tensor
    source_rows: Tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


class World:
    """The vocabulary, the table and the distributions that all batches share."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.chat: ChatVocabulary = harmony_vocabulary()
        self.table: StructureTable = compile_format("harmony", self.chat.vocabulary)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(PROBABILITY_ROWS, self.table.vocab_size, generator=generator) ** 64
        self.probs = (weights / weights.sum(dim=1, keepdim=True)).to(device)
        self._choose = random.Random(seed)
        self.turns = [self.chat.encode(text) for text in _turns(self._choose, 400)]

    @cached_property
    def terminals(self) -> list[int]:
        """Ids of `<|return|>` and `<|call|>`."""
        return [self.chat.vocabulary.controls[name] for name in ("<|return|>", "<|call|>")]

    def batch(self, size: int, draft_length: int, illegal: float) -> Batch:
        """`size` rows with windows of `draft_length` + 1 tokens; a share of them, at least one unless the share is 0,
        with one illegal token at a random column."""
        width = draft_length + 1
        rows = [self._row(width) for _ in range(size)]
        bad = self._choose.sample(range(size), min(size, max(1, round(illegal * size)))) if illegal else []
        host = self.table.host
        states = [host.walk(row.before).state for row in rows]
        tokens = [list(row.window) for row in rows]
        for i in bad:
            at = self._choose.randrange(width)
            state = host.walk(rows[i].window[:at], states[i]).state
            tokens[i][at] = next(t for t in self.chat.vocabulary.controls.values() if host.step(state, t) < 0)
        return Batch(
            rows,
            bad,
            *(t.to(self.device) for t in (torch.tensor(tokens, dtype=torch.int32), torch.full((size,), width).int())),
            torch.arange(size, device=self.device),
            torch.tensor(states, dtype=torch.int32, device=self.device),
            torch.randint(PROBABILITY_ROWS, (size, width), device=self.device),
        )

    def _row(self, width: int) -> Row:
        while True:
            turn = self._choose.choice(self.turns)
            if len(turn) > width + 1:
                at = self._choose.randrange(len(turn) - width - 1)
                return Row(turn[:at], turn[at : at + width])


def _turns(choose: random.Random, count: int) -> list[str]:
    kinds = [_canonical(kind) for kind in KINDS if kind.calls <= 1]
    return [write_turn(choose.choice(kinds), choose).replace(" <|constrain|>", "<|constrain|>") for _ in range(count)]


def _canonical(kind: Kind) -> Kind:
    return replace(kind, messages=tuple(m for m in kind.messages if m.channel != "commentary" or m.tool is not None))
