"""Facts: workers.md §2 (`Eagle3OneModelWorker` unified: attn before spec, strict base called directly), §3 (suffix
automaton behind either branch, one return), §4 (relaxed)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.acceptance import RelaxedAcceptance
from tests.upstream.common.drafting import worker_forward


class Eagle3OneModelWorker(RelaxedAcceptance, SpecWorkerBase):
    automaton_in_acceptance = True

    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(ids, logits, attn, spec),
        "draft_chain",
    )

    def sample_and_accept_draft_tokens(self, input_ids, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        runtime_draft_len = spec_metadata.runtime_draft_len
        logits = torch.atleast_2d(logits)
        if getattr(self.spec_config, "use_relaxed_acceptance_for_thinking", False):
            relaxed_delta_pool = spec_metadata.spec_resource_manager.relaxed_delta_pool
            buffers = self.start_relaxed(input_ids, logits, attn_metadata, spec_metadata, relaxed_delta_pool)
            values, indices, drafts = self.candidates(logits, num_contexts, spec_metadata)
            sizes = (runtime_draft_len, batch_size, num_contexts)
            accepted_tokens, num_accepted_tokens = torch.ops.trtllm.mtp_relaxed_acceptance_op(
                spec_metadata.slot_ids,
                values,
                indices,
                drafts,
                relaxed_delta_pool,
                *buffers,
                *sizes,
                *self.relaxed_settings,
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
