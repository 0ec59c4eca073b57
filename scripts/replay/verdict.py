"""The figures of the replay and the verdict on them: measure first, then ask of each sentence whether it holds.

A sentence that its figures do not support is reported as such; nothing here knows what the answer should be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from structured_commit import Policy

from .decoding import NUM_DRAFTS, Run, Window, decode, one_window
from .exact import largest_difference, plain_law, rejection_shares, speculative_law
from .model import (
    AGREES,
    CALLS_A_STREAM,
    CARELESS,
    DELIVERED,
    DRAFTER,
    DRAFTS,
    LEAKS,
    MALFORMED,
    REJECTS,
    TERMINAL_INSIDE,
    TORN,
    UNFINISHED,
    lost_shares,
)

POLICIES = tuple(policy.value for policy in Policy)
CASES = {"agrees": AGREES, "rejects": REJECTS}
LAW_LENGTH = 7  # tokens of the streams whose law is written out
SHORT = 2  # tokens, a length limit inside the first call
EQUAL = 1e-12
CHANCE = 4.0  # standard errors: measured shares of an exact one lie further away once in 16,000 times


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of the calls of one run.

    Attributes:
        windows: windows accepted; verbatim: of these, committed token for token; accepted: tokens in them.
        output: tokens output. behind_terminal: committed behind a terminal, and so not output.
        opened: calls; delivered, terminal_inside, malformed, unfinished: what became of them.
        rejected_inside: windows that ended in a rejection and left a call open.
        windows_of_longest_call: windows it took to decide the call that took longest.
        repaired: tokens redrawn.
    """

    target: str
    policy: str
    num_drafts: int
    streams: int
    windows: int
    verbatim: int
    accepted: int
    output: int
    opened: int
    delivered: int
    terminal_inside: int
    malformed: int
    unfinished: int
    rejected_inside: int
    windows_of_longest_call: int
    behind_terminal: int
    repaired: int

    @property
    def lost(self) -> int:
        return self.terminal_inside + self.malformed

    @property
    def opened_per_stream(self) -> float:
        return self.opened / self.streams

    @property
    def tokens_per_window(self) -> float:
        return self.output / self.windows


@dataclass(frozen=True, slots=True)
class Greedy:
    """One greedy stream of a torn target: how it was accepted, under which policy, its tokens and its first call."""

    acceptance: str
    policy: str
    tokens: tuple[int, ...]
    outcome: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything the replay measures; see `measure`."""

    one_window: dict[tuple[str, str], Window]
    interior_rejection: dict[str, float]
    law_streams: int
    law_difference: float
    sound: dict[str, Ending]
    leaking: dict[str, Ending]
    plain: Ending
    short: tuple[Ending, Ending]
    exact_lost: dict[str, float]
    greedy: tuple[Greedy, ...]


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence of the verdict, the claim it belongs to, the figures it rests on, and whether they support it."""

    claim: str
    text: str
    evidence: str
    holds: bool


def measure(requests: int, seed: int) -> Figures:
    """Run the two cases of the report, then the same streams to their end, then what does lose calls."""
    laws = [(plain_law(t, LAW_LENGTH), speculative_law(t, DRAFTER, NUM_DRAFTS, LAW_LENGTH)) for t in (REJECTS, LEAKS)]
    size = {"requests": requests, "seed": seed}
    return Figures(
        one_window={(c, p): one_window(CASES[c], DRAFTER, p, seed) for c in CASES for p in POLICIES},
        interior_rejection={c: sum(rejection_shares(CASES[c], DRAFTER, DRAFTS)) for c in CASES},
        law_streams=sum(len(plain) for plain, _ in laws),
        law_difference=max(largest_difference(*pair) for pair in laws),
        sound={p: _ending("sound", p, decode(REJECTS, DRAFTER, p, **size)) for p in POLICIES},
        leaking={p: _ending("leaking", p, decode(LEAKS, DRAFTER, p, **size)) for p in POLICIES},
        plain=_ending("leaking", "off", decode(LEAKS, DRAFTER, "off", num_drafts=0, **size), 0),
        short=tuple(
            _ending("sound", "off", decode(REJECTS, DRAFTER, "off", num_drafts=k, max_tokens=SHORT, **size), k)
            for k in (0, NUM_DRAFTS)
        ),
        exact_lost=lost_shares(LEAKS),
        greedy=tuple(_greedy(a, p) for a, p in (("strict", "off"), ("relaxed", "off"), ("relaxed", "repair"))),
    )


def judge(figures: Figures) -> list[Sentence]:
    """The three claims, sentence by sentence, and what the stage makes of the third."""
    return [
        *_prefix_emission(figures),
        *_no_rollback(figures),
        *_interior_rejection(figures),
        *_what_loses(figures),
        *_the_stage(figures),
    ]


def _prefix_emission(f: Figures) -> list[Sentence]:
    window, run = f.one_window["rejects", "off"], f.leaking["off"]
    return [
        Sentence(
            "1",
            "Prefix emission holds: what was accepted becomes output as it is.",
            f"{run.verbatim} of {run.windows} windows were output token for token",
            run.verbatim == run.windows and window.accepted == window.committed,
        )
    ]


def _no_rollback(f: Figures) -> list[Sentence]:
    run = f.leaking["off"]
    return [
        Sentence(
            "2",
            "No rollback holds: nothing takes accepted tokens back; the host only shortens at its end.",
            f"{run.accepted} tokens accepted, {run.output} output, {run.behind_terminal} dropped behind a terminal",
            run.accepted == run.output + run.behind_terminal,
        )
    ]


def _interior_rejection(f: Figures) -> list[Sentence]:
    window, run = f.one_window["rejects", "off"], f.sound["off"]
    return [
        Sentence(
            "3",
            "Exact rejection sampling leaves the law of the stream equal to the target's.",
            f"largest difference {f.law_difference:.0e} over {f.law_streams} streams, all outcomes enumerated",
            f.law_difference < EQUAL,
        ),
        Sentence(
            "3",
            "The report's replay stops after one window, where an interior rejection leaves the call open.",
            f"probability {f.interior_rejection['rejects']:.3f}; at this seed the call is {window.call.outcome}",
            window.rejected and window.call.outcome == UNFINISHED,
        ),
        Sentence(
            "3",
            "The engine goes on and closes it: an interior rejection alone loses no call.",
            f"{run.rejected_inside} windows left a call open after a rejection; {run.delivered} of {run.opened} calls "
            f"delivered, each within {run.windows_of_longest_call} windows",
            run.rejected_inside > 0 and run.delivered == run.opened,
        ),
    ]


def _what_loses(f: Figures) -> list[Sentence]:
    run, plain = f.leaking["off"], f.plain
    exact = sum(f.exact_lost.values())
    errors = [_standard_errors(r.lost, r.opened, exact) for r in (run, plain)]
    limited, speculated = f.short
    strict, relaxed, mended = f.greedy
    return [
        Sentence(
            "3",
            "A call is lost when a terminal is committed in an open block, or a header that no parser reads; by "
            "nothing else.",
            f"{run.opened} calls opened = {run.delivered} delivered + {run.terminal_inside} terminal inside + "
            f"{run.malformed} malformed",
            min(run.terminal_inside, run.malformed) > 0 and run.opened == run.delivered + run.lost,
        ),
        Sentence(
            "3",
            "Both happen without speculation, and no more often with it.",
            f"lost {plain.lost / plain.opened:.2%} without, {run.lost / run.opened:.2%} with, exactly {exact:.2%} "
            f"({errors[1]:+.1f} and {errors[0]:+.1f} standard errors)",
            plain.lost > 0 and max(map(abs, errors)) < CHANCE,
        ),
        Sentence(
            "3",
            "A length limit also leaves calls open, with or without speculation, but says so: finish reason length.",
            f"limit of {SHORT} tokens: {limited.unfinished} of {limited.opened} without, {speculated.unfinished} of "
            f"{speculated.opened} with",
            min(limited.unfinished, speculated.unfinished) > 0 == limited.lost + speculated.lost,
        ),
        Sentence(
            "3",
            "Speculation adds paths of its own, such as relaxed acceptance.",
            f"the same greedy target and drafts: strict {strict.outcome}, relaxed {relaxed.outcome}, relaxed with "
            f"repair {mended.outcome}",
            [g.outcome for g in f.greedy] == [DELIVERED, MALFORMED, DELIVERED],
        ),
    ]


def _the_stage(f: Figures) -> list[Sentence]:
    mends = [f.leaking[policy] for policy in POLICIES if Policy(policy).repairs]
    opened = {policy: (run.opened_per_stream, _standard_errors_of_opened(run)) for policy, run in f.sound.items()}
    exact = [abs(errors) < CHANCE for policy, (_, errors) in opened.items() if policy != "rollback"]
    return [
        Sentence(
            "stage",
            "With the stage repairing, every opened call of the same target is delivered.",
            "; ".join(f"{run.policy} lost {run.lost} of {run.opened}" for run in mends),
            all(run.delivered == run.opened > 0 for run in mends),
        ),
        Sentence(
            "stage",
            "Only rollback changes how often a sound target opens a call: it looks at what it discards.",
            f"calls a stream: exactly {CALLS_A_STREAM:.2f}; "
            + ", ".join(f"{policy} {mean:.2f}" for policy, (mean, _) in opened.items())
            + f" ({opened['rollback'][1]:+.0f} standard errors)",
            all(exact) and abs(opened["rollback"][1]) > CHANCE,
        ),
    ]


def _standard_errors(count: int, total: int, share: float) -> float:
    return (count / total - share) / (share * (1 - share) / total) ** 0.5


def _standard_errors_of_opened(run: Ending) -> float:
    """The number of calls of a stream is geometric: one, and another as long as the target opens one before STOP."""
    variance = CALLS_A_STREAM * (CALLS_A_STREAM - 1)
    return (run.opened_per_stream - CALLS_A_STREAM) / (variance / run.streams) ** 0.5


def _ending(target: str, policy: str, run: Run, num_drafts: int = NUM_DRAFTS) -> Ending:
    calls = [(stream, call) for stream in run.streams for call in stream.calls]
    outcomes = Counter(call.outcome for _, call in calls)
    spans = [stream.window_of(c.decided_at) - stream.window_of(c.opened_at) for stream, c in calls]
    return Ending(
        target=target,
        policy=policy,
        num_drafts=num_drafts,
        streams=len(run.streams),
        windows=run.windows,
        verbatim=run.verbatim,
        accepted=run.accepted,
        output=sum(len(stream.tokens) - 1 for stream in run.streams),
        opened=len(calls),
        delivered=outcomes[DELIVERED],
        terminal_inside=outcomes[TERMINAL_INSIDE],
        malformed=outcomes[MALFORMED],
        unfinished=outcomes[UNFINISHED],
        rejected_inside=run.rejected_inside,
        windows_of_longest_call=max(spans),
        behind_terminal=run.dropped_behind_terminal,
        repaired=run.repaired,
    )


def _greedy(acceptance: str, policy: str) -> Greedy:
    run = decode(TORN, CARELESS, policy, requests=1, seed=0, acceptance=acceptance)
    stream = run.streams[0]
    return Greedy(acceptance, policy, tuple(stream.tokens), stream.calls[0].outcome)
