"""The stage on many ranks: the same decisions on all of them, no communication of its own, and nothing hangs.

Each test launches its ranks with a bound in time. `make test-multi` runs the full counts; elsewhere they are small.
"""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from .launch import Outcome, OvertimeError, is_alive, run_ranks

FULL = bool(os.environ.get("MULTI_GPU_FULL"))
WINDOWS = 10_000 if FULL else 200
TIMEOUT = 900 if FULL else 240
RANKS = (2, 4) if FULL else (2,)
DRAFTS = 3
full_only = pytest.mark.skipif(not FULL, reason="the full counts run in `make test-multi`")


def run(program: str, ranks: int, folder, *arguments: object, **more) -> Outcome:
    outcome = run_ranks(program, ranks, folder, *arguments, timeout=TIMEOUT, **more)
    assert outcome.status == 0, outcome.output
    return outcome


def said(outcome: Outcome) -> dict[int, list[str]]:
    """What each rank said."""
    lines: dict[int, list[str]] = {}
    for rank, text in re.findall(r"^\[rank (\d+)\] (.*)$", outcome.output, flags=re.MULTILINE):
        lines.setdefault(int(rank), []).append(text)
    return lines


def report(outcome: Outcome, rank: int = 0) -> dict:
    return json.loads(said(outcome)[rank][-1])


@pytest.mark.parametrize("acceptance", ["rejection", "strict"] if FULL else ["rejection"])
@pytest.mark.parametrize("ranks", RANKS)
def test_tensor_parallel_ranks_decide_the_same_without_communication(tmp_path, ranks, acceptance):
    # The program itself compares tokens, lengths, events, state and counters over all ranks, and counts every call.
    outcome = run("tensor_parallel", ranks, tmp_path, "--windows", WINDOWS, "--acceptance", acceptance, monitor=True)
    found = report(outcome)
    counters = found["counters"]
    assert found["windows"] == counters["windows"] == WINDOWS
    assert found["illegal"] == counters["escaped"] == counters["untracked"] == 0
    assert 0 < counters["repaired"] < WINDOWS
    assert counters["ended"] > 0
    assert counters["trimmed"] > 0 or acceptance == "strict"
    if ranks == 2 and found["device"] == "cpu":
        # What the library sent: one message for each rank's part of each draft's gather, and two for the comparison.
        assert outcome.messages == ranks * (WINDOWS // 8 * DRAFTS + 2)


@full_only
def test_the_stage_adds_no_message_to_those_of_the_same_engine_without_it(tmp_path):
    windows = 2_000
    counts = [
        run("tensor_parallel", 4, tmp_path / policy, "--windows", windows, "--policy", policy, monitor=True).messages
        for policy in ("off", "observe", "trim", "repair", "gate", "rollback")
    ]
    steps = windows // 8
    assert min(counts) > steps * DRAFTS
    # One message a step would add 250; what may differ is how the library splits the comparison at the end.
    assert max(counts) - min(counts) < 16


@full_only
def test_decisions_do_not_depend_on_the_number_of_ranks(tmp_path):
    digests: dict[str, set[str]] = {}  # by device: a GPU's exponentials are not a CPU's
    for ranks in (1, 2, 4):
        found = report(run("tensor_parallel", ranks, tmp_path / str(ranks), "--windows", 2_000))
        digests.setdefault(found["device"], set()).add(found["digest"])
    assert all(len(same) == 1 for same in digests.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_a_flipped_bit_on_one_rank_stops_all_with_step_row_and_rank(tmp_path, ranks):
    lines = said(run("flipped", ranks, tmp_path, "--every", 8))
    assert sorted(lines) == list(range(ranks))
    assert len({tuple(own) for own in lines.values()}) == 1
    token, token_again, state, state_again, off, nothing = lines[0]
    at = int(re.match(r"token flipped in step (\d+)", token)[1])
    assert 13 <= at <= 16  # the ranks compare in step 17
    for line, kind, step in ((token, "token", at), (state, "state", 13)):
        assert line.startswith(f"{kind} flipped in step {step} stopped in step 17: structured_commit: in step {step}, ")
        assert f"row 5 (slot {re.search(r'slot ([0-7])', line)[1]}), rank {ranks - 1} committed something else" in line
    assert (token_again, state_again) == ("token stays stopped", "state stays stopped")
    assert off == f"off flipped in step {at} went on, digests differ: True"
    assert nothing == "nothing flipped went on, digests differ: False"


@pytest.mark.parametrize("acceptance", ["rejection", "strict"] if FULL else ["rejection"])
@pytest.mark.parametrize("ranks", RANKS)
def test_attention_dp_ranks_equal_one_rank_alone(tmp_path, ranks, acceptance):
    # The program itself compares each rank with the same requests decoded alone, and counts every call.
    steps = 200 if FULL else 20
    outcome = run("attention_dp", ranks, tmp_path, "--steps", steps, "--acceptance", acceptance)
    reports = [report(outcome, rank) for rank in range(ranks)]
    assert all(len(found["sizes"]) == steps for found in reports)
    assert sum(found["illegal"] for found in reports) == 0
    assert min(reports[0]["sizes"]) > max(reports[1]["sizes"]) > 0
    assert reports[1]["sizes"][0] == reports[1]["sizes"][-1] == 0  # comes late, leaves early
    assert reports[0]["counters"]["repaired"] > 0
    if ranks > 2:
        assert set(reports[-1]["sizes"]) == {0}
        assert reports[-1]["counters"]["windows"] == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_pipeline_stages_and_disaggregated_servers_equal_one_rank_alone(tmp_path, ranks):
    # The program itself compares the streams; first stages check that they never build a stage.
    requests = 70 if FULL else 14
    outcome = run("roles", ranks, tmp_path, "--requests", requests)
    for rank in range(1, ranks, 2):
        found = report(outcome, rank)
        assert found["requests"] == requests
        assert found["inside"] > 0  # some first tokens had opened a call, or came in one
        assert found["illegal"] == 0


def test_a_run_that_hangs_is_killed_and_fails():
    with pytest.raises(OvertimeError, match="badly on 2 ranks was not done after 5 s and was killed") as caught:
        run_ranks("badly", 2, "hang", timeout=5)
    pids = re.findall(r"pid (\d+)", str(caught.value))
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(is_alive(int(pid)) for pid in pids):
        assert time.monotonic() < until, f"of ranks {pids} some are still there"
        time.sleep(0.1)


def test_a_rank_that_fails_takes_the_others_with_it():
    outcome = run_ranks("badly", 2, "raise", timeout=60)
    assert outcome.status != 0
    assert "[rank 1] Traceback" in outcome.output
    assert "this rank fails" in outcome.output
