"""Drawing a replacement from the target's legal part, p_S(x) = p(x)·1[x ∈ S] / p(S).

Probabilities become 52-bit integers, and logits 40-bit ones, so sums do not depend on the order of addition: every
rank, and every kernel, draws the same token from the same inputs. The random word comes from a counter-based stream of
the stage's own. Pure functions of [R, ·] tensors; nothing here knows states or policies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .philox import philox4x32

PROBABILITY_BITS = 52
GREEDY_TEMPERATURE = 1e-2  # at or below it a row is greedy, as in TRT-LLM's sampler
WEIGHT_BITS = 40  # of the likeliest token's weight; 2^22 tokens of it stay below 2^63
FARTHEST = 32.0  # e^-32 < 2^-46 weighs nothing
FRACTION_BITS = 31  # of a fraction inside `exponential`
LOG2_E = 3098164009  # log2(e) · 2^31
# ln(2)^k / k! · 2^31, the series of 2^x; the last one is rounded down, so that all of them add up to 2^32 − 1.
POWERS_OF_TWO = (2147483648, 1488522236, 515882496, 119194166, 20654775, 2863360, 330788, 32755, 2838, 219, 14)
TOP_P_BITS = 32
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
        limits = (None if t is None else t[rows] for t in (self.top_k, self.top_p))
        drawn = draw(sampled_weights(here, self.temperature[rows], *limits, legal=legal), words)
        # Where every token that the filters kept is illegal, the filters give way before the format does.
        return torch.where(drawn < legal.shape[1], drawn, best_legal(here, legal))

    def scores(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[R, V]: the given probabilities or logits of each (row, column)."""
        source = self.probs if self.probs is not None else self.logits
        return source[rows, columns] if self.source_rows is None else source[self.source_rows[rows, columns]]


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


def sampled_weights(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    *,
    legal: Tensor | None = None,
) -> Tensor:
    """The sampler's distribution in integers: temperature, then top-k, then top-p over what top-k left.

    Tokens stand in the order of their logits in float32, equal ones in the order of their ids. Each weighs
    `exponential((best − logit) / temperature)`, both operations in float32, where `best` is the highest logit that is
    left: a legal part that is hardly possible is drawn from as precisely as any.

    Args:
        logits: [R, V] float, V ≤ 2^22. A row with NaN or +∞, or with −∞ alone, has no distribution: it weighs nothing.
        temperature: [R] float; rows at or below `GREEDY_TEMPERATURE` get a point mass on their argmax.
        top_k: [R] int, 0 or less = no limit. Tokens that tie with the k-th stay.
        top_p: [R] float, 1 or more = no limit; a token stays if what stands before it weighs less than `top_p` of the
            total, exactly (`top_p` is cut to 32 bits). The first one always stays.
        legal: [R, V] bool, the tokens that weigh anything; the filters look at all tokens. None = all.

    Returns:
        [R, V] int64 in [0, 2^40). A token at distance d behind `best`, in the exponent, has its share of e^-d up to a
        factor of 1 ± (d · 2^-23 + 2^-26), as in a softmax in float32, and up to 2^-40 of the share of `best`.
    """
    vocab, heat = logits.shape[1], temperature.float()[:, None]
    score = logits.float()
    score = torch.where(score == 0, 0.0, score)  # no −0.0, which a sort may put below 0.0
    best = torch.where(score.isnan(), torch.inf, score).amax(dim=1, keepdim=True)
    left = best.isfinite().expand_as(score)
    if top_k is not None or top_p is not None:
        ordered, index = score.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        k = torch.where(top_k <= 0, vocab, top_k).clamp(max=vocab).long()
        left = left & (score >= ordered.gather(1, k[:, None] - 1))
    if top_p is not None:
        share = top_p.float()
        weights = torch.where(left, exponential((best - score) / heat), 0).gather(1, index)
        within = weights.cumsum(dim=1) - weights < mass_limit(share, weights.sum(dim=1))[:, None]
        left = left & (torch.zeros_like(within).scatter(1, index, within) | (share >= 1.0)[:, None])
    if legal is not None:
        left = left & legal
        best = torch.where(left, score, -torch.inf).amax(dim=1, keepdim=True)
    weights = torch.where(left, exponential((best - score) / heat), 0)
    point = torch.arange(vocab, device=logits.device) == best_legal(logits, torch.ones_like(left))[:, None]
    point = point if legal is None else point & legal
    return torch.where(heat <= GREEDY_TEMPERATURE, point.long() << WEIGHT_BITS - 1, weights)


def filtered_probs(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """[R, V] float64: `sampled_weights` as probabilities, for who looks at them; 0 where nothing weighs anything."""
    weights = sampled_weights(logits, temperature, top_k, top_p)
    return weights.double() / weights.sum(dim=1, keepdim=True).clamp(min=1)


def exponential(distance: Tensor) -> Tensor:
    """e^-distance in integers, so that every device gives the same.

    Args:
        distance: float32, any shape; below 0, at or past `FARTHEST`, or NaN, the result is 0.

    Returns:
        int64, 2^40 · e^-distance up to a factor of 1 ± 2^-26, rounded down, below 2^40.
    """
    near = (distance >= 0) & (distance < FARTHEST)
    distance = torch.where(near, distance, 0.0)
    whole = distance.long()
    part = ((distance - whole) * float(1 << FRACTION_BITS)).long()
    exponent = whole * LOG2_E + (part * LOG2_E >> FRACTION_BITS)
    # 2^-(n + f) = 2^(1 − f) · 2^-(n + 1): all terms of the series are positive, and all products stay below 2^63.
    x = (1 << FRACTION_BITS) - (exponent & ((1 << FRACTION_BITS) - 1))
    power = torch.full_like(x, POWERS_OF_TWO[-1])
    for term in reversed(POWERS_OF_TWO[:-1]):
        power.mul_(x).bitwise_right_shift_(FRACTION_BITS).add_(term)
    power.bitwise_left_shift_(WEIGHT_BITS - FRACTION_BITS - 1).bitwise_right_shift_(exponent >> FRACTION_BITS)
    return torch.where(near, power, 0)


def mass_limit(top_p: Tensor, total: Tensor) -> Tensor:
    """[R] int64: the smallest mass that is no longer below `top_p` [R] of `total` [R] int64; 1 at least, if any is."""
    share = torch.where(top_p > 0, top_p, 0.0).clamp(max=1.0) * float(1 << TOP_P_BITS)  # NaN counts as 0
    rest = (1 << TOP_P_BITS) - share.long().clamp(min=1)
    return total - _multiply_high(torch.stack([rest, torch.zeros_like(rest)], dim=1), total)


def _multiply_high(words: Tensor, total: Tensor) -> Tensor:
    """floor(u · total / 2^64) for u = words[:, 0]·2^32 + words[:, 1] and 0 ≤ total < 2^63, in 64-bit pieces."""
    high, low = words[:, 0], words[:, 1]
    total_high, total_low = total >> 32, total & _LOW
    lowest = low * total_low  # wraps; its two halves are masked out below
    cross, other = high * total_low, low * total_high
    carry = ((lowest >> 32) & _LOW) + (cross & _LOW) + (other & _LOW)
    return high * total_high + ((cross >> 32) & _LOW) + ((other >> 32) & _LOW) + (carry >> 32)
