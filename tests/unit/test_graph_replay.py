"""Real CUDA graphs: captured once for each batch size, replayed with new values, every replay equal to an eager step.

Needs a GPU. Without one the same steps run against the same eager twin with the call itself in the graph's place, so
that what is compared, and with what, is tested everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from structured_commit import COUNTERS, CommitConfig, CommitStage, Policy
from tests.unit.test_graph_discipline import TABLE, VOCAB, WIDTH

GPU = torch.cuda.is_available()
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
REPLAYS = 1_000 if GPU else 6
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ("torch", "triton") if GPU else ("torch",)
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device here: graphs are captured and replayed on a GPU only")


class Inputs:
    """The static tensors that a graph reads and writes; `draw` puts new values into them."""

    def __init__(self, batch: int, kind: str) -> None:
        self.kind = kind
        self.tokens = torch.zeros(batch, WIDTH, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        self.slots = torch.arange(batch, device=DEVICE)
        self.scores = torch.zeros(batch, WIDTH, VOCAB, device=DEVICE)
        self.temperature = torch.ones(batch, device=DEVICE)
        self.top_k = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        self.top_p = torch.ones(batch, device=DEVICE)

    def draw(self, generator: torch.Generator) -> None:
        """New values, drawn on the host: garbage past the lengths, rows without a slot, greedy rows among others."""
        batch = len(self.lengths)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.tokens.copy_(integers(-1, 6, batch, WIDTH))
        self.lengths.copy_(integers(1, WIDTH + 1, batch))
        inside = torch.arange(WIDTH) < self.lengths.cpu()[:, None]
        self.tokens.copy_(torch.where(inside, self.tokens.cpu().clamp(min=0), self.tokens.cpu()))
        self.slots.copy_(
            torch.where(
                integers(0, 8, batch) == 0, BUCKETS[-1], torch.randperm(BUCKETS[-1], generator=generator)[:batch]
            )
        )
        scores = torch.randn(batch, WIDTH, VOCAB, generator=generator) * 3
        self.scores.copy_(scores.softmax(-1) if self.kind == "probs" else scores)
        self.temperature.copy_(torch.rand(batch, generator=generator) - 0.2)
        self.top_k.copy_(integers(0, 6, batch))
        self.top_p.copy_(torch.rand(batch, generator=generator) + 0.3)

    def clone(self) -> Inputs:
        other = Inputs(len(self.lengths), self.kind)
        for name, tensor in vars(self).items():
            if isinstance(tensor, torch.Tensor):
                setattr(other, name, tensor.clone())
        return other

    def commit_(self, stage: CommitStage) -> torch.Tensor:
        if self.kind == "probs":
            return stage.commit_(self.tokens, self.lengths, self.slots, probs=self.scores)
        filters = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return stage.commit_(self.tokens, self.lengths, self.slots, logits=self.scores, **filters)


def captured(stage: CommitStage, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """One step as a graph: calling it replays the graph and returns the events it wrote."""
    if not GPU:
        return lambda: inputs.commit_(stage)
    saved = [t.clone() for t in (stage.state, stage.steps, stage.repairs, stage.counters)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels and fills caches, which a capture must not do
            inputs.commit_(stage)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        events = inputs.commit_(stage)
    for tensor, value in zip((stage.state, stage.steps, stage.repairs, stage.counters), saved, strict=True):
        tensor.copy_(value)

    def replay() -> torch.Tensor:
        graph.replay()
        return events

    return replay


def new_stage(policy: str, backend: str) -> CommitStage:
    config = CommitConfig(policy=policy, repair_rows=4, max_repairs=50, backend=backend)
    return CommitStage(TABLE, config, num_slots=BUCKETS[-1], max_window=WIDTH, device=DEVICE)


def replayed_equals_eager(batch: int, kind: str, policy: str, backend: str, replays: int) -> dict[str, int]:
    """Replay a graph and run its eager twin on copies of the same values; both carry their state along."""
    graphed, eager = new_stage(policy, backend), new_stage(policy, "torch")
    inputs = Inputs(batch, kind)
    generator = torch.Generator().manual_seed(batch)
    inputs.draw(generator)
    step = captured(graphed, inputs)
    for number in range(replays):
        inputs.draw(generator)
        if number % 10 == 0:  # new requests, bound between two replays as the host does
            slots = list(range(0, BUCKETS[-1], 2))
            for stage in (graphed, eager):
                stage.bind(slots, [[]] * len(slots))
        twin = inputs.clone()
        events, expected = step(), twin.commit_(eager)
        pairs = (
            (events, expected),
            (inputs.tokens, twin.tokens),
            (inputs.lengths, twin.lengths),
            (graphed.state, eager.state),
            (graphed.steps, eager.steps),
            (graphed.repairs, eager.repairs),
            (graphed.counters, eager.counters),
        )
        assert all(torch.equal(*pair) for pair in pairs), f"replay {number} of batch {batch} differs from eager"
    return graphed.read_counters()


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("batch", BUCKETS)
def test_a_thousand_replays_of_a_captured_graph_equal_eager(batch, kind, backend):
    counters = replayed_equals_eager(batch, kind, "repair", backend, REPLAYS)
    assert counters["repaired"] > 0
    assert counters["ended"] > 0


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", [p.value for p in Policy if p is not Policy.OFF])
def test_every_policy_can_be_captured(policy, backend):
    counters = replayed_equals_eager(8, "probs", policy, backend, REPLAYS // 10)
    assert counters["windows"] > 0


@needs_gpu
def test_counters_are_copied_out_between_replays():
    stage, inputs = new_stage("repair", "torch"), Inputs(8, "probs")
    inputs.draw(torch.Generator().manual_seed(1))
    replay = captured(stage, inputs)
    for _ in range(5):
        replay()
        stage.counter_reader.start()
    torch.cuda.synchronize()
    assert stage.counter_reader.read() == stage.read_counters()


@pytest.mark.skipif(GPU, reason="the real graphs are tested here")
@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("policy", [p.value for p in Policy if p is not Policy.OFF])
def test_the_comparison_itself_runs_without_a_gpu(policy, kind):
    counters = replayed_equals_eager(16, kind, policy, "torch", REPLAYS)
    assert set(counters) == set(COUNTERS)
    assert counters["windows"] > 0


@pytest.mark.skipif(GPU, reason="the real graphs are tested here")
def test_the_comparison_can_fail(monkeypatch):
    honest = CommitStage.commit_
    calls = []

    def off_by_one(stage, tokens, lengths, slots, **given):
        events = honest(stage, tokens, lengths, slots, **given)
        calls.append(stage)
        if stage is calls[0]:
            tokens[0, 0] += 1
        return events

    monkeypatch.setattr(CommitStage, "commit_", off_by_one)
    with pytest.raises(AssertionError, match="replay 0 of batch 4 differs from eager"):
        replayed_equals_eager(4, "probs", "repair", "torch", 2)
