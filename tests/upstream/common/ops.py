"""Stand-ins for compiled ops and sampling helpers.

Facts: W §4 (`mtp_relaxed_acceptance_op`: 14 positional arguments, result order, who flips the deltas), W §2 (THOP op),
A §3 (`rejection_sampling_one_model`), A §2.3 (random state), W §8 (tree verification: index, count, token; the count
leaves the root out).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structured_commit import rejection_reference

ORACLE = None  # set while something else decides what is drawn, see oracle.py


def is_current_stream_capturing() -> bool:
    """torch's own raises without CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute_probs_from_logits(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """[n, V] float32 probabilities after temperature, then top-k, then top-p, each [n]; values out of use are large."""
    probs = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    place = torch.arange(probs.shape[-1])
    kept = (place < top_ks[:, None]) & (ordered.cumsum(-1) - ordered < top_ps[:, None])
    kept[:, 0] = True
    probs = torch.where(torch.zeros_like(kept).scatter(-1, order, kept), probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """[n] int32, one token of each row. As the pinned FlashInfer, only element 0 of seed and offset counts."""
    if ORACLE is not None:
        return ORACLE.draft(probs)
    generator = torch.Generator().manual_seed((int(seed[0]) * 1_000_003 + int(offset[0])) % 2**63)
    target = torch.rand(len(probs), 1, generator=generator) * probs.sum(-1, keepdim=True)
    token = (probs.cumsum(-1) <= target).sum(-1)
    last = (probs > 0).long() * torch.arange(probs.shape[-1])
    return torch.minimum(token, last.amax(-1)).int()


def sampling_batch_spec_dec_one_model(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, *, seed: Tensor, offset: Tensor
) -> Tensor:
    probs = compute_probs_from_logits(logits, temperatures, top_ks, top_ps)
    return draw(probs, seed, offset) if ORACLE is None else ORACLE.sample(probs)


def rejection_sampling_one_model(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    deterministic: bool = True,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[n, K+1] int32 tokens, −1 behind the last; [n] int32 lengths in 1 … K+1."""
    if ORACLE is not None:
        return ORACLE.verify(draft_probs, draft_token_ids, target_probs)
    drafts = draft_token_ids.contiguous()
    out = rejection_reference(draft_probs.float().contiguous(), drafts, target_probs, seed[:1], offset[:1])
    return out.output_tokens, out.emitted + 1


def relaxed_acceptance(
    slot_ids: Tensor,
    topk_value: Tensor,
    topk_indices: Tensor,
    draft_tokens: Tensor,
    delta_pool: Tensor,
    num_accepted_tokens: Tensor,
    accepted_tokens: Tensor,
    draft_len: int,
    batch_size: int,
    num_contexts: int,
    relaxed_topk: int,
    relaxed_delta: float,
    begin_token: int,
    end_token: int,
) -> tuple[Tensor, Tensor]:
    """Writes the two buffers and the pool in place; returns (tokens, counts), the reverse of their order."""
    drafts = draft_tokens.reshape(-1, draft_len).tolist()
    for row in range(num_contexts, batch_size):
        values, indices = topk_value[row - num_contexts], topk_indices[row - num_contexts]
        delta = float(delta_pool[slot_ids[row]])
        count = 0
        for column in range(draft_len):
            close = [int(indices[column, i]) for i in range(relaxed_topk) if _close(values[column], i, delta)]
            if drafts[row - num_contexts][column] not in close:
                break
            accepted_tokens[row, column] = drafts[row - num_contexts][column]
            count += 1
        accepted_tokens[row, count] = indices[count, 0]
        num_accepted_tokens[row] = count + 1
    for row in range(batch_size):
        for token in accepted_tokens[row, : int(num_accepted_tokens[row])].tolist():
            if token in (begin_token, end_token):
                delta_pool[slot_ids[row]] = relaxed_delta if token == begin_token else 0.0
    return accepted_tokens, num_accepted_tokens


def _close(values: Tensor, candidate: int, delta: float) -> bool:
    return candidate == 0 or bool(values[candidate] >= values[0] - delta)


def thop_acceptance(
    logits: Tensor,
    draft_tokens: Tensor,
    target_tokens_cache: Tensor,
    draft_len: int,
    batch_size: int,
    num_contexts: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The fused strict op: the target's argmax at every place, whatever the sampling parameters say."""
    num_gens = batch_size - num_contexts
    choice = logits.argmax(-1).int()
    accepted_tokens = torch.ones(batch_size, draft_len + 1, dtype=torch.int32)
    num_accepted_tokens = torch.ones(batch_size, dtype=torch.int32)
    accepted_tokens[:num_contexts, 0] = choice[:num_contexts]
    target = choice[num_contexts:].reshape(num_gens, draft_len + 1)
    accepted_tokens[num_contexts:] = target
    drafts = draft_tokens.reshape(num_gens, draft_len)
    num_accepted_tokens[num_contexts:] += (drafts == target[:, :draft_len]).int().cumprod(-1).sum(-1).int()
    return accepted_tokens, num_accepted_tokens


def verify_tree(choice: Tensor, drafts: Tensor, parents: Sequence[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree along the target's `choice` [n, N] while a child holds it; `drafts` [n, N−1] are nodes 1 … N−1.

    Returns accept_index [n, width] (node of each path column, 0 behind the end), accept_token_num [n] without the
    root, accept_token [n, width]: the target's choice at each node of the path.
    """
    index = torch.zeros(len(choice), width, dtype=torch.int64)
    count = torch.zeros(len(choice), dtype=torch.int64)
    token = torch.zeros(len(choice), width, dtype=torch.int64)
    for row, chosen in enumerate(choice.tolist()):
        node = column = 0
        token[row, 0] = chosen[0]
        while column + 1 < width:
            children = [i for i in range(1, len(parents)) if parents[i] == node]
            node = next((i for i in children if int(drafts[row, i - 1]) == chosen[node]), 0)
            if node == 0:
                break
            column += 1
            index[row, column], token[row, column] = node, chosen[node]
        count[row] = column
    return index, count, token


def install() -> None:
    """Put the stand-ins where the workers look for them."""
    torch.ops.trtllm.mtp_relaxed_acceptance_op = relaxed_acceptance
    torch.ops.trtllm.mtp_sampling_and_accepted_draft_tokens_op = thop_acceptance
