"""`commit` can be captured in a CUDA graph: the same operations on the same shapes whatever the values, no wait for the
device, persistent tensors that never move. Checked here by watching every operation; not on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from structured_commit import CommitConfig, CommitStage, Policy, Vocabulary, compile_format

VOCABULARY = Vocabulary(17, {0: b"a", 1: b"b", 2: b"c"}, {"<open>": 3, "<close>": 4, "<end>": 5})
VOCAB = 17
TABLE = compile_format(
    "[abc]*(?:(?<block>«<open>»(?<header>c)[ab]+«<close>»)[abc]*)*", VOCABULARY, terminals=("<end>",)
)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "is_nonzero", "equal.")
BATCH, WIDTH = 6, 4


class Watch(TorchDispatchMode):
    """Records each operation with the shapes of its results, and fails on one that waits for the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(w in name for w in WAITS), f"{name} waits for the device"
        if func is torch.ops.aten.index.Tensor:
            masks = [a for a in tree_leaves(args[1]) if isinstance(a, torch.Tensor) and a.dtype == torch.bool]
            assert not masks, f"{name} has a shape that depends on values"
        out = func(*args, **(kwargs or {}))
        shapes = [(tuple(t.shape), t.dtype) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.seen.append((name, shapes))
        return out


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


@pytest.mark.parametrize("kind", ["probs", "greedy logits", "sampled logits"])
@pytest.mark.parametrize("policy", [p.value for p in Policy])
def test_commit_does_the_same_operations_whatever_the_values(policy, kind):
    stage = CommitStage(TABLE, CommitConfig(policy=policy, repair_rows=2), num_slots=8, max_window=WIDTH)
    slots = torch.tensor([0, 1, 2, 3, 8, 8])
    persistent = (stage.state, stage.steps, stage.repairs, stage.counters)
    addresses = [t.data_ptr() for t in persistent]
    programs = []
    # Nothing illegal; anything; nothing but illegal tokens after some have ended, strayed or used up their repairs.
    for seed, tokens, state in ((1, (0, 1), 0), (2, (0, 6), TABLE.info.start), (3, (4, 6), TABLE.info.start)):
        stage.state[:8] = state
        drawn, lengths, probs = windows(seed, tokens)
        given = distribution(kind, probs)
        with Watch() as watch:
            stage.commit_(drawn, lengths, slots, **given)
        programs.append(watch.seen)
    assert programs[0] == programs[1] == programs[2]
    assert [t.data_ptr() for t in persistent] == addresses


def test_the_watch_sees_what_it_is_for():
    mask = torch.tensor([True, False])
    for wait in (lambda: mask.sum().item(), mask.nonzero, lambda: mask[mask], lambda: bool(mask.any())):
        with pytest.raises(AssertionError), Watch():
            wait()


def test_the_common_path_touches_no_more_than_repair_rows_of_the_vocabulary():
    stage = CommitStage(TABLE, CommitConfig(repair_rows=2), num_slots=8, max_window=WIDTH)
    drawn, lengths, probs = windows(5)
    with Watch() as watch:
        stage.commit(drawn, lengths, torch.arange(BATCH), probs=probs)
    wide = [shape for _, shapes in watch.seen for shape, _ in shapes if len(shape) >= 2 and shape[-1] == VOCAB]
    assert wide
    assert max(shape[0] for shape in wide) == 2
