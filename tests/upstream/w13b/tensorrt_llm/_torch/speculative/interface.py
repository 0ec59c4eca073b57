"""Facts: acceptance.md §1 (columns B, C), §2 (template forward, reshape hooks, `_rejection_buffers_valid`, penalties on
a clone, counts committed after acceptance, random state per request); workers.md §1, §7."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch

from tests.upstream.common import ops, penalties
from tests.upstream.common.acceptance import matching_prefix, single_token_output, unwritten
from tests.upstream.common.later import LaterMetadata, LaterWorker


@dataclass
class SpecMetadata(LaterMetadata):
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


class SpecWorkerBase(LaterWorker, ABC):
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

    def _apply_force_accepted_tokens(self, num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=None):
        if not self.force_num_accepted_tokens:
            return num_accepted_tokens
        if spec_metadata is not None and spec_metadata.is_cuda_graph and not ops.is_current_stream_capturing():
            return num_accepted_tokens
        num_accepted_tokens[num_contexts:] = min(int(self.force_num_accepted_tokens), runtime_draft_len) + 1
        return num_accepted_tokens

    def _sample_and_accept_draft_tokens_base(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        runtime_draft_len = draft_tokens.shape[-1]
        accepted_tokens, num_accepted_tokens = unwritten(batch_size, runtime_draft_len + 1)
        chosen = self._sample_tokens_for_batch(torch.atleast_2d(logits), spec_metadata, num_contexts, batch_size)
        accepted_tokens[:num_contexts, 0] = chosen[:num_contexts]
        accepted_tokens[num_contexts:] = chosen[num_contexts:].reshape(-1, runtime_draft_len + 1)
        num_accepted_tokens[num_contexts:] += matching_prefix(draft_tokens, accepted_tokens[num_contexts:])
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
                    logits,
                    draft_tokens,
                    self.full_draft_probs(draft_probs[:, :draft_len]),
                    num_contexts,
                    batch_size,
                    spec_metadata,
                )
                return self._commit_occurrence_counts(accepted, batch_size, spec_metadata)
        accepted = self._sample_and_accept_draft_tokens_base(logits, *five)
        return self._commit_occurrence_counts(accepted, batch_size, spec_metadata)

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
            rows = slice(num_contexts, num_contexts + num_gens * (runtime_draft_len + 1))
            target_probs = ops.compute_probs_from_logits(logits[rows], *spec_metadata.sampling_rows(rows))
            target_probs = target_probs.reshape(num_gens, runtime_draft_len + 1, -1)
            seed, offset = self._rng_state_per_request(spec_metadata, num_contexts, batch_size)
            verified = ops.rejection_sampling_one_model(draft_probs, draft_tokens, target_probs, True, seed, offset)
            if self.force_num_accepted_tokens:
                verified[0][:, 1:] = draft_tokens
            accepted_tokens[num_contexts:], num_accepted_tokens[num_contexts:] = verified
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _sample_tokens_for_batch(self, logits, spec_metadata, num_contexts, batch_size):
        if spec_metadata.is_all_greedy_sample:
            return logits.argmax(dim=-1)
        seed, offset = self._rng_state_per_token(spec_metadata, len(logits))
        rows = spec_metadata.sampling_rows(slice(0, len(logits)))
        return ops.sampling_batch_spec_dec_one_model(logits, *rows, seed=seed, offset=offset)
