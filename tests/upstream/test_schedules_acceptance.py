"""The schedules that break things, second part: how tokens are drafted and accepted, whose state it is, and what looks
at the result. See `test_schedules.py` for what each is held against."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .common.loading import WINDOWS
from .common.requests import LlmRequest, LlmRequestState, ScheduledRequests
from .common.schedules import ReducedDrafter, SpeculationGate, SuffixAutomaton, another_executor, inflate_contexts
from .common.spec_sampler import SampleStateTensorsSpec
from .paths import PATHS
from .scheduling import RUNTIME, Schedule, both, decode, leaning_to, repaired

BY_NAME = {path.name: path for path in PATHS}
EAGLE3 = BY_NAME["eagle3-strict"]
OVERLAPPED = {"disable_overlap_scheduler": False}
every_window = pytest.mark.parametrize("window", WINDOWS)


def on_windows(*names: str) -> pytest.MarkDecorator:
    """The named paths, each on its windows."""
    cases = [(window, BY_NAME[name]) for name in names for window in BY_NAME[name].windows]
    return pytest.mark.parametrize(("window", "path"), cases, ids=[f"{window}-{path.name}" for window, path in cases])


@on_windows("eagle3-strict", "mtp-strict", "eagle3-rejection")
def test_reduced_draft_vocabulary(unpatched, patched, checkpoint, window, path):
    ids = checkpoint.ids
    kept = sorted([3, 70, *(ids[text] for text in ("a", "{", "}", "<tool_call>", "<|im_end|>"))])
    schedule = Schedule(path, wrap_drafter=lambda table: ReducedDrafter(table, kept))
    plain, on = both(unpatched, patched, checkpoint, window, schedule)
    for outcome in (plain, on):
        drafts = outcome.engine.executor.sampler.next_draft_tokens
        assert set(drafts[drafts < checkpoint.vocab_size].flatten().tolist()) <= {*kept, 0}
        assert any(len(tokens) > 1 for step in outcome.run.steps for tokens in step.committed.values())


@on_windows("eagle3-strict", "mtp-strict")
def test_a_suffix_automaton_that_overrides_drafts(unpatched, patched, checkpoint, window, path):
    automata = []

    def prepare(engine, requests):
        engine.worker.sa_enhancer = SuffixAutomaton(engine)
        automata.append(engine.worker.sa_enhancer)

    both(unpatched, patched, checkpoint, window, Schedule(path, prepare=prepare, max_new_tokens=20))
    assert all(automaton.overridden > 0 for automaton in automata)


@on_windows("mtp-relaxed", "eagle3-relaxed")
def test_relaxed_acceptance(unpatched, patched, checkpoint, window, path):
    both(unpatched, patched, checkpoint, window, Schedule(path))
    exact = replace(path, law="argmax", speculative={**path.speculative, "relaxed_delta": 0.0})
    exact = replace(exact, speculative={**exact.speculative, "begin_thinking_phase_token": checkpoint.ids["a"]})
    repaired(patched, checkpoint, window, Schedule(exact))


@every_window
def test_forced_acceptance_is_let_alone_and_says_so_once(unpatched, patched, checkpoint, window, monkeypatch):
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    plain = decode(unpatched[window], checkpoint, Schedule(EAGLE3), None)
    on = decode(patched(window), checkpoint, Schedule(EAGLE3), "repair")
    assert on.run == plain.run
    assert on.aside["forced acceptance"] > len(on.run.steps) / 2
    assert len([line for line in on.log if "stands aside" in line]) <= 1, "said once, at warm-up"
    assert on.counters["windows"] == 0


BLOCKS = ("pard-strict", "dspark-strict", "pard-rejection", "dflash-rejection", "dspark-rejection")


@on_windows(*BLOCKS)
def test_placeholder_drafts_of_block_workers(unpatched, patched, checkpoint, window, path):
    """Behind a context they are zeros, with all their probability on token 0, which this target often likes."""
    schedule = Schedule(path, wrap_target=leaning_to(0, 57.0), max_new_tokens=6)
    for outcome in both(unpatched, patched, checkpoint, window, schedule):
        behind_contexts = [committed_by(outcome, r.py_request_id)[1] for r in outcome.requests]
        assert any(tokens[0] == 0 and len(tokens) > 1 for tokens in behind_contexts), "no placeholder was accepted"


def committed_by(outcome, request: int) -> list[list[int]]:
    """What the device committed of a request, one list a step."""
    return [step.accepted[request] for step in outcome.run.steps if request in step.accepted]


@on_windows("eagle3-strict", "eagle3-rejection")
def test_inflated_context_counts(unpatched, patched, checkpoint, window, path):
    seen = []

    def prepare(engine, requests):
        methods = ("_sample_and_accept_draft_tokens_base", "_sample_and_accept_draft_tokens_rejection")
        seen.append(inflate_contexts(engine, methods))

    schedule = Schedule(path, prompts=4, prepare=prepare)
    both(unpatched, patched, checkpoint, window, schedule)
    assert all(0 in counts and any(counts) for counts in seen)


@every_window
def test_a_paused_request_whose_slot_went_to_another(unpatched, patched, checkpoint, window):
    schedule = Schedule(EAGLE3, prompts=5, settings={"max_batch_size": 3}, pause_at={4: 101, 5: 100})
    _, on = both(unpatched, patched, checkpoint, window, schedule)
    slots = on.engine.executor.model_engine.checker.slots_of
    assert len(slots[100]) == len(slots[101]) == 2, "they did not come back to another slot"
    assert slots[102][0] == slots[100][-1] or slots[102][0] in slots[101], "their slots went to others meanwhile"


@every_window
@pytest.mark.parametrize("kind", ["prefill", "received"])
def test_a_throw_away_executor_before_the_real_one(unpatched, patched, checkpoint, window, kind):
    """It numbers its requests as the real one does, and leaves them in the middle of their text."""

    def prepare(engine, requests):
        if kind == "received":
            for request in requests:
                request.receive(checkpoint.constrained(checkpoint.target(), request)[0])
        dummies = [LlmRequest(r.py_request_id, [checkpoint.ids["a"]] * 5, 6) for r in requests]
        engine.run(dummies)
        another_executor(engine)

    schedule = Schedule(EAGLE3, prepare=prepare)
    before = decode(unpatched[window], checkpoint, schedule, None)
    assert decode(patched(window), checkpoint, schedule, "off").run == before.run
    repaired(patched, checkpoint, window, schedule)


@every_window
def test_a_threshold_that_switches_speculation_off(unpatched, patched, checkpoint, window):
    """Repairs cut windows, so that acceptance looks lower and the gate closes earlier than without the stage. Then
    every step has one token, and is checked all the same."""

    def gate(threshold: float):
        def prepare(engine, requests):
            engine.executor.speculation_gate = SpeculationGate(2, threshold, by_rate=window != "w12")

        return Schedule(EAGLE3, prompts=6, prepare=prepare, settings={"max_batch_size": 2}, max_new_tokens=14)

    plain, on = both(unpatched, patched, checkpoint, window, gate(0.0))
    lowest = [min(outcome.engine.executor.speculation_gate.means) for outcome in (plain, on)]
    assert lowest[1] < lowest[0]
    on = repaired(patched, checkpoint, window, gate(sum(lowest) / 2))
    assert on.engine.executor.speculation_gate.disabled
    assert {step.draft_len for step in on.run.steps} == {0, 3}


@pytest.mark.parametrize("window", BY_NAME["two-model"].windows)
def test_two_model_request_that_comes_back_to_its_slot_is_bound_again_on_the_device(patched, checkpoint, window):
    outcome = decode(patched(window), checkpoint, Schedule(BY_NAME["two-model"], settings=OVERLAPPED), "repair")
    executor, ids = outcome.engine.executor, checkpoint.ids
    request = LlmRequest(900, checkpoint.prompts(1)[0], 20, checkpoint.end_id)
    request.py_seq_slot = 0

    def decide(tokens: list[int], *, context: bool) -> int:
        """The device's count for one step that sampled `tokens`."""
        store = torch.zeros(4, executor.sampler.max_num_sequences, 1, dtype=torch.int32)
        store[: len(tokens), 0, 0] = torch.tensor(tokens)
        batch = ScheduledRequests()
        (batch.context_requests_last_chunk if context else batch.generation_requests).append(request)
        drafts = None if context else store[:-1, :, 0].T
        with outcome.engine.tree.active():
            state = SampleStateTensorsSpec(store)
            inputs = SampleStateTensorsSpec(store, next_draft_tokens=drafts)
            return int(executor._accept_draft_tokens(batch, state, inputs)[1][0])

    request.receive(ids["a"])  # the state is read from the prompt; the step's own token is not there yet
    request.tokens.pop()
    decide([ids["a"]], context=True)
    assert decide([ids["<tool_call>"], ids["{"], ids["a"], ids["a"]], context=False) == 3
    request.pause()  # those tokens never reach the host
    request.state = LlmRequestState.GENERATION_IN_PROGRESS  # its context ran again, in the same slot
    assert decide([ids["a"]], context=True) == 0
    assert decide([ids["a"], ids["a"], ids["<|im_end|>"], ids["a"]], context=False) == 2, "behind the turn's end: cut"
    stage = outcome.engine.tree.load(RUNTIME).RUNTIME.stage
    assert int(stage.state[0]) == stage.table.ended
