"""Facts: workers.md §2 (`MTPWorker` A1: K is the number of layers, all three branches share one return; nothing behind
the primitive), §4; the forced count takes no draft length yet."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.acceptance import RelaxedAcceptance
from tests.upstream.common.drafting import worker_forward


class MTPWorker(RelaxedAcceptance, SpecWorkerBase):
    has_automaton = False

    def __init__(self, spec_config, model_config=None):
        super().__init__()
        self.spec_config, self.model_config, self.is_thop = spec_config, model_config, False

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(ids, logits, spec, attn),
        "draft_from_pools",
    )

    def sample_and_accept_draft_tokens(self, input_ids, logits, spec_metadata, attn_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        mtp_num_modules = self.max_draft_len
        logits = torch.atleast_2d(logits)
        sizes = (mtp_num_modules, batch_size, num_contexts)
        if self.spec_config.use_relaxed_acceptance_for_thinking:
            mtp_relaxed_delta_pool = spec_metadata.mtp_hidden_states_manager.mtp_relaxed_delta_pool
            buffers = self.start_relaxed(input_ids, logits, attn_metadata, spec_metadata, mtp_relaxed_delta_pool)
            values, indices, drafts = self.candidates(logits, num_contexts, spec_metadata)
            accepted_tokens, num_accepted_tokens = torch.ops.trtllm.mtp_relaxed_acceptance_op(
                spec_metadata.slot_ids,
                values,
                indices,
                drafts,
                mtp_relaxed_delta_pool,
                *buffers,
                *sizes,
                *self.relaxed_settings,
            )
            num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts)
        elif self.is_thop:
            target_tokens_cache = torch.zeros(batch_size * (mtp_num_modules + 1), dtype=torch.int32)
            accepted_tokens, num_accepted_tokens = torch.ops.trtllm.mtp_sampling_and_accepted_draft_tokens_op(
                logits, spec_metadata.draft_tokens, target_tokens_cache, *sizes, logits.shape[-1]
            )
            num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts)
        else:
            draft_tokens = spec_metadata.draft_tokens.reshape(batch_size - num_contexts, mtp_num_modules)
            accepted_tokens, num_accepted_tokens = self._sample_and_accept_draft_tokens_base(
                logits, draft_tokens, num_contexts, batch_size, spec_metadata
            )
        return accepted_tokens, num_accepted_tokens
