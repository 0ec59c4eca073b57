"""What the commit stage does to single windows, policy by policy, and what it says about them."""

from __future__ import annotations

import pytest
import torch

from structured_commit import COUNTERS, CommitConfig, CommitStage, Event
from tests.support.calls import (
    BODY,
    CLOSE,
    END,
    ENDED,
    IN_TEXT,
    IN_THE_BODY,
    IN_THE_HEADER,
    NAME,
    OPEN,
    STRAY,
    TEXT,
    VOCAB,
    calls_table,
    certain,
    int32,
)

NOTHING = Event(0)


def make_stage(policy: str = "repair", num_slots: int = 4, max_window: int = 5, **config) -> CommitStage:
    return CommitStage(calls_table(), CommitConfig(policy=policy, **config), num_slots=num_slots, max_window=max_window)


def commit(stage: CommitStage, *windows: list[int], probs=None, slots=None, **how):
    """Commit one whole window per row, slots from 0 on; the target is certain of `TEXT` unless told otherwise."""
    tokens = int32(list(windows))
    if probs is None and "logits" not in how and how.get("redraw", True):
        probs = certain(TEXT, width=tokens.shape[1]).expand(len(windows), -1, -1)
    slots = torch.arange(len(windows)) if slots is None else torch.tensor(slots)
    return stage.commit(tokens, int32([len(w) for w in windows]), slots, probs=probs, **how)


def only(out) -> tuple[list[int], Event]:
    """Committed tokens and events of a batch of one."""
    return out.tokens[0, : int(out.lengths[0])].tolist(), Event(int(out.events[0]))


def run(policy: str, window: list[int], state: int = IN_TEXT, **config):
    """(committed, events, state after) of one window."""
    stage = make_stage(policy, **config)
    stage.state[0] = state
    return (*only(commit(stage, window)), int(stage.state[0]))


LET_THROUGH = Event.ILLEGAL | Event.UNTRACKED
MENDED = Event.ILLEGAL | Event.REPAIRED


@pytest.mark.parametrize(
    ("policy", "committed", "events", "state"),
    [
        ("off", [TEXT, NAME, TEXT], NOTHING, IN_TEXT),
        ("observe", [TEXT, NAME, TEXT], LET_THROUGH, STRAY),
        ("trim", [TEXT, NAME, TEXT], LET_THROUGH, STRAY),
        ("repair", [TEXT, TEXT], MENDED, IN_TEXT),
        ("gate", [TEXT, TEXT], MENDED, IN_TEXT),
        ("rollback", [TEXT, TEXT], MENDED, IN_TEXT),
    ],
)
def test_an_illegal_token_is_redrawn_by_the_policies_that_repair(policy, committed, events, state):
    assert run(policy, [TEXT, NAME, TEXT]) == (committed, events, state)


@pytest.mark.parametrize(
    ("policy", "committed", "state"),
    [
        ("off", [TEXT, END, TEXT, NAME], IN_TEXT),
        ("observe", [TEXT, END, TEXT, NAME], ENDED),
        *((policy, [TEXT, END], ENDED) for policy in ("trim", "repair", "gate", "rollback")),
    ],
)
def test_nothing_is_committed_behind_a_terminal(policy, committed, state):
    events = NOTHING if policy == "off" else Event.ENDED | Event.TRIMMED
    assert run(policy, [TEXT, END, TEXT, NAME]) == (committed, events, state)


def test_trim_ends_at_a_terminal_even_where_no_turn_may_end():
    """The host stops there whatever the format says; what follows would never be seen."""
    ended = Event.ENDED | Event.TRIMMED | LET_THROUGH
    assert run("trim", [TEXT, END, TEXT], state=IN_THE_BODY) == ([TEXT, END], ended, ENDED)


def test_a_terminal_that_is_let_through_ends_the_row():
    ended = Event.ENDED | Event.TRIMMED | LET_THROUGH
    assert run("repair", [TEXT, END, TEXT], state=IN_THE_BODY, max_repairs=0) == ([TEXT, END], ended, ENDED)


def test_a_terminal_inside_an_open_block_is_redrawn():
    assert run("repair", [TEXT, END, TEXT], state=IN_THE_BODY) == ([TEXT, TEXT], MENDED, IN_THE_BODY)


def test_a_redrawn_token_may_be_the_terminal():
    stage = make_stage()
    stage.state[0] = IN_TEXT
    assert only(commit(stage, [TEXT, BODY], probs=certain(TEXT, END))) == ([TEXT, END], MENDED | Event.ENDED)
    assert int(stage.state[0]) == ENDED


def test_an_untracked_row_passes_whatever_it_holds():
    for policy in ("observe", "trim", "repair", "gate", "rollback"):
        assert run(policy, [NAME, END, CLOSE, BODY], state=0) == ([NAME, END, CLOSE, BODY], NOTHING, 0)


def test_a_row_whose_turn_has_ended_commits_one_token_and_is_not_counted():
    assert run("repair", [NAME, TEXT], state=ENDED) == ([NAME], Event.AFTER_END, ENDED)
    stage = make_stage()
    stage.state[0] = ENDED
    commit(stage, [NAME, TEXT])
    assert not any(stage.read_counters().values())


def test_a_stray_row_still_ends_at_its_terminal():
    assert run("repair", [NAME, END, TEXT], state=STRAY) == ([NAME, END], Event.ENDED | Event.TRIMMED, ENDED)


@pytest.mark.parametrize(
    ("window", "state", "committed", "after"),
    [
        ([TEXT, OPEN, NAME, BODY], IN_TEXT, [TEXT, OPEN], IN_THE_HEADER),
        ([NAME, NAME, BODY], IN_THE_HEADER, [NAME], IN_THE_HEADER),
        ([BODY, TEXT, CLOSE], IN_THE_HEADER, [BODY], IN_THE_BODY),
    ],
)
def test_gate_commits_one_token_a_step_inside_a_header(window, state, committed, after):
    assert run("gate", window, state) == (committed, Event.GATED, after)


def test_gate_lets_whole_windows_pass_outside_headers():
    assert run("gate", [TEXT, TEXT, CLOSE, TEXT], IN_THE_BODY) == ([TEXT, TEXT, CLOSE, TEXT], NOTHING, IN_TEXT)


@pytest.mark.parametrize(
    ("window", "state", "committed"),
    [([NAME, TEXT, BODY], IN_THE_HEADER, [NAME]), ([TEXT, OPEN, TEXT], IN_TEXT, [TEXT, OPEN])],
)
def test_gate_puts_an_illegal_token_inside_a_header_off_like_any_other(window, state, committed):
    stage = make_stage("gate")
    stage.state[0] = state
    tokens, events = only(commit(stage, window, probs=certain(NAME, width=3)))
    assert tokens == committed
    assert Event.GATED in events
    assert Event.REPAIRED not in events


def test_gate_redraws_an_illegal_token_that_opens_its_window_in_a_header():
    stage = make_stage("gate")
    stage.state[0] = IN_THE_HEADER
    assert only(commit(stage, [TEXT, NAME], probs=certain(NAME, width=2))) == ([NAME], MENDED)


@pytest.mark.parametrize(
    ("window", "committed", "events"),
    [
        ([TEXT, OPEN, NAME], [TEXT], Event.ROLLED_BACK),
        ([TEXT, OPEN, BODY, TEXT], [TEXT], Event.ROLLED_BACK),
        ([OPEN, NAME, BODY], [OPEN, NAME, BODY], NOTHING),
        ([OPEN, BODY, CLOSE, TEXT, OPEN], [OPEN, BODY, CLOSE, TEXT], Event.ROLLED_BACK),
        ([TEXT, OPEN, BODY, CLOSE], [TEXT, OPEN, BODY, CLOSE], NOTHING),
        ([TEXT, OPEN, TEXT], [TEXT], Event.ROLLED_BACK),
    ],
)
def test_rollback_drops_an_opener_that_the_window_does_not_close_unless_it_comes_first(window, committed, events):
    assert run("rollback", window)[:2] == (committed, events)


def test_a_block_that_was_open_before_the_window_is_not_rolled_back():
    assert run("rollback", [TEXT, TEXT], IN_THE_BODY) == ([TEXT, TEXT], NOTHING, IN_THE_BODY)


def test_after_max_repairs_illegal_tokens_pass_and_the_row_says_so():
    stage = make_stage(max_repairs=2)
    stage.state[0] = IN_TEXT
    assert [only(commit(stage, [NAME]))[1] for _ in range(3)] == [MENDED, MENDED, LET_THROUGH]
    assert int(stage.state[0]) == STRAY
    assert only(commit(stage, [NAME, BODY])) == ([NAME, BODY], NOTHING)
    assert stage.read_counters()["untracked"] == 1


def test_rows_illegal_from_the_start_come_first_when_repair_rows_run_out():
    """A row that cannot even be cut takes the next token on the shortest way to an end, here the end itself."""
    windows = [TEXT, NAME, TEXT], [NAME, TEXT, TEXT], [TEXT, TEXT, TEXT], [CLOSE, TEXT, TEXT]
    for rows, expected in (
        (4, [MENDED, MENDED, NOTHING, MENDED]),
        (2, [Event.ILLEGAL | Event.CUT, MENDED, NOTHING, MENDED]),
        (1, [Event.ILLEGAL | Event.CUT, MENDED, NOTHING, MENDED | Event.ESCAPED | Event.ENDED]),
    ):
        stage = make_stage(repair_rows=rows)
        stage.state[:4] = IN_TEXT
        out = commit(stage, *windows)
        assert [Event(e) for e in out.events.tolist()] == expected
        assert out.lengths.tolist() == [1 if Event.CUT in expected[0] else 2, 1, 3, 1]
        assert stage.state.tolist()[:3] == [IN_TEXT] * 3


def test_a_row_that_was_cut_is_mended_a_step_later():
    stage = make_stage(repair_rows=1)
    stage.state[:2] = IN_TEXT
    first = commit(stage, [TEXT, NAME], [NAME, TEXT])
    assert Event(int(first.events[0])) == Event.ILLEGAL | Event.CUT
    assert only(commit(stage, [NAME, TEXT])) == ([TEXT], MENDED)


def test_without_legal_mass_a_fixed_legal_token_is_committed():
    stage = make_stage()
    stage.state[0] = IN_THE_HEADER
    out = commit(stage, [TEXT, TEXT], probs=certain(TEXT, width=2))
    assert only(out) == ([BODY], MENDED | Event.ESCAPED)
    assert int(stage.state[0]) == IN_THE_BODY


def test_columns_past_the_new_length_repeat_the_last_committed_token():
    stage = make_stage()
    stage.state[0] = IN_TEXT
    assert commit(stage, [TEXT, END, OPEN, -1]).tokens.tolist() == [[TEXT, END, END, END]]


@pytest.mark.parametrize("junk", [END, NAME, -1, VOCAB])
@pytest.mark.parametrize("policy", ["observe", "trim", "repair", "gate", "rollback"])
def test_columns_past_the_given_length_are_not_looked_at(policy, junk):
    stage = make_stage(policy)
    stage.state[0] = IN_TEXT
    out = stage.commit(
        int32([[TEXT, junk, junk]]), int32([1]), torch.tensor([0]), probs=certain(TEXT, width=3) * torch.nan
    )
    assert only(out) == ([TEXT], NOTHING)
    assert int(stage.state[0]) == IN_TEXT


def test_without_a_distribution_at_hand_rows_are_cut_and_a_first_column_is_let_through():
    stage = make_stage()
    stage.state[:2] = IN_TEXT
    out = commit(stage, [TEXT, NAME, TEXT], [NAME, TEXT, END], redraw=False)
    assert [Event(e) for e in out.events.tolist()] == [Event.ILLEGAL | Event.CUT, LET_THROUGH | Event.ENDED]
    assert out.lengths.tolist() == [1, 3]
    assert stage.repairs.tolist() == [0] * 5


def test_a_column_may_have_its_distribution_anywhere_in_a_flat_list():
    stage = make_stage()
    stage.state[0] = IN_TEXT
    flat = torch.cat([certain(TEXT)[0], certain(OPEN)[0], certain(END)[0]])
    out = commit(stage, [TEXT, BODY], probs=flat, source_rows=torch.tensor([[0, 2]]))
    assert only(out) == ([TEXT, END], MENDED | Event.ENDED)


def test_values_out_of_range_are_clamped_and_flagged():
    stage = make_stage(max_window=3)
    stage.state[:3] = IN_TEXT
    tokens = int32([[TEXT, TEXT, TEXT], [OPEN, TEXT, TEXT], [TEXT, VOCAB, TEXT]])
    probs = certain(TEXT, width=3).expand(3, -1, -1)
    out = stage.commit(tokens, int32([0, 9, 3]), torch.arange(3), probs=probs)
    assert all(Event.OUT_OF_RANGE in Event(e) for e in out.events.tolist())
    assert out.lengths.tolist() == [1, 2, 2]
    assert out.tokens[2].tolist() == [TEXT, TEXT, TEXT]
    assert stage.read_counters()["out_of_range"] == 3


def test_an_id_outside_the_vocabulary_passes_on_an_untracked_row():
    assert run("repair", [VOCAB + 7, -3, TEXT], state=0) == ([VOCAB + 7, -3, TEXT], Event.OUT_OF_RANGE, 0)


def test_slots_out_of_range_are_rows_without_a_slot():
    stage = make_stage(num_slots=2)
    before = stage.state.clone()
    out = commit(stage, [NAME, END], [NAME, END], [NAME, END], slots=[2, -1, 99])
    assert out.tokens.tolist() == [[NAME, END]] * 3
    assert torch.equal(stage.state, before)
    assert not any(stage.read_counters().values())


def test_an_empty_batch_is_an_empty_batch():
    stage = make_stage()
    empty = torch.empty(0, 3, dtype=torch.int32)
    out = stage.commit(empty, empty[:, 0], torch.empty(0, dtype=torch.int64), probs=torch.empty(0, 3, VOCAB))
    assert out.tokens.shape == (0, 3)
    assert out.lengths.shape == out.events.shape == (0,)


def test_commit_in_place_writes_what_commit_returns():
    for policy in ("off", "observe", "trim", "repair"):
        stage, other = make_stage(policy), make_stage(policy)
        stage.state[0] = other.state[0] = IN_TEXT
        expected = commit(other, [TEXT, END, TEXT])
        tokens, lengths = int32([[TEXT, END, TEXT]]), int32([3])
        address = tokens.data_ptr()
        events = stage.commit_(tokens, lengths, torch.tensor([0]), probs=certain(TEXT, width=3))
        assert torch.equal(tokens, expected.tokens)
        assert tokens.data_ptr() == address
        assert torch.equal(lengths, expected.lengths)
        assert torch.equal(events, expected.events)


def test_off_and_observe_return_the_tensors_they_were_given():
    tokens, lengths = int32([[NAME, END]]), int32([2])
    for policy in ("off", "observe"):
        out = make_stage(policy).commit(tokens, lengths, torch.tensor([0]))
        assert out.tokens is tokens
        assert out.lengths is lengths


def test_counters_add_up_over_steps():
    stage = make_stage()
    stage.state[:3] = int32([IN_TEXT, IN_THE_BODY, IN_TEXT])
    commit(stage, [TEXT, NAME, TEXT], [TEXT, CLOSE, END], [TEXT, END, TEXT])
    commit(stage, [TEXT, TEXT], slots=[0])
    counted = dict.fromkeys(COUNTERS, 0)
    counted |= {"windows": 4, "tokens_in": 11, "tokens_committed": 9, "illegal": 1, "repaired": 1}
    assert stage.read_counters() == counted | {"trimmed": 1, "ended": 2}


def test_steps_and_repairs_are_counted_by_slot():
    stage = make_stage(num_slots=3)
    stage.state[:3] = IN_TEXT
    commit(stage, [NAME], [TEXT], slots=[2, 0])
    commit(stage, [NAME], slots=[2])
    assert stage.steps.tolist() == [1, 0, 2, 0]
    assert stage.repairs.tolist() == [0, 0, 2, 0]
