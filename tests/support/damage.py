"""Damaged turns: what an interior rejection, a numeric slip or a confused model may leave of a well-formed one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from structured_commit import StructureTable


def damaged(
    choose: random.Random,
    ids: Sequence[int],
    controls: Sequence[int],
    fragments: Sequence[Sequence[int]],
    most: int = 3,
) -> tuple[int, ...]:
    """`ids` with one to `most` tokens deleted, doubled, swapped, replaced or put in, control tokens above all.

    `controls` are the ids to replace with and to put in, `fragments` the pieces of text to put in.
    """
    found = list(ids)
    for _ in range(choose.randint(1, most)):
        structural = [i for i, token in enumerate(found) if token in controls]
        where: Sequence[int] = structural if structural and choose.random() < 0.6 else range(len(found))
        if not where:
            break
        at = choose.choice(where)
        kind = choose.randrange(6)
        if kind == 0:
            del found[at]
        elif kind == 1:
            found.insert(at, found[at])
        elif kind == 2 and at:
            found[at - 1], found[at] = found[at], found[at - 1]
        elif kind == 3:
            found[at] = choose.choice(controls)
        elif kind == 4:
            found.insert(at, choose.choice(controls))
        else:
            found[at:at] = choose.choice(fragments)
    return tuple(found)


def blocks_opened(table: StructureTable, ids: Iterable[int], state: int | None = None) -> int:
    """How many blocks a turn opens, as the table's regions say."""
    host = table.host
    at = host.start if state is None else state
    count = 0
    for token in ids:
        following = host.step(at, token)
        count += host.block_open(following) and not host.block_open(at)
        at = following
    return count
