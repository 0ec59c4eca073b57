"""Report huggingface/transformers#47912 on real assisted generation: an EOS accepted in mid-window.

Release 5.15.0, on which it was reported, lies beside the installed one (see the Makefile) and runs in a process of its
own. The installed release cuts its windows at EOS; committing through the stage needs neither to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "5.15.0"
OLD_FOLDER = Path(sys.prefix) / f"transformers-{OLD}"
CASES = 7


@cache
def generated(old: bool) -> dict:
    if old and not OLD_FOLDER.is_dir():
        pytest.skip(f"transformers {OLD} is not in {OLD_FOLDER.name}; `make` sets it up")
    path = [*([str(OLD_FOLDER)] if old else []), str(ROOT / "overlay/tensorrt_llm/_torch/speculative")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.assisted_generation"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_mid_window(case: dict) -> bool:
    """Whether, in the run that goes on, the first EOS is followed by another token of its window."""
    at = case["at"]
    for window in case["windows"]:
        if at < len(window):
            return at + 1 < len(window)
        at -= len(window)
    raise AssertionError("the EOS was never committed")


def test_on_the_reported_release_generation_runs_past_an_eos_exactly_where_it_is_in_mid_window():
    found = generated(True)
    assert found["version"] == OLD
    past = [case for case in found["cases"] if case["assisted"] != case["plain"]]
    assert [case["at"] for case in past] == [case["at"] for case in found["cases"] if in_mid_window(case)]
    assert 3 < len(past) < len(found["cases"])
    assert all(case["assisted"][: len(case["plain"])] == case["plain"] for case in past)
    assert max(len(case["assisted"]) - len(case["plain"]) for case in past) > 10


def test_the_installed_release_stops_at_every_eos():
    found = generated(False)
    assert found["version"] != OLD
    assert all(case["assisted"] == case["plain"] for case in found["cases"])


@pytest.mark.parametrize("policy", ["trim", "repair"])
@pytest.mark.parametrize("old", [True, False], ids=["reported release", "installed release"])
def test_committed_through_the_stage_generation_stops_where_plain_greedy_stops(old, policy):
    cases = generated(old)["cases"]
    assert len(cases) == CASES
    for case in cases:
        assert case["plain"][-1] == generated(old)["known"][case["at"]]
        assert case[policy] == case["plain"]
        before = sum(map(len, case[f"windows, {policy}"][:-1]))
        assert before < len(case["plain"]), "no window follows the one with the EOS"


def test_windows_are_of_several_lengths_and_the_same_on_both_releases():
    old, new = generated(True), generated(False)
    assert old["known"] == new["known"]
    lengths = {len(window) for case in old["cases"] for window in case["windows"]}
    assert len(lengths) > 1
