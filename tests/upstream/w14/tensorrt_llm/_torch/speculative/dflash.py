"""Facts: workers.md §2 (`DFlashWorker` B+: the base's acceptance method), §5 (the block drafter starts from column
n − 1; `_ctx_len[slot]` grows by n and never shrinks)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.drafting import worker_forward


class DFlashWorker(SpecWorkerBase):
    def __init__(self, spec_config, mapping=None, use_separate_draft_kv_cache=False):
        super().__init__(use_separate_draft_kv_cache)
        self.spec_config, self.mapping = spec_config, mapping
        self._ctx_len = torch.zeros(1 << 8, dtype=torch.int64)

    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.accept_step(logits, attn, spec), "draft_block"
    )

    def accept_step(self, logits, attn_metadata, spec_metadata):
        return self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)

    def draft_block(self, input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model):
        """Every draft from the bonus token alone, all at once."""
        self.note_consumed(tokens, counts)
        self._ctx_len.index_add_(0, spec_metadata.slot_ids, counts.long())
        bonus = tokens[torch.arange(len(tokens)), counts.long() - 1].tolist()
        width = range(1, spec_metadata.runtime_draft_len + 1)
        rows = [torch.stack([draft_model.logits_of((token,) * i) for i in width]) for token in bonus]
        return torch.stack(rows).argmax(dim=-1).int()
