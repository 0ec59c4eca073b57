"""What metadata and workers share from mid July 2026 on, where no patch goes.

Facts: A §1.1 (slot rows with a spare last one; random state by request), §1.2 (allocated on the first populate), §1.6
steps 2, 5, 7, §2.1 (template forward), §2.2, §2.3 (penalties on a clone, one random window a step).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import ops, penalties
from .drafting import WorkerCommons
from .metadata import Sampling, SpecMetadataFields
from .requests import LlmRequest

DEFAULT_SEED = 42


@dataclass
class LaterMetadata(SpecMetadataFields):
    is_all_greedy_sample: bool = True
    group_all_greedy_sample: bool | None = None
    dummy_slot_row: int = 0
    penalty_state: Any = None
    request_seeds: Tensor | None = None
    request_offsets: Tensor | None = None
    seeds: Tensor | None = None
    offsets: Tensor | None = None
    _rng_window_counter: dict[int, int] = field(default_factory=dict)  # one for all views

    def prepare(self):
        self.prepare_rejection_sampling_buffers()

    def prepare_rejection_sampling_buffers(self):
        if self.use_rejection_sampling and self.draft_probs is None:
            self._reserve_slots()
            self.draft_probs = torch.zeros(self.dummy_slot_row + 1, self.max_draft_len, self.vocab_size)

    def prepare_penalty_buffers(self):
        if self.enable_penalty and self.penalty_state is None:
            self._reserve_slots()
            self.penalty_state = penalties.make(self.dummy_slot_row, self.vocab_size)

    def _reserve_slots(self):
        self.dummy_slot_row = self.num_seq_slots or self.max_num_requests
        if self.batch_slot_ids is None:
            self.batch_slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64)

    seeds: Tensor | None = None
    offsets: Tensor | None = None

    def _populate_request_rng_state(self, requests: list[LlmRequest], sampling: list[Sampling]) -> None:
        """Advances each slot's window, so that a second call in one step changes later samples."""
        counters = self._rng_window_counter
        offsets = []
        for request in requests:
            offsets.append(counters.get(request.py_seq_slot, 0) * (self.max_draft_len + 1))
            counters[request.py_seq_slot] = counters.get(request.py_seq_slot, 0) + 1
        self.request_seeds = torch.tensor([DEFAULT_SEED if r.seed is None else r.seed for r in requests])
        self.request_offsets = torch.tensor(offsets)
        repeats = torch.tensor([s.num_tokens for s in sampling])
        self.seeds, self.offsets = (
            rows.repeat_interleave(repeats) for rows in (self.request_seeds, self.request_offsets)
        )

    def _populate_penalty_params(self, requests):
        if self.enable_penalty:
            penalties.populate(self.penalty_state, requests)


class LaterWorker(WorkerCommons):
    def __init_subclass__(cls, **settings):
        super().__init_subclass__(**settings)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must implement _forward_impl, not forward")

    def forward(self, *args, **kwargs):
        attn_metadata, spec_metadata = kwargs["attn_metadata"], kwargs["spec_metadata"]
        try:
            return self._forward_impl(*args, **kwargs)
        finally:
            self._ensure_spec_dec_state_restored(attn_metadata, spec_metadata)

    def _ensure_spec_dec_state_restored(self, attn_metadata, spec_metadata):
        attn_metadata.restore_from_spec_dec()

    def _reshape_draft_tokens_for_accept(self, spec_metadata, num_gens, device):
        if spec_metadata.draft_tokens is None:
            return torch.zeros(num_gens, spec_metadata.runtime_draft_len, dtype=torch.int32, device=device)
        return spec_metadata.draft_tokens.reshape(num_gens, spec_metadata.runtime_draft_len)

    def _reshape_logits_for_accept(self, logits, num_contexts, num_gens, spec_metadata):
        return torch.atleast_2d(logits)

    def _apply_occurrence_penalties(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        if not spec_metadata.enable_penalty:
            return logits
        slots = spec_metadata.batch_slot_ids[:batch_size]
        return penalties.penalized(spec_metadata.penalty_state, logits, draft_tokens, num_contexts, slots)

    def _rng_state_per_request(self, spec_metadata, start=0, end=None, repeat=1, step_offset=0):
        seeds = spec_metadata.request_seeds[start:end].repeat_interleave(repeat)
        return seeds, spec_metadata.request_offsets[start:end].repeat_interleave(repeat) + step_offset

    def _rng_state_per_token(self, spec_metadata, num_tokens):
        return spec_metadata.seeds[:num_tokens], spec_metadata.offsets[:num_tokens]

    def sample_draft_tokens(
        self, logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None, mapping_lm_head_tp=None
    ):
        """One token of each row; or, from logits [G, K, V] of a block, K of each generation row."""
        if spec_metadata.is_all_greedy_sample or not spec_metadata.use_rejection_sampling:
            return self.to_target_vocabulary(logits.argmax(dim=-1)).int()
        probs = logits.softmax(dim=-1)
        if draft_step is None:
            width = logits.shape[1]
            spec_metadata.draft_probs[spec_metadata.batch_slot_ids[num_contexts:batch_size], :width] = probs
            state = self._rng_state_per_request(spec_metadata, num_contexts, batch_size, width, step_offset=1)
            return ops.draw(probs.flatten(0, 1), *state).view(-1, width) if len(probs) else probs.argmax(-1)
        spec_metadata.draft_probs[spec_metadata.batch_slot_ids[:batch_size], draft_step, : probs.shape[1]] = probs
        drawn = ops.draw(probs, *self._rng_state_per_request(spec_metadata, 0, batch_size, step_offset=1 + draft_step))
        return self.to_target_vocabulary(drawn).int()

    def write_context_onehot_draft_probs(self, spec_metadata, num_contexts, num_gens, draft_len, gen_vocab):
        """Context rows' placeholder drafts of 0 get a distribution that rejection can read."""
        if spec_metadata.use_rejection_sampling and spec_metadata.draft_probs is not None:
            slots = spec_metadata.batch_slot_ids[:num_contexts]
            spec_metadata.draft_probs[slots, :draft_len] = 0.0
            spec_metadata.draft_probs[slots, :draft_len, 0] = 1.0
