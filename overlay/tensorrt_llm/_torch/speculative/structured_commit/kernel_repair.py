"""The redraw as one Triton kernel: `repair_rows` programs, each mends one row or leaves at once.

Program i takes the i-th of the rows that `commit_kernel` left to be redrawn, the urgent ones first, in batch order: all
programs count the same marks, so no order of execution matters. It masks one row of the vocabulary by class and draws
as `kernel_draw` says, with a random word that `repair.random_words` would give. Importing this module imports Triton.
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
from .kernel_draw import best_legal, draw_legal, find_filters, highest_logit
from .philox import KEY_INCREMENTS, MULTIPLIERS, ROUNDS
from .repair import GREEDY_TEMPERATURE, STREAM

# What is left, the layout of scores and class map, lets loads be wide, and differs little within a server.
UNSPECIALIZED = [
    *TABLE_AND_STATE,
    *[
        "temperature",
        "top_k",
        "top_p",
        "source_rows",
        "words",
        "seed_low",
        "seed_high",
        "temperature_row",
        "top_k_row",
        "top_p_row",
        "source_rows_row",
        "source_rows_column",
        "words_row",
        "words_column",
        "num_sources",
    ],
]

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
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
def _add_one(counter, amount, counted):
    tl.atomic_add(counter, amount.to(tl.int64), mask=counted & (amount != 0), sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def repair_kernel(
    source,  # probabilities or logits: [B, W, V], or [M, V] with source_rows
    temperature,  # [B] float, with KIND "sampled"; as are top_k [B] int32 and top_p [B] float
    top_k,
    top_p,
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
    temperature_row,
    top_k_row,
    top_p_row,
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
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
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
            drawn = draw_legal(
                scores, source_token, (high, low), (0.0, 0.0, 0, 0), vocab, token_class, transitions, before,
                num_classes, illegal, False, BLOCK, BLOCKS,
            )  # fmt: skip
        if KIND == "sampled":
            heat = tl.load(temperature + row * temperature_row).to(tl.float32)
            k, p = vocab.to(tl.int64), heat * 0.0 + 1.0
            if HAS_TOP_K:
                k = tl.load(top_k + row * top_k_row).to(tl.int64)
            if HAS_TOP_P:
                p = tl.load(top_p + row * top_p_row).to(tl.float32)
            best = highest_logit(
                scores, source_token, vocab, 0, 0, token_class, transitions, before, num_classes, illegal, False, BLOCK
            )
            # A greedy row's point mass is on the best legal token, or on none.
            if (heat > _GREEDY) & (tl.abs(best) < float("inf")):
                pivot, last = find_filters(scores, source_token, vocab, best, heat, k, p, HAS_TOP_K, HAS_TOP_P, BLOCK)
                best = highest_logit(
                    scores, source_token, vocab, pivot, last, token_class, transitions, before, num_classes, illegal,
                    True, BLOCK,
                )  # fmt: skip
                drawn = draw_legal(
                    scores, source_token, (high, low), (best, heat, pivot, last), vocab, token_class, transitions,
                    before, num_classes, illegal, True, BLOCK, BLOCKS,
                )  # fmt: skip
        if KIND != "probs":  # noqa: SIM102 - one is known when compiling, one is not
            # Where every token that the filters kept is illegal, the filters give way before the format does.
            if drawn >= vocab:
                drawn = best_legal(
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
