"""The flight recorder in a server: what the hooks hand it, and that nothing about the stage changes by it."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from structured_commit import hooks
from structured_commit.recording.recorder import WIDTH as UNKNOWN
from structured_commit.recording.trace import read_trace
from structured_commit.runtime import RUNTIME
from tests.support.graph_watch import GraphWatch, tensors_of
from tests.upstream.common.requests import LlmRequest, dummy_request
from tests.upstream.toy import Checkpoint

WORKER = SimpleNamespace(force_num_accepted_tokens=0)
WIDTH = 4


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.delenv("TRTLLM_STRUCTURED_COMMIT", raising=False)
    checkpoint = Checkpoint.write(tmp_path)

    def build(record=True, mapping=None, engine=None, **more):
        more |= {"record": str(tmp_path / "traces")} if record else {}
        value = checkpoint.section("repair", backend="torch", **more)  # what runs on a GPU, not the CPU's short cut
        config = SimpleNamespace(structured_commit=value, max_draft_len=WIDTH - 1)
        hooks.build(None, tmp_path, None, engine, None, config, mapping)
        return checkpoint

    yield build
    RUNTIME.reset()


def play(checkpoint, steps=12, drafted=True):
    """Steps of two contexts and three generation rows, everything drawn from the same numbers: what was committed."""
    generator = torch.Generator().manual_seed(0)
    used = torch.tensor(list(checkpoint.ids.values()))
    prompts = checkpoint.prompts(40)
    end = checkpoint.ids["<|im_end|>"]
    requests = [LlmRequest(100 + i, prompts[i], 99, end, py_seq_slot=i) for i in range(5)]
    for request in requests:
        request.py_client_id = request.py_request_id + 100
        request.receive(checkpoint.ids["a"])  # a generation row from here on
    committed, programs = [], []
    for step in range(steps):
        rows = [*requests, dummy_request(WIDTH - 1)]
        contexts = 2 if step % 4 == 3 else 0
        tokens = used[torch.randint(len(used), (6, WIDTH), generator=generator)].int()
        counts = torch.randint(1, WIDTH + 1, (6,), dtype=torch.int32, generator=generator)
        counts[:contexts] = 1
        logits = torch.randn(contexts + (6 - contexts) * WIDTH, checkpoint.vocab_size, generator=generator)
        drafts = tokens[contexts:, :-1].reshape(-1).clone() if drafted else None
        meta = SimpleNamespace(
            spec_dec_mode=SimpleNamespace(use_one_engine=lambda: True), is_all_greedy_sample=True, draft_tokens=drafts
        )
        hooks.bind(meta, rows)
        static = [*tensors_of(RUNTIME.stage).values(), RUNTIME.rows, tokens, counts, logits]
        if RUNTIME.recorder is not None:
            static += [*tensors_of(RUNTIME.recorder.ring).values(), *([drafts] if drafted else [])]
        with GraphWatch(static) as watch:
            hooks.commit_strict(WORKER, tokens, counts, logits, contexts, 6, meta)
        programs.append(watch.seen)
        committed.append([tokens[i, : counts[i]].tolist() for i in range(6)])
    return committed, programs


def test_what_is_committed_is_the_same_with_and_without_a_record(built):
    (plain, _), counters = play(built(record=False)), RUNTIME.stage.read_counters()
    assert RUNTIME.recorder is None
    (recorded, _), same = play(built()), RUNTIME.stage.read_counters()
    assert recorded == plain
    assert same == counters
    assert counters["repaired"] > 5
    assert not RUNTIME.aside


def test_a_traced_request_has_its_ids_its_drafts_and_what_the_hook_committed(built, tmp_path):
    committed, _ = play(built())
    RUNTIME.recorder.write_now()
    RUNTIME.recorder.flush()
    traces = [read_trace(p) for p in sorted((tmp_path / "traces").glob("*.json"))]
    whole = [t for t in traces if "asked for" in t.reasons]
    assert sorted(t.request["id"] for t in whole) == [str(100 + i) for i in range(5)]
    for trace in whole:
        slot = trace.request["slot"]
        assert trace.consistent
        assert trace.request["names"] == [str(100 + slot), str(200 + slot)]
        assert [list(w.committed) for w in trace.windows] == [rows[slot] for rows in committed]
        for i, window in enumerate(trace.windows):
            in_context = i % 4 == 3 and slot < 2
            assert window.width == (1 if in_context else WIDTH)
            assert (window.drafts is None) == in_context
            if window.drafts is not None:  # what was drafted stands in the first columns, see `play`
                shared = min(len(window.drafts), len(window.accepted))
                assert window.drafts[:shared] == window.accepted[:shared]


def test_recorded_commits_can_be_captured_and_are_the_same_whatever_happens(built):
    _, programs = play(built())
    assert RUNTIME.recorder.counts["record_failed"] == 0
    assert RUNTIME.recorder.counts["record_incidents"] > 5
    assert all(p == programs[i % 4 == 3 and 3] for i, p in enumerate(programs))


def test_the_finish_guard_is_answered_by_the_clients_id(built, tmp_path):
    from structured_commit.recording.incidents import ask_for_trace

    play(built())
    ask_for_trace(tmp_path / "traces", 203, "ended inside a block")
    RUNTIME.recorder.flush()
    found = [read_trace(p) for p in (tmp_path / "traces").glob("*.json")]
    assert [t.request["id"] for t in found if "ended inside a block" in t.reasons] == ["103"]


def test_what_two_model_speculation_accepts_on_the_device_is_recorded_too(built, tmp_path):
    ids = built().ids
    opened = LlmRequest(7, [ids["<|im_start|>"]], 9, ids["<|im_end|>"], py_seq_slot=1)
    opened.receive(ids["a"])
    batch = SimpleNamespace(all_requests=lambda: [opened])
    sampled = torch.tensor([[0, ids["a"]], [0, ids["<|im_start|>"]], [0, ids["a"]]])
    RUNTIME.bind([opened])
    RUNTIME.stage.state[1] = RUNTIME.stage.table.info.start
    counts, _ = hooks.accept_on_device(None, torch.tensor([0, 2], dtype=torch.int32), sampled, batch)
    assert counts.tolist() == [0, 0]  # cut before what may never come
    RUNTIME.recorder.flush()
    (trace,) = [read_trace(p) for p in (tmp_path / "traces").glob("*.json")]
    (window,) = trace.windows
    assert window.accepted == tuple(sampled[:, 1].tolist())
    assert window.committed == (ids["a"],)
    assert (trace.reasons, window.choice) == (("illegal", "cut"), None)


def test_drafts_of_another_layout_are_left_out(built, tmp_path):
    checkpoint = built()
    play(checkpoint, drafted=False)
    RUNTIME.recorder.write_now()
    RUNTIME.recorder.flush()
    traces = [read_trace(p) for p in (tmp_path / "traces").glob("*.json")]
    assert {w.drafts for t in traces for w in t.windows} == {None}
    assert hooks._by_row(torch.zeros(15), slice(0, 3), 4) is None  # five drafts a row, three columns


def test_start_up_says_what_is_recorded_and_the_counters_say_what_came_of_it(built, caplog):
    with caplog.at_level(logging.INFO, "structured_commit"):
        play(built(report_every=5))
    started = next(r.getMessage() for r in caplog.records if "records to" in r.getMessage())
    assert "the last 32 windows of 11915 slots, 2816 bytes a slot, 32 MiB on the device" in started
    assert any("record_incidents=" in r.getMessage() and "record_failed=0" in r.getMessage() for r in caplog.records)
    stats = {}
    hooks.add_statistics(stats)
    assert stats["structuredCommitStats"]["record_incidents"] > 0


def test_one_rank_of_those_that_own_the_same_requests_records(built):
    engine = SimpleNamespace(dist=SimpleNamespace(tp_allgather=lambda own: [own, own]))
    for rank, attention_dp, records in ((0, False, True), (1, False, False), (1, True, True)):
        mapping = SimpleNamespace(
            rank=rank, tp_rank=rank, tp_size=2, enable_attention_dp=attention_dp, is_last_pp_rank=lambda: True
        )
        built(mapping=mapping, engine=engine)
        assert (RUNTIME.recorder is not None) == records


def test_without_a_known_draft_length_windows_up_to_a_default_are_recorded(built, tmp_path, monkeypatch):
    checkpoint = built()
    assert RUNTIME.recorder.ring.width == WIDTH
    value = checkpoint.section("repair", record=str(tmp_path / "traces"))
    monkeypatch.setenv("TRTLLM_STRUCTURED_COMMIT", json.dumps(value))
    hooks.build(None, tmp_path, None, None, None, SimpleNamespace(), None)
    assert RUNTIME.recorder.ring.width == UNKNOWN


def test_a_recorder_that_fails_leaves_the_stage_at_work(built, monkeypatch, caplog):
    plain, _ = play(built(record=False))
    checkpoint = built()
    monkeypatch.setattr(RUNTIME.recorder.ring, "after", lambda *_: 1 / 0)
    assert play(checkpoint)[0] == plain
    assert not RUNTIME.aside
    assert sum("flight recorder stops" in r.getMessage() for r in caplog.records) == 1
