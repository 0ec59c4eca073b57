"""Philox4x32-10, the counter-based generator behind the sampler's random numbers, in plain torch.

A word of the stream is a pure function of (seed, subsequence, offset): nothing is stored, nothing advances,
and ranks that hold the same three draw the same word. This module promises curand's stream word for word and
curand's uniforms bit for bit, on any device, with static shapes and without a host sync, so a CUDA graph can
capture it. It must not know what the numbers are for.

The generator is from Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
(doi:10.1145/2063384.2063405). A 32-bit word is held in an int64 tensor, in [0, 2**32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import StageError

WORD = 0xFFFFFFFF
ROUNDS = 10
WORDS_PER_BLOCK = 4

# Philox4x32's multipliers and key increments, from the paper; the same in Random123 and curand.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

# curand writes its constant as 2.3283064e-10f; the nearest float32 is exactly this power of two.
TWO_POW_MINUS_32 = 2.0**-32
TWO_POW_MINUS_33 = 2.0**-33


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """The block of four words that ten Philox rounds make of a counter and a key.

    Args:
        counter: [..., 4] int64, least significant word first.
        key: [..., 2] int64, least significant word first. Leading dimensions of the two broadcast.
            Words outside [0, 2**32) are taken modulo 2**32.

    Returns:
        [..., 4] int64, each word in [0, 2**32).

    Raises:
        StageError: a dtype is not int64, or a last dimension is not 4 and 2.
    """
    _require_int64("counter", counter)
    _require_int64("key", key)
    if counter.shape[-1:] != (WORDS_PER_BLOCK,) or key.shape[-1:] != (2,):
        shapes = f"{list(counter.shape)} and {list(key.shape)}"
        raise StageError(f"counter and key must be [..., 4] and [..., 2], got {shapes}")
    c0, c1, c2, c3 = (counter & WORD).unbind(-1)
    k0, k1 = key.unbind(-1)
    for step in range(ROUNDS):
        # int64 products wrap modulo 2**64 in torch, and the mask undoes the arithmetic shift's sign:
        # both halves of the unsigned 64-bit product are right although it may exceed 2**63.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        round_key0 = k0 + step * KEY_INCREMENTS[0]
        round_key1 = k1 + step * KEY_INCREMENTS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ c1 ^ round_key0) & WORD,
            p1 & WORD,
            ((p0 >> 32) ^ c3 ^ round_key1) & WORD,
            p0 & WORD,
        )
    return torch.stack((c0, c1, c2, c3), dim=-1)


def curand_philox_words(seed: int | Tensor, subsequence: Tensor, offset: int | Tensor, n: int) -> Tensor:
    """The first `n` words of curand's Philox4_32_10 state after `curand_init(seed, subsequence, offset)`.

    As in curand, the seed is the key, the subsequence is the upper half of the 128-bit block counter, and the
    offset counts words: whole blocks of four move the lower half, the remainder is a place inside a block. A
    64-bit offset reaches a quarter of the lower half, so a carry into the upper half cannot occur.

    Args:
        seed, offset: an int, taken modulo 2**64, or an int64 tensor holding the bits of the unsigned number:
            one element for all subsequences or [N], one for each. A tensor is never read by the host.
        subsequence: [N] int64, the bits of unsigned numbers.
        n: words wanted of each subsequence, at least 0.

    Returns:
        [N, n] int64, each word in [0, 2**32).

    Raises:
        StageError: a dtype, shape or device does not fit, or n is negative.
    """
    _require_int64("subsequence", subsequence)
    if subsequence.dim() != 1:
        raise StageError(f"subsequence must be [N], got {list(subsequence.shape)}")
    if n < 0:
        raise StageError(f"cannot draw {n} words")
    seeds = _one_per_row("seed", seed, subsequence)
    offsets = _one_per_row("offset", offset, subsequence)

    # Enough blocks for n words from any place in the first one: the shape does not depend on the offset.
    num_blocks = (n + 2 * (WORDS_PER_BLOCK - 1)) // WORDS_PER_BLOCK
    first_block = (offsets >> 2) & ((1 << 62) - 1)
    blocks = first_block.unsqueeze(1) + torch.arange(num_blocks, device=subsequence.device)
    upper = subsequence.unsqueeze(1).expand_as(blocks)
    # philox4x32 masks its inputs, so low words need no mask here.
    counter = torch.stack((blocks, blocks >> 32, upper, upper >> 32), dim=-1)
    key = torch.stack((seeds, seeds >> 32), dim=-1).unsqueeze(1)
    words = philox4x32(counter, key).flatten(1)

    positions = (offsets & 3).unsqueeze(1) + torch.arange(n, device=subsequence.device)
    return words.gather(1, positions)


def curand_uniform(words: Tensor) -> Tensor:
    """curand's uniform of each word: float32 in (0, 1], `word * 2**-32 + 2**-33`.

    curand writes a multiply and an add, and nvcc contracts them to one fused multiply-add (seen in what it
    emits for flashinfer's kernel). Both give the same bits, so there is nothing to choose: the word is first
    rounded to float32, and its product with a power of two is exact. The largest words give 1.0; 0.0 never
    occurs.

    Args:
        words: int64, any shape, in [0, 2**32).

    Returns:
        float32, same shape.

    Raises:
        StageError: the dtype is not int64.
    """
    _require_int64("words", words)
    return words.to(torch.float32) * TWO_POW_MINUS_32 + TWO_POW_MINUS_33


def _require_int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise StageError(f"{name} must be int64, got {tensor.dtype}")


def _one_per_row(name: str, value: int | Tensor, rows: Tensor) -> Tensor:
    """`value` as [N] int64 beside `rows`. An int is filled in, not copied, so that a graph can capture it."""
    if isinstance(value, Tensor):
        _require_int64(name, value)
        if value.device != rows.device:
            raise StageError(f"{name} is on {value.device}, subsequence on {rows.device}")
        if value.numel() != 1 and value.shape != rows.shape:
            raise StageError(f"{name} must have one element or {len(rows)}, got {list(value.shape)}")
        return value.reshape(-1).expand(rows.shape)
    bits = value & ((1 << 64) - 1)
    return torch.full_like(rows, bits - (1 << 64) if bits >= 1 << 63 else bits)
