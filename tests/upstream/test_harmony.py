"""The real Harmony format over gpt-oss's real vocabulary, found by `format: auto`, in a batch that is never at rest:
seven requests for four slots, chunked prompts beside generation rows, requests that end, and two that are paused and
resume in another slot."""

from __future__ import annotations

import pytest

from .harmony import HarmonyCheckpoint
from .paths import PATHS
from .test_patched_repair import Decoded

BY_NAME = {path.name: path for path in PATHS}
WORKERS = (
    ("w12", "eagle3-strict"),
    ("w13a", "dflash-strict"),
    ("w13b", "pard-strict"),
    ("w14", "mtp-strict"),
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    return HarmonyCheckpoint.write(tmp_path_factory.mktemp("harmony"))


@pytest.mark.parametrize(("window", "worker"), WORKERS)
def test_harmony_under_repair_is_the_constrained_target(patched, harmony, window, worker):
    path = BY_NAME[worker]
    decoded = Decoded(patched(window), path, harmony, way={"use_cuda_graph": True}, count=7, pause_at={4: 100, 5: 103})
    assert not decoded.illegal
    assert not decoded.committed_behind_an_end
    assert not decoded.aside
    assert 0 < decoded.counters["repaired"] < decoded.counters["windows"]
    assert decoded.tokens == decoded.constrained
    checker = decoded.engine.executor.model_engine.checker
    resumed = [slots for slots in checker.slots_of.values() if len(set(slots)) > 1]
    assert resumed, "no paused request came back in another slot"
    assert any(step.num_contexts and len(step.committed) > step.num_contexts for step in decoded.run.steps)
