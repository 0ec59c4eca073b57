"""The one-model sampler: stores by slot on the device, a host copy a step later.

Facts: A §4 (stores, row slicing, padding and silent truncation, garbage in slots that were not sampled, host update and
its assertion), X §1.8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .requests import LlmRequest, LlmRequestState, ScheduledRequests, handle_stop_criteria

GARBAGE = 1 << 20


@dataclass
class SampleStateTensorsSpec:
    """Device: `new_tokens` are the next step's inputs. Host: the accepted tokens."""

    new_tokens: Tensor
    new_tokens_lens: Tensor | None = None
    next_draft_tokens: Tensor | None = None
    log_probs: Tensor | None = None


@dataclass
class SampleStateSpec:
    device: SampleStateTensorsSpec
    host: SampleStateTensorsSpec
    requests: list[LlmRequest]
    draft_counts: list[int]
    runtime_draft_len: int


class SpecSampler:
    """The body of `SpecSamplerBase`; the windows' files name it."""

    def __init__(self, max_num_sequences: int, max_draft_len: int, max_total_draft_tokens: int) -> None:
        self.max_num_sequences = max_num_sequences
        self.max_accepted_path_len = max_draft_len + 1
        slots, width = max_num_sequences, max_total_draft_tokens + 1
        self.new_tokens = torch.full((self.max_accepted_path_len, slots, 1), GARBAGE, dtype=torch.int32)
        self.next_new_tokens = torch.full((width, slots, 1), GARBAGE, dtype=torch.int32)
        self.next_draft_tokens = torch.full((slots, max_total_draft_tokens), GARBAGE, dtype=torch.int32)
        self.new_tokens_lens = torch.full((slots,), GARBAGE, dtype=torch.int32)

    def sample_async(self, scheduled_requests: ScheduledRequests, outputs: dict, num_context_logits_prefix_sum=None):
        requests = scheduled_requests.sampled_requests()
        skip = len(scheduled_requests.context_requests_chunking)
        real = [i for i, request in enumerate(requests) if not request.is_dummy]
        requests = [requests[i] for i in real]
        rows = torch.tensor([skip + i for i in real], dtype=torch.int64)
        slots = torch.tensor([request.py_seq_slot for request in requests], dtype=torch.int64)
        contexts = len(scheduled_requests.context_requests_last_chunk)
        draft_counts = [0 if i < contexts else r.py_draft_tokens_effective_len for i, r in enumerate(requests)]
        draft_len = outputs["next_draft_tokens"].shape[1]
        self.new_tokens_lens.index_copy_(0, slots, outputs["new_tokens_lens"][rows].int())
        _copy(self.new_tokens[:, :, 0].T, slots, outputs["new_tokens"][rows])
        _copy(self.next_new_tokens[:, :, 0].T, slots, outputs["next_new_tokens"][rows])
        _copy(self.next_draft_tokens, slots, outputs["next_draft_tokens"][rows])
        device = SampleStateTensorsSpec(self.next_new_tokens, self.new_tokens_lens, self.next_draft_tokens)
        host = SampleStateTensorsSpec(
            self.new_tokens.clone(), self.new_tokens_lens.clone(), self.next_draft_tokens.clone()
        )
        for request in scheduled_requests.context_requests_last_chunk:
            request.py_draft_tokens = [1] * draft_len
        return SampleStateSpec(device, host, requests, draft_counts, draft_len)

    def update_requests(self, state: SampleStateSpec, resource_manager=None) -> None:
        for request, drafted in zip(state.requests, state.draft_counts, strict=True):
            if request.state is LlmRequestState.GENERATION_COMPLETE:
                continue
            slot = request.py_seq_slot
            count = int(state.host.new_tokens_lens[slot])
            assert count <= self.max_accepted_path_len, f"request {request.py_request_id}: {count} tokens"
            for token in state.host.new_tokens[:count, slot, 0].tolist():
                request.add_new_token(token, 0)
                if handle_stop_criteria(request, token):
                    break
            request.py_num_accepted_draft_tokens = count - 1
            request.py_num_draft_tokens_verified = drafted
            request.py_rewind_len = drafted - request.py_num_accepted_draft_tokens
            request.py_draft_tokens = state.host.next_draft_tokens[slot, : state.runtime_draft_len].tolist()
            request.py_decoding_iter += 1


def _copy(store: Tensor, slots: Tensor, values: Tensor) -> None:
    """Scatter rows into a store by slot, in place; narrower rows are filled with 0, wider ones cut."""
    width = min(store.shape[1], values.shape[1])
    rows = torch.zeros(len(slots), store.shape[1], dtype=store.dtype)
    rows[:, :width] = values[:, :width]
    store.index_copy_(0, slots, rows)
