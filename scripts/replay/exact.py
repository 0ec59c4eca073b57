"""The exact law of short streams, with and without speculation, in plain Python.

For one sentence of the verdict: rejection sampling leaves the law of the stream as it is. Every draft, acceptance
and redraw is enumerated; nothing is sampled and no tensor is used, so that this does not share code with the
reference rule it vouches for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .model import CH, STOP, Law

Stream = tuple[int, ...]


def plain_law(law: Law, length: int) -> dict[Stream, float]:
    """Streams of `length` tokens behind CH, or shorter ones that end with STOP: their probability under `law`."""
    return _grown(length, lambda last: [((token,), p) for token, p in law.get(last, {STOP: 1.0}).items()])


def speculative_law(law: Law, drafter: Law, num_drafts: int, length: int) -> dict[Stream, float]:
    """The same streams under rejection sampling with `num_drafts` drafts a window."""
    windows: dict[int, list[tuple[Stream, float]]] = {}

    def steps(last: int) -> list[tuple[Stream, float]]:
        if last not in windows:
            windows[last] = _windows(law, drafter, num_drafts, last)
        return windows[last]

    return _grown(length, steps)


def rejection_shares(law: Law, drafter: Law, drafts: Stream) -> list[float]:
    """For each of `drafts` behind CH: the probability that it is the first to be rejected."""
    shares, reached = [], 1.0
    for last, draft in zip((CH, *drafts), drafts):  # noqa: B905 - the last draft has no successor
        passes = min(1.0, law[last].get(draft, 0.0) / drafter[last][draft])
        shares.append(reached * (1.0 - passes))
        reached *= passes
    return shares


def largest_difference(a: dict[Stream, float], b: dict[Stream, float]) -> float:
    """The largest difference in the probability of one stream."""
    return max(abs(a.get(s, 0.0) - b.get(s, 0.0)) for s in a.keys() | b.keys())


def _windows(law: Law, drafter: Law, num_drafts: int, last: int) -> list[tuple[Stream, float]]:
    """Every window behind `last`, with its probability."""
    p, q = law.get(last, {STOP: 1.0}), drafter.get(last, {STOP: 1.0})
    if num_drafts == 0:
        return [((token,), mass) for token, mass in p.items() if mass]
    found: dict[Stream, float] = defaultdict(float)
    residual = {token: max(mass - q.get(token, 0.0), 0.0) for token, mass in p.items()}
    total = sum(residual.values())
    for draft, drafted in q.items():
        passes = min(1.0, p.get(draft, 0.0) / drafted)
        for rest, mass in _windows(law, drafter, num_drafts - 1, draft) if passes else ():
            found[(draft, *rest)] += drafted * passes * mass
        for token, mass in residual.items() if passes < 1.0 else ():
            found[(token,)] += drafted * (1.0 - passes) * mass / total
    return [(window, mass) for window, mass in found.items() if mass]


def _grown(length: int, steps: Callable[[int], list[tuple[Stream, float]]]) -> dict[Stream, float]:
    """The law of whole streams when `steps(last)` lists what may be added behind a token."""
    live: list[dict[Stream, float]] = [defaultdict(float) for _ in range(length)]
    whole: dict[Stream, float] = defaultdict(float)
    live[0][()] = 1.0
    for n in range(length):
        for stream, mass in live[n].items():
            for added, share in steps(stream[-1] if stream else CH):
                grown = _up_to_stop((*stream, *added))[:length]
                ends = len(grown) == length or grown[-1] == STOP
                (whole if ends else live[len(grown)])[grown] += mass * share
    return dict(whole)


def _up_to_stop(stream: Stream) -> Stream:
    return stream[: stream.index(STOP) + 1] if STOP in stream else stream
