"""The world of report #17437: nine tokens, one kind of call, and targets that decide what follows a token.

The report names MSG = 6, TOK = 7, END = 8, a window of the drafts MSG TOK END behind an opener CH that the target
itself chose (the golden token), and the rule: keep a draft while u < min(1, p/q), else draw again and stop. The
other ids and all probabilities here are this replay's own. Nothing in this module decodes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from structured_commit import StructureTable, Vocabulary, compile_format

STOP, ALT, TXT, SPARE, GO, CH, MSG, TOK, END = range(9)
VOCAB = 9
NAMES = ("STOP", "ALT", "TXT", "SPARE", "GO", "CH", "MSG", "TOK", "END")
PROMPT = (GO, CH)  # a turn, and the golden opener
DRAFTS = (MSG, TOK, END)

# What became of a call.
DELIVERED, TERMINAL_INSIDE, MALFORMED, UNFINISHED = "delivered", "terminal inside", "malformed", "unfinished"


@cache
def calls_table() -> StructureTable:
    """Text and calls: CH MSG, at least one token of text, END. A turn may end outside of calls."""
    text = {ALT: b"a", TXT: b"b", SPARE: b"c", TOK: b"t"}
    controls = {NAMES[i]: i for i in (STOP, GO, CH, MSG, END)}
    turn = "[abct]*(?:(?<block>(?<header>«CH»«MSG»)[abct]+«END»)[abct]*)*"
    return compile_format(turn, Vocabulary(VOCAB, text, controls), terminals=("STOP",), turn_openers=("«GO»",))


Law = dict[int, dict[int, float]]


def rows(law: Law) -> Tensor:
    """[V, V] float32: the law of the next token behind each token; behind one that is not named, STOP is certain."""
    table = torch.zeros(VOCAB, VOCAB)
    table[:, STOP] = 1.0
    for last, following in law.items():
        table[last] = 0.0
        for token, probability in following.items():
            table[last, token] = probability
    return table


_OUTSIDE = {STOP: 0.5, TXT: 0.25, CH: 0.25}
CALLS_A_STREAM = 1 / (1 - _OUTSIDE[CH] / (_OUTSIDE[CH] + _OUTSIDE[STOP]))  # of a target that always closes them
_BODY = {ALT: 0.3, END: 0.7}

# The two cases of the report differ in whether the target wants the draft TOK.
AGREES: Law = {
    CH: {MSG: 1.0},
    MSG: {TOK: 0.95, ALT: 0.05},
    TOK: {END: 0.95, ALT: 0.05},
    ALT: _BODY,
    END: _OUTSIDE,
    TXT: _OUTSIDE,
}
REJECTS: Law = {**AGREES, MSG: {TOK: 0.1, ALT: 0.9}, TOK: _BODY}
# The same target, with a little mass where no well-formed turn has any.
LEAKS: Law = {
    **REJECTS,
    CH: {MSG: 0.93, TOK: 0.05, STOP: 0.02},
    MSG: {TOK: 0.1, ALT: 0.88, STOP: 0.02},
    TOK: {ALT: 0.3, END: 0.65, STOP: 0.05},
    ALT: {ALT: 0.3, END: 0.65, STOP: 0.05},
}
DRAFTER: Law = {
    CH: {MSG: 0.9, TOK: 0.1},
    MSG: {TOK: 0.9, ALT: 0.1},
    TOK: {END: 0.9, ALT: 0.1},
    ALT: {END: 0.9, ALT: 0.1},
    END: {STOP: 0.6, TXT: 0.2, CH: 0.2},
    TXT: {STOP: 0.6, TXT: 0.2, CH: 0.2},
}
# A greedy decoder of this target never begins a header that no parser reads; its drafter always does.
TORN: Law = {**REJECTS, CH: {MSG: 0.6, TOK: 0.4}}
CARELESS: Law = {**DRAFTER, CH: {MSG: 0.2, TOK: 0.8}}


@dataclass(frozen=True, slots=True)
class Call:
    """One opened call in a stream: what became of it, and where it opened and was decided."""

    outcome: str
    opened_at: int
    decided_at: int


def read_calls(tokens: Sequence[int]) -> list[Call]:
    """What a parser makes of a stream. It knows the format from this function alone, not from the automaton."""
    calls = []
    at = 0
    while at < len(tokens):
        if tokens[at] == CH:
            call = _read_call(tokens, at)
            calls.append(call)
            at = call.decided_at
        elif tokens[at] == STOP:
            break
        at += 1
    return calls


def _read_call(tokens: Sequence[int], opened_at: int) -> Call:
    malformed_at = None
    for at in range(opened_at + 1, len(tokens)):
        token, inside = tokens[at], at - opened_at
        if malformed_at is None and token != STOP:
            in_header, is_text = inside == 1, token in (ALT, TXT, SPARE, TOK)
            closes = token == END and inside > 2
            if not (token == MSG if in_header else is_text or closes):
                malformed_at = at
        if token in (END, STOP):
            outcome = TERMINAL_INSIDE if token == STOP else DELIVERED
            return Call(outcome if malformed_at is None else MALFORMED, opened_at, at)
    return Call(UNFINISHED if malformed_at is None else MALFORMED, opened_at, len(tokens))


def spell(tokens: Sequence[int]) -> str:
    """Tokens by name."""
    return " ".join(NAMES[t] for t in tokens)


def lost_shares(law: Law) -> dict[str, float]:
    """The exact share of opened calls that plain sampling from `law` loses, by cause."""
    p = rows(law).double()
    body = [MSG, TOK, ALT]
    stay = torch.eye(len(body), dtype=torch.float64) - p[body][:, body]
    stops = torch.linalg.solve(stay, p[body, STOP])[0]
    return {
        TERMINAL_INSIDE: float(p[CH, STOP] + p[CH, MSG] * stops),
        MALFORMED: float(1 - p[CH, STOP] - p[CH, MSG]),
    }
