"""Facts: workers.md §2 (`DSparkWorker` B, one class: the base's acceptance method), §5 (frames of the committed tokens
but the bonus, `_ctx_len` grows by n; metadata is let alone)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import DSparkDrafting
from tests.upstream.common.drafting import worker_forward


class DSparkWorker(DSparkDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(logits, attn, spec), "draft_block"
    )
