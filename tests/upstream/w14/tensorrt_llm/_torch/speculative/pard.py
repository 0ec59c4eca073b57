"""Facts: workers.md §2 (`PARDWorker` B+: the base's acceptance method, both reshape hooks overridden), §3, §5, §6 (2K
rows narrowed to K + 1, 2K − 1 drafts to K, padded into a new tensor after acceptance)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import PardDrafting
from tests.upstream.common.drafting import worker_forward


class PARDWorker(PardDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.padded(*self.sample_and_accept_draft_tokens(logits, attn, spec)),
        "draft_parallel",
    )

    def _reshape_draft_tokens_for_accept(self, spec_metadata, num_gens, device):
        return self.real_drafts(spec_metadata, num_gens)

    def _reshape_logits_for_accept(self, logits, num_contexts, num_gens, spec_metadata):
        return self.rows_to_accept(logits, num_contexts, num_gens)
