"""The schedules that break things, on every window that has them: how a batch is put together, and when.

Each runs not patched, patched but off (every step alike), and with `repair` (legal, closed, the constrained target).
After every step of all of them the double's own checker compares what each reader has seen with what was committed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from .common.loading import WINDOWS
from .paths import PATHS, SETTINGS
from .scheduling import Schedule, both, decode, leaning_to, off_is_upstream, repaired

BY_NAME = {path.name: path for path in PATHS}
EAGLE3 = BY_NAME["eagle3-strict"]
OVERLAPPED = {"disable_overlap_scheduler": False}
every_window = pytest.mark.parametrize("window", WINDOWS)


@every_window
def test_chunked_prefill(unpatched, patched, checkpoint, window):
    in_chunks, whole = (Schedule(EAGLE3, weights={"chunk_size": chunk}) for chunk in (3, 1 << 20))
    _, chunked = both(unpatched, patched, checkpoint, window, in_chunks)
    at_once = repaired(patched, checkpoint, window, whole)
    assert len(chunked.run.steps) > len(at_once.run.steps)
    for on in (chunked, at_once):
        windows = on.engine.executor.model_engine.checker.windows
        assert on.counters["windows"] == len(windows), "a chunk that is not the last is nobody's window"
        assert on.counters["tokens_committed"] == sum(len(tokens) for _, tokens in windows)


@every_window
def test_overlap_where_the_host_is_a_step_behind(unpatched, patched, checkpoint, window):
    _, on = both(unpatched, patched, checkpoint, window, Schedule(EAGLE3, settings=OVERLAPPED))
    at_once = repaired(patched, checkpoint, window, Schedule(EAGLE3))
    assert on.tokens == at_once.tokens


@every_window
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draft_length_to_nothing_and_back(unpatched, patched, checkpoint, window, settings):
    path = replace(BY_NAME["eagle3-changing-length"], weights={"draft_len_schedule": [3, 3, 3, 0, 0, 0, 2, 3, 0, 3]})
    _, on = both(unpatched, patched, checkpoint, window, Schedule(path, settings=settings))
    lengths = [step.draft_len for step in on.run.steps if any(step.committed.values())]
    assert 0 in lengths[1:-1]
    assert lengths[-1] > 0


@every_window
def test_padded_batches_with_dummy_rows(unpatched, patched, checkpoint, window):
    bare = repaired(patched, checkpoint, window, Schedule(EAGLE3))
    settings = {"use_cuda_graph": True, "enable_attention_dp": True, "max_batch_size": 8}
    _, on = both(unpatched, patched, checkpoint, window, Schedule(EAGLE3, settings=settings))
    assert on.tokens == bare.tokens
    assert on.counters == bare.counters, "dummies are not counted"
    path = replace(BY_NAME["eagle3-changing-length"], weights={"draft_len_schedule": [3, 3, 3, 3, 0, 3]})
    repaired(patched, checkpoint, window, Schedule(path, settings=settings))


@every_window
@pytest.mark.parametrize("overlap", [False, True], ids=["at-once", "overlap"])
def test_a_slot_reused_in_the_very_next_step(unpatched, patched, checkpoint, window, overlap):
    settings = {"max_batch_size": 1, "disable_overlap_scheduler": not overlap}
    schedule = Schedule(EAGLE3, settings=settings, weights={"chunk_size": 1 << 20})
    _, on = both(unpatched, patched, checkpoint, window, schedule)
    assert on.engine.executor.model_engine.checker.slots_of == {request: [0] for request in on.tokens}
    owners = [next(iter(step.committed)) for step in on.run.steps if step.committed]
    assert any(first != second for first, second in pairwise(owners)), "no step lies between two owners"


@every_window
def test_requests_that_ignore_the_end_are_let_alone(unpatched, patched, checkpoint, window):
    def prepare(engine, requests):
        requests[0].py_end_id = requests[2].py_end_id = -1

    schedule = Schedule(
        EAGLE3, prompts=4, prepare=prepare, settings=OVERLAPPED, wrap_target=leaning_to(checkpoint.end_id, 2.0)
    )
    plain = off_is_upstream(unpatched, patched, checkpoint, window, schedule)
    on = decode(patched(window), checkpoint, schedule, "repair")
    ignoring = [r.py_request_id for r in on.requests if r.py_end_id < 0]
    assert {r: on.tokens[r] for r in ignoring} == {r: plain.tokens[r] for r in ignoring}
    assert checkpoint.end_id in {token for r in ignoring for token in on.tokens[r][:-1]}, "they go on behind an end"
    others = set(on.tokens) - set(ignoring)
    assert {r: on.tokens[r] for r in others} == {r: on.constrained[r] for r in others}
    assert not on.aside


@every_window
def test_prompts_that_already_opened_a_block(unpatched, patched, checkpoint, window):
    ids = checkpoint.ids
    opener = [ids["<|im_start|>"], *(ids[c] for c in "assistant\n")]
    inside = [[ids["<tool_call>"]], [ids["<tool_call>"], ids["{"]], [ids["<tool_call>"], *(ids[c] for c in "{ab}")]]
    schedule = Schedule(EAGLE3, prompts=[[ids["a"], *opener, *more] for more in inside], seed=0)
    plain, on = both(unpatched, patched, checkpoint, window, schedule)
    assert any(checkpoint.first_illegal(r, r.output) == 0 for r in plain.requests), (
        "the target leaves the block at once"
    )
    assert next(iter(on.tokens.values()))[0] == ids["{"]


@every_window
@pytest.mark.parametrize("overlap", [False, True], ids=["at-once", "overlap"])
def test_a_disaggregated_first_step(unpatched, patched, checkpoint, window, overlap):
    def prepare(engine, requests):
        for request in requests[:2]:
            request.receive(checkpoint.constrained(checkpoint.target(), request)[0])

    settings = {"disable_overlap_scheduler": not overlap}
    schedule = Schedule(EAGLE3, prompts=4, prepare=prepare, settings=settings)
    before = decode(unpatched[window], checkpoint, schedule, None)
    assert decode(patched(window), checkpoint, schedule, "off").run == before.run
    repaired(patched, checkpoint, window, schedule)


@every_window
def test_a_stop_inside_a_window(unpatched, patched, checkpoint, window):
    word = []

    def prepare(engine, requests):
        word[:] = checkpoint.constrained(checkpoint.target(0), requests[1])[3:6]
        requests[1].py_stop_words_list = [list(word)]

    schedule = Schedule(EAGLE3, prompts=4, prepare=prepare, seed=0)
    before = decode(unpatched[window], checkpoint, schedule, None)
    assert decode(patched(window), checkpoint, schedule, "off").run == before.run
    on = decode(patched(window), checkpoint, schedule, "repair")
    assert set(on.run.finish_reasons.values()) >= {"LENGTH", "STOP_WORDS"}
    inside = [
        len(step.committed[request]) < len(accepted)
        for step in on.run.steps
        for request, accepted in step.accepted.items()
        if request in step.committed
    ]
    assert any(inside), "no stop cut a window on the host"
    stopped = on.requests[1].py_request_id
    assert on.tokens[stopped][-3:] == word
    for request, tokens in on.tokens.items():
        expected = on.constrained[request]
        assert tokens == (expected[: len(tokens)] if request == stopped else expected)
    assert not on.aside


@every_window
def test_one_extra_step_after_the_end(unpatched, patched, checkpoint, window):
    schedule = Schedule(EAGLE3, wrap_target=leaning_to(checkpoint.end_id, 6.0), max_new_tokens=40)
    _, at_once = both(unpatched, patched, checkpoint, window, schedule)
    schedule = replace(schedule, settings=OVERLAPPED)
    _, on = both(unpatched, patched, checkpoint, window, schedule)
    assert set(on.run.finish_reasons.values()) == {"END_ID"}
    ran = [request for step in on.run.steps for request in step.accepted]
    told = [request for step in on.run.steps for request in step.committed]
    assert len(ran) == len(told) + len(on.tokens), "each request runs once more"
    assert on.counters == at_once.counters, "what runs behind the end is not a window"
