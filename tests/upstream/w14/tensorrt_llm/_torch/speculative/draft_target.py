"""Facts: workers.md §2 (`DraftTargetOneModelWorker` B+: the base's acceptance method), §5."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.drafting import worker_forward


class DraftTargetOneModelWorker(SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(logits, attn, spec), "draft_chain"
    )
