"""What the patches call: harmless while nothing is configured, in place and per row when it is, and never raising."""

import json
from types import SimpleNamespace

import pytest
import torch

from structured_commit import StructuredCommitError, hooks
from structured_commit.runtime import NUM_SLOTS, RUNTIME
from tests.unit.test_vocabulary import byte_level_tokenizer

ONE_ENGINE = SimpleNamespace(use_one_engine=lambda: True)
FORMAT = {
    "name": "tiny",
    "turn": "[a-z]*(?:(?<block>«<open>»[ab]+«<close>»)[a-z]*)*",
    "terminals": ["<end>"],
    "turn_openers": ["«<turn>»"],
}
OPEN, CLOSE, END, TURN = 260, 261, 262, 263
A, B, Z = (byte_level_tokenizer().get_vocab()[c] for c in "abz")
V = 264


def metadata(**more):
    return SimpleNamespace(spec_dec_mode=ONE_ENGINE, **more)


def request(slot, tokens=(TURN,), request_id=1, context=False, **more):
    return SimpleNamespace(
        py_seq_slot=slot,
        py_request_id=request_id,
        is_context_init_state=context,
        get_tokens=lambda beam: list(tokens),
        **more,
    )


@pytest.fixture(autouse=True)
def no_stage_left_behind(monkeypatch, tmp_path):
    monkeypatch.delenv("TRTLLM_STRUCTURED_COMMIT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    RUNTIME.reset()
    yield
    RUNTIME.reset()


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<open>", "<close>", "<end>", "<turn>"])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "vocab_size": V}))
    (folder / "tiny.json").write_text(json.dumps(FORMAT))
    return folder


@pytest.fixture
def active(checkpoint):
    def build(policy="repair", **more):
        value = {"policy": policy, "format": str(checkpoint / "tiny.json"), **more}
        hooks.build(None, checkpoint, None, None, None, SimpleNamespace(structured_commit=value), None)
        return RUNTIME.stage

    return build


def window(rows, width):
    tokens = torch.full((len(rows), width), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, torch.tensor([len(r) for r in rows], dtype=torch.int32)


def favouring(token, rows):
    logits = torch.zeros(rows, V)
    logits[:, token] = 5.0
    return logits


WORKER = SimpleNamespace(force_num_accepted_tokens=0)


def test_every_hook_returns_what_it_was_given_while_nothing_is_configured():
    tokens, counts, logits = object(), object(), object()
    meta = SimpleNamespace()
    assert hooks.bind(meta, []) is None
    assert hooks.commit_strict(WORKER, tokens, counts, logits, 0, 1, meta) == (tokens, counts)
    assert hooks.commit_rejection(WORKER, tokens, counts, logits, 0, 1, meta, None) == (tokens, counts)
    assert hooks.commit_thop(WORKER, tokens, counts, logits, 0, 1, meta) == (tokens, counts)
    assert hooks.commit_single(WORKER, tokens, logits, 0, 1, meta) is tokens
    assert hooks.before_relaxed(WORKER, tokens) is None
    assert hooks.commit_relaxed(WORKER, tokens, counts, logits, 0, 1, meta, None, None) == (tokens, counts)
    assert hooks.commit_tree(WORKER, tokens, counts, logits, 0, 1, meta) is None
    assert hooks.veto_fused(WORKER) is False
    assert hooks.guard_draft_loop(meta, counts, None) is counts
    assert hooks.host_stop(None, 1) is False
    assert hooks.host_rejection(None, 2, True, None, None) == (2, True, None)
    assert hooks.host_recovered(None, 7, None) == 7
    assert hooks.accept_on_device(None, counts, tokens, None) == (counts, tokens)


def test_build_does_nothing_without_configuration_or_under_off(checkpoint):
    for value in (None, "off", {"policy": "off"}):
        hooks.build(None, checkpoint, None, None, None, SimpleNamespace(structured_commit=value), None)
        assert RUNTIME.stage is None
    hooks.build(None, checkpoint, None, None, None, None, None)
    assert RUNTIME.stage is None


def test_build_reads_the_variable_where_the_configuration_has_no_field(checkpoint, monkeypatch):
    value = {"policy": "trim", "format": str(checkpoint / "tiny.json")}
    monkeypatch.setenv("TRTLLM_STRUCTURED_COMMIT", json.dumps(value))
    hooks.build(None, checkpoint, None, None, None, SimpleNamespace(), None)
    assert RUNTIME.stage.config.policy.value == "trim"


def test_first_pipeline_stages_build_none(active, checkpoint):
    value = {"policy": "repair", "format": str(checkpoint / "tiny.json")}
    first = SimpleNamespace(rank=0, is_last_pp_rank=lambda: False)
    hooks.build(None, checkpoint, None, None, None, SimpleNamespace(structured_commit=value), first)
    assert RUNTIME.stage is None


def test_a_second_executor_gets_a_fresh_stage(active):
    first = active()
    hooks.bind(metadata(), [request(3)])
    second = active()
    assert second is not first
    assert RUNTIME.rows.eq(NUM_SLOTS).all()
    assert second.state.eq(0).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"policy": "fix"}, "unknown policy"),
        ({"format": "auto"}, "no built-in format is known for model type 'tiny'"),
        ({"format": "harmony"}, "harmony needs the control token"),
        ({"checkpoint": "/nowhere"}, "is not a local folder"),
    ],
)
def test_a_configuration_that_cannot_be_honoured_stops_start_up(checkpoint, value, message):
    with pytest.raises(StructuredCommitError, match=message):
        hooks.build(None, checkpoint, None, None, None, SimpleNamespace(structured_commit=value), None)
    assert RUNTIME.stage is None


def test_the_configuration_field_is_checked():
    assert hooks.check_config(None) is None
    assert hooks.check_config("off") == {"policy": "off"}
    assert hooks.check_config("gate")["policy"] == "gate"
    with pytest.raises(ValueError, match="choose one of: off, observe"):
        hooks.check_config("fix")


def test_bind_gives_each_row_its_slot_and_dummies_none(active):
    stage = active()
    last = request(5, [TURN, A], 2, context=True, is_last_context_chunk=True)
    chunk = request(6, [TURN], 3, context=True, is_last_context_chunk=False)
    hooks.bind(metadata(), [chunk, last, request(7, [TURN, OPEN], 4), request(None), request(0, is_dummy=True)])
    assert RUNTIME.rows[:6].tolist() == [NUM_SLOTS, 5, 7, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS]
    host = stage.table.host
    assert stage.state[5] == host.locate([TURN, A])
    assert host.block_open(int(stage.state[7]))
    assert stage.state[6] == stage.state[0] == 0


def test_bind_keeps_what_the_device_knows_and_rebinds_on_change(active):
    stage = active()
    running = request(2, [TURN, OPEN], 9)
    hooks.bind(metadata(), [running])
    stage.state[2] = stage.table.ended
    hooks.bind(metadata(), [running])  # the host is a step behind
    assert stage.state[2] == stage.table.ended
    hooks.bind(metadata(), [request(2, [TURN, OPEN], 9)])  # another executor gave the same number to another request
    assert stage.table.host.block_open(int(stage.state[2]))
    hooks.bind(metadata(), [request(2, [TURN], 10)])  # the slot was reused
    assert stage.state[2] == stage.table.info.start or stage.state[2] == stage.table.host.locate([TURN])
    hooks.bind(metadata(), [request(2, [TURN, OPEN], 10, context=True)])  # resumed after a pause
    assert stage.table.host.block_open(int(stage.state[2]))
    resumed = request(2, [TURN, OPEN, END], 11, context=True, py_orig_prompt_len=2)
    hooks.bind(metadata(), [resumed])  # its illegal terminal was committed: nothing is tracked behind it
    assert stage.state[2] == stage.table.ended


def test_a_request_that_ignores_end_tokens_is_let_alone(active):
    stage = active()
    hooks.bind(metadata(), [request(2, [TURN], py_end_id=-1)])
    tokens, counts = window([[OPEN, END, A]], 3)
    hooks.commit_strict(WORKER, tokens, counts, favouring(A, 3), 0, 1, metadata())
    assert (tokens.tolist(), counts.tolist()) == ([[OPEN, END, A]], [3])
    assert stage.state[2] == 0


def test_strict_rows_are_cut_and_repaired_in_place_contexts_first(active):
    stage = active()
    rows = [request(1, [TURN, OPEN], 1, context=True), request(2, [TURN], 2), request(3, [TURN], 3)]
    hooks.bind(metadata(), rows)
    tokens, counts = window([[END], [A, END, A], [OPEN, END, A]], 3)
    logits = torch.cat([favouring(B, 1), favouring(END, 3), favouring(B, 3)])
    out = hooks.commit_strict(WORKER, tokens, counts, logits, 1, 3, metadata())
    assert out[0] is tokens
    assert out[1] is counts
    assert counts.tolist() == [1, 2, 2]
    assert tokens[0, 0] == B  # illegal inside the open block; the best legal token instead
    assert tokens[1].tolist() == [A, END, END]
    assert tokens[2].tolist() == [OPEN, B, B]
    assert stage.state[[1, 2, 3]].tolist()[1] == stage.table.ended


def test_the_samplers_settings_are_those_of_the_row(active):
    active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1, context=True), request(2, [TURN, OPEN], 2)])
    meta = metadata(
        is_all_greedy_sample=False,
        temperatures=torch.tensor([1.0, 0.0, 0.0, 0.0, 9.0]),
        top_ks=torch.tensor([1, 2**31 - 1, 2**31 - 1, 0, 0], dtype=torch.int32),
        top_ps=torch.ones(5),
    )
    tokens, counts = window([[END], [END, A]], 3)
    logits = torch.cat([favouring(CLOSE, 1), favouring(B, 3)])
    logits[0, A] = 1.0
    hooks.commit_strict(WORKER, tokens, counts, logits, 1, 2, meta)
    # The context row keeps only its top token, which is illegal here: the filter gives way to the best legal one.
    assert tokens[0, 0] == A
    assert tokens[1, 0] == B


def test_rejection_rows_draw_from_the_targets_probabilities(active):
    active()
    hooks.bind(metadata(), [request(2, [TURN, OPEN], 2)])
    tokens, counts = window([[A, END]], 3)
    probs = torch.zeros(1, 3, V)
    probs[0, :, END], probs[0, :, B] = 0.9, 0.1
    hooks.commit_rejection(WORKER, tokens, counts, favouring(Z, 3), 0, 1, metadata(is_all_greedy_sample=False), probs)
    assert tokens[0].tolist() == [A, B, B]
    assert counts.tolist() == [2]


def test_rows_without_a_token_are_left_alone(active):
    stage = active()
    hooks.bind(metadata(), [request(1, [TURN], 1, context=True), request(2, [TURN], 2)])
    tokens, counts = window([[], [A]], 2)
    tokens[0] = 0
    before = int(stage.state[1])
    hooks.commit_rejection(WORKER, tokens, counts, favouring(A, 3), 1, 2, metadata(), torch.full((1, 2, V), 1 / V))
    assert counts.tolist() == [0, 1]
    assert stage.state[1] == before


def test_a_single_token_step_keeps_its_dtype(active):
    active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1), request(2, [TURN], 2)])
    sampled = torch.tensor([END, END])
    out = hooks.commit_single(WORKER, sampled, favouring(A, 2), 0, 2, metadata())
    assert out is sampled
    assert (out.dtype, out.tolist()) == (torch.int64, [A, END])


def test_forced_acceptance_makes_the_stage_stand_aside(active):
    stage = active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1)])
    tokens, counts = window([[END, A]], 2)
    forced = SimpleNamespace(force_num_accepted_tokens=2)
    hooks.commit_strict(forced, tokens, counts, favouring(A, 2), 0, 1, metadata())
    assert tokens.tolist() == [[END, A]]
    assert stage.state[1] == 0
    assert RUNTIME.aside["forced acceptance"] == 1


def test_a_shape_that_is_not_understood_passes_and_is_counted_and_said_once(active, caplog):
    stage = active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1)])
    for _ in range(2):
        tokens, counts = window([[END, A]], 2)
        hooks.commit_strict(WORKER, tokens, counts, torch.zeros(2, V - 1), 0, 1, metadata())
        assert (tokens.tolist(), counts.tolist()) == ([[END, A]], [2])
    assert sum(RUNTIME.aside.values()) == 2
    assert len([r for r in caplog.records if "stands aside" in r.message]) == 1
    assert stage.state[1] == 0


def test_metadata_that_is_not_understood_does_not_fail_the_batch(active):
    stage = active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1)])
    tokens, counts = window([[END, A]], 2)
    broken = metadata(is_all_greedy_sample=False, temperatures="none")
    hooks.commit_strict(WORKER, tokens, counts, favouring(A, 2), 0, 1, broken)
    hooks.commit_tree(SimpleNamespace(), tokens, counts, favouring(A, 2), 0, 1, metadata())
    assert (tokens.tolist(), counts.tolist()) == ([[END, A]], [2])
    assert sum(RUNTIME.aside.values()) == 2
    assert stage.state[1] == 0


def test_a_padded_vocabulary_is_cut_to_the_tables(active):
    active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1)])
    tokens, counts = window([[END]], 1)
    wide = torch.cat([favouring(B, 1), torch.full((1, 8), 9.0)], dim=1)
    hooks.commit_strict(WORKER, tokens, counts, wide, 0, 1, metadata())
    assert tokens.tolist() == [[B]]


def test_relaxed_deltas_follow_what_was_committed(active):
    active()
    worker = SimpleNamespace(
        force_num_accepted_tokens=0,
        spec_config=SimpleNamespace(begin_thinking_phase_token=A, end_thinking_phase_token=B, relaxed_delta=0.5),
    )
    hooks.bind(metadata(), [request(1, [TURN], 1), request(2, [TURN], 2)])
    pool = torch.tensor([0.0, 0.0, 0.0])
    before = hooks.before_relaxed(worker, pool)
    pool[1:] = torch.tensor([0.5, 0.5])  # the op saw A in both rows, after a terminal in the first
    tokens, counts = window([[Z, END, A], [Z, A]], 3)
    meta = metadata(slot_ids=torch.tensor([1, 2]))
    hooks.commit_relaxed(worker, tokens, counts, favouring(A, 6), 0, 2, meta, pool, before)
    assert counts.tolist() == [2, 2]
    assert pool.tolist() == [0.0, 0.0, 0.5]


def test_a_tree_path_is_redrawn_from_its_own_rows_and_written_to_what_is_drafted_from(active):
    active()
    hooks.bind(metadata(), [request(1, [TURN, OPEN], 1)])
    tokens, counts = window([[A, END]], 3)
    logits = torch.zeros(4, V)
    logits[3, B] = 5.0  # node 3 was accepted behind the root: column 1 has its row
    logits[1, Z] = logits[2, Z] = 9.0
    worker = SimpleNamespace(
        force_num_accepted_tokens=0,
        tokens_per_gen_step=4,
        _accepted_draft_indices_tensor=torch.tensor([[2, -1]]),
        _accept_token=torch.tensor([[A, END, 0]]),
    )
    hooks.commit_tree(worker, tokens, counts, logits, 0, 1, metadata(), greedy=True)
    assert tokens[0, :2].tolist() == [A, B]
    assert worker._accept_token[0, :2].tolist() == [A, B]
    assert counts.tolist() == [2]


def test_the_drafting_loop_never_advances_past_its_rows(active):
    counts = torch.tensor([3, -1, 1], dtype=torch.int32)
    attn = SimpleNamespace(_seq_lens_cuda=torch.tensor([3, 4, 4], dtype=torch.int32))
    assert hooks.guard_draft_loop(None, counts, attn) is counts
    active()
    assert hooks.guard_draft_loop(None, counts, attn).tolist() == [2, 0, 1]
    assert hooks.guard_draft_loop(None, counts, object()) is counts


def test_host_verification_stops_before_an_illegal_token_and_after_a_terminal(active):
    active()
    req = request(1, [TURN, OPEN, A], 1)
    assert hooks.host_stop(req, END) is True
    assert hooks.host_stop(req, B) is False
    tokens = [TURN, A]
    growing = request(1, tokens, 2)
    assert hooks.host_stop(growing, END) is False
    tokens.append(END)
    assert hooks.host_stop(growing, A) is True
    assert hooks.host_stop(request(1, [TURN, OPEN], 3, py_is_draft=True), END) is False
    assert hooks.host_stop(SimpleNamespace(), END) is False  # never raises


def test_host_rejection_cuts_at_the_first_illegal_draft_and_redraws_it(active):
    active()
    probs = torch.zeros(3, V)
    probs[:, END], probs[:, B] = 0.9, 0.1
    req = request(1, [TURN, OPEN], 1, py_draft_tokens=[A, END])
    assert hooks.host_rejection(req, 2, False, probs, None) == (1, True, B)
    req = request(1, [TURN, OPEN], 2, py_draft_tokens=[A, B])
    assert hooks.host_rejection(req, 2, True, probs, None) == (2, True, None)
    req = request(0, [TURN, OPEN], 5, py_draft_tokens=[A, B])
    sampled = [[[A]], [[B]], [[END]]]
    assert hooks.host_rejection(req, 2, False, probs, sampled) == (2, True, B)  # the bonus is looked at too
    sampled[2] = [[A]]
    assert hooks.host_rejection(req, 2, False, probs, sampled) == (2, False, None)
    assert hooks.host_recovered(request(1, [TURN, OPEN, A], 3), END, probs[0]) == B
    assert hooks.host_recovered(request(1, [TURN, A], 4), END, probs[0]) == END


def test_the_device_decides_under_overlap_what_the_host_will(active):
    active()
    requests = [request(0, [TURN, OPEN], 1), request(2, [TURN], 2)]
    batch = SimpleNamespace(all_requests=lambda: requests)
    sampled = torch.tensor([[A, 0, A], [END, 0, END], [B, 0, A]])
    given = torch.tensor([2, 1, 2], dtype=torch.int32)
    counts, tokens = hooks.accept_on_device(None, given, sampled, batch)
    assert tokens is sampled
    assert counts.tolist() == [0, 1, 1]
    assert given.tolist() == [2, 1, 2]


def test_the_fused_step_is_declined_while_the_stage_is_on(active):
    active()
    assert hooks.veto_fused(WORKER) is True


def test_the_counters_are_logged_every_so_many_steps(active, caplog):
    active(report_every=2)
    caplog.set_level("INFO", logger="structured_commit")
    for _ in range(4):
        hooks.bind(metadata(), [request(1, [TURN, OPEN], 1, context=True)])
        tokens, counts = window([[END]], 1)
        hooks.commit_strict(WORKER, tokens, counts, favouring(B, 1), 1, 1, metadata())
    lines = [r.message for r in caplog.records if "counters" in r.message]
    assert len(lines) == 1  # the first report only starts the copy that the second one shows
    assert "windows=1 " in lines[0]
    assert "repaired=1 " in lines[0]
