"""The acceptance rules that run before the commit stage, in plain torch, for replays and tests without a GPU.

Each function promises the outputs of the kernel it stands for, value for value: rejection sampling as
flashinfer's `chain_speculative_sampling` (random numbers and float32 rounding included), strict and relaxed
acceptance as TensorRT-LLM. It is slow, it reads values on the host to check them, and it changes no argument.
It must not know of structure, slots or policies.

Vocabulary, with K drafts in a row's window:
    draft tokens: proposed by the drafter, one for each of the K positions.
    emitted: the drafts before the first rejection; they are output as they are.
    recovered token: drawn from max(target - draft, 0) at the first rejection.
    bonus token: drawn from the target after K drafts, when none was rejected.
    accepted: the drafts that pass the test when each position is looked at by itself; at least `emitted`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import StageError
from .philox import curand_philox_words, curand_uniform

PADDING = -1  # flashinfer's filler after the last token of a row
RELAXED_FILLER = 1  # TensorRT-LLM's: its output starts as a tensor of ones

# The launch of the kernel on compute capability 8.0 and later: one block of 1024 threads for each row, and a
# thread loads up to 16 bytes at a time, as many floats as divide the vocabulary.
THREADS = 1024
WARP = 32
VECTOR = 4

TOKEN_TYPES = (torch.int32, torch.int64)
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Rejection(NamedTuple):
    """What rejection sampling returns; see `rejection_reference`."""

    output_tokens: Tensor
    accepted: Tensor
    emitted: Tensor


class Acceptance(NamedTuple):
    """What strict and relaxed acceptance return: tokens [n, K+1] int32, lengths [n] int32 in 1 ... K+1."""

    tokens: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What flashinfer changed over time. Nothing else that can be seen in the outputs did."""

    per_row_seeds: bool  # else element 0 of a seed or offset tensor serves all rows
    retests_rejected: bool  # the first rejected draft is tested again and may count as accepted
    sums_by_tile: bool  # the mass of a row is the sum of its tiles' sums, else of its threads' sums


KERNELS = {
    "0.6.4": _Kernel(per_row_seeds=False, retests_rejected=True, sums_by_tile=True),
    "0.7.2": _Kernel(per_row_seeds=True, retests_rejected=True, sums_by_tile=True),
    "0.7.4": _Kernel(per_row_seeds=True, retests_rejected=False, sums_by_tile=False),
}


def rejection_reference(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    seed: int | Tensor,
    offset: int | Tensor,
    *,
    flashinfer: str = "0.6.4",
) -> Rejection:
    """Rejection sampling of Chen et al. 2023 (arXiv:2302.01318) and Leviathan et al. 2022 (arXiv:2211.17192).

    Draft i passes if u_i * draft_probs < target_probs at its token. The first draft that does not pass is
    replaced by a token drawn from max(target - draft, 0), and the row ends there; if all pass, one more token
    is drawn from the target. Row r reads curand's Philox stream with subsequence r: one number for each draft
    up to and with the first rejected, then one more for each from the rejected one on (for `accepted` only),
    then one for the last token.

    Equal to `flashinfer.chain_speculative_sampling(..., deterministic=True)` in every output, bit for bit:
    the sums follow its block reduction and block scan (CUB 3: pairs inside a thread and inside a warp, then
    warp after warp), and subnormal numbers are zero, because flashinfer compiles with -use_fast_math. Two
    set-ups may sum in another order: compute capability below 8.0 (512 threads) and CUB older than 3, which
    was not read. There the last token can become its neighbour when the number drawn is within rounding of a
    boundary; the counts cannot change.

    A row without any mass to draw from (target <= draft everywhere, reachable only by rounding or by u = 1)
    gives PADDING as its last token. So does flashinfer 0.7.4; before it the value is uninitialised memory.

    Args:
        draft_probs: [n, K, V] float32. K may be 0.
        draft_tokens: [n, K] int32 or int64, in [0, V).
        target_probs: [n, K+1, V] float32.
        seed, offset: an int, or an int64 tensor with one element or [n].
        flashinfer: which kernel to equal, named by the first release read that behaves so.
            "0.6.4": up to 0.7.0. TensorRT-LLM asks for at least 0.6.4 and was seen to pin up to 0.6.18.
            "0.7.2": a seed tensor may differ by row (before, its element 0 serves all rows).
            "0.7.4": the second test of the rejected draft no longer counts (but uses up its number), and a
                row's mass is summed in another order.

    Returns:
        output_tokens: [n, K+1] int32: the emitted drafts, the recovered or bonus token, then PADDING.
        accepted: [n] int32, 0 ... K: what flashinfer adds into its `output_accepted_token_num`.
        emitted: [n] int32, 0 ... K: what it adds into its `output_emitted_draft_token_num`. Both buffers are
            zero unless the caller passes its own. TensorRT-LLM's `rejection_sampling_one_model` returns
            `emitted + 1`, the row's length with its last token, and drops `accepted`.

    Raises:
        StageError: a shape, dtype, device or token id does not fit, or the kernel name is not known.
    """
    kernel = KERNELS.get(flashinfer)
    if kernel is None:
        raise StageError(f"no flashinfer kernel {flashinfer!r}, choose one of {', '.join(KERNELS)}")
    n, num_drafts, vocab = _check_window(draft_tokens, "target_probs", target_probs, (torch.float32,))
    _check("draft_probs", draft_probs, (torch.float32,), (n, num_drafts, vocab), draft_tokens)
    seeds = _row_seeds("seed", seed, draft_tokens, kernel)
    offsets = _row_seeds("offset", offset, draft_tokens, kernel)

    rows = torch.arange(n, device=draft_tokens.device)
    uniforms = curand_uniform(curand_philox_words(seeds, rows, offsets, num_drafts + 2))

    ids = draft_tokens.long().unsqueeze(-1)
    draft_mass = _flush(draft_probs.gather(2, ids).squeeze(-1))
    target_mass = _flush(target_probs[:, :num_drafts].gather(2, ids).squeeze(-1))

    def passes(numbers: Tensor) -> Tensor:
        return _flush(numbers * draft_mass) < target_mass

    emitted = _prefix_length(passes(uniforms[:, :num_drafts]))
    positions = torch.arange(num_drafts, device=draft_tokens.device)
    # From the rejected draft on, every position reads the number after its own: the rejection used one up.
    counted = positions >= emitted.unsqueeze(1) + (0 if kernel.retests_rejected else 1)
    accepted = emitted + (passes(uniforms[:, 1 : num_drafts + 1]) & counted).sum(1)

    rejected = emitted < num_drafts
    weights = _flush(target_probs[rows, emitted])
    if num_drafts:
        draft_row = _flush(draft_probs[rows, emitted.clamp(max=num_drafts - 1)])
        weights = torch.where(rejected.unsqueeze(1), _flush(weights - draft_row), weights)
    weights = torch.where(weights > 0, weights, 0.0)  # as the kernel's max(x, 0), this also drops NaN
    last_token = _draw(weights, uniforms[rows, num_drafts + rejected.long()], kernel)
    return Rejection(_window(draft_tokens, emitted, last_token, PADDING), accepted.int(), emitted.int())


def strict_reference(draft_tokens: Tensor, target_tokens: Tensor) -> Acceptance:
    """Strict acceptance: a draft is kept while it is the target's own choice at its position.

    Equal to the base path of TensorRT-LLM's one-model workers, which returns the target's choice at all K+1
    positions: columns at and past the length are plausible tokens that were not accepted.

    Args:
        draft_tokens: [n, K] int32 or int64. K may be 0.
        target_tokens: [n, K+1] int32 or int64, the target's choice (argmax or sample) at each position.

    Returns:
        tokens: [n, K+1] int32, equal to target_tokens.
        lengths: [n] int32, 1 + the number of drafts before the first mismatch.

    Raises:
        StageError: a shape, dtype or device does not fit.
    """
    _check("draft_tokens", draft_tokens, TOKEN_TYPES, (None, None), draft_tokens)
    n, num_drafts = draft_tokens.shape
    _check("target_tokens", target_tokens, TOKEN_TYPES, (n, num_drafts + 1), draft_tokens)
    lengths = 1 + _prefix_length(draft_tokens == target_tokens[:, :num_drafts])
    return Acceptance(target_tokens.int(), lengths.int())


def relaxed_reference(
    draft_tokens: Tensor,
    target_scores: Tensor,
    top_k: int,
    delta: float | Tensor,
) -> Acceptance:
    """Relaxed acceptance: a draft is kept while it is among the target's best and close to the very best.

    At each position the candidates are the `top_k` highest scores; a candidate is close enough if its score
    is not below the best score minus delta, in float32. The first position whose draft is not kept (or
    position K) gives the target's best token, and the row ends there. Nothing is drawn: the rule is greedy.

    Equal to TensorRT-LLM's `mtp_relaxed_acceptance_op`. Its worker feeds it **softmax probabilities**,
    although the variable is called gen_logprobs and a comment speaks of log probability: delta is a
    difference of probabilities. With log-probabilities as scores this function is the rule as the comment
    words it. A request's delta is the configured one while it thinks and 0 otherwise. With 0 a draft is kept
    if it is the best token, or one of the top k that ties with it exactly. The change of a request's delta
    after the step is not part of this function. Among equal scores, which come first or make the top k is
    torch.topk's choice and may differ on a GPU.

    Args:
        draft_tokens: [n, K] int32 or int64, in [0, V). K may be 0.
        target_scores: [n, K+1, V] float32, float16 or bfloat16.
        top_k: candidates at each position, 1 ... V.
        delta: one number, or [n] float32.

    Returns:
        tokens: [n, K+1] int32: the kept drafts, the target's best token, then RELAXED_FILLER.
        lengths: [n] int32, 1 + the number of kept drafts.

    Raises:
        StageError: a shape, dtype, device or token id does not fit, or top_k is out of range.
    """
    n, num_drafts, vocab = _check_window(draft_tokens, "target_scores", target_scores, FLOAT_TYPES)
    if not 1 <= top_k <= vocab:
        raise StageError(f"top_k must be in 1 ... {vocab}, got {top_k}")
    if not isinstance(delta, Tensor):
        delta = torch.full((n,), delta, dtype=torch.float32, device=draft_tokens.device)
    _check("delta", delta, (torch.float32,), (n,), draft_tokens)

    scores, candidates = torch.topk(target_scores, top_k, dim=-1)
    scores = scores.float()
    close = ~(scores[..., :1] - delta.view(n, 1, 1) > scores)
    close[..., 0] = True  # the kernel does not compare the best candidate with itself
    hits = close[:, :num_drafts] & (candidates[:, :num_drafts] == draft_tokens.unsqueeze(-1))
    kept = _prefix_length(hits.any(-1))
    best = candidates[..., 0].gather(1, kept.unsqueeze(1)).squeeze(1)
    return Acceptance(_window(draft_tokens, kept, best, RELAXED_FILLER), (1 + kept).int())


def _prefix_length(flags: Tensor) -> Tensor:
    """[n] int64: how many of [n, K] are True before the first False."""
    return flags.long().cumprod(1).sum(1)


def _window(draft_tokens: Tensor, kept: Tensor, last_token: Tensor, filler: int) -> Tensor:
    """[n, K+1] int32: the kept drafts of each row, its last token, then the filler."""
    columns = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    end = kept.unsqueeze(1)
    tail = torch.where(columns == end, last_token.unsqueeze(1), filler)
    return torch.where(columns < end, pad(draft_tokens.long(), (0, 1)), tail).int()


def _flush(x: Tensor) -> Tensor:
    """Subnormal numbers become zero, as in the kernel's arithmetic."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)


def _draw(weights: Tensor, uniform: Tensor, kernel: _Kernel) -> Tensor:
    """[n] int64: the kernel's inverse-CDF draw from [n, V] weights; PADDING where no weight is positive."""
    n, vocab = weights.shape
    vector = math.gcd(VECTOR, vocab)
    # A vocabulary smaller than a tile leaves threads idle. They add zeros, so whole idle warps are left out.
    threads = min(THREADS, max(WARP, 1 << (vocab // vector - 1).bit_length()))
    width = threads * vector
    num_tiles = -(-vocab // width)
    tiles = pad(weights, (0, num_tiles * width - vocab)).view(n, num_tiles, threads, vector)

    tile_sums = _block_sum(_sum_pairs(tiles))
    before = torch.zeros(n, num_tiles + 1, device=weights.device)
    for index in range(num_tiles):
        before[:, index + 1] = before[:, index] + tile_sums[:, index]
    if kernel.sums_by_tile:
        total = before[:, -1]
    else:
        thread_sums = torch.zeros(n, threads, device=weights.device)
        for index in range(num_tiles):
            for lane in range(vector):
                thread_sums = thread_sums + tiles[:, index, :, lane]
        total = _block_sum(thread_sums)
    threshold = _flush(uniform * total)

    # The kernel stops at the first tile whose running sum exceeds the threshold: the token is in there.
    exceeds = before[:, 1:] > threshold.unsqueeze(1)
    found = exceeds.any(1)
    tile = torch.where(found, exceeds.long().argmax(1), num_tiles - 1)
    rows = torch.arange(n, device=weights.device)
    inside = tiles[rows, tile]
    cdf = _inclusive_scan(inside) + before[rows, tile].view(n, 1, 1)
    hits = ((cdf > threshold.view(n, 1, 1)) & (inside > 0)).flatten(1) & found.unsqueeze(1)
    token = tile * width + hits.long().argmax(1)

    # By rounding the threshold may lie above every step of the CDF: then the last weight seen is taken.
    positions = torch.arange(num_tiles * width, device=weights.device)
    seen = (tiles.flatten(1) > 0) & (positions < ((tile + 1) * width).unsqueeze(1))
    last_seen = torch.where(seen, positions, PADDING).amax(1)
    return torch.where(hits.any(1), token, last_seen)


def _sum_pairs(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, by adjacent pairs, then pairs of pairs, and so on."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def _block_sum(x: Tensor) -> Tensor:
    """Sum over the threads of a block as CUB does it: pairs inside a warp, then warp after warp."""
    warps = _sum_pairs(x.unflatten(-1, (-1, WARP)))
    total = warps[..., 0]
    for warp in range(1, warps.shape[-1]):
        total = total + warps[..., warp]
    return total


def _inclusive_scan(x: Tensor) -> Tensor:
    """Prefix sums over [n, threads, vector] in the order of flashinfer's deterministic block scan."""
    prefix = [x[..., 0]]
    for lane in range(1, x.shape[-1]):
        prefix.append(prefix[-1] + x[..., lane])
    before_thread, warp_sums = _exclusive_scan(prefix[-1].unflatten(-1, (-1, WARP)))
    before_warp, _ = _exclusive_scan(warp_sums)
    before = (before_warp.unsqueeze(-1) + before_thread).flatten(-2)
    return before.unsqueeze(-1) + torch.stack(prefix, dim=-1)


def _exclusive_scan(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blelloch scan of the last dimension, a power of two: the sums before each element, and the total."""
    x = x.clone()
    strides = [1 << step for step in range(x.shape[-1].bit_length() - 1)]
    for stride in strides:
        x[..., 2 * stride - 1 :: 2 * stride] += x[..., stride - 1 :: 2 * stride]
    total = x[..., -1].clone()
    x[..., -1] = 0
    for stride in reversed(strides):
        left = x[..., stride - 1 :: 2 * stride].clone()
        right = x[..., 2 * stride - 1 :: 2 * stride].clone()
        x[..., stride - 1 :: 2 * stride] = right
        x[..., 2 * stride - 1 :: 2 * stride] = left + right
    return x, total


def _row_seeds(name: str, value: int | Tensor, draft_tokens: Tensor, kernel: _Kernel) -> int | Tensor:
    if not isinstance(value, Tensor):
        return value
    _check(name, value, (torch.int64,), (None,), draft_tokens)
    if value.numel() not in (1, len(draft_tokens)):
        raise StageError(f"{name} must have one element or {len(draft_tokens)}, got {value.numel()}")
    return value if kernel.per_row_seeds else value[:1]


def _check_window(
    draft_tokens: Tensor, name: str, target: Tensor, dtypes: tuple[torch.dtype, ...]
) -> tuple[int, int, int]:
    """Check a window of drafts beside the target's [n, K+1, V]; returns n, K, V."""
    _check("draft_tokens", draft_tokens, TOKEN_TYPES, (None, None), draft_tokens)
    n, num_drafts = draft_tokens.shape
    _check(name, target, dtypes, (n, num_drafts + 1, None), draft_tokens)
    vocab = target.shape[-1]
    if vocab == 0:
        raise StageError(f"{name} has an empty vocabulary")
    outside = ((draft_tokens < 0) | (draft_tokens >= vocab)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        token = draft_tokens[row, column].item()
        raise StageError(f"draft_tokens[{row}, {column}] is {token}, outside the vocabulary [0, {vocab})")
    return n, num_drafts, vocab


def _check(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], beside: Tensor
) -> None:
    """Raise unless `tensor` has one of the dtypes, the shape (None: any size) and the device of `beside`."""
    if tensor.dtype not in dtypes:
        raise StageError(f"{name} must be {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise StageError(f"{name} must be [{wanted}], got {list(tensor.shape)}")
    if tensor.device != beside.device:
        raise StageError(f"{name} is on {tensor.device}, the other arguments on {beside.device}")
