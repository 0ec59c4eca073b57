"""The redraw as one Triton kernel: `repair_rows` programs, each mends one row or leaves at once.

Program i takes the i-th of the rows that `commit_kernel` left to be redrawn, the urgent ones first, in batch order: all
programs count the same marks, so no order of execution matters. It masks one row of the vocabulary by class and
draws as `repair.draw` does, to the bit: sums of integers do not depend on their order, and a probability times
2^52 is exact in any float. Importing this module imports Triton.
"""

import triton
import triton.language as tl

from .kernel import (
    CUT,
    ENDED,
    ESCAPED,
    IDLE,
    ILLEGAL,
    N_COMMITTED,
    N_CUT,
    N_ENDED,
    N_ESCAPED,
    N_REPAIRED,
    PATIENT,
    REPAIRED,
    TABLE_AND_STATE,
    URGENT,
    follow_state,
)
from .philox import KEY_INCREMENTS, MULTIPLIERS, ROUNDS
from .repair import PROBABILITY_BITS, STREAM

# What is left, the layout of scores and class map, lets loads be wide, and differs little within a server.
UNSPECIALIZED = [
    *TABLE_AND_STATE,
    *[
        "source_rows",
        "words",
        "seed_low",
        "seed_high",
        "source_rows_row",
        "source_rows_column",
        "words_row",
        "words_column",
        "num_sources",
    ],
]

_SCALE = tl.constexpr(float(1 << PROBABILITY_BITS))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # float32; what nan_to_num makes of infinity
_WORD, _STREAM = tl.constexpr(0xFFFFFFFF), tl.constexpr(STREAM)
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(m) for m in MULTIPLIERS)
_INCREMENT_0, _INCREMENT_1 = (tl.constexpr(k) for k in KEY_INCREMENTS)


@triton.jit
def _nth_row(urgency, batch, n, SCAN: tl.constexpr):
    """The n-th row to redraw, urgent ones first, or −1."""
    at = tl.arange(0, SCAN)
    urgent = batch * 0
    for start in range(0, batch, SCAN):
        marks = tl.load(urgency + start + at, mask=start + at < batch, other=IDLE)
        urgent += tl.sum((marks == URGENT).to(tl.int32), axis=0)
    wanted = tl.where(n < urgent, URGENT, PATIENT)
    n = tl.where(n < urgent, n, n - urgent)
    found, seen = batch * 0 - 1, batch * 0
    for start in range(0, batch, SCAN):
        marks = tl.load(urgency + start + at, mask=start + at < batch, other=IDLE)
        hits = (marks == wanted).to(tl.int32)
        number = seen + tl.cumsum(hits, axis=0)
        here = tl.where((hits == 1) & (number == n + 1), start + at, -1)
        found = tl.maximum(found, tl.max(here, axis=0))
        seen += tl.sum(hits, axis=0)
    return found


@triton.jit
def _random_words(slot, step, seed_low, seed_high):
    """The first two words of `repair.random_words`, as int64."""
    c0, c1, c2 = slot, step & _WORD, (step >> 32) & _WORD
    c3 = step * 0 + _STREAM
    k0, k1 = step * 0 + seed_low, step * 0 + seed_high
    for _ in tl.static_range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1  # wrap; what follows masks the sign out
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _WORD
        c1 = p1 & _WORD
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _WORD
        c3 = p0 & _WORD
        k0 += _INCREMENT_0
        k1 += _INCREMENT_1
    return c0, c1


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
def _draw(
    probs, stride, words, vocab, token_class, transitions, before, num_classes, illegal, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token that `words` picks among the legal ones, `vocab` if none has any weight: one pass, then one block."""
    at, block_number = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.int64)
    for block in range(tl.cdiv(vocab, BLOCK)):
        ids = block * BLOCK + at
        legal = _legal(ids, vocab, token_class, transitions, before, num_classes, illegal)
        weight = tl.sum(_weights(probs, ids, stride, legal), axis=0)
        sums = tl.where(block_number == block, weight, sums)
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
        cumulative = below + tl.cumsum(_weights(probs, ids, stride, legal), axis=0)
        drawn = block * BLOCK + tl.sum((cumulative <= target).to(tl.int32), axis=0)
    return drawn


@triton.jit
def _best(scores, stride, vocab, token_class, transitions, before, num_classes, illegal, BLOCK: tl.constexpr):
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


@triton.jit
def _add_one(counter, amount, counted):
    tl.atomic_add(counter, amount.to(tl.int64), mask=counted & (amount != 0), sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def repair_kernel(
    source,  # probabilities or logits: [B, W, V], or [M, V] with source_rows
    filtered,  # [repair_rows, V] float32: with KIND "sampled", the filtered distribution of each program's row
    source_rows,  # [B, W] int64
    words,  # [B, 2] int64
    slots,  # [B] int64
    new_tokens,  # these six as commit_kernel left them
    new_lengths,
    events,
    urgency,
    illegal_at,
    state_before,
    state,
    steps,
    repairs,
    counters,
    token_class,
    transitions,
    escape_token,
    batch,
    width,
    vocab,
    num_slots,
    num_classes,
    ended,
    illegal,
    seed_low,
    seed_high,
    source_row,
    source_column,
    source_token,
    source_rows_row,
    source_rows_column,
    words_row,
    words_column,
    slots_row,
    new_tokens_row,
    new_tokens_column,
    new_lengths_row,
    num_sources,
    KIND: tl.constexpr,  # "probs", "greedy" or "sampled"
    HAS_SOURCE_ROWS: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = _nth_row(urgency, batch, tl.program_id(0), SCAN).to(tl.int64)
    if row >= 0:
        at = tl.load(illegal_at + row)
        before = tl.load(state_before + row)
        slot = tl.load(slots + row * slots_row)
        has_slot = (slot >= 0) & (slot < num_slots)
        slot = tl.where(has_slot, slot, num_slots)

        if HAS_WORDS:
            high = tl.load(words + row * words_row)
            low = tl.load(words + row * words_row + words_column)
        else:
            high, low = _random_words(slot, tl.load(steps + slot) - 1, seed_low, seed_high)
        if HAS_SOURCE_ROWS:
            here = tl.load(source_rows + row * source_rows_row + at.to(tl.int64) * source_rows_column)
            named = (here >= 0) & (here < num_sources)  # anything else has no mass
            scores = source + tl.where(named, here, 0) * source_row
        else:
            named = row >= 0
            scores = source + row * source_row + at.to(tl.int64) * source_column
        drawn = vocab + at * 0
        if KIND == "probs":
            drawn = _draw(
                scores, source_token, (high, low), vocab, token_class, transitions, before, num_classes, illegal,
                BLOCK, BLOCKS,
            )  # fmt: skip
        if KIND == "sampled":
            drawn = _draw(
                filtered + tl.program_id(0).to(tl.int64) * vocab, 1, (high, low), vocab, token_class, transitions,
                before, num_classes, illegal, BLOCK, BLOCKS,
            )  # fmt: skip
        if KIND != "probs":  # noqa: SIM102 - one is known when compiling, one is not
            # Where every token that the filters kept is illegal, the filters give way before the format does.
            if drawn >= vocab:
                drawn = _best(
                    scores, source_token, vocab, token_class, transitions, before, num_classes, illegal, BLOCK
                )

        no_mass = (drawn >= vocab) | ~named
        token = tl.load(escape_token + before, mask=no_mass, other=0) + tl.where(no_mass, 0, drawn)
        new_class = tl.load(token_class + token).to(tl.int32)
        mended = follow_state(transitions, before, new_class, num_classes, illegal, row >= 0)
        was = tl.load(events + row)
        ends = mended == ended
        now = (was & ~(CUT | ESCAPED | ENDED)) | ILLEGAL | REPAIRED
        now = now | tl.where(no_mass, ESCAPED, 0) | tl.where(ends, ENDED, 0)
        for column in range(at, width):
            tl.store(new_tokens + row * new_tokens_row + column * new_tokens_column, token)
        tl.store(new_lengths + row * new_lengths_row, at + 1)
        tl.store(events + row, now)
        tl.store(state + slot, tl.where(has_slot, mended, 0))
        is_new = ~((was & REPAIRED) != 0)  # an urgent row was repaired before, by a fixed token
        tl.atomic_add(repairs + slot, 1, mask=is_new, sem="relaxed")
        _add_one(counters + N_REPAIRED, is_new.to(tl.int32), has_slot)
        _add_one(counters + N_COMMITTED, is_new.to(tl.int32), has_slot)
        _add_one(counters + N_CUT, 0 - ((was & CUT) != 0).to(tl.int32), has_slot)
        _add_one(counters + N_ESCAPED, no_mass.to(tl.int32) - ((was & ESCAPED) != 0).to(tl.int32), has_slot)
        _add_one(counters + N_ENDED, ends.to(tl.int32) - ((was & ENDED) != 0).to(tl.int32), has_slot)
