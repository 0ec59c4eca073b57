"""Runs cases: the stage on one side, the definition and the host twin on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from structured_commit import CommitConfig, CommitStage, Event, Policy

from .case import Binding, Case, Step
from .model import Result, Row, commit, sums


class MismatchError(Exception):
    """The stage and its definition disagree. `case` makes it again."""

    def __init__(self, case: int, step: int, what: str) -> None:
        super().__init__(case, step, what)
        self.case, self.step, self.what = case, step, what

    def __str__(self) -> str:
        return f'case {self.case}, step {self.step}: {self.what}\nagain: make fuzz ARGS="--case {self.case}"'


def run_case(number: int, backend: str | None = None, make_stage: type[CommitStage] = CommitStage) -> int:
    """Run one case.

    Args:
        number: which.
        backend: the stage's implementation, None = as it chooses itself.
        make_stage: what to test.

    Returns:
        How many windows were compared.

    Raises:
        MismatchError: at the first difference.
    """
    case = Case(number)
    return sum(len(rows) for _, rows, _ in _played(case, _config(case.config, backend), make_stage))


def _config(config: CommitConfig, backend: str | None) -> CommitConfig:
    return config if backend is None else replace(config, backend=backend)


def _played(
    case: Case, config: CommitConfig, make_stage: type[CommitStage]
) -> Iterator[tuple[Step, list[Row], list[Result]]]:
    stage = make_stage(case.table, config, num_slots=case.num_slots, max_window=case.width)
    states, steps, repairs = ([0] * case.num_slots for _ in range(3))
    owners: dict[int, int] = {}
    counters = dict.fromkeys(stage.read_counters(), 0)
    for at in range(case.num_steps):
        step = case.step(states)
        if step.binding is not None:
            _bind(case, step.binding, stage, states, repairs, owners)
        for slot in step.untracked:
            states[slot] = 0
        stage.untrack_(torch.tensor(step.untracked, dtype=torch.int64))
        _require(case, at, "state after bind", stage.state[:-1].tolist(), states)
        rows = _rows(case, step, states, steps, repairs)
        results = commit(config, case.automaton, rows, step.source)
        out = stage.commit(step.tokens, step.lengths, step.slots, **step.arguments)
        for i, (row, result) in enumerate(zip(rows, results, strict=True)):
            got = (out.tokens[i].tolist(), int(out.lengths[i]), int(out.events[i]))
            if got != (result.tokens, result.length, int(result.events)):
                raise MismatchError(case.number, at, _difference(config, i, row, got, result))
            if row.slot is not None and config.policy is not Policy.OFF:
                _follow_host(case, at, i, row, result, config)
                states[row.slot] = result.state
                steps[row.slot] += 1
                repairs[row.slot] += result.repaired
        if config.policy is not Policy.OFF:
            counters = {name: n + counters[name] for name, n in sums(results, rows).items()}
        _require(case, at, "state", stage.state.tolist(), [*states, 0])
        _require(case, at, "steps", stage.steps[:-1].tolist(), steps)
        _require(case, at, "repairs", stage.repairs[:-1].tolist(), repairs)
        _require(case, at, "counters", stage.read_counters(), counters)
        yield step, rows, results


def _rows(case: Case, step: Step, states: list[int], steps: list[int], repairs: list[int]) -> list[Row]:
    words = step.arguments.get("words")
    rows = []
    for i, slot in enumerate(step.slots.tolist()):
        given = None if words is None else tuple(words[i].tolist())
        tokens, length = step.tokens[i].tolist(), int(step.lengths[i])
        if 0 <= slot < case.num_slots:
            rows.append(Row(tokens, length, slot, states[slot], steps[slot], repairs[slot], given))
        else:
            rows.append(Row(tokens, length, None, 0, words=given))
    return rows


def _bind(
    case: Case, binding: Binding, stage: CommitStage, states: list[int], repairs: list[int], owners: dict[int, int]
) -> None:
    stage.bind(
        binding.slots,
        binding.token_ids,
        owners=binding.owners,
        in_context=binding.in_context,
        tracked=binding.tracked,
        prompt_lengths=binding.prompt_lengths,
    )
    for i, slot in enumerate(binding.slots):
        in_context = binding.in_context is not None and binding.in_context[i]
        owner = None if binding.owners is None else binding.owners[i]
        if owner is not None and owners.get(slot) == owner and not in_context:
            continue
        owners.pop(slot, None)
        if owner is not None:
            owners[slot] = owner
        repairs[slot] = 0
        states[slot] = _located(case, binding.token_ids[i], binding.prompt_lengths[i]) if binding.tracked[i] else 0


def _located(case: Case, token_ids: list[int], prompt_length: int) -> int:
    """The state behind a prompt and what was committed since, by the definition."""
    automaton, (opener, state) = case.automaton, case.table.info.entries[0]
    prompt = token_ids[:prompt_length]
    if opener not in prompt:
        state = 0
    else:
        at = len(prompt) - 1 - prompt[::-1].index(opener)
        for token in prompt[at + 1 :]:
            state = automaton.step(state, token) if automaton.tracks(state) else -1
        if not automaton.tracks(state):
            state = 0
    for token in token_ids[prompt_length:]:
        state = automaton.pass_on(state, token)
    return state


def _follow_host(case: Case, at: int, index: int, row: Row, result: Result, config: CommitConfig) -> None:
    """The host twin, walking what was committed, must come to the same state."""
    host, state = case.table.host, row.state
    for token in result.tokens[: min(max(result.length, 1), len(result.tokens))]:
        following = host.step(state, token)
        state = host.let_through(token) if following < 0 else following
    if state != result.state:
        raise MismatchError(case.number, at, f"row {index}: the host twin comes to state {state}, not {result.state}")


def _require(case: Case, step: int, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise MismatchError(case.number, step, f"{what}: {got}\n  instead of {expected}")


def _difference(config: CommitConfig, index: int, row: Row, got: tuple, result: Result) -> str:
    tokens, length, events = got
    return (
        f"row {index} under {config}: {row}\n"
        f"  committed {tokens}, length {length}, {Event(events)!r}\n"
        f"  instead of {result.tokens}, length {result.length}, {result.events!r}"
    )
