"""What holds of every single call of `commit`, whatever the automaton, the windows and the policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structured_commit import COUNTERS, CommitConfig, CommitOutput, CommitStage, Event, StructureTable
from structured_commit.table import TERMINAL

from .instances import random_table

CHANGING = ("trim", "repair", "gate", "align", "rollback")
POLICIES = ("off", "observe", *CHANGING)
EXAMPLES = settings(max_examples=60, deadline=None)
FEW, ENOUGH = st.integers(1, 6), st.just(64)  # repair rows
HELD = Event.GATED | Event.ALIGNED | Event.ROLLED_BACK
SHORTENING = Event.TRIMMED | Event.REPAIRED | Event.CUT | HELD | Event.AFTER_END


@dataclass(frozen=True)
class Step:
    """Arguments of one call, and the state and repairs of each row before it."""

    table: StructureTable
    config: CommitConfig
    tokens: Tensor
    lengths: Tensor
    slots: Tensor
    states: Tensor
    repairs: Tensor
    probs: Tensor
    words: Tensor

    @property
    def num_slots(self) -> int:
        return len(self.slots) + 2

    def stage(self) -> CommitStage:
        stage = CommitStage(self.table, self.config, num_slots=self.num_slots, max_window=self.tokens.shape[1])
        owned = self.slots < self.num_slots
        stage.state[self.slots[owned]] = self.states[owned]
        stage.repairs[self.slots[owned]] = self.repairs[owned]
        return stage

    def run(self) -> tuple[CommitOutput, CommitStage]:
        stage = self.stage()
        return self.commit(stage), stage

    def commit(self, stage: CommitStage) -> CommitOutput:
        return stage.commit(self.tokens, self.lengths, self.slots, probs=self.probs, words=self.words)

    def committed(self, out: CommitOutput, row: int) -> list[int]:
        return out.tokens[row, : int(out.lengths[row])].tolist()


@cache
def _table(seed: int) -> StructureTable:
    choose = random.Random(seed)
    return random_table(choose, vocab=choose.randint(2, 7), automata=2)[1]


@st.composite
def steps(draw, policies=POLICIES, repair_rows=ENOUGH, dummies=False) -> Step:
    table, width, rows = _table(draw(st.integers(0, 99))), draw(st.sampled_from((1, 3, 4, 5))), draw(st.integers(1, 6))
    vocab = table.vocab_size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    weights = torch.randint(0, 4, (rows, width, vocab), generator=generator).float() + 1e-3
    slots = draw(st.permutations(range(rows + 2)))[:rows]
    if dummies:
        slots = [rows + 2 if draw(st.booleans()) else s for s in slots]
    config = CommitConfig.of_rule(
        draw(st.sampled_from(policies)),
        repair_rows=draw(repair_rows),
        max_repairs=draw(st.sampled_from((0, 1, 8))),
    )
    states = draw(_lists(st.integers(0, table.stray), rows))
    choices = draw(_lists(_lists(st.integers(0, 3 * vocab - 1), width), rows))
    tokens = [_mostly_legal(table, state, row) for state, row in zip(states, choices, strict=True)]
    return Step(
        table=table,
        config=config,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        lengths=torch.tensor(draw(_lists(st.integers(1, width), rows)), dtype=torch.int32),
        slots=torch.tensor(slots),
        states=torch.tensor(states, dtype=torch.int32),
        repairs=torch.tensor(draw(_lists(st.integers(0, 1), rows)), dtype=torch.int32),
        probs=weights / weights.sum(dim=2, keepdim=True),
        words=torch.randint(2**32, (rows, 2), generator=generator),
    )


def _lists(elements, size: int):
    return st.lists(elements, min_size=size, max_size=size)


def _mostly_legal(table: StructureTable, state: int, choices: list[int]) -> list[int]:
    """One token for each choice: any token in a third of cases, one that fits what went before in the others."""
    tokens = []
    for choice in choices:
        fitting = [t for t in range(table.vocab_size) if table.host.step(state, t) >= 0]
        token = choice if choice < table.vocab_size else fitting[choice % len(fitting)]
        tokens.append(token)
        state = max(table.host.step(state, token), 0)
    return tokens


def _is_terminal(table: StructureTable, token: int) -> bool:
    return bool(table.class_flags[table.token_class[token].long()] & TERMINAL)


@EXAMPLES
@given(steps(repair_rows=FEW))
def test_every_row_commits_at_least_one_token_and_at_most_its_length(step):
    out, _ = step.run()
    assert bool((out.lengths >= 1).all())
    assert bool((out.lengths <= step.lengths).all())


@EXAMPLES
@given(steps(policies=CHANGING))
def test_columns_past_the_new_length_repeat_the_last_committed_token(step):
    out, _ = step.run()
    for row in range(len(step.slots)):
        committed = step.committed(out, row)
        width = step.tokens.shape[1]
        assert out.tokens[row].tolist() == committed + [committed[-1]] * (width - len(committed))


@EXAMPLES
@given(steps(policies=CHANGING, repair_rows=FEW))
def test_the_state_is_where_the_host_twin_walks_with_the_committed_tokens(step):
    out, stage = step.run()
    host = step.table.host
    for row, slot in enumerate(step.slots.tolist()):
        committed, before = step.committed(out, row), int(step.states[row])
        walk = host.walk(committed, before)
        if walk.illegal_at is None:
            assert int(stage.state[slot]) == walk.state
        else:
            ended = _is_terminal(step.table, committed[walk.illegal_at]) or _is_terminal(step.table, committed[-1])
            assert bool(out.events[row] & Event.UNTRACKED)
            assert int(stage.state[slot]) == (step.table.ended if ended else step.table.stray)


@EXAMPLES
@given(steps(policies=CHANGING))
def test_nothing_is_committed_after_a_terminal(step):
    out, _ = step.run()
    for row, state in enumerate(step.states.tolist()):
        committed = step.committed(out, row)
        if state == 0:
            continue  # untracked: whoever asked for it wants tokens after a terminal
        assert not any(_is_terminal(step.table, t) for t in committed[:-1])
        assert state != step.table.ended or len(committed) == 1


@EXAMPLES
@given(steps(policies=("repair", "gate", "align", "rollback"), repair_rows=FEW))
def test_a_tracked_row_commits_an_illegal_token_only_when_its_repairs_are_spent(step):
    out, _ = step.run()
    for row, state in enumerate(step.states.tolist()):
        illegal = step.table.host.walk(step.committed(out, row), state).illegal_at is not None
        assert illegal == bool(out.events[row] & Event.UNTRACKED)
        assert not illegal or int(step.repairs[row]) >= step.config.max_repairs


@EXAMPLES
@given(steps(policies=("gate",), repair_rows=FEW))
def test_gate_commits_one_token_a_step_inside_headers(step):
    out, _ = step.run()
    host = step.table.host
    for row, state in enumerate(step.states.tolist()):
        committed = step.committed(out, row)
        for i in range(1, len(committed)):
            assert not host.header_open(host.walk(committed[:i], state).state)


@EXAMPLES
@given(steps(policies=("align",), repair_rows=FEW))
def test_align_lets_no_window_cross_two_boundaries(step):
    out, _ = step.run()
    host = step.table.host
    for row, state in enumerate(step.states.tolist()):
        regions = [(host.block_open(state), host.header_open(state))]
        for token in step.committed(out, row):
            following = host.step(state, token)
            state = host.let_through(token) if following < 0 else following
            regions.append((host.block_open(state), host.header_open(state)))
        assert len(set(regions[:-1])) == 1, "a boundary stands only behind the last token"


@EXAMPLES
@given(steps(repair_rows=FEW))
def test_events_agree_with_each_other_and_with_what_was_committed(step):
    out, stage = step.run()
    policy = step.config.rule
    for row, slot in enumerate(step.slots.tolist()):
        event, length, given_length = Event(int(out.events[row])), int(out.lengths[row]), int(step.lengths[row])
        if policy == "off":
            assert event == Event(0)
            continue
        assert not event & Event.OUT_OF_RANGE
        assert (Event.AFTER_END in event) == (int(step.states[row]) == step.table.ended)
        assert (Event.ENDED in event) == (int(stage.state[slot]) == step.table.ended != int(step.states[row]))
        if event & (Event.REPAIRED | Event.CUT | Event.UNTRACKED):
            assert Event.ILLEGAL in event
        assert not (Event.REPAIRED in event and Event.CUT in event)
        assert Event.REPAIRED in event or Event.ESCAPED not in event
        assert Event.ENDED in event or Event.TRIMMED not in event
        assert Event.GATED not in event or policy == "gate"
        assert Event.ALIGNED not in event or policy == "align"
        assert Event.ROLLED_BACK not in event or policy == "rollback"
        assert policy in ("repair", "gate", "align", "rollback") or not event & (Event.REPAIRED | Event.CUT)
        if policy == "observe":
            assert length == given_length
        elif length < given_length:
            assert event & SHORTENING
        elif not event & Event.REPAIRED:
            assert step.committed(out, row) == step.tokens[row, :given_length].tolist()


@EXAMPLES
@given(steps(policies=("repair",)))
def test_a_window_with_nothing_to_mend_comes_out_bit_for_bit(step):
    out, _ = step.run()
    for row, state in enumerate(step.states.tolist()):
        window = step.tokens[row, : int(step.lengths[row])].tolist()
        if step.table.host.walk(window, state).taken == len(window):
            assert step.committed(out, row) == window
            assert not int(out.events[row]) & ~int(Event.ENDED)


@EXAMPLES
@given(steps(), st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_outputs(step, choose):
    order = list(range(len(step.slots)))
    choose.shuffle(order)
    names = ("tokens", "lengths", "slots", "states", "repairs", "probs", "words")
    shuffled = replace(step, **{name: getattr(step, name)[order] for name in names})
    out, stage = step.run()
    moved, moved_stage = shuffled.run()
    assert all(torch.equal(a[order], b) for a, b in zip(out, moved, strict=True))
    assert torch.equal(stage.state, moved_stage.state)
    assert torch.equal(stage.counters, moved_stage.counters)


@EXAMPLES
@given(steps(), st.integers(0, 10**6))
def test_what_lies_past_a_rows_length_has_no_effect(step, seed):
    generator = torch.Generator().manual_seed(seed)
    past = torch.arange(step.tokens.shape[1]) >= step.lengths[:, None]
    junk = torch.randint(-(2**31), 2**31, step.tokens.shape, generator=generator).int()
    littered = replace(
        step,
        tokens=torch.where(past, junk, step.tokens),
        probs=torch.where(past[:, :, None], torch.nan, step.probs),
    )
    out, stage = step.run()
    other, other_stage = littered.run()
    for row in range(len(step.slots)):
        assert step.committed(out, row) == littered.committed(other, row)
    assert torch.equal(out.lengths, other.lengths)
    assert torch.equal(out.events, other.events)
    assert torch.equal(stage.state, other_stage.state)
    assert torch.equal(stage.counters, other_stage.counters)


@EXAMPLES
@given(steps(dummies=True))
def test_rows_without_a_slot_leave_state_and_counters_alone(step):
    owned = step.slots < step.num_slots
    out, stage = step.run()
    assert int(stage.state[step.num_slots]) == 0
    if step.config.policy.value != "off":
        assert not bool(out.events[~owned].any())
        assert torch.equal(out.lengths[~owned], step.lengths[~owned])
    names = ("tokens", "lengths", "slots", "states", "repairs", "probs", "words")
    if bool(owned.any()):
        alone = replace(step, **{name: getattr(step, name)[owned] for name in names})
        alone_stage = CommitStage(step.table, step.config, num_slots=step.num_slots, max_window=step.tokens.shape[1])
        alone_stage.state[alone.slots] = alone.states
        alone_stage.repairs[alone.slots] = alone.repairs
        alone.commit(alone_stage)
        assert torch.equal(stage.state, alone_stage.state)
        assert torch.equal(stage.counters, alone_stage.counters)
    else:
        assert not bool(stage.counters.any())


@EXAMPLES
@given(steps(repair_rows=FEW))
def test_counters_are_the_sums_of_what_the_events_say(step):
    out, stage = step.run()
    counted = stage.read_counters()
    if step.config.policy.value == "off":
        assert not any(counted.values())
        return
    live = (out.events & Event.AFTER_END) == 0
    assert counted["windows"] == int(live.sum())
    assert counted["tokens_in"] == int(step.lengths[live].sum())
    assert counted["tokens_committed"] == int(out.lengths[live].sum())
    for name in ("illegal", "repaired", "cut", "escaped", "untracked", "ended", "out_of_range"):
        assert counted[name] == int(((out.events[live] & Event[name.upper()]) != 0).sum()), name
    for name in ("trimmed", "gated", "aligned", "rolled_back"):
        rows = live & ((out.events & Event[name.upper()]) != 0)
        dropped = int((step.lengths - out.lengths)[rows].sum())
        # `observe` counts what it would have cut; a mended row also drops what followed its illegal token.
        assert counted[name] == 0 or bool(rows.any()), name
        assert counted[name] <= dropped or step.config.policy.value == "observe"
    assert set(counted) == set(COUNTERS)


@EXAMPLES
@given(steps(policies=CHANGING))
def test_the_arguments_are_not_changed(step):
    before = [t.clone() for t in (step.tokens, step.lengths, step.slots, step.probs, step.words)]
    step.run()
    after = (step.tokens, step.lengths, step.slots, step.probs, step.words)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
