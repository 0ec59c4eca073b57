"""Facts: acceptance.md §1, §2 (columns C, as later); workers.md §0 (age E), §5 (rollback just before the next tokens);
under rejection the logits of padding rows are zeroed first."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any

import torch

from tests.upstream.common import ops, penalties
from tests.upstream.common.acceptance import matching_prefix, single_token_output, unwritten
from tests.upstream.common.drafting import WorkerCommons
from tests.upstream.common.metadata import RandomState, SpecMetadataFields


@dataclass
class SpecMetadata(RandomState, SpecMetadataFields):
    group_all_greedy_sample: bool | None = None
    dummy_slot_row: int = 0
    penalty_state: Any = None

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

    def _scan_one_model_sampling(self, requests):
        per_request_normalized, self.is_all_greedy_sample = self.normalized(requests)
        if self.group_all_greedy_sample is not None:
            self.is_all_greedy_sample = self.group_all_greedy_sample
        slots = [self.dummy_slot_row if r.py_seq_slot is None else r.py_seq_slot for r in requests]
        return per_request_normalized, slots

    def update_is_all_greedy_sample(self, requests):
        if not self.spec_dec_mode.use_one_engine():
            return
        self.group_all_greedy_sample = None
        self._scan_one_model_sampling(requests)

    def populate_sampling_params_for_one_model(self, requests):
        if not self.spec_dec_mode.use_one_engine():
            return
        self.prepare_rejection_sampling_buffers()
        self.prepare_penalty_buffers()
        if self.temperatures is None:
            torch.manual_seed(0)
        per_request_normalized, per_request_slot_ids = self._scan_one_model_sampling(requests)
        self.allocate_sampling_rows(per_request_normalized)
        self._populate_request_rng_state(requests, per_request_normalized)
        if self.batch_slot_ids is not None:
            self.batch_slot_ids[: len(requests)] = torch.tensor(per_request_slot_ids)
        self._populate_penalty_params(requests)
        if self.is_all_greedy_sample:
            return
        self.fill_sampling_rows(per_request_normalized)

    def _populate_penalty_params(self, requests):
        if self.enable_penalty:
            penalties.populate(self.penalty_state, requests)


class SpecWorkerBase(WorkerCommons, ABC):
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

    def skip_drafting(self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        self._execute_guided_decoder_if_present(logits)
        target_tokens = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        return single_token_output(logits, target_tokens)

    def sample_and_accept_draft_tokens(self, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        draft_tokens = self._reshape_draft_tokens_for_accept(spec_metadata, num_gens, logits.device)
        logits = self._reshape_logits_for_accept(logits, num_contexts, num_gens, spec_metadata)
        return self._accept_draft_tokens(logits, draft_tokens, num_contexts, batch_size, spec_metadata)

    def _reshape_draft_tokens_for_accept(self, spec_metadata, num_gens, device):
        if spec_metadata.draft_tokens is None:
            return torch.zeros(num_gens, spec_metadata.runtime_draft_len, dtype=torch.int32, device=device)
        return spec_metadata.draft_tokens.reshape(num_gens, spec_metadata.runtime_draft_len)

    def _reshape_logits_for_accept(self, logits, num_contexts, num_gens, spec_metadata):
        return torch.atleast_2d(logits)

    def _apply_force_accepted_tokens(self, num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=None):
        if self.force_num_accepted_tokens == 0.0:
            return num_accepted_tokens
        if spec_metadata is not None and spec_metadata.is_cuda_graph and not ops.is_current_stream_capturing():
            return num_accepted_tokens
        num_accepted_tokens[num_contexts:] = min(int(self.force_num_accepted_tokens), runtime_draft_len) + 1
        return num_accepted_tokens

    def _sample_and_accept_draft_tokens_base(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        runtime_draft_len, num_gens = draft_tokens.shape[-1], batch_size - num_contexts
        logits = torch.atleast_2d(logits)
        target_tokens = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        gen_target_tokens = target_tokens[num_contexts:].reshape(num_gens, runtime_draft_len + 1)
        accepted_tokens, num_accepted_tokens = unwritten(batch_size, runtime_draft_len + 1)
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        accepted_tokens[num_contexts:] = gen_target_tokens
        num_accepted_tokens[num_contexts:] += matching_prefix(draft_tokens, gen_target_tokens)
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _accept_draft_tokens(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        logits = self._apply_occurrence_penalties(logits, draft_tokens, num_contexts, batch_size, spec_metadata)
        five = (draft_tokens, num_contexts, batch_size, spec_metadata)
        if batch_size > num_contexts and self._can_use_rejection_sampling(spec_metadata):
            draft_len, stored_vocab = draft_tokens.shape[1], spec_metadata.vocab_size
            if self._rejection_buffers_valid(
                draft_tokens, draft_len, stored_vocab, num_contexts, batch_size, logits, spec_metadata
            ):
                draft_probs = spec_metadata.draft_probs[spec_metadata.batch_slot_ids[num_contexts:batch_size]]
                accepted = self._sample_and_accept_draft_tokens_rejection(
                    logits, draft_tokens, draft_probs[:, :draft_len], num_contexts, batch_size, spec_metadata
                )
                return self._commit_occurrence_counts(accepted, batch_size, spec_metadata)
        accepted = self._sample_and_accept_draft_tokens_base(logits, *five)
        return self._commit_occurrence_counts(accepted, batch_size, spec_metadata)

    def _apply_occurrence_penalties(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        if not spec_metadata.enable_penalty:
            return logits
        slots = spec_metadata.batch_slot_ids[:batch_size]
        return penalties.penalized(spec_metadata.penalty_state, logits, draft_tokens, num_contexts, slots)

    def _commit_occurrence_counts(self, accepted, batch_size, spec_metadata):
        if spec_metadata.enable_penalty:
            slots = spec_metadata.batch_slot_ids[:batch_size]
            penalties.update_penalty_counts(spec_metadata.penalty_state, slots, *accepted)
        return accepted

    def _can_use_rejection_sampling(self, spec_metadata):
        return spec_metadata.use_rejection_sampling and not spec_metadata.is_all_greedy_sample

    def _rejection_buffers_valid(
        self, draft_tokens, draft_len, stored_vocab, num_contexts, batch_size, logits, spec_metadata
    ):
        rows = num_contexts + (batch_size - num_contexts) * (draft_len + 1)
        return spec_metadata.draft_probs is not None and stored_vocab == logits.shape[-1] and len(logits) == rows

    def _sample_and_accept_draft_tokens_rejection(
        self, logits, draft_tokens, draft_probs, num_contexts, batch_size, spec_metadata
    ):
        runtime_draft_len, num_gens = draft_tokens.shape[1], batch_size - num_contexts
        logits = torch.atleast_2d(logits)
        accepted_tokens, num_accepted_tokens = unwritten(batch_size, runtime_draft_len + 1)
        if num_contexts > 0:
            contexts = self._sample_tokens_for_batch(logits[:num_contexts], spec_metadata, num_contexts, num_contexts)
            accepted_tokens[:num_contexts, 0] = contexts
        if num_gens > 0:
            width = runtime_draft_len + 1
            rows = slice(num_contexts, num_contexts + num_gens * width)
            gen_logits = self._zero_padding_rows(logits[rows], spec_metadata, num_contexts, batch_size, width)
            target_probs = ops.compute_probs_from_logits(gen_logits, *spec_metadata.sampling_rows(rows))
            target_probs = target_probs.reshape(num_gens, width, -1)
            seed, offset = self._rng_state_per_request(spec_metadata, num_contexts, batch_size)
            verified = ops.rejection_sampling_one_model(draft_probs, draft_tokens, target_probs, True, seed, offset)
            if self.force_num_accepted_tokens != 0.0:
                verified[0][:, 1:] = draft_tokens
            accepted_tokens[num_contexts:], num_accepted_tokens[num_contexts:] = verified
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _zero_padding_rows(self, gen_logits, spec_metadata, num_contexts, batch_size, width):
        padding = spec_metadata.batch_slot_ids[num_contexts:batch_size] == spec_metadata.dummy_slot_row
        return gen_logits.masked_fill(padding.repeat_interleave(width)[:, None], 0.0)

    def _rollback_guided_decoder_after_verify(self, num_accepted_tokens):
        if self.guided_decoder is not None:
            self.guided_decoder.rollback_rejected_batch(num_accepted_tokens)

    def _rng_state_per_request(self, spec_metadata, start=0, end=None, repeat=1, step_offset=0):
        seeds = spec_metadata.request_seeds[start:end].repeat_interleave(repeat)
        return seeds, spec_metadata.request_offsets[start:end].repeat_interleave(repeat) + step_offset

    def _rng_state_per_token(self, spec_metadata, num_tokens):
        return spec_metadata.seeds[:num_tokens], spec_metadata.offsets[:num_tokens]

    def _sample_tokens_for_batch(self, logits, spec_metadata, num_contexts, batch_size):
        if spec_metadata.is_all_greedy_sample:
            return logits.argmax(dim=-1)
        seed, offset = self._rng_state_per_token(spec_metadata, len(logits))
        rows = spec_metadata.sampling_rows(slice(0, len(logits)))
        return ops.sampling_batch_spec_dec_one_model(logits, *rows, seed=seed, offset=offset)

    def sample_draft_tokens(
        self, logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None, mapping_lm_head_tp=None
    ):
        if spec_metadata.is_all_greedy_sample or not spec_metadata.use_rejection_sampling:
            return logits.argmax(dim=-1).int()
        probs = logits.softmax(dim=-1)
        spec_metadata.draft_probs[spec_metadata.batch_slot_ids[:batch_size], draft_step] = probs
        return ops.draw(probs, *self._rng_state_per_request(spec_metadata, 0, batch_size, step_offset=1 + draft_step))
