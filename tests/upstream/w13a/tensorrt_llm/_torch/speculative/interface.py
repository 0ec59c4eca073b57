"""Facts: acceptance.md §1 (columns A2), §2.2, §2.3 (base, rejection, forced count, draft length 0; one seed tensor per
worker, advanced before every sampling launch); workers.md §7."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch

from tests.upstream.common import ops
from tests.upstream.common.acceptance import matching_prefix, single_token_output, unwritten
from tests.upstream.common.drafting import WorkerCommons
from tests.upstream.common.metadata import SpecMetadataFields


@dataclass
class SpecMetadata(SpecMetadataFields):
    is_all_greedy_sample: bool = True
    draft_probs_valid: bool = False

    def prepare(self):
        if self.use_rejection_sampling and self.draft_probs is None:
            self.draft_probs = torch.zeros(self.max_num_requests, self.max_draft_len, self.vocab_size)
            self.batch_slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64)

    def _scan_one_model_sampling(self, requests):
        per_request_normalized, self.is_all_greedy_sample = self.normalized(requests)
        # A row without a slot shares slot 0 with a live one.
        return per_request_normalized, [r.py_seq_slot or 0 for r in requests]

    def update_is_all_greedy_sample(self, requests):
        if not self.spec_dec_mode.use_one_engine():
            return
        self._scan_one_model_sampling(requests)

    def populate_sampling_params_for_one_model(self, requests):
        if not self.spec_dec_mode.use_one_engine():
            return
        if self.temperatures is None:
            torch.manual_seed(0)
        per_request_normalized, per_request_slot_ids = self._scan_one_model_sampling(requests)
        self.allocate_sampling_rows(per_request_normalized)
        if self.use_rejection_sampling and self.batch_slot_ids is not None:
            self.batch_slot_ids[: len(requests)] = torch.tensor(per_request_slot_ids)
        if self.is_all_greedy_sample:
            return
        self.fill_sampling_rows(per_request_normalized)


class SpecWorkerBase(WorkerCommons, ABC):
    def __init__(self, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.seed = self.offset = None

    def skip_drafting(self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        self._execute_guided_decoder_if_present(logits)
        target_tokens = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        return single_token_output(logits, target_tokens)

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
        if batch_size > num_contexts and self._can_use_rejection_sampling(spec_metadata):
            slots = spec_metadata.batch_slot_ids[num_contexts:batch_size]
            draft_probs = self.full_draft_probs(spec_metadata.draft_probs[slots, : draft_tokens.shape[1]])
            return self._sample_and_accept_draft_tokens_rejection(
                logits, draft_tokens, draft_probs, num_contexts, batch_size, spec_metadata
            )
        return self._sample_and_accept_draft_tokens_base(logits, draft_tokens, num_contexts, batch_size, spec_metadata)

    def _can_use_rejection_sampling(self, spec_metadata):
        if not spec_metadata.use_rejection_sampling or spec_metadata.is_all_greedy_sample:
            return False
        return spec_metadata.draft_probs_valid

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
            seed, offset = self._next_random_state()
            verified = ops.rejection_sampling_one_model(draft_probs, draft_tokens, target_probs, True, seed, offset)
            if self.force_num_accepted_tokens:
                verified[0][:, 1:] = draft_tokens
            accepted_tokens[num_contexts:], num_accepted_tokens[num_contexts:] = verified
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, runtime_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _next_random_state(self):
        if self.seed is None:
            self.seed, self.offset = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.seed.add_(1)
        return self.seed, self.offset

    def _sample_tokens_for_batch(self, logits, spec_metadata, num_contexts, batch_size):
        if spec_metadata.is_all_greedy_sample:
            return logits.argmax(dim=-1)
        seed, offset = self._next_random_state()
        rows = spec_metadata.sampling_rows(slice(0, len(logits)))
        return ops.sampling_batch_spec_dec_one_model(logits, *rows, seed=seed, offset=offset)

    def sample_draft_tokens(self, logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None):
        if spec_metadata.is_all_greedy_sample or not spec_metadata.use_rejection_sampling:
            return self.to_target_vocabulary(logits.argmax(dim=-1)).int()
        probs = logits.softmax(dim=-1)
        spec_metadata.draft_probs[spec_metadata.batch_slot_ids[:batch_size], draft_step, : probs.shape[1]] = probs
        spec_metadata.draft_probs_valid = True
        return self.to_target_vocabulary(ops.draw(probs, *self._next_random_state())).int()
