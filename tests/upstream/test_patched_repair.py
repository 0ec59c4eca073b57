"""Patched doubles with the stage on: only what the format allows is committed, on every path and in every setting.

Where the target's choice is an argmax, repaired speculation equals the target alone with the illegal tokens masked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from .common.drafting import SaRecorder
from .common.engine import requests_for
from .common.loading import WINDOWS
from .paths import PATHS, SETTINGS, cases, name

RUNTIME = "_torch.speculative.structured_commit.runtime"
ONE_MODEL = {"two_model": False}
BY_NAME = {path.name: path for path in PATHS}


class Decoded:
    """One run of a patched double, and what its stage counted."""

    def __init__(
        self,
        tree,
        path,
        checkpoint,
        *,
        policy="repair",
        way=(),
        count=5,
        pause_at=None,
        receive=False,
        recorder=None,
        seed=4,
    ):
        self.target, self.checkpoint = checkpoint.target(seed), checkpoint
        path = path.with_thinking_tokens(*checkpoint.thinking_tokens)
        self.engine = path.engine(
            tree,
            self.target,
            checkpoint.drafter(self.target),
            checkpoint.vocab_size,
            stage=checkpoint.section(policy) if policy else None,
            checkpoint=str(checkpoint.folder),
            **dict(way),
        )
        runtime = tree.load(RUNTIME).RUNTIME
        self.counters_after_warm_up = runtime.stage.read_counters() if runtime.stage else {}
        if recorder:
            self.engine.worker.sa_enhancer = recorder
        prompts = checkpoint.prompts(4 if path.two_model else count)
        self.requests = requests_for(prompts, max_new_tokens=14, end_id=checkpoint.end_id, temperature=path.temperature)
        if receive:
            for request in self.requests[1:3]:
                request.receive(self.constrained[request.py_request_id][0])
        self.run = self.engine.run(self.requests, pause_at)
        self.aside = dict(runtime.aside)
        self.counters = runtime.stage.read_counters() if runtime.stage else {}

    @property
    def illegal(self) -> dict[int, int]:
        """Index of the first illegal token of each request that has one."""
        found = {r.py_request_id: self.checkpoint.first_illegal(r, self.tokens[r.py_request_id]) for r in self.requests}
        return {request: at for request, at in found.items() if at is not None}

    @property
    def committed_behind_an_end(self) -> list[list[int]]:
        """Windows in which the device committed something behind a terminal, one-model only."""
        windows = self.engine.executor.model_engine.checker.windows
        return [tokens for _, tokens in windows if self.checkpoint.end_id in tokens[:-1]]

    @property
    def tokens(self) -> dict[int, list[int]]:
        return self.run.tokens

    @property
    def constrained(self) -> dict[int, list[int]]:
        return {r.py_request_id: self.checkpoint.constrained(self.target, r) for r in self.requests}


@pytest.mark.parametrize(("window", "path", "way"), cases(law="argmax", **ONE_MODEL), ids=name)
def test_greedy_repair_is_the_constrained_target(patched, checkpoint, window, path, way):
    decoded = Decoded(patched(window), path, checkpoint, way=SETTINGS[way])
    assert decoded.tokens == decoded.constrained
    assert not decoded.committed_behind_an_end
    assert not decoded.aside
    assert 0 < decoded.counters["repaired"] < decoded.counters["windows"]


@pytest.mark.parametrize(("window", "path", "way"), cases(law="sampled", **ONE_MODEL), ids=name)
def test_sampled_repair_commits_only_legal_tokens(patched, checkpoint, window, path, way):
    decoded = Decoded(patched(window), path, checkpoint, way=SETTINGS[way])
    assert not decoded.illegal
    assert not decoded.committed_behind_an_end
    assert not decoded.aside
    assert decoded.counters["repaired"] > 0


@pytest.mark.parametrize(("window", "path", "way"), cases(law="relaxed"), ids=name)
def test_relaxed_repair_commits_only_legal_tokens(patched, checkpoint, window, path, way):
    decoded = Decoded(patched(window), path, checkpoint, way=SETTINGS[way])
    assert not decoded.illegal
    assert not decoded.committed_behind_an_end
    assert not decoded.aside
    assert decoded.counters["repaired"] > 0


def committed_by(decoded, request) -> list[list[int]]:
    """What the steps committed of a request, one list a step."""
    return [step.committed[request] for step in decoded.run.steps if request in step.committed]


@pytest.mark.parametrize("window", WINDOWS)
def test_gate_commits_the_same_text_in_smaller_steps(patched, checkpoint, window):
    decoded = Decoded(patched(window), BY_NAME["eagle3-strict"], checkpoint, policy="gate", seed=0)
    assert decoded.tokens == decoded.constrained
    assert decoded.counters["gated"] > 0


@pytest.mark.parametrize("window", WINDOWS)
def test_rollback_commits_only_legal_tokens(patched, checkpoint, window):
    decoded = Decoded(patched(window), BY_NAME["eagle3-strict"], checkpoint, policy="rollback", seed=0)
    assert not decoded.illegal
    assert decoded.counters["rolled_back"] > 0


@pytest.mark.parametrize(("window", "path"), [(path.windows[-1], path) for path in PATHS], ids=name)
def test_observing_changes_nothing(patched, checkpoint, window, path):
    tree = patched(window)
    off = Decoded(tree, path, checkpoint, policy=None)
    observed = Decoded(tree, path, checkpoint, policy="observe")
    assert observed.tokens == off.tokens
    if not path.two_model:
        assert observed.counters["illegal"] > 0
        assert observed.run == off.run or path.name == "k3-fused"


@pytest.mark.parametrize("window", WINDOWS)
def test_trimmed_windows_end_with_the_terminal(patched, checkpoint, window):
    last = {}
    for policy in ("observe", "trim"):
        recorder = SaRecorder()
        Decoded(patched(window), BY_NAME["mtp-strict"], checkpoint, policy=policy, recorder=recorder, seed=6)
        ended = [row for rows in recorder.extended for row in rows if checkpoint.end_id in row]
        last[policy] = {row.index(checkpoint.end_id) == len(row) - 1 for row in ended}
    assert last == {"observe": {True, False}, "trim": {True}}


@pytest.mark.parametrize("window", WINDOWS)
def test_later_readers_see_what_was_committed(patched, checkpoint, window):
    names = ("mtp-strict", "mtp-relaxed", "eagle3-rejection", "eagle3-relaxed")
    for path in (BY_NAME[n] for n in names if window in BY_NAME[n].windows):
        recorder = SaRecorder()
        decoded = Decoded(patched(window), path, checkpoint, count=1, recorder=recorder)
        (tokens,) = decoded.tokens.values()
        assert recorder.stream()[: len(tokens) - 1] == tokens[1:]
        assert decoded.counters["repaired"] > 0


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["mtp-relaxed", "eagle3-relaxed"])
def test_thinking_deltas_follow_what_was_committed(patched, checkpoint, window, kind):
    recorder = SaRecorder()
    decoded = Decoded(patched(window), BY_NAME[kind], checkpoint, count=1, recorder=recorder)
    thinks, stops = checkpoint.ids["a"], checkpoint.ids["}"]
    (request,) = decoded.requests
    first = decoded.tokens[request.py_request_id][0]
    said = [t for t in (*request.prompt, first, *recorder.stream()) if t in (thinks, stops)]
    pool = decoded.engine.executor.model_engine.hidden_states_manager.relaxed_delta_pool
    assert float(pool[0]) == pytest.approx(0.6 if said[-1] == thinks else 0.0)
    assert decoded.counters["repaired"] > 0


@pytest.mark.parametrize("window", ["w13b", "w14"])
def test_penalties_count_only_what_was_committed(patched, checkpoint, window):
    path = BY_NAME["eagle3-strict"]
    penalized = replace(path, weights={"enable_penalty": True})
    recorder = SaRecorder()
    decoded = Decoded(patched(window), penalized, checkpoint, count=1, recorder=recorder)
    counts = decoded.engine.executor.model_engine.spec_metadata.penalty_state.counts[0]
    first = decoded.tokens[decoded.requests[0].py_request_id][0]
    committed = [first, *recorder.stream()]
    assert {t: int(n) for t, n in enumerate(counts) if n} == Counter(committed)
    assert decoded.counters["repaired"] > 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_paused_and_a_received_request_go_on_where_they_were(patched, checkpoint, window):
    path = BY_NAME["eagle3-strict"]
    paused = Decoded(patched(window), path, checkpoint, pause_at={2: 100, 5: 101})
    assert paused.tokens == paused.constrained
    received = Decoded(patched(window), path, checkpoint, receive=True, way=SETTINGS["overlap"])
    assert received.tokens == received.constrained


@pytest.mark.parametrize("window", WINDOWS)
def test_warm_up_and_dummy_rows_are_not_counted(patched, checkpoint, window):
    path = BY_NAME["eagle3-strict"]
    bare = Decoded(patched(window), path, checkpoint)
    padded = Decoded(patched(window), path, checkpoint, way={"use_cuda_graph": True, "enable_attention_dp": True})
    assert set(bare.counters_after_warm_up.values()) == {0}
    assert padded.counters == bare.counters


@pytest.mark.parametrize("window", WINDOWS)
def test_forced_acceptance_is_let_alone(patched, checkpoint, window, monkeypatch):
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    path = BY_NAME["eagle3-strict"]
    off = Decoded(patched(window), path, checkpoint, policy=None)
    on = Decoded(patched(window), path, checkpoint)
    assert on.tokens == off.tokens
    assert set(on.aside) == {"forced acceptance"}


def test_the_fused_step_is_declined_while_the_stage_is_on(patched, checkpoint):
    path = BY_NAME["k3-fused"]
    off = Decoded(patched("w14"), path, checkpoint, policy=None)
    on = Decoded(patched("w14"), path, checkpoint)
    assert (off.engine.worker.fused_steps > 0, on.engine.worker.fused_steps) == (True, 0)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_bad_section_is_refused_with_what_is_allowed(patched, checkpoint, window):
    with pytest.raises(ValueError, match=r"unknown policy 'mend'; choose one of: off, observe, trim, repair"):
        Decoded(patched(window), BY_NAME["eagle3-strict"], checkpoint, policy="mend")


@pytest.mark.parametrize(("window", "path", "way"), cases(law="argmax", two_model=True), ids=name)
def test_two_model_acceptance_stops_before_an_illegal_token(patched, checkpoint, window, path, way):
    decoded = Decoded(patched(window), path, checkpoint, way=SETTINGS[way])
    assert not decoded.aside
    for request, at in decoded.illegal.items():
        firsts = [0]
        for tokens in committed_by(decoded, request):
            firsts.append(firsts[-1] + len(tokens))
        assert at in firsts, "only a step's first token, which two-model verification cannot refuse"


def test_two_model_device_and_host_cut_alike_under_overlap(patched, checkpoint):
    decoded = Decoded(patched("w13b"), BY_NAME["two-model-sampled"], checkpoint, way=SETTINGS["overlap"], seed=0)
    assert not decoded.aside


@pytest.mark.parametrize("window", ["w12", "w13a", "w13b"])
def test_two_model_rejection_redraws_illegal_tokens(patched, checkpoint, window):
    path = BY_NAME["two-model-recovering" if window == "w12" else "two-model-rejection"]
    decoded = Decoded(patched(window), path, checkpoint, seed=0)
    assert set(decoded.illegal.values()) <= {0}, "only the first token, which no rejection step verifies"


def test_two_model_rejection_redraws_an_illegal_bonus_token(patched, checkpoint):
    decoded = Decoded(patched("w13b"), BY_NAME["two-model-rejection"], checkpoint, seed=1)
    assert set(decoded.illegal.values()) <= {0}
