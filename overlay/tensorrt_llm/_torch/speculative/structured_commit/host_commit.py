"""The stage on a CPU: a look first, and plain torch only where a batch holds something to act on.

On a CPU nothing waits when a value is read, so an ordinary step (every window legal and open-ended) is one walk through
a table that sends whatever a policy would act on to a state of its own, *special*. A batch whose rows all stay clear of
it is committed as it is; any other goes through `PlainCommit` from the start. Same results to the bit. In numpy, whose
calls on a few hundred numbers cost a fraction of torch's; importing this module imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .plain import CommitOutput, PlainCommit
from .policy import COUNTERS, Policy
from .repair import Distribution
from .table import IN_BLOCK, IN_HEADER

if TYPE_CHECKING:
    from .stage import CommitStage


class HostCommit(PlainCommit):
    """`CommitStage.commit` for a stage on the CPU."""

    name = "host"

    def __init__(self, stage: CommitStage) -> None:
        super().__init__(stage)
        table = stage.table
        # One more class, for columns past a row's length: it changes no state.
        self._classes = np.append(table.token_class.numpy(), table.num_classes).astype(np.int32)
        self._stride = table.num_classes + 1
        self._walk = self._ordinary_steps().numpy()
        self._special = int(self._walk.max())
        self._columns = np.arange(stage.max_window)[:, None]
        self._state, self._steps, self._counters = (t.numpy() for t in (stage.state, stage.steps, stage.counters))
        self._windows = COUNTERS.index("windows")
        self._tokens = [COUNTERS.index("tokens_in"), COUNTERS.index("tokens_committed")]

    def commit(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> CommitOutput:
        """As `CommitStage.commit`, its arguments checked; `given` is None where nothing can be redrawn."""
        windows, counts, width = tokens.numpy().T, lengths.numpy(), tokens.shape[1]
        least = counts.min()
        inside = None if least == width else self._columns[:width] < counts
        if least < 1 or counts.max() > width or not self._commit_ordinary(windows, counts, slots.numpy(), inside):
            return super().commit(tokens, lengths, slots, given)
        events = torch.zeros_like(lengths)
        if self.config.policy is Policy.OBSERVE:
            return CommitOutput(tokens, lengths, events)
        if inside is None:
            return CommitOutput(tokens.clone(), lengths.clone(), events)
        kept = np.where(inside, windows, windows[counts - 1, np.arange(len(counts))])
        return CommitOutput(torch.from_numpy(kept.T.copy()), lengths.clone(), events)

    def _commit_ordinary(
        self, windows: np.ndarray, counts: np.ndarray, slots: np.ndarray, inside: np.ndarray | None
    ) -> bool:
        """Move states, steps and counters on if every row is ordinary, else change nothing.

        Args:
            windows: [W, B] int32. counts: [B] int32, in [1, W]. slots: [B] int64.
            inside: [W, B] bool, the columns inside the lengths; None if all are.
        """
        num_slots, vocab = self.stage.num_slots, self.table.vocab_size
        last = slots.max()
        if slots.min() < 0 or last > num_slots:
            return False
        wanted = windows
        if inside is not None:
            wanted = np.where(inside, windows, vocab)
            if (windows == vocab).any():  # it would pass for a column past the length
                return False
        if wanted.min() < 0 or wanted.max() > (vocab - 1 if inside is None else vocab):
            return False
        classes = self._classes[wanted]
        at = self._state[slots] * self._stride
        for column in classes:
            at = self._walk[at + column]
        if at.max() == self._special:
            return False
        self._state[slots] = at // self._stride
        rows, total = len(slots), int(counts.sum())
        if last < num_slots:
            self._steps[slots] += 1
        else:  # rows without a slot share the last one
            np.add.at(self._steps, slots, 1)
            real = slots < num_slots
            rows, total = int(real.sum()), int(counts[real].sum())
        self._counters[self._windows] += rows
        self._counters[self._tokens] += total
        return True

    def _redraws(self, mends: Tensor) -> int:
        return min(self.config.repair_rows, int(mends.sum()))

    def _ordinary_steps(self) -> Tensor:
        """[(S + 3)·(C + 1)] int32: from state·(C + 1) + class to the next state·(C + 1). The last state is special."""
        table, policy = self.table, self.config.policy
        flags = table.extended_flags
        follow = table.transitions.int()
        after = follow.clamp(min=0).long()
        special = (follow < 0) | (follow == table.ended)
        if policy is Policy.GATE:
            header = (flags & IN_HEADER) != 0
            special |= header[:, None] | header[after]
        if self.config.align:
            region = flags & (IN_BLOCK | IN_HEADER)
            special |= region[:, None] != region[after]
        if policy is Policy.ROLLBACK:
            is_open = (flags & (IN_BLOCK | IN_HEADER)) != 0
            special |= ~is_open[:, None] & is_open[after]
        special[0] = False  # untracked: nothing is looked at, terminals included
        stays = torch.arange(len(follow), dtype=torch.int32)[:, None]
        steps = torch.cat([torch.where(special, len(follow), follow), stays], dim=1)
        steps = torch.cat([steps, torch.full_like(steps[:1], len(follow))])
        return steps.mul_(self._stride).flatten()
