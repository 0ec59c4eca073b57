"""Facts: workers.md §2 (`Eagle3OneModelWorker` A1: no `input_ids`, returns the strict base, no relaxed acceptance)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.drafting import worker_forward


class Eagle3OneModelWorker(SpecWorkerBase):
    def __init__(self, spec_config, mapping=None):
        super().__init__()
        self.spec_config, self.mapping = spec_config, mapping

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(logits, attn, spec), "draft_chain"
    )

    def sample_and_accept_draft_tokens(self, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        draft_tokens = spec_metadata.draft_tokens.reshape(batch_size - num_contexts, self.max_draft_len)
        return self._sample_and_accept_draft_tokens_base(logits, draft_tokens, num_contexts, batch_size, spec_metadata)
