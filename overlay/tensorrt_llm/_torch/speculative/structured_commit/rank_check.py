"""A debug switch: ranks that must commit the same compare what they committed, every so many steps.

Under tensor parallelism every rank is given the same inputs, so the stage needs no communication, and has none but
this. `record` runs inside a captured graph: static shapes, no wait for the device. `next_step` runs on the host; once
in `every` steps it waits for the device and calls one collective, so all ranks of a group must take part: it has no
place under attention data parallelism, where each rank owns other requests. Knows nothing of policies and formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import RankMismatchError
from .log import log

if TYPE_CHECKING:
    from .stage import CommitStage

Gather = Callable[[object], list]  # from each rank's object to those of all ranks, in rank order
_Report = tuple[list[list[int]], list[list[int]]]  # of each step: the slot of each row; the checksum of each row

_FACTOR = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier; odd, so one differing value always shows
_OUTSIDE = -1


class RankCheck:
    """Checksums of the last `every` steps, row by row.

    Args:
        every: compare once in so many steps.
        gather: called by every rank of the group at the same steps.
        max_rows: the largest batch.
        device: the stage's.
    """

    def __init__(self, every: int, gather: Gather, max_rows: int, device: torch.device | str) -> None:
        self.every = every
        self._gather, self._max_rows = gather, max_rows
        self._history = torch.zeros(every * max_rows, dtype=torch.int64, device=device)
        self._row = torch.arange(max_rows, device=device)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)  # where in the history this step writes
        self._slots: list[list[int]] = [[] for _ in range(every)]
        self._steps = 0
        self._failure: str | None = None

    def next_step(self) -> None:
        """Begin a step. Host side, outside any captured graph, once a step on every rank.

        Raises:
            RankMismatchError: ranks committed different things; from then on at every call, on every rank.
        """
        if self._failure is None and self._steps and self._steps % self.every == 0:
            self._failure = self._compare()
        if self._failure is not None:
            raise RankMismatchError(self._failure)
        place = self._steps % self.every
        start = place * self._max_rows
        self._slots[place] = []
        self._start.fill_(start)
        self._history[start : start + self._max_rows].zero_()
        self._steps += 1

    def name_rows(self, slots: Sequence[int]) -> None:
        """Say which slot each row of the step has."""
        self._slots[(self._steps - 1) % self.every] = list(slots)

    def record(self, stage: CommitStage, tokens: Tensor, lengths: Tensor, slots: Tensor) -> None:
        """Note what a step committed: tokens [B, W] int32, lengths [B] int32, slots [B] int64, and their new state."""
        slot = torch.where((slots >= 0) & (slots < stage.num_slots), slots, stage.num_slots)
        checksum = lengths.long()
        for column in range(tokens.shape[1]):
            token = torch.where(column < lengths, tokens[:, column].long(), _OUTSIDE)
            checksum = checksum * _FACTOR + token
        for value in (stage.state, stage.steps, stage.repairs):
            checksum = checksum * _FACTOR + value[slot].long()
        checksum = torch.where(slot < stage.num_slots, checksum, 0)  # what rows without a slot hold is nobody's
        self._history.index_copy_(0, self._start + self._row[: len(checksum)], checksum)

    def _compare(self) -> str | None:
        used = max(map(len, self._slots))
        history = self._history.view(self.every, self._max_rows)[:, :used].tolist()
        message = first_difference(self._gather((self._slots, history)), self._steps - self.every + 1)
        if message is not None:
            log.error(message)
        return message


def first_difference(reports: Sequence[_Report], first_step: int) -> str | None:
    """What to say of the first row in which the ranks' reports differ, or None if they are all the same."""
    if all(report == reports[0] for report in reports):
        return None
    for place in range(len(reports[0][0])):
        steps = [(slots[place], history[place]) for slots, history in reports]
        for row in range(max(len(checksums) for _, checksums in steps)):
            seen = [
                (slots[row] if row < len(slots) else None, checksums[row] if row < len(checksums) else 0)
                for slots, checksums in steps
            ]
            if any(value != seen[0] for value in seen):
                return _describe(seen, first_step + place, row)
    return None


def tensor_parallel_gather(model_engine, mapping) -> Gather | None:
    """The engine's own collective over its tensor-parallel group; None where no two ranks own the same requests."""
    if getattr(mapping, "enable_attention_dp", False) or getattr(mapping, "tp_size", 1) < 2:
        return None
    return getattr(getattr(model_engine, "dist", None), "tp_allgather", None)


def _describe(seen: list[tuple[int | None, int]], step: int, row: int) -> str:
    usual = max(seen, key=lambda value: (seen.count(value), -seen.index(value)))
    others = [rank for rank, value in enumerate(seen) if value != usual]
    who = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return (
        f"structured_commit: in step {step}, row {row} (slot {usual[0]}), {who} committed something else than rank "
        f"{seen.index(usual)}. Ranks of a tensor-parallel group must be given the same logits, drafts and seeds; "
        "compare those of that step"
    )
