"""What some schedules need beside the engine: a drafter over a reduced vocabulary, a suffix automaton that overrides
drafts, the gate that switches speculation off, an executor that only sizes caches.

Facts: A §1.1, §2.3 (`d2t` holds offsets; draft probabilities keep the reduced width and are scattered before
rejection), W §3 (drafts of generation rows are overridden once, after the draft loop), X §8 (the gate looks at finished
requests: tokens per step in w12, the share of accepted drafts later; it never opens again), X §2.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .block_workers import follows
from .drafting import SaRecorder
from .engine import Engine
from .invariants import StepChecker
from .requests import LlmRequest
from .tables import Context, Table, TableModel, reader


@dataclass
class ReducedDrafter:
    """A drafter's table that can only say `kept`, in ascending order."""

    table: Table
    kept: Sequence[int]

    def make_model(self, num_lines: int, max_len: int) -> TableModel:
        read, ids = reader(self.table), torch.tensor(self.kept)

        def logits(context: Context) -> Tensor:
            return read(context)[ids]

        model = TableModel(logits, len(ids), num_lines, max_len, complete=False)
        model.d2t = ids - torch.arange(len(ids))
        return model


class SuffixAutomaton(SaRecorder):
    """Drafts what followed the last token where the request said it before; `overridden` counts the rows."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self._said, self._found = engine.executor.model_engine, {}, []
        self.overridden = 0

    def extend_and_prepare(self, *, accepted_tokens, num_accepted_tokens, num_contexts, **unused) -> None:
        super().extend_and_prepare(
            accepted_tokens=accepted_tokens, num_accepted_tokens=num_accepted_tokens, num_contexts=num_contexts
        )
        request_ids = self._engine.spec_metadata.request_ids[num_contexts:]
        self._found = []
        for request, tokens in zip(request_ids, self.extended[-1], strict=True):
            said = self._said[request] = self._said.get(request, []) + tokens
            self._found.append(follows(said))

    def maybe_override_all_draft_tokens(self, draft_tokens: Tensor) -> Tensor:
        drafts = draft_tokens.clone()
        for row, found in enumerate(self._found):
            if found:
                self.overridden += 1
                length = min(len(found), drafts.shape[1])
                drafts[row, :length] = torch.tensor(found[:length], dtype=drafts.dtype)
        return drafts


@dataclass
class SpeculationGate:
    """Closed for good once the mean over the last `window` finished requests is below `threshold`.

    `by_rate` tells what is averaged: accepted drafts of all verified, or accepted drafts a step.
    """

    window: int
    threshold: float
    by_rate: bool
    disabled: bool = False
    means: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._history: deque[float] = deque(maxlen=self.window)

    def record(self, request: LlmRequest) -> None:
        accepted = len(request.output) - request.py_decoding_iter
        steps = max(request.py_decoding_iter - 1, 1)
        drafted = steps * max(len(request.py_draft_tokens), 1)
        self._history.append(accepted / drafted if self.by_rate else accepted / request.py_decoding_iter)
        if len(self._history) == self.window:
            self.means.append(sum(self._history) / self.window)
            self.disabled |= self.means[-1] < self.threshold


def another_executor(engine: Engine) -> None:
    """Replace the executor by a new one on the same model engine and sampler."""
    old = engine.executor
    model_engine = old.model_engine
    with engine.tree.active():
        engine.executor = type(old)(model_engine=model_engine, sampler=old.sampler, llm_args=old.llm_args)
    model_engine.checker = StepChecker(model_engine)


def inflate_contexts(engine: Engine, names: Sequence[str]) -> list[int]:
    """Let `attn_metadata.num_contexts` count every row as a context whenever one of the worker's acceptance methods
    runs, as where kernels take verification for chunked prefill. Returns a list that gets the true count of each call.
    """
    worker, model_engine, seen, latest = engine.worker, engine.executor.model_engine, [], []
    prepare = model_engine._prepare_inputs

    def prepared(*arguments: Any) -> Any:
        latest[:] = inputs = prepare(*arguments)
        return inputs

    def wrapped(method: Any) -> Any:
        def call(logits, draft_tokens, *rest):
            *_, num_contexts, batch_size, _ = rest
            metadata = latest[1]
            kept, metadata.num_contexts = metadata.num_contexts, batch_size
            seen.append(num_contexts)
            try:
                return method(logits, draft_tokens, *rest)
            finally:
                metadata.num_contexts = kept

        return call

    model_engine._prepare_inputs = prepared
    for name in names:
        if hasattr(worker, name):
            object.__setattr__(worker, name, wrapped(getattr(worker, name)))
    return seen
