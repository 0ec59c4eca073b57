"""`commit` can be captured in a CUDA graph: the same operations on the same shapes whatever the values, no wait for the
device, nothing read but what a replay finds in place, and no address that moves. Checked here by watching every
operation of plain torch; `test_graph_replay.py` captures and replays real graphs where there is a GPU."""

from types import SimpleNamespace

import pytest
import torch

from structured_commit import CommitConfig, CommitStage, Policy, Vocabulary, compile_format, hooks
from structured_commit.runtime import RUNTIME
from tests.support.graph_watch import GraphWatch, addresses, tensors_of
from tests.upstream.common.requests import LlmRequest, dummy_request
from tests.upstream.toy import Checkpoint

VOCABULARY = Vocabulary(17, {0: b"a", 1: b"b", 2: b"c"}, {"<open>": 3, "<close>": 4, "<end>": 5})
VOCAB = 17
TABLE = compile_format(
    "[abc]*(?:(?<block>«<open>»(?<header>c)[ab]+«<close>»)[abc]*)*", VOCABULARY, terminals=("<end>",)
)
BATCH, WIDTH = 6, 4
POLICIES = [p.value for p in Policy]
KINDS = ["probs", "greedy logits", "sampled logits"]


def windows(seed, tokens=(0, 6)):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(*tokens, (BATCH, WIDTH), dtype=torch.int32, generator=generator)
    lengths = torch.randint(1, WIDTH + 1, (BATCH,), dtype=torch.int32, generator=generator)
    probs = torch.rand(BATCH, WIDTH, VOCAB, generator=generator).softmax(-1)
    return drawn, lengths, probs


def distribution(kind, probs):
    if kind == "probs":
        return {"probs": probs}
    if kind == "greedy logits":
        return {"logits": probs.log()}
    return {
        "logits": probs.log(),
        "temperature": torch.rand(BATCH),
        "top_k": torch.full((BATCH,), 3, dtype=torch.int32),
        "top_p": torch.full((BATCH,), 0.9),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_commit_does_the_same_operations_on_the_same_tensors_whatever_the_values(policy, kind):
    config = CommitConfig(policy=policy, repair_rows=2, backend="torch")
    stage = CommitStage(TABLE, config, num_slots=8, max_window=WIDTH)
    slots = torch.tensor([0, 1, 2, 3, 8, 8])
    before = addresses(stage)
    assert {"state", "steps", "repairs", "counters"} <= set(before)
    programs = []
    # Nothing illegal; anything; nothing but illegal tokens after some have ended, strayed or used up their repairs.
    for seed, tokens, state in ((1, (0, 1), 0), (2, (0, 6), TABLE.info.start), (3, (4, 6), TABLE.info.start)):
        stage.state[:8] = state
        drawn, lengths, probs = windows(seed, tokens)
        given = distribution(kind, probs)
        static = [*tensors_of(stage).values(), drawn, lengths, slots, *given.values()]
        with GraphWatch(static) as watch:
            stage.commit_(drawn, lengths, slots, **given)
        programs.append(watch.seen)
        assert addresses(stage) == before
    assert programs[0] == programs[1] == programs[2]


def test_the_watch_sees_what_it_is_for():
    mask, outside = torch.tensor([True, False]), torch.ones(2)
    for wait in (lambda: mask.sum().item(), mask.nonzero, lambda: mask[mask], lambda: bool(mask.any())):
        with pytest.raises(AssertionError, match="waits for the device|depends on values"), GraphWatch():
            wait()
    with pytest.raises(AssertionError, match="shape that depends on values"), GraphWatch():
        torch.ops.aten.index.Tensor(outside, [mask])
    with pytest.raises(AssertionError, match="reads the host"), GraphWatch():
        torch.tensor([1, 2])
    with pytest.raises(AssertionError, match="reads a tensor that no replay would find"), GraphWatch([mask]):
        outside.add(1)
    with GraphWatch([mask, outside]) as watch:
        (outside + mask)[0].mul_(2)
    assert len(watch.seen) == 3


def test_what_an_object_holds_is_found_however_deep():
    holder = SimpleNamespace(a=torch.zeros(1), b=[{"c": torch.zeros(2)}, SimpleNamespace(d=torch.zeros(3))])
    assert list(tensors_of(holder)) == ["a", "b.0.c", "b.1.d"]
    before = addresses(holder)
    holder.b[1].d = torch.zeros(3)
    assert addresses(holder) != before


def test_the_common_path_touches_no_more_than_repair_rows_of_the_vocabulary():
    stage = CommitStage(TABLE, CommitConfig(repair_rows=2, backend="torch"), num_slots=8, max_window=WIDTH)
    drawn, lengths, probs = windows(5)
    with GraphWatch() as watch:
        stage.commit(drawn, lengths, torch.arange(BATCH), probs=probs)
    wide = [shape for _, shapes in watch.seen for shape, _ in shapes if len(shape) >= 2 and shape[-1] == VOCAB]
    assert wide
    assert max(shape[0] for shape in wide) == 2


def hook_inputs(checkpoint, kind, seed):
    """What a captured forward gives its hook: accepted tokens, counts, logits or probabilities, the metadata."""
    vocab = checkpoint.vocab_size
    generator = torch.Generator().manual_seed(seed)
    used = torch.tensor(list(checkpoint.ids.values()))
    tokens = used[torch.randint(len(used), (BATCH, WIDTH), generator=generator)].int()
    counts = torch.randint(1, WIDTH + 1, (BATCH,), dtype=torch.int32, generator=generator)
    logits = torch.randn(BATCH * WIDTH, vocab, generator=generator)
    filled = torch.ones(BATCH * WIDTH)
    metadata = SimpleNamespace(
        spec_dec_mode=SimpleNamespace(use_one_engine=lambda: True),
        is_all_greedy_sample=kind == "greedy logits",
        temperatures=filled * 0.8,
        top_ks=(filled * 4).int(),
        top_ps=filled * 0.9,
    )
    probs = logits.softmax(-1).view(BATCH, WIDTH, vocab) if kind == "probs" else None
    return tokens, counts, logits, metadata, probs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("policy", "rank_check_every"), [*((p, 0) for p in POLICIES[1:]), ("repair", 4)])
def test_nothing_moves_over_bind_and_commit_while_requests_come_and_go(tmp_path, policy, kind, rank_check_every):
    checkpoint, worker = Checkpoint.write(tmp_path), SimpleNamespace(force_num_accepted_tokens=0)
    section = checkpoint.section(policy, repair_rows=2, rank_check_every=rank_check_every, backend="torch")
    try:
        RUNTIME.build(section, tmp_path, 0, True, (lambda own: [own, own]) if rank_check_every else None)
        before = addresses(RUNTIME)
        assert {"rows", "stage.state", "stage.steps", "stage.repairs", "stage.counters"} <= set(before)
        prompts, commits, binds = checkpoint.prompts(40), [], {}
        running = [LlmRequest(i, prompts[i], 99, py_seq_slot=i) for i in range(4)]
        for step in range(7):
            if step in (2, 5):  # one leaves, another takes its slot in the next step
                running[step % 4] = LlmRequest(
                    step + 10, prompts[step + 10], 99, py_seq_slot=running[step % 4].py_seq_slot
                )
            for request in running:
                request.receive(checkpoint.ids["a"])  # a generation row, as all rows of a captured batch are
            tokens, counts, logits, metadata, probs = hook_inputs(checkpoint, kind, step)
            compares = rank_check_every and step and step % rank_check_every == 0  # that step waits for the others
            if compares:
                hooks.bind(metadata, [*running, dummy_request(3), dummy_request(3)])
            else:
                with GraphWatch(host_side=True) as bound:
                    hooks.bind(metadata, [*running, dummy_request(3), dummy_request(3)])
                binds.setdefault(2 if step == 0 else step in (2, 5), []).append(bound.seen)
            static = [*tensors_of(RUNTIME).values(), tokens, counts, logits, *tensors_of(metadata).values()]
            with GraphWatch(static if probs is None else [*static, probs]) as watch:
                if kind == "probs":
                    hooks.commit_rejection(worker, tokens, counts, logits, 0, BATCH, metadata, probs)
                else:
                    hooks.commit_strict(worker, tokens, counts, logits, 0, BATCH, metadata)
            commits.append(watch.seen)
            assert addresses(RUNTIME) == before
        assert not RUNTIME.aside
        assert all(seen == commits[0] for seen in commits)
        for same in binds.values():  # `bind` depends on which requests are new, and on nothing else
            assert all(seen == same[0] for seen in same)
        assert RUNTIME.stage.read_counters()["windows"] > 0
    finally:
        RUNTIME.reset()
