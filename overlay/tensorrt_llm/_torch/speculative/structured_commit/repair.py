"""Drawing a replacement from the target's legal part, p_S(x) = p(x)·1[x ∈ S] / p(S).

Probabilities become 52-bit integers, so sums do not depend on the order of addition: every rank, and every
kernel, draws the same token from the same inputs. The random word comes from a counter-based stream of the
stage's own. Pure functions of [R, ·] tensors; nothing here knows states or policies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .philox import philox4x32

PROBABILITY_BITS = 52
GREEDY_TEMPERATURE = 1e-2  # at or below it a row is greedy, as in TRT-LLM's sampler
STREAM = 0x5C0117ED  # keeps this stream apart from any other use of the same seed
_LOW = 0xFFFFFFFF


class Distribution(NamedTuple):
    """What `CommitStage.commit` was given to draw from; see there for shapes."""

    probs: Tensor | None = None
    logits: Tensor | None = None
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    source_rows: Tensor | None = None
    words: Tensor | None = None

    def draw_legal(self, rows: Tensor, columns: Tensor, legal: Tensor, words: Tensor) -> Tensor:
        """A legal token for each (row, column).

        Args:
            rows, columns: [R] int64. legal: [R, V] bool. words: [R, 2] int64 random words.

        Returns:
            [R] int64; V where no legal token has any mass.
        """
        here = self.scores(rows, columns)
        if self.probs is not None:
            return draw(legal_weights(here, legal), words)
        if self.temperature is None:
            return best_legal(here, legal)
        drawn = draw(legal_weights(self.filtered(rows, columns), legal), words)
        # Where every token that the filters kept is illegal, the filters give way before the format does.
        return torch.where(drawn < legal.shape[1], drawn, best_legal(here, legal))

    def scores(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[R, V]: the given probabilities or logits of each (row, column)."""
        source = self.probs if self.probs is not None else self.logits
        return source[rows, columns] if self.source_rows is None else source[self.source_rows[rows, columns]]

    def filtered(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[R, V] float32: what the sampler draws from at each (row, column), from logits with a temperature."""
        limits = (None if t is None else t[rows] for t in (self.top_k, self.top_p))
        return filtered_probs(self.scores(rows, columns), self.temperature[rows], *limits)


def legal_weights(probs: Tensor, legal: Tensor) -> Tensor:
    """Integer weights of the legal part.

    Args:
        probs: [R, V] float, each row a distribution; values are clamped to [0, 1], NaN counts as 0.
        legal: [R, V] bool.

    Returns:
        [R, V] int64, floor(p · 2^52) where legal, else 0.
    """
    clean = torch.nan_to_num(probs.double(), nan=0.0).clamp(0.0, 1.0)
    return torch.where(legal, (clean * float(1 << PROBABILITY_BITS)).to(torch.int64), 0)


def draw(weights: Tensor, words: Tensor) -> Tensor:
    """Inverse-CDF draw by integers: token x with probability weights[x] / sum(weights), up to 2^-64.

    Args:
        weights: [R, V] int64 ≥ 0, row sums below 2^63.
        words: [R, 2] int64, high and low 32-bit word of a uniform 64-bit number.

    Returns:
        [R] int64 token ids; V where all weights are 0.
    """
    cumulative = weights.cumsum(dim=1)
    target = _multiply_high(words, cumulative[:, -1])
    return (cumulative <= target[:, None]).sum(dim=1)


def random_words(seed: int, slots: Tensor, steps: Tensor) -> Tensor:
    """[R, 2] int64 random 32-bit words of the stage's stream, a function of (seed, slot, step) alone."""
    counter = torch.stack([slots, steps & _LOW, (steps >> 32) & _LOW, torch.full_like(slots, STREAM)], dim=1)
    key = torch.stack([torch.full_like(slots, seed & _LOW), torch.full_like(slots, seed >> 32)], dim=1)
    return philox4x32(counter, key)[:, :2]


def best_legal(scores: Tensor, legal: Tensor) -> Tensor:
    """[R] int64: the legal token with the highest score, the lowest id among equals; V if none is legal."""
    vocab = scores.shape[1]
    masked = torch.where(legal, torch.nan_to_num(scores.float(), nan=-torch.inf), -torch.inf)
    best = (masked == masked.amax(dim=1, keepdim=True)) & legal
    ids = torch.arange(vocab, device=scores.device)
    return torch.where(best, ids, vocab).amin(dim=1)


def filtered_probs(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The sampler's distribution: temperature, then top-k, then top-p over what top-k left.

    Args:
        logits: [R, V] float.
        temperature: [R] float; rows at or below `GREEDY_TEMPERATURE` get a point mass on their argmax.
        top_k: [R] int, 0 or less = no limit. Tokens that tie with the k-th stay.
        top_p: [R] float, 1 or more = no limit.

    Returns:
        [R, V] float32.
    """
    greedy = temperature <= GREEDY_TEMPERATURE
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.float())[:, None]
    if top_k is not None:
        vocab = logits.shape[1]
        k = torch.where(top_k <= 0, vocab, top_k).clamp(max=vocab).long()
        ordered = scaled.sort(dim=1, descending=True).values
        scaled = torch.where(scaled < ordered.gather(1, k[:, None] - 1), -torch.inf, scaled)
    probs = scaled.softmax(dim=1)
    if top_p is not None:
        ordered, index = probs.sort(dim=1, descending=True, stable=True)
        kept = ordered.cumsum(dim=1) - ordered < top_p.float()[:, None]
        kept = torch.zeros_like(kept).scatter(1, index, kept) | (top_p >= 1.0)[:, None]
        probs = torch.where(kept, probs, 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)
    top = best_legal(logits, torch.ones_like(logits, dtype=torch.bool))
    point = torch.arange(logits.shape[1], device=logits.device) == top[:, None]
    return torch.where(greedy[:, None], point.float(), probs)


def _multiply_high(words: Tensor, total: Tensor) -> Tensor:
    """floor(u · total / 2^64) for u = words[:, 0]·2^32 + words[:, 1] and 0 ≤ total < 2^63, in 64-bit pieces."""
    high, low = words[:, 0], words[:, 1]
    total_high, total_low = total >> 32, total & _LOW
    lowest = low * total_low  # wraps; its two halves are masked out below
    cross, other = high * total_low, low * total_high
    carry = ((lowest >> 32) & _LOW) + (cross & _LOW) + (other & _LOW)
    return high * total_high + ((cross >> 32) & _LOW) + ((other >> 32) & _LOW) + (carry >> 32)
