"""Facts: workers.md §2 (`PARDWorker` A2: forward calls `_accept_draft_tokens` with the usual five), §3 (the suffix
automaton after the padding), §5, §6 (2K rows, 2K − 1 drafts, padded into a new tensor)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.block_workers import PardDrafting
from tests.upstream.common.drafting import worker_forward


class PARDWorker(PardDrafting, SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping

    def accept_in_forward(self, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        draft_tokens = self.real_drafts(spec_metadata, num_gens)
        rows = self.rows_to_accept(logits, num_contexts, num_gens)
        return self.padded(
            *self._accept_draft_tokens(rows, draft_tokens, num_contexts, batch_size, spec_metadata),
        )

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.accept_in_forward(logits, attn, spec), "draft_parallel"
    )
