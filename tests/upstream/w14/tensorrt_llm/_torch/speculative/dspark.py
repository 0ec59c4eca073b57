"""Facts: workers.md §1 (two classes since the split: one for a drafter inside the target, one that inherits DFlash),
§2, §5 (frames of the committed tokens but the bonus, `_ctx_len` grows by n; metadata is let alone)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.dflash import DFlashWorker
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import DSparkDrafting
from tests.upstream.common.drafting import worker_forward


class DSv4DSparkWorker(DSparkDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(logits, attn, spec), "draft_block"
    )


class DSparkWorker(DFlashWorker):
    """Standalone drafter; a Markov head is all it adds, and no hook concerns that."""
