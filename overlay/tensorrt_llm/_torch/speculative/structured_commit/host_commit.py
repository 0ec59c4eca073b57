"""The stage on a CPU: a look first, and plain torch only where a batch holds something to act on.

On a CPU nothing waits when a value is read, so an ordinary step (every window legal and open-ended) is one walk
through a table that sends whatever a policy would act on to a state of its own, *special*. A batch whose rows all stay
clear of it is committed as it is; any other goes through `PlainCommit` from the start. Same results to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        self._classes = torch.cat([table.token_class, table.token_class.new_tensor([table.num_classes])]).int()
        self._stride = table.num_classes + 1
        self._walk = self._ordinary_steps()
        self._special = int(self._walk.max())
        self._columns = torch.arange(stage.max_window)[:, None]
        self._ones = torch.ones(1, dtype=torch.int64)
        names = torch.tensor([[n == "windows", n in ("tokens_in", "tokens_committed")] for n in COUNTERS])
        self._per_window, self._per_token = names.long().unbind(1)

    def commit(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> CommitOutput:
        """As `CommitStage.commit`, its arguments checked; `given` is None where nothing can be redrawn."""
        inside = self._commit_ordinary(tokens, lengths, slots)
        if inside is None:
            return super().commit(tokens, lengths, slots, given)
        events = torch.zeros_like(lengths)
        if self.config.policy is Policy.OBSERVE:
            return CommitOutput(tokens, lengths, events)
        last = tokens.gather(1, (lengths - 1)[:, None].long())
        return CommitOutput(torch.where(inside.T, tokens, last), lengths.clone(), events)

    def _commit_ordinary(self, tokens: Tensor, lengths: Tensor, slots: Tensor) -> Tensor | None:
        """Move states, steps and counters on if every row is ordinary. Returns [W, B] bool, the columns inside their
        row's length; None if some row is not ordinary, and nothing is changed then."""
        stage, width, vocab = self.stage, tokens.shape[1], self.table.vocab_size
        least, most = torch.aminmax(lengths)
        lowest, highest = torch.aminmax(slots)
        if int(least) < 1 or int(most) > width or int(lowest) < 0 or int(highest) > stage.num_slots:
            return None
        inside = self._columns[:width] < lengths
        wanted = torch.where(inside, tokens.T, vocab)
        low, high = torch.aminmax(wanted)
        if int(low) < 0 or int(high) > vocab or (int(high) == vocab and bool((inside & (vocab == tokens.T)).any())):
            return None
        classes = self._classes.index_select(0, wanted.reshape(-1)).view(width, -1)
        at = stage.state.index_select(0, slots).mul_(self._stride)
        for column in classes[: int(most)].unbind(0):
            at = self._walk.index_select(0, at + column)
        if int(at.max()) == self._special:
            return None
        stage.state.index_copy_(0, slots, at.div_(self._stride, rounding_mode="floor"))
        stage.steps.index_add_(0, slots, self._ones.expand(len(slots)))
        real = slots < stage.num_slots if int(highest) == stage.num_slots else None
        rows = len(slots) if real is None else int(real.sum())
        total = int(lengths.sum() if real is None else (lengths * real).sum())
        stage.counters.add_(self._per_window * rows + self._per_token * total)
        return inside

    def _redraws(self, mends: Tensor) -> int:
        return min(self.config.repair_rows, int(mends.sum()))

    def _ordinary_steps(self) -> Tensor:
        """[(S + 3)·(C + 1)] int32: from state·(C + 1) + class to the next state·(C + 1). The last state is special."""
        table, policy = self.table, self.config.policy
        states = table.num_states + 2
        flags = table.extended_flags
        follow = table.transitions.int()
        special = follow < 0
        special |= follow == table.ended
        if policy is Policy.GATE:
            header = (flags & IN_HEADER) != 0
            special |= header[:, None] | header[follow.clamp(min=0).long()]
        if self.config.align:
            region = flags & (IN_BLOCK | IN_HEADER)
            special |= region[:, None] != region[follow.clamp(min=0).long()]
        if policy is Policy.ROLLBACK:
            is_open = (flags & (IN_BLOCK | IN_HEADER)) != 0
            special |= ~is_open[:, None] & is_open[follow.clamp(min=0).long()]
        special[0] = False  # untracked: nothing is looked at, terminals included
        stays = torch.arange(states, dtype=torch.int32)[:, None]
        steps = torch.cat([torch.where(special, states, follow), stays], dim=1)
        steps = torch.cat([steps, torch.full_like(steps[:1], states)])
        return steps.mul_(self._stride).flatten()
