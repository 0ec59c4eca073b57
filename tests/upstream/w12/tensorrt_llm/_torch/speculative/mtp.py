"""Facts: workers.md §2 (`MTPWorker` A1: spec before attn, strict base with positional arguments), §4 (relaxed wins
over THOP and strict), §5 (pools read up to n). The suffix automaton stands where the Eagle3 of this age has it
(inferred)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.acceptance import RelaxedAcceptance
from tests.upstream.common.drafting import worker_forward


class MTPWorker(RelaxedAcceptance, SpecWorkerBase):
    def __init__(self, spec_config, model_config=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.model_config, self.is_thop = spec_config, model_config, False

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(ids, logits, spec, attn),
        "draft_from_pools",
    )

    def sample_and_accept_draft_tokens(self, input_ids, logits, spec_metadata, attn_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        runtime_draft_len = spec_metadata.runtime_draft_len
        logits = torch.atleast_2d(logits)
        sizes = (runtime_draft_len, batch_size, num_contexts)
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
            num_accepted_tokens = self._apply_force_accepted_tokens(
                num_accepted_tokens, num_contexts, runtime_draft_len
            )
        elif self.is_thop:
            target_tokens_cache = torch.zeros(batch_size * (runtime_draft_len + 1), dtype=torch.int32)
            accepted_tokens, num_accepted_tokens = torch.ops.trtllm.mtp_sampling_and_accepted_draft_tokens_op(
                logits, spec_metadata.draft_tokens, target_tokens_cache, *sizes, logits.shape[-1]
            )
            num_accepted_tokens = self._apply_force_accepted_tokens(
                num_accepted_tokens, num_contexts, runtime_draft_len
            )
        else:
            draft_tokens = spec_metadata.draft_tokens.reshape(batch_size - num_contexts, runtime_draft_len)
            accepted_tokens, num_accepted_tokens = self._sample_and_accept_draft_tokens_base(
                logits, draft_tokens, num_contexts, batch_size, spec_metadata
            )
        if self.sa_enhancer is not None:
            self.sa_enhancer.extend_and_prepare(
                accepted_tokens=accepted_tokens, num_accepted_tokens=num_accepted_tokens, num_contexts=num_contexts
            )
        return accepted_tokens, num_accepted_tokens


class MTPEagleWorker(Eagle3OneModelWorker):
    def __init__(self, spec_config, model_config=None, use_separate_draft_kv_cache=False):
        super().__init__(spec_config, None, use_separate_draft_kv_cache)
        self.model_config, self.is_thop = model_config, False
