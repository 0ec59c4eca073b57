"""Turns with one fault in their markers: what a drafter's wrong guess, or a cut in a wrong place, leaves behind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def marker_faults(text: str, markers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(kind of fault, faulty text) for each marker of `text` left out, doubled, preceded by text, or moved.

    Kinds name the marker and not its position, so that a test can list them.
    """
    names = sorted(markers, key=len, reverse=True)
    pieces = [p for p in re.split("(" + "|".join(map(re.escape, names)) + ")", text) if p]
    for i, piece in enumerate(pieces):
        if piece not in names:
            continue
        before, after = "".join(pieces[:i]), "".join(pieces[i + 1 :])
        last = piece not in pieces[i + 1 :]
        yield f"without {'the last ' if last else ''}{piece}", before + after
        yield f"{piece} twice", before + piece * 2 + after
        yield f"text before {piece}", before + "zz" + piece + after
        if i:
            yield f"{piece} one place early", "".join(pieces[: i - 1]) + piece + pieces[i - 1] + after
