"""The commit as one Triton kernel: walk the window, apply the policy, write everything, one row per thread.

The same function as `plain.PlainCommit`, bit for bit. Nothing of the vocabulary's size is touched. A row whose illegal
token is to be redrawn gets here what it would get without a redraw (it is cut, or escapes), and is left in three
numbers for `kernel_repair`, which may then do better. Importing this module imports Triton.

Names as in `stage` and `plain`. All arithmetic is in int32 but for slots and addresses.
"""

import triton
import triton.language as tl

from .policy import COUNTERS, Event
from .table import IN_BLOCK, IN_HEADER

# Triton compiles again where an argument is 1, or a multiple of 16, and was not before; in a server that is a stall.
TABLE_AND_STATE = [
    "slots",
    "new_tokens",
    "new_lengths",
    "events",
    "urgency",
    "illegal_at",
    "state_before",
    "state",
    "steps",
    "repairs",
    "counters",
    "transitions",
    "escape_token",
    "batch",
    "width",
    "vocab",
    "num_slots",
    "num_classes",
    "ended",
    "illegal",
    "slots_row",
    "new_tokens_row",
    "new_tokens_column",
    "new_lengths_row",
]
UNSPECIALIZED = [
    *TABLE_AND_STATE,
    *["tokens", "lengths", "token_class", "flags", "max_repairs", "tokens_row", "tokens_column"],
    "lengths_row",
]

URGENT, PATIENT, IDLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_HEADER, _OPEN = tl.constexpr(IN_HEADER), tl.constexpr(IN_HEADER | IN_BLOCK)

ENDED, AFTER_END, TRIMMED = (tl.constexpr(int(e)) for e in (Event.ENDED, Event.AFTER_END, Event.TRIMMED))
ILLEGAL, REPAIRED, CUT = (tl.constexpr(int(e)) for e in (Event.ILLEGAL, Event.REPAIRED, Event.CUT))
ESCAPED, UNTRACKED = (tl.constexpr(int(e)) for e in (Event.ESCAPED, Event.UNTRACKED))
GATED, ROLLED_BACK = (tl.constexpr(int(e)) for e in (Event.GATED, Event.ROLLED_BACK))
ALIGNED = tl.constexpr(int(Event.ALIGNED))
OUT_OF_RANGE = tl.constexpr(int(Event.OUT_OF_RANGE))

N_WINDOWS, N_TOKENS_IN = (tl.constexpr(COUNTERS.index(n)) for n in ("windows", "tokens_in"))
N_COMMITTED, N_TRIMMED = (tl.constexpr(COUNTERS.index(n)) for n in ("tokens_committed", "trimmed"))
N_ILLEGAL, N_REPAIRED = (tl.constexpr(COUNTERS.index(n)) for n in ("illegal", "repaired"))
N_GATED, N_ROLLED_BACK = (tl.constexpr(COUNTERS.index(n)) for n in ("gated", "rolled_back"))
N_CUT, N_ESCAPED = (tl.constexpr(COUNTERS.index(n)) for n in ("cut", "escaped"))
N_UNTRACKED, N_ENDED = (tl.constexpr(COUNTERS.index(n)) for n in ("untracked", "ended"))
N_OUT_OF_RANGE, N_ALIGNED = (tl.constexpr(COUNTERS.index(n)) for n in ("out_of_range", "aligned"))


@triton.jit
def follow_state(transitions, state, token_class, num_classes, illegal, mask):
    """The state after a token of a class, −1 where that is illegal or masked out."""
    found = tl.load(transitions + state * num_classes + token_class, mask=mask, other=illegal).to(tl.int32)
    return tl.where(found == illegal, -1, found)


@triton.jit
def _class_of(token_class, token, vocab, mask):
    """Whether a token is one of the vocabulary, and its class if so."""
    known = mask & (token >= 0) & (token < vocab)
    return known, tl.load(token_class + token, mask=known, other=0).to(tl.int32)


@triton.jit
def _add(counter, amounts):
    total = tl.sum(amounts.to(tl.int32), axis=0)
    tl.atomic_add(counter, total.to(tl.int64), mask=total != 0, sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def commit_kernel(
    tokens,  # [B, W] int32
    lengths,  # [B] int32
    slots,  # [B] int64
    new_tokens,  # [B, W] int32, may be `tokens`
    new_lengths,  # [B] int32, may be `lengths`
    events,  # [B] int32
    urgency,  # [B] int32: URGENT, PATIENT or IDLE
    illegal_at,  # [B] int32: the column of the illegal token, 0 where IDLE
    state_before,  # [B] int32: the state before it
    state,  # [N + 1] int32
    steps,  # [N + 1] int64
    repairs,  # [N + 1] int32
    counters,  # [len(COUNTERS)] int64
    token_class,
    transitions,
    escape_token,
    flags,
    batch,
    width,
    vocab,
    num_slots,
    num_classes,
    ended,
    illegal,
    max_repairs,
    tokens_row,
    tokens_column,
    lengths_row,
    slots_row,
    new_tokens_row,
    new_tokens_column,
    new_lengths_row,
    POLICY: tl.constexpr,  # `CommitConfig.rule`
    REDRAWS: tl.constexpr,  # whether there is a distribution to redraw from
    ROWS: tl.constexpr,
):
    repairing: tl.constexpr = (POLICY != "observe") and (POLICY != "trim")
    stray = ended + 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < batch
    slot = tl.load(slots + row * slots_row, mask=live, other=num_slots)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, num_slots)
    given_length = tl.load(lengths + row * lengths_row, mask=live, other=1)
    length = tl.minimum(tl.maximum(given_length, 1), width)
    start = tl.load(state + slot, mask=live, other=0)
    spent = live
    if repairing and REDRAWS:
        spent = tl.load(repairs + slot, mask=live, other=0) >= max_repairs

    # The walk. Classes are loaded two columns ahead and tokens three, so that a column waits for its transition alone.
    row_tokens = tokens + row * tokens_row
    token = tl.load(row_tokens, mask=live, other=0)
    next_token = tl.load(row_tokens + tokens_column, mask=live & (length > 1), other=-1)
    far_token = tl.load(row_tokens + 2 * tokens_column, mask=live & (length > 2), other=-1)
    known, this_class = _class_of(token_class, token, vocab, live)
    next_known, next_class = _class_of(token_class, next_token, vocab, live)
    now = start
    end, at, before = length, length * 0 + width, start
    strange = row < 0
    stopped = row < 0  # an illegal token that is not let through has been met
    held_at, held_state = length * 0 + (width + 1), start  # how far gate, align or rollback let the row go
    if repairing and POLICY != "repair":
        start_flags = tl.load(flags + start, mask=live, other=0)
        now_flags = start_flags
    for i in range(width):
        inside = live & (i < length)
        far_known, far_class = _class_of(token_class, far_token, vocab, live)
        far_token = tl.load(row_tokens + (i + 3) * tokens_column, mask=live & (i + 3 < length), other=-1)

        tracked = (now != 0) & (now < ended)
        following = follow_state(transitions, now, this_class, num_classes, illegal, inside & known)
        following = tl.where(known, following, tl.where(tracked, -1, now))
        following = tl.where(inside, following, now)
        bad = following < 0
        passed_on = follow_state(transitions, stray, this_class, num_classes, illegal, bad & known)
        following = tl.where(bad, tl.where(known, passed_on, stray), following)
        at = tl.where(bad & (at == width), i, at)
        before = tl.where(bad & (at == i), now, before)
        end = tl.where((following == ended) & (now != ended), i + 1, end)
        strange = strange | (inside & ~known)
        if repairing:
            stays_out = ~spent if REDRAWS else i > 0
            stopped = stopped | (bad & stays_out)
            if POLICY != "repair":
                # Column i is legal, or let through, and before the end: ended and stray states have no flags.
                passes = inside & ~stopped
                next_flags = tl.load(flags + following, mask=passes, other=0)
                if POLICY == "gate":
                    opens = passes & ((next_flags & _HEADER) != 0)
                    if i == 0:
                        opens = opens | ((start_flags & _HEADER) != 0)
                    opens = opens & (held_at > width)
                    held_at = tl.where(opens, i + 1, held_at)
                    held_state = tl.where(opens, following, held_state)
                elif POLICY == "align":
                    crosses = passes & ((now_flags & _OPEN) != (next_flags & _OPEN)) & (held_at > width)
                    held_at = tl.where(crosses, i + 1, held_at)
                    held_state = tl.where(crosses, following, held_state)
                else:
                    opens = passes & ((now_flags & _OPEN) == 0) & ((next_flags & _OPEN) != 0)
                    held_at = tl.where(opens, i, held_at)
                    held_state = tl.where(opens, now, held_state)
                now_flags = tl.where(passes, next_flags, now_flags)
        now = following
        known, this_class = next_known, next_class
        next_known, next_class = far_known, far_class

    # The policy. `now` is the state at `end`, and at `length`: nothing leaves the ended state.
    after_end = live & (start == ended)
    terminal = (now == ended) & ~after_end
    said = tl.where(after_end, AFTER_END, 0) | tl.where((given_length != length) | strange, OUT_OF_RANGE, 0)
    kept = tl.where(after_end, 1, end)
    trimmed = tl.where(terminal, length - end, 0)
    final, first, put_off = now, 0, end * 0
    if not repairing:
        said = said | tl.where(terminal, ENDED, 0) | tl.where(trimmed > 0, TRIMMED, 0)
        said = said | tl.where(at < end, ILLEGAL | UNTRACKED, 0)
        committed = kept
        if POLICY == "observe":
            committed = length
    else:
        has_illegal = at < width
        if not REDRAWS:
            spent = at == 0
        waits = has_illegal & ~spent
        legal_end = tl.where(waits, at, kept)
        legal_state = tl.where(waits, before, now)
        limit = held_at
        if POLICY == "rollback":
            still_open = (tl.load(flags + legal_state, mask=live, other=0) & _OPEN) != 0
            limit = tl.where(still_open & (held_at > 0), held_at, width + 1)
        is_held = limit < legal_end
        postponed = tl.minimum(limit, legal_end)
        final = tl.where(is_held, held_state, legal_state)
        mends = live & waits & (limit > at)
        let_through = has_illegal & spent & (at < postponed)
        reached = (final == ended) & ~after_end
        trimmed = tl.where(reached, length - postponed, 0)
        put_off = legal_end - postponed

        # What a row gets where it is not redrawn: at its first column it escapes, behind that it is cut.
        escapes = mends & (at == 0)
        first = tl.load(escape_token + before, mask=escapes, other=0)
        first_class = tl.load(token_class + first, mask=escapes, other=0).to(tl.int32)
        mended = follow_state(transitions, before, first_class, num_classes, illegal, escapes)
        final = tl.where(escapes, mended, final)
        committed = tl.where(escapes, 1, postponed)
        reached = reached | (escapes & (mended == ended))

        said = said | tl.where(reached, ENDED, 0) | tl.where(trimmed > 0, TRIMMED, 0)
        said = said | tl.where(mends | let_through, ILLEGAL, 0) | tl.where(let_through, UNTRACKED, 0)
        said = said | tl.where(escapes, REPAIRED | ESCAPED, 0) | tl.where(mends & ~escapes, CUT, 0)
        held_event: tl.constexpr = ROLLED_BACK if POLICY == "rollback" else ALIGNED if POLICY == "align" else GATED
        said = said | tl.where((put_off > 0) | (waits & ~mends), held_event, 0)
        tl.store(urgency + row, tl.where(mends, tl.where(escapes, URGENT, PATIENT), IDLE), mask=live)
        tl.store(illegal_at + row, tl.where(mends, at, 0), mask=live)
        tl.store(state_before + row, before, mask=live)
        tl.atomic_add(repairs + slot, 1, mask=escapes, sem="relaxed")

    if POLICY != "observe":
        last = first + end * 0
        for i in range(width):
            token = tl.load(row_tokens + i * tokens_column, mask=live & (i < committed), other=0)
            if repairing:
                token = tl.where(escapes, first, token)  # its one token; the row commits no other
            last = tl.where(i < committed, token, last)
            tl.store(new_tokens + row * new_tokens_row + i * new_tokens_column, last, mask=live)
        tl.store(new_lengths + row * new_lengths_row, committed, mask=live)
    tl.store(events + row, said, mask=live)
    tl.store(state + slot, tl.where(slot < num_slots, final, 0), mask=live)
    # Rows without a slot share the last one.
    tl.atomic_add(steps + slot, 1, mask=live, sem="relaxed")

    counted = live & (slot < num_slots) & ~after_end
    _add(counters + N_WINDOWS, counted)
    _add(counters + N_TOKENS_IN, tl.where(counted, length, 0))
    _add(counters + N_COMMITTED, tl.where(counted, committed, 0))
    _add(counters + N_TRIMMED, tl.where(counted, trimmed, 0))
    _add(counters + N_ILLEGAL, counted & ((said & ILLEGAL) != 0))
    _add(counters + N_UNTRACKED, counted & ((said & UNTRACKED) != 0))
    _add(counters + N_ENDED, counted & ((said & ENDED) != 0))
    _add(counters + N_OUT_OF_RANGE, counted & ((said & OUT_OF_RANGE) != 0))
    if repairing:
        _add(counters + N_REPAIRED, counted & ((said & REPAIRED) != 0))
        _add(counters + N_CUT, counted & ((said & CUT) != 0))
        _add(counters + N_ESCAPED, counted & ((said & ESCAPED) != 0))
        if POLICY == "gate":
            _add(counters + N_GATED, tl.where(counted, put_off, 0))
        if POLICY == "align":
            _add(counters + N_ALIGNED, tl.where(counted, put_off, 0))
        if POLICY == "rollback":
            _add(counters + N_ROLLED_BACK, tl.where(counted, put_off, 0))
