"""The executor's loop around one-model steps, with and without overlap.

Facts: X §1.7 (order of a step in both loops; host state lags the device by one under overlap), §2.4 (attention-DP dummy
behind the generation rows), §3.2 (pause), §3.3 (a disaggregated server's first token), A §4 (a finished request runs
once more), X §1.6 (accepted + rewound = verified).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .model_engine import PyTorchModelEngine
from .requests import KvCacheManager, LlmRequest, LlmRequestState, ScheduledRequests, SlotPool
from .spec_sampler import SpecSampler


@dataclass
class StepRecord:
    """What one step did to the requests whose tokens the host took, by request id."""

    num_contexts: int
    draft_len: int
    committed: dict[int, list[int]] = field(default_factory=dict)
    rewinds: dict[int, int] = field(default_factory=dict)
    kv_lens: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)  # on the device, before the host cuts at an end


@dataclass
class Run:
    """A finished run: what each request committed, by id, and the steps in order."""

    tokens: dict[int, list[int]]
    finish_reasons: dict[int, str | None]
    steps: list[StepRecord]


class ExecutorLoop:
    """The body of `PyExecutor`; the windows' files add what is patched there."""

    def __init__(self, *, model_engine: PyTorchModelEngine, sampler: SpecSampler, llm_args: Any) -> None:
        self.model_engine, self.sampler, self.llm_args = model_engine, sampler, llm_args
        self.overlap = not llm_args.disable_overlap_scheduler
        self.kv_cache_manager = KvCacheManager()
        self.slots, self.holders = SlotPool(model_engine.num_seq_slots), {}
        self.waiting: list[LlmRequest] = []
        self.active: list[LlmRequest] = []
        self.steps: list[StepRecord] = []
        self.speculation_gate: Any = None  # switches speculation off for good once acceptance is low

    def run(self, requests: Iterable[LlmRequest], pause_at: dict[int, int] | None = None) -> Run:
        """Decode to the end. `pause_at`: step → id of a request that is preempted before it (not under overlap)."""
        everyone = list(requests)
        self.waiting += everyone
        previous, step = None, 0
        while self.waiting or self.active or previous:
            if pause_at and step in pause_at:
                self._pause(pause_at[step])
            off = self.speculation_gate is not None and self.speculation_gate.disabled
            batch = self._schedule(draft_len := 0 if off else self.model_engine.draft_len_at(step))
            if not batch.all_requests():
                self._update(*previous)
                previous = None
                continue
            outputs = self.model_engine.forward(batch, draft_len, self.sampler if self.overlap else None)
            if previous:
                self._take(*previous)
            state = self.sampler.sample_async(batch, outputs)
            self._advance_contexts(batch)
            record = StepRecord(batch.num_context_requests, draft_len, accepted=self.model_engine.checker.last)
            self.steps.append(record)
            if previous:
                self._settle(*previous, in_flight=batch)
            previous = (batch, state, record)
            if not self.overlap:
                self._update(*previous)
                previous = None
            step += 1
        return Run(
            {request.py_request_id: request.output for request in everyone},
            {request.py_request_id: request.finish_reason for request in everyone},
            self.steps,
        )

    def _schedule(self, draft_len: int) -> ScheduledRequests:
        while self.waiting and self.slots.free and len(self.active) < self.llm_args.max_batch_size:
            self.active.append(self.waiting.pop(0))
        self.slots.assign(self.active, self.holders)
        batch = ScheduledRequests()
        width = self.model_engine.verified_tokens(draft_len)
        for request in self.active:
            if request.is_context_init_state:
                chunk = self.llm_args._double.chunk_size
                request.context_chunk_size = min(chunk, request.prompt_len - request.context_current_position)
                last = request.is_last_context_chunk
                (batch.context_requests_last_chunk if last else batch.context_requests_chunking).append(request)
            else:
                if request.py_request_id not in self.kv_cache_manager.lengths:
                    self._receive(request)
                request.py_draft_tokens = (request.py_draft_tokens + [0] * width)[:width]
                request.py_draft_tokens_effective_len = width
                batch.generation_requests.append(request)
        self.kv_cache_manager.prepare_resources(batch)
        if self.llm_args.enable_attention_dp and batch.all_requests():
            batch.generation_requests.append(self.model_engine.padding_row(draft_len))
        return batch

    def _receive(self, request: LlmRequest) -> None:
        """A request whose context another server computed: its cache arrives, its first token is already there."""
        tokens = request.get_tokens(0)
        self.model_engine.target.cache[request.py_seq_slot, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        self.model_engine.drafter.cache[request.py_seq_slot, : len(tokens) - 1] = torch.tensor(tokens[1:])
        self.kv_cache_manager.lengths[request.py_request_id] = len(tokens) - 1
        recurrent = getattr(self.model_engine.target, "recurrent", None)
        if recurrent is not None:
            recurrent.receive(request.py_seq_slot, tuple(tokens[:-1]))

    def _advance_contexts(self, batch: ScheduledRequests) -> None:
        for request in batch.context_requests:
            last = request.is_last_context_chunk
            request.context_current_position += request.context_chunk_size
            if last:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
        for request in batch.all_requests():
            request.py_batch_idx = request.py_seq_slot

    def _update(self, batch: ScheduledRequests, state: Any, record: StepRecord) -> None:
        self._take(batch, state, record)
        self._settle(batch, state, record, in_flight=None)

    def _take(self, batch: ScheduledRequests, state: Any, record: StepRecord) -> None:
        """The host learns what the device accepted."""
        lengths = {request.py_request_id: request.get_num_tokens(0) for request in state.requests}
        drafted = dict(zip(lengths, getattr(state, "draft_counts", ()), strict=False))
        self.sampler.update_requests(state)
        for request in state.requests:
            new = request.get_tokens(0)[lengths[request.py_request_id] :]
            if new:
                record.committed[request.py_request_id] = new
                record.rewinds[request.py_request_id] = request.py_rewind_len
                accepted = record.accepted.get(request.py_request_id)
                self.model_engine.checker.check_host(request, new, accepted, drafted.get(request.py_request_id, 0))

    def _settle(self, batch, state, record: StepRecord, in_flight: ScheduledRequests | None) -> None:
        """Rewind caches, drop what has finished, and see that host, manager and cache agree."""
        self.kv_cache_manager.update_resources(batch)
        ahead = in_flight.generation_requests if in_flight else []
        for request in state.requests:
            if request.is_finished:
                if request in self.active:
                    if self.speculation_gate is not None:
                        self.speculation_gate.record(request)
                    self.active.remove(request)
                    self.slots.release(request, self.holders)
                continue
            length = self.kv_cache_manager.lengths[request.py_request_id]
            length -= 1 + request.py_draft_tokens_effective_len if request in ahead else 0
            record.kv_lens[request.py_request_id] = length
            tokens = request.get_tokens(0)[:-1]
            assert length == len(tokens), f"request {request.py_request_id}: cache holds {length} of {len(tokens)}"
            cached = self.model_engine.target.cache[request.py_seq_slot, :length].tolist()
            forced = getattr(self.model_engine.worker, "force_num_accepted_tokens", 0)
            assert forced or cached == tokens, f"request {request.py_request_id}: cache {cached}, tokens {tokens}"

    def _pause(self, request_id: int) -> None:
        request = next(request for request in self.active if request.py_request_id == request_id)
        request.pause()
        self.slots.release(request, self.holders)
        del self.kv_cache_manager.lengths[request_id]
        self.active.remove(request)
        self.waiting.append(request)
