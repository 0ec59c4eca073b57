"""Facts: workers.md §2 (`DFlashWorker` A: forward calls the strict base directly, five arguments), §5 (recurrent
states, then `_ctx_len[slot]` grows by n and never shrinks)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import DFlashDrafting
from tests.upstream.common.drafting import worker_forward


class DFlashWorker(DFlashDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    def accept_in_forward(self, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        draft_tokens = spec_metadata.draft_tokens.reshape(batch_size - num_contexts, self.max_draft_len)
        return self._sample_and_accept_draft_tokens_base(logits, draft_tokens, num_contexts, batch_size, spec_metadata)

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.accept_in_forward(logits, attn, spec), "draft_block"
    )
