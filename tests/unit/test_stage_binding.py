"""Which slots `bind` writes, and with what."""

from __future__ import annotations

from structured_commit import CommitConfig, CommitStage
from tests.support.calls import BODY, END, IN_TEXT, IN_THE_BODY, IN_THE_HEADER, NAME, OPEN, TEXT, calls_table

HEADER_OPEN, BODY_OPEN = [TEXT, OPEN, NAME], [TEXT, OPEN, NAME, BODY]


def make_stage() -> CommitStage:
    return CommitStage(calls_table(), CommitConfig(), num_slots=3, max_window=4)


def test_a_slot_starts_where_its_prompt_and_its_output_so_far_lead():
    stage = make_stage()
    stage.bind([2, 0], [HEADER_OPEN, BODY_OPEN])
    assert stage.state.tolist() == [IN_THE_BODY, 0, IN_THE_HEADER, 0]


def test_a_prompt_without_a_turn_or_with_a_finished_one_is_untracked():
    stage = make_stage()
    stage.state[:3] = IN_TEXT
    stage.bind([0, 1, 2], [[TEXT, NAME], [], [OPEN, END]])
    assert stage.state.tolist() == [0, 0, 0, 0]


def test_a_request_that_must_be_let_alone_is_untracked():
    stage = make_stage()
    stage.bind([0, 1], [BODY_OPEN, BODY_OPEN], tracked=[False, True])
    assert stage.state.tolist() == [0, IN_THE_BODY, 0, 0]


def test_without_owners_every_call_writes():
    stage = make_stage()
    stage.bind([0], [BODY_OPEN])
    stage.bind([0], [HEADER_OPEN])
    assert int(stage.state[0]) == IN_THE_HEADER


def test_what_the_device_knows_of_a_known_owner_is_kept():
    stage = make_stage()
    stage.bind([0], [BODY_OPEN], owners=["a"])
    stage.state[0], stage.repairs[0] = IN_TEXT, 5
    stage.bind([0], [HEADER_OPEN], owners=["a"])
    assert int(stage.state[0]) == IN_TEXT
    assert int(stage.repairs[0]) == 5


def test_a_new_owner_or_a_context_phase_writes_again_and_forgets_the_repairs():
    for again in ({"owners": ["b"]}, {"owners": ["a"], "in_context": [True]}):
        stage = make_stage()
        stage.bind([0], [BODY_OPEN], owners=["a"])
        stage.state[0], stage.repairs[0] = IN_TEXT, 5
        stage.bind([0], [HEADER_OPEN], **again)
        assert int(stage.state[0]) == IN_THE_HEADER
        assert int(stage.repairs[0]) == 0


def test_none_is_an_owner_like_any_other():
    stage = make_stage()
    stage.bind([0], [BODY_OPEN], owners=[None])
    stage.state[0] = IN_TEXT
    stage.bind([0], [HEADER_OPEN], owners=[None])
    assert int(stage.state[0]) == IN_TEXT


def test_a_binding_without_an_owner_ends_the_last_ones_claim():
    stage = make_stage()
    stage.bind([0], [BODY_OPEN], owners=["a"])
    stage.bind([0], [HEADER_OPEN])
    stage.bind([0], [BODY_OPEN], owners=["a"])
    assert int(stage.state[0]) == IN_THE_BODY


def test_binding_does_not_rewind_the_slots_random_stream():
    stage = make_stage()
    stage.steps[0] = 7
    stage.bind([0], [BODY_OPEN])
    assert int(stage.steps[0]) == 7


def test_there_is_one_row_more_than_slots_and_bind_cannot_reach_it():
    stage = make_stage()
    assert stage.state.shape == (4,)
    stage.bind([0, 1, 2], [BODY_OPEN] * 3)
    assert int(stage.state[3]) == 0
