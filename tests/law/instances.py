"""Small random worlds in which the law of a stream can be written out in full.

A world is a target p and a drafter q, both tables over every prefix, and an automaton over the same tokens. Worlds
come in families that share vocabulary and lengths, so that one call of the stage serves them all; the automata of
a family are the components of one table. An automaton's meaning is spelled out here a second time, in plain
lists, so that a test compares the stage with the definition and not with itself. Nothing here calls the stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from structured_commit import StructureTable, TableError, TableInfo
from structured_commit.table import IN_BLOCK, IN_HEADER, MAY_END, TERMINAL

MAX_VOCAB, MAX_DRAFTS, MAX_LENGTH = 5, 3, 5
# A fixed draft length runs over the end of the stream; its tables reach so much further that only small worlds do.
MAX_PREFIXES = 1100


@dataclass(frozen=True)
class Automaton:
    """A component: `rows[s][c]` is the state after class c, −1 illegal, and `flags[s]`; row 0 is untracked."""

    rows: list[list[int]]
    flags: list[int]


@dataclass(frozen=True)
class Family:
    """M worlds. A prefix is a number: the world, then its tokens, as digits in base V.

    Attributes:
        name: how to make it again.
        num_drafts: K. length: tokens in a whole stream.
        target, drafter: for each prefix length n, [M·V^n, V] float64, the next token's law.
        starts: [M] int64, the state at the start of a stream.
        table: the automata, as one table.
        overruns: whether windows may run past `length`; otherwise the drafts are shortened near the end.
    """

    name: str
    num_drafts: int
    length: int
    target: tuple[Tensor, ...]
    drafter: tuple[Tensor, ...]
    starts: Tensor
    table: StructureTable
    overruns: bool = False

    @property
    def worlds(self) -> int:
        return len(self.starts)

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    def drafts_at(self, n: int) -> int:
        """Drafts proposed behind a prefix of n tokens."""
        return self.num_drafts if self.overruns else min(self.num_drafts, self.length - n - 1)

    @cached_property
    def terminal(self) -> Tensor:
        """[V] bool."""
        classes = self.table.class_flags & TERMINAL
        return torch.tensor([bool(classes[c]) for c in self.table.token_class.tolist()])

    @cached_property
    def moves(self) -> Tensor:
        """[S + 2, V] int64: where each token leads. −1: illegal. Then come `ended` and `stray`, as in the table."""
        next_state, classes = self.table.next_state.tolist(), self.table.token_class.tolist()
        ends = self.terminal.tolist()
        rows = [[0] * self.vocab]
        for row in next_state[1:]:
            entries = [row[c] for c in classes]
            rows.append([self.table.ended if e >= 0 and ends[t] else e for t, e in enumerate(entries)])
        rows.append([self.table.ended] * self.vocab)
        rows.append([self.table.ended if end else self.table.stray for end in ends])
        return torch.tensor(rows)

    @cached_property
    def legal(self) -> Tensor:
        """[S + 2, V] bool."""
        return self.moves >= 0

    @cached_property
    def states(self) -> tuple[Tensor, ...]:
        """For each prefix length, [M·V^n] int64: the state behind it. After an illegal token: ended, or stray."""
        after_illegal = torch.where(self.terminal, self.table.ended, self.table.stray)
        walked = [self.starts]
        for _ in range(len(self.target) - 1):
            follow = self.moves[walked[-1]]
            walked.append(torch.where(follow >= 0, follow, after_illegal).flatten())
        return tuple(walked)

    def constrained(self, n: int) -> Tensor:
        """[M·V^n, V]: the target restricted to the legal tokens, renormalised; all zero where no legal mass is."""
        kept = torch.where(self.legal[self.states[n]], self.target[n], 0.0)
        total = kept.sum(dim=1, keepdim=True)
        return torch.where(total > 0, kept / total, 0.0)

    @cached_property
    def lacks_legal_mass(self) -> Tensor:
        """[M] bool: whether some prefix that constrained sampling reaches has p(S) = 0."""
        lacks = torch.zeros(self.worlds, dtype=torch.bool)
        reached = torch.ones(self.worlds, dtype=torch.bool)
        for n in range(self.length):
            step = self.constrained(n)
            lacks |= (reached & (step.sum(dim=1) == 0)).view(self.worlds, -1).any(dim=1)
            reached = (reached[:, None] & (step > 0) & ~self.terminal).flatten()
        return lacks

    def only(self, worlds: Tensor) -> Family:
        """The family of these worlds ([N] int64)."""

        def take(table: Tensor) -> Tensor:
            return table.view(self.worlds, -1, self.vocab)[worlds].flatten(0, 1)

        return replace(
            self,
            name=f"{self.name}, worlds {worlds.tolist()}",
            target=tuple(map(take, self.target)),
            drafter=tuple(map(take, self.drafter)),
            starts=self.starts[worlds],
        )


def random_family(seed: int, worlds: int, zeros: float | None = None) -> Family:
    """The family of a seed; `zeros` is the share of impossible tokens, drawn at random if None."""
    choose = random.Random(seed)
    vocab, num_drafts = choose.randint(2, MAX_VOCAB), choose.randint(1, MAX_DRAFTS)
    length = choose.randint(num_drafts + 1, MAX_LENGTH)
    overruns = vocab ** (length + num_drafts) <= MAX_PREFIXES
    depth = length + (num_drafts if overruns else 0)
    if zeros is None:
        zeros = choose.choice((0.0, 0.0, 0.2))
    generator = torch.Generator().manual_seed(seed)
    shape = [worlds * vocab**n for n in range(depth)]
    target = [_random_rows(rows, vocab, zeros, generator) for rows in shape]
    # A drafter that equals the target rejects nothing; one with zeros drafts few tokens again and again.
    kind = choose.choice(("other", "other", "other", "same", "sparse"))
    share = 0.6 if kind == "sparse" else zeros
    drafter = target if kind == "same" else [_random_rows(rows, vocab, share, generator) for rows in shape]
    starts, table = random_table(choose, vocab, worlds)
    return Family(f"seed {seed}", num_drafts, length, tuple(target), tuple(drafter), starts, table, overruns)


def random_table(choose: random.Random, vocab: int, automata: int = 1) -> tuple[Tensor, StructureTable]:
    """Valid automata over one vocabulary, each with an illegal token and a terminal: (start states, table)."""
    num_classes = choose.randint(2, vocab)
    token_class = list(range(num_classes)) + [choose.randrange(num_classes) for _ in range(vocab - num_classes)]
    choose.shuffle(token_class)
    terminal = set(choose.sample(range(num_classes), choose.choice((1, 1, 1, min(2, num_classes - 1)))))
    parts: list[Automaton] = []
    while len(parts) < automata:
        part = _random_automaton(choose, num_classes, terminal)
        try:
            make_table(token_class, [part], terminal, range(1, len(part.rows)))
        except TableError:
            continue
        if any(-1 in row for row in part.rows):
            parts.append(part)
    starts = [1]
    for part in parts[:-1]:
        starts.append(starts[-1] + len(part.rows) - 1)
    return torch.tensor(starts), make_table(token_class, parts, terminal, starts)


def make_table(
    token_class: list[int], parts: Sequence[Automaton], terminal: set[int], starts: Iterable[int] = (1,)
) -> StructureTable:
    """One table from automata, whose states are numbered on; `terminal` holds classes, `starts` states to enter by."""
    num_classes = len(parts[0].rows[0])
    rows, flags = [[0] * num_classes], [MAY_END]
    for part in parts:
        shift = len(rows) - 1
        rows += [[s + shift if s > 0 else s for s in row] for row in part.rows[1:]]
        flags += part.flags[1:]
    return StructureTable(
        torch.tensor(token_class, dtype=torch.int16),
        torch.tensor(rows, dtype=torch.int16),
        torch.tensor(flags, dtype=torch.uint8),
        torch.tensor([TERMINAL * (c in terminal) for c in range(num_classes)], dtype=torch.uint8),
        TableInfo(start=1, entries=tuple((0, state) for state in starts)),
    )


def _random_automaton(choose: random.Random, num_classes: int, terminal: set[int]) -> Automaton:
    num_states = choose.randint(2, 5)
    flags, rows = [MAY_END], [[0] * num_classes]
    for _ in range(1, num_states):
        may_end = choose.random() < 0.6
        region = choose.choice((0, 0, IN_BLOCK, IN_HEADER, IN_BLOCK | IN_HEADER))
        flags.append(region | (MAY_END if may_end else 0))
        rows.append(
            [
                (choose.randrange(num_states) if may_end and choose.random() < 0.9 else -1)
                if c in terminal
                else (-1 if choose.random() < 0.35 else choose.randrange(1, num_states))
                for c in range(num_classes)
            ]
        )
    return Automaton(rows, flags)


def _random_rows(count: int, vocab: int, zeros: float, generator: torch.Generator) -> Tensor:
    weights = torch.randint(1, 10, (count, vocab), generator=generator).double()
    weights *= torch.rand(count, vocab, generator=generator) >= zeros
    empty = weights.sum(dim=1) == 0
    spare = torch.randint(vocab, (count,), generator=generator)
    weights[empty, spare[empty]] = 1.0
    return weights / weights.sum(dim=1, keepdim=True)
