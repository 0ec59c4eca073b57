"""What the stage costs in accepted tokens: mean tokens per step under each policy, on the same turns and drafts.

A turn is fixed, and so are the positions where the drafter is wrong and those where the target says an illegal token
instead; only the policy differs. A step's window reaches to the first wrong draft, at most K drafts and one more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from structured_commit import CommitConfig, CommitStage

from .workload import World

DRAFTS = 8
AGREES = 0.8  # how often the drafter is right about the next token
ROWS = 256
LAST_COLUMNS = DRAFTS + 1


@dataclass(frozen=True)
class Accepted:
    """One policy at one share of illegal windows.

    Attributes:
        tokens, steps: in all.
        illegal: share of the windows of `off` that held an illegal token.
    """

    policy: str
    illegal: float
    tokens: int
    steps: int

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps


@dataclass(frozen=True)
class _Turns:
    """ROWS turns over a small vocabulary, and for each position the wrong draft and the illegal token, if any."""

    tokens: list[list[int]]
    wrong: list[list[bool]]
    illegal: list[list[int | None]]


def measure(
    world: World, shares: tuple[float, ...], policies: tuple[str, ...], advance: Callable[[], object] = lambda: None
) -> list[Accepted]:
    """Every policy at every share of illegal windows."""
    found = []
    vocabulary = world.chat.vocabulary
    single = {i for i, text in vocabulary.texts.items() if len(text) == 1}  # so that every state has a way on
    ids = sorted({t for turn in world.turns for t in turn} | set(vocabulary.controls.values()) | single)
    table = world.table.select(torch.tensor(ids))
    small = {token: i for i, token in enumerate(ids)}
    for share in shares:
        turns = _make_turns(world, small, table, share)
        under_off = None
        for policy in policies:
            decoded = _decode(turns, table, policy)
            under_off = decoded.illegal if under_off is None else under_off
            found.append(replace(decoded, illegal=under_off))
            advance()
    return found


def _make_turns(world: World, small: dict[int, int], table, share: float) -> _Turns:
    choose = random.Random(5)
    chosen = [world.turns[choose.randrange(len(world.turns))] for _ in range(ROWS)]
    tokens = [[small[t] for t in turn] for turn in chosen]
    wrong = [[choose.random() >= AGREES for _ in turn] for turn in tokens]
    mean_window = sum(AGREES**k for k in range(LAST_COLUMNS))
    controls = [small[t] for t in world.chat.vocabulary.controls.values()]
    illegal: list[list[int | None]] = []
    for turn in tokens:
        row, state = [], table.host.start
        for token in turn:
            refused = [c for c in controls if table.host.step(state, c) < 0]
            row.append(choose.choice(refused) if refused and choose.random() < share / mean_window else None)
            state = table.host.step(state, token)
        illegal.append(row)
    return _Turns(tokens, wrong, illegal)


def _decode(turns: _Turns, table, policy: str) -> Accepted:
    stage = CommitStage(
        table,
        CommitConfig.of_rule(policy, max_repairs=2**31 - 1, repair_rows=ROWS),
        num_slots=ROWS,
        max_window=LAST_COLUMNS,
    )
    stage.state[:ROWS] = table.host.start
    at, tokens, steps, windows, bad = [0] * ROWS, 0, 0, 0, 0
    while live := [i for i in range(ROWS) if at[i] < len(turns.tokens[i])]:
        committed, illegal = _step(stage, turns, at, live)
        for i, count in zip(live, committed, strict=True):
            at[i] += count
        tokens, steps = tokens + sum(committed), steps + len(live)
        windows, bad = windows + len(live), bad + illegal
    return Accepted(policy, bad / windows, tokens, steps)


def _step(stage: CommitStage, turns: _Turns, at: list[int], live: list[int]) -> tuple[list[int], int]:
    vocab = stage.table.vocab_size
    windows, lengths, truth = [], [], []
    for i in live:
        said, right = [], turns.tokens[i][at[i] : at[i] + LAST_COLUMNS]
        for p in range(at[i], at[i] + len(right)):
            said.append(turns.tokens[i][p] if turns.illegal[i][p] is None else turns.illegal[i][p])
            if turns.wrong[i][p]:
                break
        lengths.append(len(said))
        windows.append(said + [0] * (LAST_COLUMNS - len(said)))
        truth.append(right + [0] * (LAST_COLUMNS - len(right)))
    rows = torch.tensor(truth)
    out = stage.commit(
        torch.tensor(windows, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(live),
        probs=torch.eye(vocab),  # the target is sure of the turn's own token
        source_rows=rows,
    )
    off = [any(turns.illegal[i][at[i] + j] is not None for j in range(n)) for i, n in zip(live, lengths, strict=True)]
    return out.lengths.tolist(), sum(off)
