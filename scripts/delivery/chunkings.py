"""The deltas that speculation makes of a turn, and the shapes that reports name.

Sizes 1 to 16 as constant steps, random sizes, and three deltas cut at every pair of boundaries, where a boundary is the
token border at or before, and at or behind, each end of a part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from .turns import BODY, CLOSE, OPEN, TEXT, THOUGHT, Turn

SIZES = range(1, 17)

Cuts = tuple[int, ...]
"""Where deltas end, in tokens; the end of the turn goes without saying."""


def chunkings(turn: Turn, tokens: Sequence[bytes], seed: int, randoms: int, pairs: int | None) -> Iterator[Cuts]:
    """Chunkings of a turn, `randoms` of them of random sizes; at most `pairs` pairs of boundaries (None: all)."""
    end = len(tokens)
    for size in SIZES:
        yield tuple(range(size, end, size))
    choose = random.Random(seed)
    for _ in range(randoms):
        cuts, at = [], choose.randint(1, 16)
        while at < end:
            cuts.append(at)
            at += choose.randint(1, 16)
        yield tuple(cuts)
    found = list(combinations(boundaries(turn, tokens), 2))
    if pairs is not None and len(found) > pairs:
        found = sorted(choose.sample(found, pairs))
    yield from found


def boundaries(turn: Turn, tokens: Sequence[bytes]) -> list[int]:
    """Token borders beside the ends of the turn's parts."""
    ends, at = [], 0
    for _, text in turn.parts:
        at += len(text.encode())
        ends.append(at)
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(token))
    found = set()
    for end in ends:
        found.add(max(i for i, start in enumerate(starts) if start <= end))
        found.add(min(i for i, start in enumerate(starts) if start >= end))
    return sorted(found - {0, len(tokens)})


def shapes(turn: Turn) -> dict[str, tuple[Turn, list[str]]]:
    """The seven shapes in which reports see calls lost, as a turn and its deltas, made of a turn of two calls or more.

    The shapes that begin before the first call need a turn with reasoning and with text there; those that follow the
    last call, a turn that does not stop at its terminal.
    """
    kinds, texts = [kind for kind, _ in turn.parts], [text for _, text in turn.parts]
    first, second = [i for i, kind in enumerate(kinds) if kind == OPEN][:2]
    before, last = "".join(texts[:first]), len(texts) - 1
    body = max((i for i in range(first, second) if kinds[i] == BODY), default=first)
    middle, half = len(texts[body]) // 2, len(texts[last]) // 2 if kinds[last] == BODY else 0
    found = {
        "a whole call in one delta": [before, "".join(texts[first:second]), *texts[second:]],
        "several calls in one delta": [before, "".join(texts[first:])],
        "end fused with start": [
            *texts[:body],
            texts[body][:middle],
            texts[body][middle:] + "".join(texts[body + 1 : second + 1]),
            *texts[second + 1 :],
        ],
    }
    if TEXT in kinds[:first]:
        begun, rest = texts[first - 1][:3], texts[first - 1][3:]
        found["a call start in mid-stream"] = [*texts[: first - 1], begun, rest + texts[first], *texts[first + 1 :]]
    if THOUGHT in kinds and TEXT in kinds[:first]:
        at = max(texts[0].rfind("<"), texts[0].rfind("[/"))
        closer = texts[0][at:] + "".join(texts[1 : first + 1])
        found["reasoning end, text and call start"] = [texts[0][:at], closer, *texts[first + 1 :]]
    made = {name: (turn, deltas) for name, deltas in found.items()}
    stopped = texts[last].endswith("<|call|>")  # a terminal: nothing can follow
    for name, behind in () if stopped else (("end and newline", "\n"), ("end and text", " Done.")):
        longer = Turn((*turn.parts, (TEXT, behind)), name)
        made[name] = longer, [*texts[:last], texts[last][:half], texts[last][half:] + behind]
    return {name: (made_of, [delta for delta in deltas if delta]) for name, (made_of, deltas) in made.items()}


SHAPES = (
    "reasoning end, text and call start",
    "a call start in mid-stream",
    "end and newline",
    "end and text",
    "a whole call in one delta",
    "several calls in one delta",
    "end fused with start",
)


def report_41967() -> tuple[Turn, list[str]]:
    """The turn of vllm report 41967, Gemma 4 with two calls of one tool, and the delta that ends one, starts the next.

    The comment that reproduces it with a stream interval has every delta of 12 tokens; those are among `chunkings`.
    """
    parts: list[tuple[str, str]] = []
    for city in ("Milano", "Piacenza"):
        parts += [
            (OPEN, "<|tool_call>call:getStationInfo{"),
            (BODY, f'location:<|"|>{city}<|"|>}}'),
            (CLOSE, "<tool_call|>"),
        ]
    texts = [text for _, text in parts]
    return Turn(tuple(parts), "vllm 41967"), [texts[0], texts[1][:-1], "}" + texts[2] + texts[3], *texts[4:]]
