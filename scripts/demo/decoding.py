"""Speculative decoding of many requests with the table models: draft, accept, commit, go on from what was committed.

Every random number is a function of the seed, the request and its step, so a request's stream does not depend on
the batch it ran in, and two policies differ only where one of them changed a token. A stream ends at its first
terminal, as on the host of TensorRT-LLM, or at the length limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from structured_commit import (
    CommitConfig,
    CommitOutput,
    CommitStage,
    Event,
    StructureTable,
    relaxed_reference,
    strict_reference,
)

from .delivery import TERMINALS
from .model import World

NUM_DRAFTS = 4
BATCH = 1000
MAX_TOKENS = 256

# The values of TensorRT-LLM's own example for relaxed acceptance, which holds while the request thinks.
RELAXED_TOP_K = 10
RELAXED_DELTA = 0.6

ACCEPTANCES = ("strict", "rejection", "relaxed")
POLICIES = ("off", "observe", "repair")


class Window(NamedTuple):
    """What acceptance returns: tokens [B, K+1] int32 and lengths [B] int32; see the references."""

    tokens: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one request, for showing it, in local ids.

    Attributes:
        window: what acceptance returned: accepted drafts, then one bonus or recovered token.
        committed: what the stage let pass and the host kept; `window` is as long or longer.
        repaired: whether the last committed token was redrawn.
    """

    window: list[int]
    committed: list[int]
    repaired: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """What one request committed.

    Attributes:
        tokens: local ids, terminal included.
        steps: how many steps it took.
        repairs: how many of its tokens were redrawn.
        ended: by a terminal; otherwise by the length limit.
    """

    tokens: list[int]
    steps: int
    repairs: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Requests under one acceptance rule and one policy: their streams, the stage's counters, and a trace if asked."""

    streams: list[Stream]
    counters: dict[str, int]
    trace: list[Step]


class Requests:
    """A load: the kind of each request, and every uniform number it may need.

    Args:
        kinds: index into `KINDS` of each request.
        seed: of the random numbers, the commit stage's own included.
    """

    def __init__(self, kinds: Sequence[int], seed: int) -> None:
        self.kinds, self.seed = list(kinds), seed
        generator = torch.Generator().manual_seed(seed)
        # Drafts, then what acceptance needs; a step commits at least one token, so there are MAX_TOKENS at most.
        shape = (len(kinds), MAX_TOKENS, 2 * NUM_DRAFTS + 1)
        self.uniforms = torch.rand(shape, generator=generator)

    def __len__(self) -> int:
        return len(self.kinds)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw.

    Args:
        probs: [..., V'] float32 weights ≥ 0, not all zero.
        uniform: [...] float32 in [0, 1).

    Returns:
        [...] int64, never a token of weight zero.
    """
    cumulative = probs.cumsum(dim=-1)
    target = (uniform * cumulative[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # By rounding the target may reach the total: then the last token that adds to it is drawn.
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous()).squeeze(-1)
    return torch.minimum(token, last)


def rejection(draft_probs: Tensor, drafts: Tensor, target_probs: Tensor, uniforms: Tensor) -> Window:
    """Rejection sampling as `rejection_reference`, but with the caller's random numbers and without its slow parts.

    Args:
        draft_probs: [B, K, V'] float32. drafts: [B, K] int64. target_probs: [B, K+1, V'] float32.
        uniforms: [B, K+1] float32, one for each draft, one for the recovered or bonus token.
    """
    rows = torch.arange(len(drafts))
    num_drafts = drafts.shape[1]
    q = draft_probs.gather(2, drafts[..., None])[..., 0]
    p = target_probs[:, :num_drafts].gather(2, drafts[..., None])[..., 0]
    emitted = (uniforms[:, :num_drafts] * q < p).long().cumprod(dim=1).sum(dim=1)
    weights = target_probs[rows, emitted]
    residual = (weights - draft_probs[rows, emitted.clamp(max=num_drafts - 1)]).clamp(min=0)
    last = draw(torch.where((emitted < num_drafts)[:, None], residual, weights), uniforms[:, num_drafts])
    tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, emitted[:, None], last[:, None])
    return Window(tokens.int(), (emitted + 1).int())


def decode(
    world: World,
    table: StructureTable,
    requests: Requests,
    acceptance: str,
    policy: str,
    *,
    only: int | None = None,
    watch: Callable[[Tensor, Window, Tensor], None] | None = None,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Run:
    """Decode all requests, or `only` one of them with a trace of its steps.

    Args:
        table: the format over the local ids.
        acceptance: one of `ACCEPTANCES`. Strict compares the drafts with tokens sampled from the target.
        policy: of the commit stage.
        watch: shown each step before it is committed: the drafts [B, K], what acceptance returned, and the target's
            distributions [B, K+1, V'].
        on_finished: told in each step how many requests have finished.
    """
    everyone = range(len(requests))
    config = CommitConfig(policy=policy, repair_rows=BATCH, seed=requests.seed)
    stage = CommitStage(table, config, num_slots=len(requests), max_window=NUM_DRAFTS + 1)
    stage.bind(everyone, [world.prompt] * len(requests))
    batch = _Batch(world, table, requests)
    waiting = list(everyone) if only is None else [only]
    active = torch.tensor(waiting[:BATCH])
    waiting = waiting[BATCH:]
    trace = []
    while len(active):
        path, drafts, window, probs = batch.accept(active, acceptance)
        if watch is not None:
            watch(drafts, window, probs)
        # Only a repair needs the distributions; leaving them out shows that the other policies do not.
        out = stage.commit(window.tokens, window.lengths, active, probs=probs if policy == "repair" else None)
        finished, kept = batch.take(active, path, out.tokens.long(), out.lengths.long())
        if only is not None:
            trace.append(_step(window, out, int(kept)))
        count = int(finished.sum())
        on_finished(count)
        active = torch.cat([active[~finished], torch.tensor(waiting[:count], dtype=torch.int64)])
        waiting = waiting[count:]
    streams = [batch.stream(i, int(stage.repairs[i])) for i in (everyone if only is None else [only])]
    return Run(streams, stage.read_counters(), trace)


class _Batch:
    """The requests' state outside the stage: what they committed, where they are, what they draw."""

    def __init__(self, world: World, table: StructureTable, requests: Requests) -> None:
        n = len(requests)
        self.world, self.requests = world, requests
        self.context = world.contexts.start(requests.kinds, world.prompt)
        self.steps = torch.zeros(n, dtype=torch.int64)
        self.length = torch.zeros(n, dtype=torch.int64)
        self.output = torch.zeros(n, MAX_TOKENS + NUM_DRAFTS + 1, dtype=torch.int64)
        self.ended = torch.zeros(n, dtype=torch.bool)
        self.thinks = torch.zeros(n, dtype=torch.bool)
        self._terminal = torch.zeros(len(world.ids), dtype=torch.bool)
        self._terminal[[table.info.controls[name] for name in TERMINALS]] = True

    def accept(self, active: Tensor, acceptance: str) -> tuple[Tensor, Tensor, Window, Tensor]:
        """One step of the active requests [B], up to the commit stage.

        Returns:
            path: [B, K+1] int64, the contexts along the drafts.
            drafts: [B, K] int64.
            window: what acceptance returned.
            probs: [B, K+1, V'] float32, the target's distributions along the drafts.
        """
        world, k = self.world, NUM_DRAFTS
        uniforms = self.requests.uniforms[active, self.steps[active]]
        contexts, drafts, draft_probs = [self.context[active]], [], []
        for i in range(k):
            draft_probs.append(world.drafter(contexts[-1]))
            drafts.append(draw(draft_probs[-1], uniforms[:, i]))
            contexts.append(world.contexts.step(contexts[-1], drafts[-1]))
        drafts, path = torch.stack(drafts, dim=1), torch.stack(contexts, dim=1)
        probs = world.target(path)
        if acceptance == "strict":
            window = strict_reference(drafts, draw(probs, uniforms[:, k:]))
        elif acceptance == "rejection":
            window = rejection(torch.stack(draft_probs, dim=1), drafts, probs, uniforms[:, k:])
        else:
            delta = torch.where(self.thinks[active], RELAXED_DELTA, 0.0)
            window = relaxed_reference(drafts, probs, RELAXED_TOP_K, delta)
        return path, drafts, Window(*window), probs

    def take(self, active: Tensor, path: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Append what was committed, up to the first terminal. All but the last of it are drafts.

        Returns:
            finished: [B] bool, which requests are done.
            kept: [B] int64, how many tokens were appended.
        """
        world = self.world
        column = torch.arange(tokens.shape[1])
        terminal = self._terminal[tokens] & (column < lengths[:, None])
        ends = terminal.any(dim=1)
        kept = torch.where(ends, terminal.long().argmax(dim=1) + 1, lengths)
        self.output[active[:, None], self.length[active][:, None] + column] = tokens
        last = (kept - 1)[:, None]
        self.context[active] = world.contexts.step(path.gather(1, last)[:, 0], tokens.gather(1, last)[:, 0])
        thinks = self.thinks[active]
        begin, end = world.thinking
        for i in range(tokens.shape[1]):
            changed = (thinks | (tokens[:, i] == begin)) & (tokens[:, i] != end)
            thinks = torch.where(i < kept, changed, thinks)
        self.thinks[active] = thinks
        self.steps[active] += 1
        length = self.length[active] + kept
        self.ended[active] = ends & (length <= MAX_TOKENS)
        self.length[active] = length.clamp(max=MAX_TOKENS)
        return ends | (length >= MAX_TOKENS), kept

    def stream(self, request: int, repairs: int) -> Stream:
        """What a request committed."""
        tokens = self.output[request, : int(self.length[request])].tolist()
        return Stream(tokens, int(self.steps[request]), repairs, bool(self.ended[request]))


def _step(window: Window, out: CommitOutput, kept: int) -> Step:
    return Step(
        window=window.tokens[0, : int(window.lengths[0])].tolist(),
        committed=out.tokens[0, :kept].tolist(),
        repaired=bool(out.events[0] & Event.REPAIRED),
    )
