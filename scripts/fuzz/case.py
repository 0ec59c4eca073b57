"""A case: a table, a configuration and a schedule of steps, all a function of one number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structured_commit import CommitConfig, StructureTable

from .model import Automaton, Source
from .worlds import random_table

RULES = ("off", "observe", "trim", "repair", "repair", "repair", "gate", "rollback", "align")
STRANGE_LENGTHS = (0, -3, 1 << 20)
STRANGE_SLOTS = (-1, -(1 << 40), 1 << 40)


@dataclass(frozen=True)
class Binding:
    """Slots whose owner is new, or whose request is in its context phase again."""

    slots: list[int]
    token_ids: list[list[int]]
    owners: list[int] | None
    in_context: list[bool] | None
    tracked: list[bool]
    prompt_lengths: list[int]


@dataclass(frozen=True)
class Step:
    """One call of `commit` and what happened before it."""

    binding: Binding | None
    untracked: list[int]  # slots given to `untrack_`
    tokens: Tensor
    lengths: Tensor
    slots: Tensor
    source: Source  # each score at its row and column
    arguments: dict[str, Tensor | bool]  # the same, as `commit` takes it


@dataclass
class Case:
    """Everything that `number` stands for. `step` draws the next step; its tokens follow the states of the slots."""

    number: int
    choose: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)
    table: StructureTable = field(init=False)
    config: CommitConfig = field(init=False)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.number)
        self.generator = torch.Generator().manual_seed(self.number)
        self.table = random_table(self.choose)
        self.automaton = Automaton(self.table)
        choose = self.choose
        self.width = choose.choice((1, 2, 3, 4, 5, 9, 17))
        self.num_slots = choose.choice((1, 3, 8, 40, 100))
        self.num_steps = choose.randint(1, 6)
        self.illegal = choose.choice((0.0, 0.02, 0.3, 1.0))  # chance of any token in place of one that fits
        self.strange = choose.choice((0.0, 0.0, 0.1))  # chance of a value out of range
        self.kinds = ("probs", "greedy", "sampled", "none")[: choose.randint(1, 4)]
        self.config = CommitConfig.of_rule(
            choose.choice(RULES),
            max_repairs=choose.choice((0, 1, 2, 64)),
            repair_rows=choose.choice((1, 2, 8, 256)),
            seed=choose.choice((0, choose.getrandbits(64))),
        )
        self.next_owner = 0

    def step(self, states: list[int]) -> Step:
        """The next step. `states` [N]: the state of each slot; where `binding` moves one, the caller moves it too
        before it commits, and the tokens drawn here need not fit then, which is as good a window as any."""
        choose, slots = self.choose, self._slots()
        owned = [s for s in slots if 0 <= s < self.num_slots]
        binding = self._binding(owned) if choose.random() < 0.6 else None
        untracked = [s for s in owned if choose.random() < 0.03]
        starts = [states[s] if 0 <= s < self.num_slots else 0 for s in slots]
        tokens = torch.tensor([self._window(s) for s in starts], dtype=torch.int32).reshape(len(slots), self.width)
        lengths = [choose.randint(1, self.width) for _ in slots]
        lengths = [choose.choice((*STRANGE_LENGTHS, self.width + 1)) if self._odd() else n for n in lengths]
        source, arguments = self._source(len(slots))
        lengths = torch.tensor(lengths, dtype=torch.int32)
        return Step(binding, untracked, tokens, lengths, torch.tensor(slots, dtype=torch.int64), source, arguments)

    def _odd(self) -> bool:
        return self.choose.random() < self.strange

    def _slots(self) -> list[int]:
        rows = self.choose.randint(0 if self.choose.random() < 0.02 else 1, self.num_slots)
        slots = self.choose.sample(range(self.num_slots), rows)
        dummies = self.choose.choice((0, 0, 1, 5))
        slots += [self.num_slots] * dummies + [self.choose.choice(STRANGE_SLOTS) for _ in range(dummies // 2)]
        self.choose.shuffle(slots)
        return slots

    def _window(self, state: int) -> list[int]:
        return [*self._walk(state, self.width)]

    def _walk(self, state: int, count: int):
        for _ in range(count):
            token = self.choose.randrange(self.automaton.vocab)
            if self.choose.random() >= self.illegal:
                fitting = [t for t in range(self.automaton.vocab) if self.automaton.legal(state, t)]
                token = self.choose.choice(fitting or [token])
            if self._odd():
                token = self.choose.choice((-1, self.automaton.vocab, 2**31 - 1, -(2**31)))
            state = self.automaton.pass_on(state, token)
            yield token

    def _binding(self, owned: list[int]) -> Binding:
        choose = self.choose
        slots = [s for s in owned if choose.random() < 0.5]
        opener, entry = self.table.info.entries[0]
        token_ids, prompts = [], []
        for _ in slots:
            before = [choose.randrange(self.automaton.vocab) for _ in range(choose.randint(0, 4))]
            inside = [opener, *self._walk(entry, choose.randint(0, 4))] if choose.random() < 0.8 else []
            ids = before + inside
            prompts.append(choose.randint(0, len(ids)))
            token_ids.append(ids)
        owners = None
        if choose.random() < 0.7:
            owners = list(range(self.next_owner, self.next_owner + len(slots)))
            self.next_owner += choose.choice((0, len(slots)))  # 0: the same owners again, whose state is kept
        in_context = choose.choice((None, [choose.random() < 0.3 for _ in slots]))
        return Binding(slots, token_ids, owners, in_context, [choose.random() < 0.9 for _ in slots], prompts)

    def _source(self, rows: int) -> tuple[Source, dict[str, Tensor | bool]]:
        kind = self.choose.choice(self.kinds)
        if kind == "none":
            return Source(kind), {"redraw": False}
        shape = (rows, self.width, self.automaton.vocab)
        scores = torch.randint(-6, 7, shape, generator=self.generator).float()
        if kind == "probs":
            scores = torch.where(scores > self.choose.choice((-6, 0, 5)), scores.exp(), 0.0)  # rows may be all zero
            scores = torch.nan_to_num(scores / scores.sum(dim=2, keepdim=True))
        if self.choose.random() < 0.1:
            scores[torch.rand(shape, generator=self.generator) < 0.05] = torch.nan
        dtype = self.choose.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        scores = scores.to(dtype)
        given = {} if kind != "sampled" else self._filters(rows)
        source = Source(kind, scores, *(given.get(n) for n in ("temperature", "top_k", "top_p")))
        arguments: dict[str, Tensor | bool] = dict(given)
        name = "probs" if kind == "probs" else "logits"
        arguments[name] = scores
        if self.choose.random() < 0.3:  # as the accepted path of a tree: rows in any order
            order = torch.randperm(rows * self.width, generator=self.generator)
            flat = torch.empty(rows * self.width, self.automaton.vocab, dtype=dtype)
            flat[order] = scores.reshape(-1, self.automaton.vocab)
            arguments |= {name: flat, "source_rows": order.reshape(rows, self.width)}
        if self.choose.random() < 0.3:
            arguments["words"] = torch.randint(2**32, (rows, 2), generator=self.generator)
        return source, arguments

    def _filters(self, rows: int) -> dict[str, Tensor]:
        given = {"temperature": torch.tensor([self.choose.choice((0.0, 0.01, 0.5, 1.0, 2.0)) for _ in range(rows)])}
        if self.choose.random() < 0.5:
            given["top_k"] = torch.tensor([self.choose.choice((0, 1, 3, 1 << 20)) for _ in range(rows)]).int()
        if self.choose.random() < 0.5:
            given["top_p"] = torch.tensor([self.choose.choice((0.1, 0.6, 1.0)) for _ in range(rows)])
        return given
