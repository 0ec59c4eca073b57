"""Facts: workers.md §2 (`DFlashWorker` E: the base's acceptance method), §5 (recurrent states, then the block from
column n − 1; `_ctx_len[slot]` grows by n and never shrinks), §9 (the K3 workers accept in their own way)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import DFlashDrafting
from tests.upstream.common.drafting import worker_forward


class DFlashWorker(DFlashDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.accept_step(logits, attn, spec), "draft_block"
    )

    def accept_step(self, logits, attn_metadata, spec_metadata):
        return self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
