"""Drawing a token from one row of the vocabulary, inside a program of `kernel_repair`.

The same integers as `repair`, so the same tokens: a probability times 2^52 is exact in any float, logits become weights
by whole numbers alone behind one difference and one quotient in float32, and sums of integers do not depend on their
order. The sampler's filters, which `repair` finds by sorting, are found here by bisection: passes over the row, no
scratch. Importing this module imports Triton.
"""

import triton
import triton.language as tl

from .kernel import follow_state
from .repair import FARTHEST, FRACTION_BITS, LOG2_E, POWERS_OF_TWO, PROBABILITY_BITS, TOP_P_BITS, WEIGHT_BITS

_SCALE = tl.constexpr(float(1 << PROBABILITY_BITS))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # float32; what nan_to_num makes of infinity
_FARTHEST, _LOG2_E = tl.constexpr(FARTHEST), tl.constexpr(LOG2_E)
_FRACTION_BITS = tl.constexpr(FRACTION_BITS)
_ONE = tl.constexpr(1 << FRACTION_BITS)
_POWER_SHIFT = tl.constexpr(WEIGHT_BITS - FRACTION_BITS - 1)
_TERMS = tl.constexpr(POWERS_OF_TWO)
_LAST_TERM = tl.constexpr(len(POWERS_OF_TWO) - 1)
_TOP_P_ONE = tl.constexpr(1 << TOP_P_BITS)
_LOWEST_KEY = tl.constexpr(-(1 << 31))
_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _multiply_high(high, low, total):
    """As `repair._multiply_high`."""
    total_high, total_low = total >> 32, total & _WORD
    lowest = low * total_low
    cross, other = high * total_low, low * total_high
    carry = ((lowest >> 32) & _WORD) + (cross & _WORD) + (other & _WORD)
    return high * total_high + ((cross >> 32) & _WORD) + ((other >> 32) & _WORD) + (carry >> 32)


@triton.jit
def _legal(ids, vocab, token_class, transitions, before, num_classes, illegal):
    inside = ids < vocab
    classes = tl.load(token_class + ids, mask=inside, other=0).to(tl.int32)
    return follow_state(transitions, before, classes, num_classes, illegal, inside) >= 0


@triton.jit
def _weights(probs, ids, stride, legal):
    p = tl.load(probs + ids.to(tl.int64) * stride, mask=legal, other=0.0)
    if probs.dtype.element_ty != tl.float64:
        p = p.to(tl.float32)
    p = tl.where(p == p, p, 0.0)
    return (tl.minimum(tl.maximum(p, 0.0), 1.0) * _SCALE).to(tl.int64)


@triton.jit
def _logits(scores, ids, stride, inside):
    """In float32; no −0.0, whose bits are not those of 0.0, and for NaN, as for infinity, a row has no distribution."""
    x = tl.load(scores + ids.to(tl.int64) * stride, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), tl.where(x == 0.0, 0.0, x))


@triton.jit
def _flipped(bits):
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):
    """An int32 for each float32, in the same order."""
    return _flipped(x.to(tl.int32, bitcast=True))


@triton.jit
def _exponential(best, x, temperature):
    """`repair.exponential` of (best − x) / temperature. The products are of 32 bits each."""
    distance = tl.div_rn(best - x, temperature)
    near = (distance >= 0.0) & (distance < _FARTHEST)
    distance = tl.where(near, distance, 0.0)
    whole = distance.to(tl.int32)
    part = ((distance - whole.to(tl.float32)) * _ONE).to(tl.int32)
    exponent = whole.to(tl.int64) * _LOG2_E + ((part.to(tl.int64) * _LOG2_E) >> _FRACTION_BITS)
    fraction = (-(exponent & (_ONE - 1)) + _ONE).to(tl.uint32).to(tl.int64)
    power = fraction * 0 + _TERMS[_LAST_TERM]
    for i in tl.static_range(_LAST_TERM):
        power = (((power * fraction) >> _FRACTION_BITS) + _TERMS[_LAST_TERM - 1 - i]).to(tl.uint32).to(tl.int64)
    return tl.where(near, (power << _POWER_SHIFT) >> (exponent >> _FRACTION_BITS), 0)


@triton.jit
def _pivot(scores, stride, vocab, limit, highest, least, best, temperature, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key in [least, highest] at and above which the tokens weigh `limit` or more, and what is above it.

    With COUNTS each token weighs one. What is known to lie above, or not to matter, is not weighed again.
    """
    at = tl.arange(0, BLOCK)
    low, high = least.to(tl.int64), highest.to(tl.int64)
    above = limit * 0
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        sums = tl.zeros([BLOCK], tl.int64)
        for block in range(tl.cdiv(vocab, BLOCK)):
            ids = block * BLOCK + at
            x = _logits(scores, ids, stride, ids < vocab)
            here = (_key(x) >= middle.to(tl.int32)) & (_key(x) <= high.to(tl.int32)) & (ids < vocab)
            if COUNTS:
                sums += here.to(tl.int64)
            else:
                if tl.max(here.to(tl.int32), axis=0) > 0:
                    sums += tl.where(here, _exponential(best, x, temperature), 0)
        found = above + tl.sum(sums, axis=0)
        enough = found >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, found)
    return low.to(tl.int32), above


@triton.jit
def _nth_equal(scores, stride, vocab, key, n, BLOCK: tl.constexpr):
    """The id of the n-th token, from 1, whose logit has `key`."""
    at = tl.arange(0, BLOCK)
    found, seen = vocab * 0 - 1, n * 0
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + at
        hits = (_key(_logits(scores, ids, stride, ids < vocab)) == key) & (ids < vocab)
        number = seen + tl.cumsum(hits.to(tl.int64), axis=0)
        found = tl.maximum(found, tl.max(tl.where(hits & (number == n), ids, -1), axis=0))
        seen += tl.sum(hits.to(tl.int64), axis=0)
    return found


@triton.jit
def highest_logit(
    scores, stride, vocab, pivot, last, token_class, transitions, before, num_classes, illegal, LEGAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest logit; with LEGAL, of the legal tokens that the filters left."""
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + at
        x = _logits(scores, ids, stride, ids < vocab)
        if LEGAL:
            legal = _legal(ids, vocab, token_class, transitions, before, num_classes, illegal)
            x = tl.where(legal & _is_left(x, ids, pivot, last), x, -float("inf"))
        best = tl.maximum(best, x)
    return tl.max(best, axis=0)


@triton.jit
def _is_left(x, ids, pivot, last):
    """Whether the filters leave a token: it is above the pivot, or as high and not behind the last one there."""
    return (_key(x) > pivot) | ((_key(x) == pivot) & (ids <= last))


@triton.jit
def find_filters(
    scores, stride, vocab, best, temperature, top_k, top_p, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_is_left` asks for: the key of the lowest logit that is left, and the last token that has it."""
    pivot, last, highest = vocab * 0 + _LOWEST_KEY, vocab, _key(best)
    if HAS_TOP_K:  # noqa: SIM102 - one is known when compiling, one is not
        if (top_k > 0) & (top_k < vocab):
            pivot, _ = _pivot(scores, stride, vocab, top_k, highest, pivot, best, temperature, True, BLOCK)
    if HAS_TOP_P:  # noqa: SIM102
        if not top_p >= 1.0:
            at = tl.arange(0, BLOCK)
            sums = tl.zeros([BLOCK], tl.int64)
            for block in range(tl.cdiv(vocab, BLOCK)):
                ids = block * BLOCK + at
                x = _logits(scores, ids, stride, ids < vocab)
                here = (_key(x) >= pivot) & (ids < vocab)
                sums += tl.where(here, _exponential(best, x, temperature), 0)
            total = tl.sum(sums, axis=0)
            if total > 0:
                # As `repair.mass_limit`.
                share = (tl.where(top_p > 0.0, top_p, 0.0) * _TOP_P_ONE).to(tl.int64)
                limit = total - _multiply_high(-tl.maximum(share, 1) + _TOP_P_ONE, total * 0, total)
                pivot, above = _pivot(scores, stride, vocab, limit, highest, pivot, best, temperature, False, BLOCK)
                each = _exponential(best, _flipped(pivot).to(tl.float32, bitcast=True), temperature)
                last = _nth_equal(scores, stride, vocab, pivot, (limit - above + each - 1) // each, BLOCK)
    return pivot, last


@triton.jit
def draw_legal(
    scores, stride, words, sampling, vocab, token_class, transitions, before, num_classes, illegal,
    SAMPLED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token that `words` picks among the legal ones, `vocab` if none has any weight: one pass, then one block.

    `scores` are probabilities; with SAMPLED, logits, and `sampling` is the highest of those that are left, the
    temperature, and what `_is_left` asks for.
    """
    at, block_number = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    best, temperature, pivot, last = sampling
    sums = tl.zeros([BLOCKS], tl.int64)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + at
        legal = _legal(ids, vocab, token_class, transitions, before, num_classes, illegal)
        if SAMPLED:
            weights = _left_weights(scores, ids, stride, legal, best, temperature, pivot, last)
        else:
            weights = _weights(scores, ids, stride, legal)
        sums = tl.where(block_number == block, tl.sum(weights, axis=0), sums)
    high, low = words
    total = tl.sum(sums, axis=0)
    drawn = vocab + before * 0
    if total > 0:
        target = _multiply_high(high, low, total)
        passed = tl.cumsum(sums, axis=0) <= target
        block = tl.sum(passed.to(tl.int32), axis=0)
        below = tl.sum(tl.where(passed, sums, 0), axis=0)
        ids = block * BLOCK + at
        legal = _legal(ids, vocab, token_class, transitions, before, num_classes, illegal)
        if SAMPLED:
            weights = _left_weights(scores, ids, stride, legal, best, temperature, pivot, last)
        else:
            weights = _weights(scores, ids, stride, legal)
        cumulative = below + tl.cumsum(weights, axis=0)
        drawn = block * BLOCK + tl.sum((cumulative <= target).to(tl.int32), axis=0)
    return drawn


@triton.jit
def _left_weights(scores, ids, stride, legal, best, temperature, pivot, last):
    x = _logits(scores, ids, stride, legal)
    return tl.where(legal & _is_left(x, ids, pivot, last), _exponential(best, x, temperature), 0)


@triton.jit
def best_legal(scores, stride, vocab, token_class, transitions, before, num_classes, illegal, BLOCK: tl.constexpr):
    """As `repair.best_legal`."""
    at = tl.arange(0, BLOCK)
    best, best_id = before * 0.0 - float("inf"), vocab + before * 0
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + at
        legal = _legal(ids, vocab, token_class, transitions, before, num_classes, illegal)
        score = tl.load(scores + ids.to(tl.int64) * stride, mask=legal, other=0.0).to(tl.float32)
        clean = tl.minimum(tl.maximum(score, -_LARGEST), _LARGEST)
        clean = tl.where(legal & (score == score), clean, -float("inf"))
        highest = tl.max(clean, axis=0)
        first = tl.min(tl.where(legal & (clean == highest), ids, vocab), axis=0)
        better = (highest > best) | ((highest == best) & (first < best_id))
        best_id = tl.where(better, first, best_id)
        best = tl.maximum(best, highest)
    return best_id
