"""Facts: acceptance.md §1.6 (column A1: one switch for all sampling, rows filled for every batch), §2.2, §2.3 (strict
acceptance and forced count); workers.md §7 (draft length 0, late in this window)."""

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
    allow_advanced_sampling: bool = False

    def populate_sampling_params_for_one_model(self, requests):
        if not self.allow_advanced_sampling or not self.spec_dec_mode.use_one_engine():
            return
        if self.temperatures is None:
            torch.manual_seed(0)
        per_request, _ = self.normalized(requests)
        self.allocate_sampling_rows(per_request)
        self.fill_sampling_rows(per_request)


class SpecWorkerBase(WorkerCommons, ABC):
    def __init__(self, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.seed = self.offset = None

    def skip_drafting(self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        self._execute_guided_decoder_if_present(logits)
        target_tokens = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        return single_token_output(logits, target_tokens)

    def _apply_force_accepted_tokens(self, num_accepted_tokens, num_contexts, runtime_draft_len):
        if self.force_num_accepted_tokens:
            num_accepted_tokens[num_contexts:] = min(int(self.force_num_accepted_tokens), runtime_draft_len) + 1
        return num_accepted_tokens

    def _sample_and_accept_draft_tokens_base(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        runtime_draft_len = draft_tokens.shape[-1]
        accepted_tokens, num_accepted_tokens = unwritten(batch_size, runtime_draft_len + 1)
        chosen = self._sample_tokens_for_batch(torch.atleast_2d(logits), spec_metadata, num_contexts, batch_size)
        accepted_tokens[:num_contexts, 0] = chosen[:num_contexts]
        accepted_tokens[num_contexts:] = chosen[num_contexts:].reshape(-1, runtime_draft_len + 1)
        num_accepted_tokens[num_contexts:] += matching_prefix(draft_tokens, accepted_tokens[num_contexts:])
        num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, runtime_draft_len)
        return accepted_tokens, num_accepted_tokens

    def _sample_tokens_for_batch(self, logits, spec_metadata, num_contexts, batch_size):
        if not spec_metadata.allow_advanced_sampling:
            return logits.argmax(dim=-1)
        if self.seed is None:
            self.seed, self.offset = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.seed.add_(1)
        num_tokens = num_contexts + (batch_size - num_contexts) * (spec_metadata.runtime_draft_len + 1)
        rows = spec_metadata.sampling_rows(slice(0, num_tokens))
        return ops.sampling_batch_spec_dec_one_model(logits, *rows, seed=self.seed, offset=self.offset)

    def sample_draft_tokens(self, logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None):
        return self.to_target_vocabulary(logits.argmax(dim=-1)).int()
