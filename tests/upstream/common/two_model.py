"""Decoding with a draft engine, greedy, sampled, by rejection or over a static tree, with and without overlap.

Facts: X §1.2 to §1.4 (draft rows: contexts, then windows of K + 1 padded with 0; `num_accepted_draft_tokens` by row),
§1.5 (no rejection under overlap), §1.7 (device acceptance of the step before, draft forward, target forward, and only
then the host's update). The device decision slices the slot axis at the context count, so that under overlap all
contexts must come in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch

from .attention import AttentionMetadata
from .executor import ExecutorLoop, Run, StepRecord
from .requests import LlmRequest, ScheduledRequests
from .spec_sampler import SampleStateTensorsSpec
from .trees import PARENTS, SpecTreeManager, grow


class TwoModelLoop(ExecutorLoop):
    """`PyExecutor` where a draft engine may exist. `drafting_loop` is set by the window's creator."""

    drafting_loop = None
    accepted_on_device: torch.Tensor | None = None  # [slots] int32, under overlap
    advanced: dict[int, list[int]]  # by request id: what the drafting loop advanced over in its last run

    def run(self, requests: Iterable[LlmRequest], pause_at: dict[int, int] | None = None) -> Run:
        if self.model_engine.mode.use_one_engine():
            return super().run(requests, pause_at)
        return self._run_two_models(list(requests))

    def _run_two_models(self, everyone: list[LlmRequest]) -> Run:
        self.waiting += everyone
        self.tree = self.model_engine.spec_config.eagle_choices
        assert not (self.tree and self.overlap), "overlap needs a chain"
        if self.tree:
            self.sampler.spec_tree_manager = SpecTreeManager(self.model_engine.num_seq_slots)
        previous = None
        while self.waiting or self.active or previous:
            batch = self._schedule_targets()
            if not batch.all_requests():
                self._update(*previous)
                previous = None
                continue
            new_tokens = self._accept_previous(previous) if previous else None
            self._draft(batch.generation_requests, new_tokens)
            self.kv_cache_manager.prepare_resources(batch)
            logits = self._forward(batch, new_tokens)
            if previous:
                self._take(*previous)
            state = self.sampler.sample_async(batch, logits)
            self._advance_contexts(batch)
            record = StepRecord(batch.num_context_requests, self.model_engine.spec_config.max_draft_len)
            self.steps.append(record)
            if previous:
                self._settle(*previous, in_flight=batch)
            previous = (batch, state, record)
            if not self.overlap:
                self._update(*previous)
                previous = None
        tokens = {request.py_request_id: request.output for request in everyone}
        return Run(tokens, {request.py_request_id: request.finish_reason for request in everyone}, self.steps)

    def _schedule_targets(self) -> ScheduledRequests:
        while self.waiting and len(self.active) < self.llm_args.max_batch_size:
            self.active.append(self.waiting.pop(0))
        self.slots.assign(self.active, self.holders)
        batch = ScheduledRequests()
        for request in self.active:
            if request.is_context_init_state:
                request.context_chunk_size = request.prompt_len
                batch.context_requests_last_chunk.append(request)
            else:
                batch.generation_requests.append(request)
        return batch

    def _accept_previous(self, previous: tuple) -> torch.Tensor:
        """[slots] int32: each slot's next input token, decided on the device."""
        batch, state, _ = previous
        drafts = None
        if batch.generation_requests:
            drafts = torch.full((self.model_engine.num_seq_slots, len(self.sampler.new_tokens) - 1), -1)
            for request in batch.generation_requests:
                drafts[request.py_seq_slot] = torch.tensor(state.drafts[request.py_request_id])
        inputs = SampleStateTensorsSpec(self.sampler.new_tokens, next_draft_tokens=drafts)
        result, self.accepted_on_device = self._accept_draft_tokens(batch, state.device, inputs)
        return result.new_tokens[0, :, 0]

    def _newest(self, request: LlmRequest, new_tokens: torch.Tensor | None) -> tuple[list[int], int]:
        """What the last step committed of a request, and where it starts among its tokens."""
        tokens = request.get_tokens(0)
        if new_tokens is None:
            count = request.py_num_accepted_draft_tokens + 1
            return tokens[-count:], len(tokens) - count
        slot = request.py_seq_slot
        drafts = self.sampler.new_tokens[: int(self.accepted_on_device[slot]), slot, 0].tolist()
        return [*drafts, int(new_tokens[slot])], len(tokens)

    def _draft(self, requests: list[LlmRequest], new_tokens: torch.Tensor | None) -> None:
        width = self.model_engine.spec_config.max_draft_len + 1
        ids, seq_lens, kv_lens, accepted, starts_at = [], [], [], [], []
        self.advanced = {}
        for request in requests:
            new, at = self._newest(request, new_tokens)
            self.advanced[request.py_request_id] = new
            first = at == request.prompt_len
            row = [*request.get_tokens(0)[1:at], *new] if first else [*new, *[0] * (width - len(new))]
            ids += row
            seq_lens.append(len(row))
            kv_lens.append(len(row) if first else at - 1 + len(row))
            accepted.append(len(row) - 1 if first else len(new) - 1)
            starts_at.append(at - 1)
            if self.tree:
                line = self.model_engine.drafter.cache[request.py_seq_slot]
                line[at - 1 : at - 1 + len(new)] = torch.tensor(new)
                if first:
                    line[: at - 1] = torch.tensor(request.get_tokens(0)[1:at])
                request.py_draft_tokens = grow(self.model_engine.drafter, request.py_seq_slot, at - 1 + len(new))
        if self.tree or not requests:
            return
        lines = [request.py_seq_slot for request in requests]
        request_ids = [request.py_request_id for request in requests]
        attn_metadata = AttentionMetadata(torch.tensor(kv_lens), seq_lens, 0, lines, request_ids)
        starts = attn_metadata.seq_lens.cumsum(0) - attn_metadata.seq_lens
        spec_metadata = SimpleNamespace(
            num_accepted_draft_tokens=torch.tensor(accepted, dtype=torch.int32),
            gather_ids=starts + torch.tensor(accepted),
            request_ids=request_ids,
            is_cuda_graph=False,
        )
        positions = [kv - n + i for kv, n in zip(kv_lens, seq_lens, strict=True) for i in range(n)]
        drafted = self.drafting_loop(torch.tensor(ids), torch.tensor([positions]), attn_metadata, spec_metadata)
        self._require_committed_advance(requests, starts_at, attn_metadata)
        for row, request in enumerate(requests):
            request.py_draft_tokens = drafted["new_draft_tokens"][:, row].tolist()
            request.py_draft_logits = None if self.overlap else drafted["draft_logits"][:, row]
            if not getattr(self.model_engine.spec_config, "use_rejection_sampling", True):  # no such field in w12
                request.py_draft_logits = None

    def _forward(self, batch: ScheduledRequests, new_tokens: torch.Tensor | None) -> torch.Tensor:
        ids, seq_lens, kv_lens, gather = [], [], [], []
        for i, request in enumerate(batch.all_requests()):
            if i < batch.num_context_requests:
                row, start = request.get_tokens(0), 0
            else:
                new, at = self._newest(request, new_tokens)
                row, start = [new[-1], *request.py_draft_tokens], at + len(new) - 1
                request.py_draft_tokens_effective_len = len(row) - 1
            first = len(ids) + (len(row) - 1 if i < batch.num_context_requests else 0)
            gather += range(first, len(ids) + len(row))
            ids += row
            seq_lens.append(len(row))
            kv_lens.append(start + len(row))
        attn_metadata = AttentionMetadata(
            torch.tensor(kv_lens),
            seq_lens,
            batch.num_context_requests,
            [request.py_seq_slot for request in batch.all_requests()],
            [request.py_request_id for request in batch.all_requests()],
            PARENTS if self.tree else None,
        )
        return self.model_engine.target.forward(torch.tensor(ids), attn_metadata, torch.tensor(gather))

    def _require_committed_advance(self, requests, starts_at: list[int], attn_metadata) -> None:
        """The loop's KV lengths moved by what was committed, and its cache holds those tokens at their places."""
        drafts = self.model_engine.spec_config.max_draft_len
        for request, start, kv_len in zip(requests, starts_at, attn_metadata.kv_lens_cuda.tolist(), strict=True):
            committed = self.advanced[request.py_request_id]
            assert kv_len - start - drafts == len(committed), f"advanced to {kv_len} from {start}, not by {committed}"
            held = self.model_engine.drafter.cache[request.py_seq_slot, start : start + len(committed)].tolist()
            assert held == committed, f"request {request.py_request_id}: drafted behind {held}, committed {committed}"

    def _take(self, batch, state, record) -> None:
        before = {request.py_request_id: request.get_num_tokens(0) for request in state.requests}
        self._take_tokens(batch, state, record)
        for request in state.requests if self.overlap and not self.model_engine.mode.use_one_engine() else ():
            advanced = self.advanced.get(request.py_request_id)
            new = request.get_tokens(0)[before[request.py_request_id] :]
            if advanced is not None and not request.is_finished and new:
                assert advanced == new, f"request {request.py_request_id}: drafted behind {advanced}, host took {new}"

    def _take_tokens(self, batch, state, record) -> None:
        starts = {request.py_request_id: request.get_num_tokens(0) - 1 for request in state.requests}
        super()._take(batch, state, record)
        if self.model_engine.mode.use_one_engine() or not self.tree:
            return
        for request in batch.generation_requests:
            line, start = self.model_engine.target.cache[request.py_seq_slot], starts[request.py_request_id]
            nodes = torch.tensor(request.py_num_accepted_draft_tokens_indices, dtype=torch.int64) + 1
            line[start + 1 : start + 1 + len(nodes)] = line[start + nodes].clone()
