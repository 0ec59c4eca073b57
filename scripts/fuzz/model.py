"""What the stage must do to one row, written out token by token over Python integers.

The definition a second time, in another shape: no tensors, no masks, one token after the other. It shares nothing
with the stage but the table's defining tensors and the numbers of the events. Philox, the draw, the sampler's filters
and the choice of rows to redraw are written again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import Tensor

from structured_commit import COUNTERS, CommitConfig, Event, Policy, StructureTable
from structured_commit.table import IN_BLOCK, IN_HEADER, TERMINAL

UNTRACKED, ILLEGAL = 0, -1
_HELD = {"gate": Event.GATED, "align": Event.ALIGNED, "rollback": Event.ROLLED_BACK}
WORD = 0xFFFFFFFF


class Automaton:
    """The meaning of a table, read from its defining tensors."""

    def __init__(self, table: StructureTable) -> None:
        self.token_class = table.token_class.tolist()
        self.next_state = table.next_state.tolist()
        self.flags = table.state_flags.tolist()
        self.terminal_class = [bool(f & TERMINAL) for f in table.class_flags.tolist()]
        self.escape = table.escape_token.tolist()
        self.vocab = len(self.token_class)
        self.ended, self.stray = len(self.next_state), len(self.next_state) + 1

    def knows(self, token: int) -> bool:
        return 0 <= token < self.vocab

    def is_terminal(self, token: int) -> bool:
        return self.knows(token) and self.terminal_class[self.token_class[token]]

    def tracks(self, state: int) -> bool:
        return UNTRACKED < state < self.ended

    def step(self, state: int, token: int) -> int:
        """The state after `token`, or −1 if it is illegal."""
        if state in (UNTRACKED, self.ended):
            return state
        if state == self.stray:
            return self.ended if self.is_terminal(token) else self.stray
        if not self.knows(token):
            return ILLEGAL
        following = self.next_state[state][self.token_class[token]]
        return self.ended if following >= 0 and self.is_terminal(token) else following

    def pass_on(self, state: int, token: int) -> int:
        """The state after `token` was committed, legal or not."""
        following = self.step(state, token)
        return self.step(self.stray, token) if following == ILLEGAL else following

    def legal(self, state: int, token: int) -> bool:
        return self.step(state, token) != ILLEGAL

    def has(self, state: int, flag: int) -> bool:
        return self.tracks(state) and bool(self.flags[state] & flag)


@dataclass
class Row:
    """One row of one step, as the stage finds it."""

    tokens: list[int]
    length: int
    slot: int | None  # None: without one
    state: int
    steps: int = 0
    repairs: int = 0
    words: tuple[int, int] | None = None  # given by the caller instead of the stage's own


@dataclass
class Result:
    """What the stage must make of a row."""

    tokens: list[int]  # all W columns
    length: int
    events: Event
    state: int
    repaired: bool = False
    amounts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What rows are redrawn from; each tensor as `commit` takes it, but already picked for its row and column."""

    kind: str  # "probs", "greedy", "sampled" or "none"
    scores: Tensor | None = None  # [B, W, V]
    temperature: Tensor | None = None  # [B]
    top_k: Tensor | None = None
    top_p: Tensor | None = None

    def replacement(self, automaton: Automaton, row: int, column: int, state: int, words: tuple[int, int]) -> int:
        """A legal token, or V where none has any mass."""
        legal = [automaton.legal(state, t) for t in range(automaton.vocab)]
        here = self.scores[row, column]
        if self.kind == "greedy":
            return _best(here, legal)
        if self.kind == "probs":
            return _draw(_shares(here, legal), words)
        limits = (None if t is None else t[row].item() for t in (self.top_k, self.top_p))
        drawn = _draw(sampled_weights(here, float(self.temperature[row]), *limits, legal), words)
        return drawn if drawn < automaton.vocab else _best(here, legal)


def commit(config: CommitConfig, automaton: Automaton, rows: Sequence[Row], source: Source) -> list[Result]:
    """The rows of one step."""
    if config.policy is Policy.OFF:
        return [Result(row.tokens, row.length, Event(0), row.state) for row in rows]
    plans = [_plan(config, automaton, row, source.kind != "none") for row in rows]
    urgent = [i for i, plan in enumerate(plans) if plan.mends and plan.taken == 0]
    patient = [i for i, plan in enumerate(plans) if plan.mends and plan.taken > 0]
    drawn = set((urgent + patient)[: config.repair_rows]) if source.kind != "none" else set()
    return [_finish(config, automaton, i, row, plans[i], source, i in drawn) for i, row in enumerate(rows)]


@dataclass
class _Plan:
    """A row before any redraw: the first `taken` tokens pass, then perhaps one is to be replaced."""

    width: int
    length: int
    taken: int
    state: int
    events: Event
    mends: bool = False
    held: int = 0  # legal tokens that the policy puts off
    trimmed: int = 0


def _plan(config: CommitConfig, automaton: Automaton, row: Row, redraws: bool) -> _Plan:
    width = len(row.tokens)
    length = min(max(row.length, 1), width)
    window = row.tokens[:length]
    events = Event(0)
    if length != row.length or any(not automaton.knows(t) for t in window):
        events |= Event.OUT_OF_RANGE
    if row.state == automaton.ended:
        kept = length if config.policy is Policy.OBSERVE else 1
        plan = _Plan(width, length, kept, row.state, events | Event.AFTER_END)
        plan.trimmed = length - 1
        return plan
    spent = row.repairs >= config.max_repairs
    states, illegal, waits = [row.state], None, False
    for i, token in enumerate(window):
        state = states[-1]
        if not automaton.legal(state, token):
            illegal = i
            lets_through = not config.policy.repairs or (spent if redraws else i == 0)
            if not lets_through:
                waits = True
                break
        states.append(automaton.pass_on(state, token))
        if states[-1] == automaton.ended != state:
            break
    reach = len(states) - 1  # tokens up to the terminal, the illegal token or the end of the window
    limit = _limit(config.rule, automaton, states)
    taken = min(reach, limit)
    plan = _Plan(width, length, taken, states[taken], events)
    plan.mends = waits and limit > reach
    plan.held = reach - taken
    if plan.held or (waits and not plan.mends):
        plan.events |= _HELD[config.rule]
    if plan.mends:
        plan.events |= Event.ILLEGAL
    if illegal is not None and not waits and illegal < taken:
        plan.events |= Event.ILLEGAL | Event.UNTRACKED
    if plan.state == automaton.ended != row.state:
        plan.events |= Event.ENDED
        if taken < length:
            plan.events |= Event.TRIMMED
            plan.trimmed = length - taken
    if config.policy is Policy.OBSERVE:
        for token in window[taken:]:
            plan.state = automaton.pass_on(plan.state, token)
        plan.taken = length
    return plan


def _limit(rule: str, automaton: Automaton, states: list[int]) -> int:
    """How many tokens `gate`, `align` or `rollback` let pass."""
    unlimited = len(states)
    if rule == "gate":
        if automaton.has(states[0], IN_HEADER):
            return 1
        return next((i for i in range(1, len(states)) if automaton.has(states[i], IN_HEADER)), unlimited)
    if rule == "align":
        regions = [[automaton.has(s, flag) for flag in (IN_HEADER, IN_BLOCK)] for s in states]
        return next((i for i in range(1, len(states)) if regions[i] != regions[i - 1]), unlimited)
    if rule == "rollback":
        opened = [automaton.has(s, IN_HEADER | IN_BLOCK) for s in states]
        openers = [i for i in range(len(states) - 1) if opened[i + 1] and not opened[i]]
        if openers and openers[-1] > 0 and opened[-1]:
            return openers[-1]
    return unlimited


def _finish(
    config: CommitConfig, automaton: Automaton, index: int, row: Row, plan: _Plan, source: Source, redraws: bool
) -> Result:
    if config.policy is Policy.OBSERVE:
        tokens, length = row.tokens, row.length
    else:
        committed = row.tokens[: plan.taken]
        if plan.mends:
            plan = replace(plan)
            if redraws or plan.taken == 0:
                committed = [*committed, _mend(config, automaton, index, row, plan, source, redraws)]
            else:
                plan.events |= Event.CUT
        tokens = committed + [committed[-1]] * (plan.width - len(committed))
        length = len(committed)
    return Result(tokens, length, plan.events, plan.state, Event.REPAIRED in plan.events, _amounts(plan, length))


def _mend(
    config: CommitConfig, automaton: Automaton, index: int, row: Row, plan: _Plan, source: Source, redraws: bool
) -> int:
    token = automaton.vocab
    if redraws:
        words = row.words or stream_words(config.seed, row.slot, row.steps)
        token = source.replacement(automaton, index, plan.taken, plan.state, words)
    plan.events |= Event.REPAIRED
    if token == automaton.vocab:
        token = automaton.escape[plan.state]
        plan.events |= Event.ESCAPED
    plan.state = automaton.step(plan.state, token)
    if plan.state == automaton.ended:
        plan.events |= Event.ENDED
    return token


def _amounts(plan: _Plan, length: int) -> dict[str, int]:
    """What the row adds to each counter; nothing once its turn has ended."""
    if Event.AFTER_END in plan.events:
        return {}
    names = ("illegal", "repaired", "cut", "escaped", "untracked", "ended", "out_of_range")
    amounts = {name: int(Event[name.upper()] in plan.events) for name in names}
    amounts |= {"windows": 1, "tokens_in": plan.length, "trimmed": plan.trimmed}
    amounts["tokens_committed"] = min(max(length, 1), plan.width)
    for held in _HELD.values():
        if held in plan.events:
            amounts[held.name.lower()] = plan.held
    return amounts


def sums(results: Sequence[Result], rows: Sequence[Row]) -> dict[str, int]:
    """What a step adds to the counters; rows without a slot are not counted."""
    counted = [r.amounts for r, row in zip(results, rows, strict=True) if row.slot is not None]
    return {name: sum(a.get(name, 0) for a in counted) for name in COUNTERS}


def _best(scores: Tensor, legal: list[bool]) -> int:
    """The legal token with the highest score, the lowest id among equals; not a number is as low as can be."""
    best, at = None, len(legal)
    for token, value in enumerate(scores.float().tolist()):
        value = -math.inf if math.isnan(value) else value
        if legal[token] and (best is None or value > best):
            best, at = value, token
    return at


def _shares(probs: Tensor, legal: list[bool]) -> list[int]:
    """52 bits of each legal token's probability."""
    clean = [0.0 if math.isnan(p) else min(max(p, 0.0), 1.0) for p in probs.double().tolist()]
    return [int(p * 2**52) if fits else 0 for p, fits in zip(clean, legal, strict=True)]


def sampled_weights(
    scores: Tensor, temperature: float, top_k: int | None, top_p: float | None, legal: list[bool]
) -> list[int]:
    """What each legal token weighs behind temperature, top-k and top-p, in this order; nothing in a greedy row."""
    logits = scores.float().tolist()
    nothing = [0] * len(logits)
    best = max(math.inf if math.isnan(x) else x for x in logits)
    if temperature <= c_float(0.01).value or math.isinf(best):
        return nothing
    left = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k is not None and 0 < top_k < len(left):
        least = logits[left[top_k - 1]]
        left = [token for token in left if logits[token] >= least]
    if top_p is not None and not top_p >= 1:
        weights = [_exponential(best, logits[token], temperature) for token in left]
        mass = max(Fraction(int(top_p * 2**32) if top_p > 0 else 0, 2**32), Fraction(1, 2**32)) * sum(weights)
        left = [token for i, token in enumerate(left) if sum(weights[:i]) < mass]
    left = [token for token in left if legal[token]]
    for token in left:
        nothing[token] = _exponential(logits[left[0]], logits[token], temperature)
    return nothing


# ln(2)^k / k! in 31 bits; the last one is smaller by one, so that the sum is 2^32 − 1.
SERIES = [round(math.log(2) ** k / math.factorial(k) * 2**31) - (k == 10) for k in range(11)]


def _exponential(best: float, logit: float, temperature: float) -> int:
    """2^40 · e^−((best − logit) / temperature), rounded down at each step: a quotient of float32, then fixed point."""
    distance = c_float(c_float(best - logit).value / temperature).value if best > logit else 0.0
    if not distance < 32 or math.isnan(temperature):
        return 0
    whole, part = int(distance), int(math.fmod(distance, 1) * 2**31)
    base = round(math.log2(math.e) * 2**31)
    halvings, rest = divmod(whole * base + part * base // 2**31, 2**31)
    power = 0
    for term in reversed(SERIES):
        power = term + power * (2**31 - rest) // 2**31
    return power * 2**8 // 2**halvings


def _draw(weights: list[int], words: tuple[int, int]) -> int:
    target = ((words[0] << 32 | words[1]) * sum(weights)) >> 64
    for token, weight in enumerate(weights):
        if target < weight:
            return token
        target -= weight
    return len(weights)


def stream_words(seed: int, slot: int, step: int) -> tuple[int, int]:
    """The first two words of Philox4x32-10 (Salmon et al. 2011) for the stage's counter and key."""
    c = [slot, step & WORD, step >> 32, 0x5C0117ED]
    k = [seed & WORD, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & WORD, (p >> 32) ^ c[3] ^ k[1], p & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c[0], c[1]
