"""Facts: executor.md §1.2 (`forward`: first pass read at `gather_ids`, then one token a step; what
`prepare_for_generation` reads and writes, before contexts become generation rows)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class BaseDraftingLoopWrapper(ABC, nn.Module):
    @abstractmethod
    def forward(self, input_ids, position_ids, attn_metadata, spec_metadata): ...

    @abstractmethod
    def sample(self, logits): ...

    @abstractmethod
    def prepare_for_generation(self, attn_metadata, spec_metadata, position_ids): ...


class LinearDraftingLoopWrapper(BaseDraftingLoopWrapper):
    def __init__(self, max_draft_len, max_total_draft_tokens, draft_model):
        super().__init__()
        self.max_draft_len, self.draft_model = max_draft_len, draft_model

    def forward(self, input_ids, position_ids, attn_metadata, spec_metadata):
        logits = [self.draft_model.forward(input_ids, attn_metadata, spec_metadata.gather_ids)]
        tokens = [self.sample(logits[0])]
        position_ids = self.prepare_for_generation(attn_metadata, spec_metadata, position_ids)
        rows = torch.arange(attn_metadata.num_seqs)
        while len(tokens) < self.max_draft_len:
            assert torch.equal(attn_metadata.kv_lens_cuda.long() - 1, position_ids), "position and KV length disagree"
            logits.append(self.draft_model.forward(tokens[-1], attn_metadata, rows))
            tokens.append(self.sample(logits[-1]))
            attn_metadata.kv_lens_cuda += 1
            position_ids = position_ids + 1
        return {"new_draft_tokens": torch.stack(tokens), "draft_logits": torch.stack(logits)}

    def sample(self, logits):
        return logits.argmax(dim=-1).int()

    def prepare_for_generation(self, attn_metadata, spec_metadata, position_ids):
        batch_size = attn_metadata.num_seqs
        num_accepted_draft_tokens = spec_metadata.num_accepted_draft_tokens[:batch_size]
        widths = attn_metadata.seq_lens_cuda
        attn_metadata.kv_lens_cuda -= widths - num_accepted_draft_tokens - 1
        last_tokens_idx = (widths.cumsum(0) - widths + num_accepted_draft_tokens).long()
        attn_metadata.one_token_each()
        attn_metadata.kv_lens_cuda += 1
        return position_ids[0, last_tokens_idx] + 1
