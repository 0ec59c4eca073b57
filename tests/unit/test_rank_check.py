"""The debug switch that compares tensor-parallel ranks: what it sees, what it does not mind, and when it is off."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from structured_commit import CommitConfig, CommitStage, StageError, hooks, rank_check
from structured_commit.errors import RankMismatchError
from structured_commit.rank_check import RankCheck, first_difference, tensor_parallel_gather
from structured_commit.runtime import RUNTIME
from structured_commit.settings import parse_settings
from tests.law.instances import random_family
from tests.upstream.common.requests import LlmRequest
from tests.upstream.toy import Checkpoint

SLOTS, WIDTH = 4, 3
ONE_ENGINE = SimpleNamespace(spec_dec_mode=SimpleNamespace(use_one_engine=lambda: True))


@pytest.fixture
def stage():
    return CommitStage(random_family(3, 1).table, CommitConfig(), num_slots=SLOTS, max_window=WIDTH)


def window(tokens=((1, 2, 3), (4, 5, 6)), lengths=(2, 3), slots=(0, 1)):
    return (
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
    )


def checksums(stage, *windows) -> list[list[int]]:
    """What a check of one step records of each window."""
    seen = []
    for given in windows:
        check = RankCheck(1, lambda own: [own], 8, "cpu")
        check.next_step()
        check.record(stage, *given)
        seen.append(check._history[: len(given[1])].tolist())
    return seen


def test_every_accepted_token_length_and_state_shows_in_its_row_and_in_no_other(stage):
    first, *others = checksums(
        stage,
        window(),
        window(tokens=((1, 3, 3), (4, 5, 6))),
        window(tokens=((2, 1, 3), (4, 5, 6))),
        window(lengths=(1, 3)),
        window(lengths=(3, 3)),
    )
    for other in others:
        assert other[0] != first[0]
        assert other[1] == first[1]
    for tensor in (stage.state, stage.steps, stage.repairs):
        tensor[1] += 1
        (changed,) = checksums(stage, window())
        assert changed[0] == first[0]
        assert changed[1] != first[1]
        tensor[1] -= 1


def test_each_bit_of_each_token_shows(stage):
    first, *flipped = checksums(
        stage, window(), *(window(tokens=((1, 2 ^ (1 << bit), 3), (4, 5, 6))) for bit in range(31))
    )
    assert all(other[0] != first[0] for other in flipped)


def test_what_lies_past_a_row_or_in_rows_without_a_slot_does_not_matter(stage):
    first, past, nobody, beyond = checksums(
        stage,
        window(lengths=(2, 3), slots=(0, SLOTS)),
        window(tokens=((1, 2, -1), (4, 5, 6)), slots=(0, SLOTS)),
        window(tokens=((1, 2, 3), (9, 9, 9)), slots=(0, SLOTS)),
        window(tokens=((1, 2, 3), (9, 9, 9)), slots=(0, SLOTS + 7)),
    )
    assert first == past == nobody == beyond
    assert first[1] == 0


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ([[[5, 6], [7, 8]], [[5, 6], [7, 8]]], None),
        (
            [[[5, 6], [7, 8]], [[5, 6], [7, 9]]],
            "in step 42, row 1 (slot 3), rank 1 committed something else than rank 0",
        ),
        ([[[5, 6], [7, 8]], [[5, 0], [0, 8]]], "in step 41, row 1 (slot 3), rank 1 "),
        (
            [[[1, 6], [7, 8]], [[5, 6], [7, 8]], [[5, 6], [7, 8]]],
            "row 0 (slot 2), rank 0 committed something else than rank 1",
        ),
        ([[[1, 6]], [[5, 6]], [[5, 6]], [[2, 6]]], "row 0 (slot 2), ranks 0, 3 committed something else than rank 1"),
    ],
)
def test_the_first_differing_row_is_named_and_the_ranks_outside_the_largest_group(histories, message):
    found = first_difference([([[2, 3]] * len(h), h) for h in histories], 41)
    assert (found is None) if message is None else (message in found)


def test_ranks_that_bind_other_rows_differ_too():
    same = [[5, 6]]
    assert "row 1 (slot 3), rank 1 " in first_difference([([[2, 3]], same), ([[2, 1]], same)], 1)
    assert "row 1 (slot 3), rank 1 " in first_difference([([[2, 3]], same), ([[2]], [[5]])], 1)


def test_ranks_are_asked_once_in_so_many_steps_and_stay_stopped(stage):
    asked = []

    def gather(own):
        asked.append(own)
        slots, history = own
        return [own, own if len(asked) < 2 else (slots, [[1, *row[1:]] for row in history])]

    check = RankCheck(3, gather, 8, "cpu")
    for _ in range(6):
        check.next_step()
        check.name_rows([0, 1])
        check.record(stage, *window())
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=r"in step 4, row 0 \(slot 0\), rank 1"):
            check.next_step()
    assert len(asked) == 2
    assert asked[0][0] == [[0, 1]] * 3
    assert len(asked[0][1]) == 3
    assert len(asked[0][1][0]) == 2


@pytest.mark.parametrize(
    ("mapping", "compares"),
    [
        ({"tp_size": 2}, True),
        ({"tp_size": 2, "enable_attention_dp": True}, False),
        ({"tp_size": 1}, False),
        ({}, False),
    ],
)
def test_only_ranks_with_the_same_requests_are_compared(mapping, compares):
    engine = SimpleNamespace(dist=SimpleNamespace(tp_allgather=lambda own: [own]))
    assert (tensor_parallel_gather(engine, SimpleNamespace(**mapping)) is not None) == compares
    assert tensor_parallel_gather(SimpleNamespace(), SimpleNamespace(**mapping)) is None
    assert tensor_parallel_gather(None, None) is None


@pytest.mark.parametrize("every", [-1, 1_001])
def test_a_bad_interval_is_refused(every):
    with pytest.raises(StageError, match=f"rank_check_every is {every}; it must be 0 .* 1000"):
        parse_settings({"rank_check_every": every})


def test_the_mismatch_is_the_one_error_that_leaves_a_hook(tmp_path):
    checkpoint = Checkpoint.write(tmp_path)
    answers = [([[1]], [[5]]), ([[1]], [[6]])]
    section = checkpoint.section(rank_check_every=1)
    try:
        RUNTIME.build(section, tmp_path, 0, True, lambda own: answers)
        request = LlmRequest(7, checkpoint.prompts(1)[0], 8, py_seq_slot=1)
        request.receive(checkpoint.ids["a"])
        hooks.bind(ONE_ENGINE, [request])
        for _ in range(2):
            with pytest.raises(RankMismatchError, match="in step 1, row 0"):
                hooks.bind(ONE_ENGINE, [request])
        assert not RUNTIME.aside
    finally:
        RUNTIME.reset()


def test_the_switch_without_anyone_to_compare_with_is_said_and_off(tmp_path, caplog):
    try:
        RUNTIME.build(Checkpoint.write(tmp_path).section(rank_check_every=5), tmp_path, 0, True, None)
        assert RUNTIME.rank_check is None
    finally:
        RUNTIME.reset()
    assert "rank_check_every does nothing here" in caplog.text


def test_the_package_itself_imports_nothing_to_communicate_with():
    imported = set()
    for path in Path(rank_check.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert "torch.Tensor" in imported
    assert not [name for name in imported if name.split(".")[0] == "mpi4py" or name.startswith("torch.distributed")]
