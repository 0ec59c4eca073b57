"""Facts: workers.md §9 (the predicate and what it decides before and after the forward; the fused launch runs neither
the strict base nor `_accept_draft_tokens`), §3 (`_on_acceptance` keeps the two tensors and knows them again by
identity)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.dflash import DFlashWorker
from tensorrt_llm._torch.speculative.dspark import DSparkWorker

from tests.upstream.common.acceptance import matching_prefix


class KimiK3DFlashWorker(DFlashWorker):
    k3_decode = False
    fused_steps = 0

    def accept_step(self, logits, attn_metadata, spec_metadata):
        num_contexts = attn_metadata.num_contexts
        num_gens = attn_metadata.num_seqs - num_contexts
        if not self._k3_accept_applies(logits, attn_metadata, spec_metadata, None, num_contexts, num_gens):
            return super().accept_step(logits, attn_metadata, spec_metadata)
        self.fused_steps += 1
        accepted_tokens = logits.argmax(dim=-1).int().reshape(num_gens, -1)
        drafts = spec_metadata.draft_tokens.reshape(num_gens, -1)
        return accepted_tokens, torch.ones(num_gens, dtype=torch.int32) + matching_prefix(drafts, accepted_tokens)

    def _k3_accept_applies(self, logits, attn_metadata, spec_metadata, draft_model, num_contexts, num_gens):
        return self._k3_accept_step_applies(attn_metadata, spec_metadata, draft_model, num_contexts, num_gens)

    def _k3_accept_step_applies(self, attn_metadata, spec_metadata, draft_model, num_contexts, num_gens):
        if not self.k3_decode:
            return False
        if num_contexts or not 1 <= num_gens <= 8 or self.guided_decoder is not None:
            return False
        greedy = spec_metadata.is_all_greedy_sample and not spec_metadata.enable_penalty
        return greedy and not self._can_use_rejection_sampling(spec_metadata)


class KimiK3DSparkWorker(KimiK3DFlashWorker, DSparkWorker):
    recognised = 0
    _kept = (None, None)

    def sample_and_accept_draft_tokens(self, logits, attn_metadata, spec_metadata):
        accepted_tokens, num_accepted_tokens = super().sample_and_accept_draft_tokens(
            logits, attn_metadata, spec_metadata
        )
        if self.k3_decode:
            self._on_acceptance(accepted_tokens, num_accepted_tokens)
        return accepted_tokens, num_accepted_tokens

    def _on_acceptance(self, accepted_tokens, num_accepted_tokens):
        self._kept = accepted_tokens, num_accepted_tokens

    def _prepare_next_new_tokens(self, accepted_tokens, next_draft_tokens, rows, batch_size, num_accepted_tokens):
        self.recognised += self._kept[0] is accepted_tokens and self._kept[1] is num_accepted_tokens
        return super()._prepare_next_new_tokens(
            accepted_tokens, next_draft_tokens, rows, batch_size, num_accepted_tokens
        )
