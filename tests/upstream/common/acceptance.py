"""Pieces of acceptance that no patch touches.

Facts: A §2.3 (columns that acceptance does not write hold anything), W §4 (relaxed acceptance: ones as filler, argmax
for contexts whatever their sampling parameters, a chunk with the begin token sets its slot's delta, else 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

GARBAGE = 1 << 20  # in columns that upstream leaves unwritten


def unwritten(batch_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, width] full of garbage and counts [B] of one, int32."""
    return torch.full((batch_size, width), GARBAGE, dtype=torch.int32), torch.ones(batch_size, dtype=torch.int32)


def matching_prefix(drafts: Tensor, chosen: Tensor) -> Tensor:
    """[n] int32: how many of [n, K] drafts stand before the first that is not the [n, K+1] choice at its place."""
    return (drafts == chosen[:, : drafts.shape[1]]).int().cumprod(dim=1).sum(dim=1).int()


def single_token_output(logits: Tensor, tokens: Tensor) -> dict:
    """The dictionary of a step without drafts. `tokens` [B] goes into two tensors that share no memory."""
    column = tokens[:, None].int()
    return {
        "logits": logits,
        "new_tokens": column.clone(),
        "new_tokens_lens": torch.ones(len(tokens), dtype=torch.int32),
        "next_draft_tokens": column[:, :0].clone(),
        "next_new_tokens": column.clone(),
    }


class RelaxedAcceptance:
    """Mixed into workers that know relaxed acceptance."""

    def start_relaxed(self, input_ids, logits, attn_metadata, spec_metadata, pool) -> tuple[Tensor, Tensor]:
        """Counts and tokens with the context rows done; the context rows' deltas are set in `pool`, in place."""
        num_contexts, config = attn_metadata.num_contexts, self.spec_config
        tokens = torch.ones(attn_metadata.num_seqs, spec_metadata.runtime_draft_len + 1, dtype=torch.int32)
        tokens[:num_contexts, 0] = logits[:num_contexts].argmax(dim=-1)
        chunks = input_ids[: attn_metadata.num_ctx_tokens].split(attn_metadata.seq_lens[:num_contexts].tolist())
        for slot, chunk in zip(spec_metadata.slot_ids.tolist(), chunks, strict=False):
            pool[slot] = config.relaxed_delta if config.begin_thinking_phase_token in chunk.tolist() else 0.0
        return torch.ones(attn_metadata.num_seqs, dtype=torch.int32), tokens

    def candidates(self, logits, num_contexts: int, spec_metadata) -> tuple[Tensor, Tensor, Tensor]:
        """The best probabilities and their tokens, [G, K+1, topk], and the drafts, [G, K]."""
        width = spec_metadata.runtime_draft_len + 1
        best = logits[num_contexts:].softmax(dim=-1).topk(self.spec_config.relaxed_topk, dim=-1)
        shape = (-1, width, self.spec_config.relaxed_topk)
        drafts = spec_metadata.draft_tokens.reshape(-1, width - 1)
        return best.values.reshape(shape), best.indices.reshape(shape), drafts

    @property
    def relaxed_settings(self) -> tuple[int, float, int, int]:
        """The op's last four arguments."""
        config = self.spec_config
        return (
            config.relaxed_topk,
            config.relaxed_delta,
            config.begin_thinking_phase_token,
            config.end_thinking_phase_token,
        )
