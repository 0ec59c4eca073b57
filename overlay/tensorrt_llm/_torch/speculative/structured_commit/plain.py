"""The stage in plain torch: the reference that the kernels are compared with, and what runs without a GPU.

Some three to seven hundred small operations, the same ones on the same shapes whatever the values. Knows the
automaton, the policies and the events; the draw itself is in `repair`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import repair
from .policy import COUNTERS, Event, Policy
from .table import IN_BLOCK, IN_HEADER, UNTRACKED

if TYPE_CHECKING:
    from .stage import CommitStage


class CommitOutput(NamedTuple):
    """What one step committed.

    tokens: [B, W] int32; columns past the new length repeat the row's last committed token.
    lengths: [B] int32, in [1, W], never above the length given (a length below 1 counts as 1).
    events: [B] int32, `Event` flags.
    """

    tokens: Tensor
    lengths: Tensor
    events: Tensor


class _Window(NamedTuple):
    """The window read against the automaton, before any policy. B rows, W columns."""

    state: (
        Tensor  # [W + 1, B] int64, state before each column and after the last; stray, or ended, after an illegal token
    )
    length: Tensor  # [B] int64, clamped to [1, W]
    end: Tensor  # [B] int64, columns up to and including the first terminal, `length` if there is none
    illegal: Tensor  # [B] int64, the first illegal column, W if there is none
    out_of_range: Tensor  # [B] bool


class PlainCommit:
    """`CommitStage.commit` in plain torch, on any device. Reads the stage's table and settings, writes its state."""

    name = "torch"

    def __init__(self, stage: CommitStage) -> None:
        self.stage, self.config, self.table = stage, stage.config, stage.table
        self._from_stray = self.table.transitions[self.table.stray].long()
        self._class_legal = self.table.transitions >= 0
        self._class_index = self.table.token_class.long()
        flags = self.table.extended_flags
        self._in_header = (flags & IN_HEADER) != 0
        self._region = flags & (IN_BLOCK | IN_HEADER)
        self._open = self._region != 0

    def commit(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: repair.Distribution | None) -> CommitOutput:
        """As `CommitStage.commit`, its arguments checked; `given` is None where nothing can be redrawn."""
        stage = self.stage
        slot = torch.where((slots >= 0) & (slots < stage.num_slots), slots, stage.num_slots)
        window = self._read(tokens, lengths, slot)
        if self.config.policy.repairs:
            result = self._commit_repairing(tokens, slot, window, given)
        else:
            result = self._commit_plain(tokens, lengths, window)
        output, new_state, cuts = result
        repaired = (output.events & Event.REPAIRED) != 0
        stage.state.index_copy_(0, slot, torch.where(slot < stage.num_slots, new_state, UNTRACKED).to(torch.int32))
        stage.steps.index_add_(0, slot, torch.ones_like(slot))
        stage.repairs.index_add_(0, slot, repaired.to(torch.int32))
        self._count(output, slot < stage.num_slots, window, cuts)
        return output

    def commit_(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: repair.Distribution | None) -> Tensor:
        """`commit`, written back into `tokens` and `lengths`. Returns the events."""
        output = self.commit(tokens, lengths, slots, given)
        if output.tokens is not tokens:
            tokens.copy_(output.tokens)
            lengths.copy_(output.lengths)
        return output.events

    def _read(self, tokens: Tensor, lengths: Tensor, slot: Tensor) -> _Window:
        table = self.table
        width = tokens.shape[1]
        length = lengths.long().clamp(1, width)
        column = torch.arange(width, device=tokens.device)
        inside = column < length[:, None]
        known = (tokens >= 0) & (tokens < table.vocab_size)
        token_class = self._class_index[torch.where(inside & known, tokens, 0)]
        state = self.stage.state[slot].long()
        path = [state]
        illegal, terminal = [], []
        for i in range(width):
            tracked = (state != UNTRACKED) & (state < table.ended)
            follow = table.transitions[state, token_class[:, i]].long()
            follow = torch.where(known[:, i], follow, torch.where(tracked, -1, state))
            follow = torch.where(inside[:, i], follow, state)
            illegal.append(follow < 0)
            let_through = torch.where(known[:, i], self._from_stray[token_class[:, i]], table.stray)
            follow = torch.where(follow < 0, let_through, follow)
            terminal.append((follow == table.ended) & (state != table.ended))
            state = follow
            path.append(state)
        end = _first(torch.stack(terminal, dim=1), width)
        return _Window(
            state=torch.stack(path),
            length=length,
            end=torch.where(end < width, end + 1, length),
            illegal=_first(torch.stack(illegal, dim=1), width),
            out_of_range=(lengths != length) | (inside & ~known).any(dim=1),
        )

    def _commit_plain(self, tokens: Tensor, lengths: Tensor, window: _Window):
        """`observe` and `trim`: nothing is redrawn; an illegal token leaves the row stray."""
        trims = self.config.policy is Policy.TRIM
        after_end = window.state[0] == self.table.ended
        kept = torch.where(after_end, 1, window.end) if trims else window.length
        events = self._common_events(window, after_end, kept=window.end)
        events |= _flag(window.illegal < window.end, Event.ILLEGAL | Event.UNTRACKED)
        final = window.state.gather(0, kept[None])[0]
        cuts = {"trimmed": window.length - torch.where(after_end, 1, window.end)}
        if not trims:
            return CommitOutput(tokens, lengths, events), final, cuts
        return CommitOutput(_padded(tokens, kept), kept.to(torch.int32), events), final, cuts

    def _commit_repairing(
        self, tokens: Tensor, slot: Tensor, window: _Window, given: repair.Distribution | None
    ) -> tuple[CommitOutput, Tensor, dict[str, Tensor]]:
        """`repair`, `gate`, `rollback`; without a distribution a row is cut, and a first column let through."""
        table, width = self.table, tokens.shape[1]
        after_end = window.state[0] == table.ended
        at = window.illegal
        spent = self.stage.repairs[slot] >= self.config.max_repairs if given is not None else at == 0
        has_illegal = at < window.length
        lets_through = has_illegal & spent
        legal_end = torch.where(has_illegal & ~spent, at, window.end)
        legal_end = torch.where(after_end, 1, legal_end)
        limit, postponed_event = self._limit(window, legal_end)
        postponed = torch.minimum(limit, legal_end)
        mends = has_illegal & ~spent & (limit > at)

        before = window.state.gather(0, at.clamp(max=width)[None])[0]
        replacement = table.escape_token[before]
        redrawn, escaped = mends & (at == 0), torch.ones_like(mends)
        if given is not None:
            # The most urgent rows are those that cannot be cut before their illegal token.
            urgency = torch.where(mends, torch.where(at == 0, 0, 1), 2)
            rows = urgency.argsort(stable=True)[: self._redraws(mends)]
            drawn, no_mass = self._redraw(rows, slot, window, given)
            replacement = replacement.index_copy(0, rows, drawn)
            escaped = escaped.index_copy(0, rows, no_mass)
            redrawn = redrawn | (mends & torch.zeros_like(mends).index_fill_(0, rows, True))
        cut = mends & ~redrawn
        escaped = escaped & redrawn

        kept = postponed + redrawn.long()
        column = torch.arange(width, device=tokens.device)
        changed = torch.where(redrawn[:, None] & (column == at[:, None]), replacement[:, None], tokens)
        final = window.state.gather(0, kept[None].clamp(max=width))[0]
        mended_state = table.transitions[before, self._class_index[replacement.long()]].long()
        final = torch.where(redrawn, mended_state, final)

        lets_through = lets_through & (at < postponed)
        events = self._common_events(window, after_end, kept=postponed)
        trimmed = torch.where((events & Event.TRIMMED) != 0, window.length - postponed, 0)
        events |= _flag(redrawn & (mended_state == table.ended), Event.ENDED)
        events |= _flag(mends | lets_through, Event.ILLEGAL) | _flag(lets_through, Event.UNTRACKED)
        events |= _flag(redrawn, Event.REPAIRED) | _flag(cut, Event.CUT) | _flag(escaped, Event.ESCAPED)
        events |= _flag((postponed < legal_end) | (has_illegal & ~spent & ~mends), postponed_event)
        cuts = {"trimmed": trimmed, postponed_event.name.lower(): legal_end - postponed}
        return CommitOutput(_padded(changed, kept), kept.to(torch.int32), events), final, cuts

    def _limit(self, window: _Window, legal_end: Tensor) -> tuple[Tensor, Event]:
        """How many columns `gate`, `align` or `rollback` let pass (W + 1 = none held), and the event of a held row."""
        width = window.state.shape[0] - 1
        column = torch.arange(width, device=legal_end.device)
        if self.config.policy is Policy.GATE:
            header = self._in_header[window.state]
            first = _first(header[1:].T & (column < legal_end[:, None]), width)
            return torch.where(header[0], 1, torch.where(first < width, first + 1, width + 1)), Event.GATED
        if self.config.align:
            region = self._region[window.state]
            crosses = (region[1:] != region[:-1]).T & (column < legal_end[:, None])
            first = _first(crosses, width)
            return torch.where(first < width, first + 1, width + 1), Event.ALIGNED
        if self.config.policy is Policy.ROLLBACK:
            is_open = self._open[window.state]
            opens = ~is_open[:-1].T & is_open[1:].T & (column < legal_end[:, None])
            last = torch.where(opens, column, 0).amax(dim=1)
            still_open = is_open.gather(0, legal_end[None])[0]
            return torch.where(still_open & (last > 0), last, width + 1), Event.ROLLED_BACK
        return torch.full_like(legal_end, width + 1), Event.GATED

    def _redraws(self, mends: Tensor) -> int:
        """How many rows are redrawn; those that need nothing fill up, since shapes must not depend on values."""
        return min(self.config.repair_rows, len(mends))

    def _redraw(self, rows: Tensor, slot: Tensor, window: _Window, given: repair.Distribution) -> tuple[Tensor, Tensor]:
        """Replacement for the first illegal token of `rows` [R]: (tokens [R] int32, without legal mass [R] bool)."""
        table, width = self.table, window.state.shape[0] - 1
        at = window.illegal[rows]
        at = torch.where(at < width, at, 0)  # the only column that every row has
        state = window.state[at, rows]
        legal = self._class_legal[state].gather(1, self._class_index.expand(len(rows), -1))
        if given.words is None:
            words = repair.random_words(self.config.seed, slot[rows], self.stage.steps[slot[rows]])
        else:
            words = given.words[rows]
        drawn = given.draw_legal(rows, at, legal, words)
        no_mass = drawn >= table.vocab_size
        return torch.where(no_mass, table.escape_token[state].long(), drawn).to(torch.int32), no_mass

    def _common_events(self, window: _Window, after_end: Tensor, kept: Tensor) -> Tensor:
        reached = window.state.gather(0, kept[None])[0] == self.table.ended
        return (
            _flag(after_end, Event.AFTER_END)
            | _flag(reached & ~after_end, Event.ENDED)
            | _flag(reached & (kept < window.length) & ~after_end, Event.TRIMMED)
            | _flag(window.out_of_range, Event.OUT_OF_RANGE)
        )

    def _count(self, output: CommitOutput, real: Tensor, window: _Window, cuts: dict[str, Tensor]) -> None:
        real = real & ((output.events & Event.AFTER_END) == 0)
        amounts = {
            "windows": torch.ones_like(window.length),
            "tokens_in": window.length,
            "tokens_committed": output.lengths.long().clamp(1, window.state.shape[0] - 1),
        }
        for name in ("illegal", "repaired", "cut", "escaped", "untracked", "ended", "out_of_range"):
            amounts[name] = ((output.events & Event[name.upper()]) != 0).long()
        amounts.update(cuts)
        zero = torch.zeros_like(window.length)
        totals = torch.stack([torch.where(real, amounts.get(name, zero), 0).sum() for name in COUNTERS])
        self.stage.counters.add_(totals)


def _first(mask: Tensor, width: int) -> Tensor:
    """[B] int64: the first True column of [B, W], W if there is none."""
    column = torch.arange(width, device=mask.device)
    return torch.where(mask, column, width).amin(dim=1)


def _flag(mask: Tensor, event: Event) -> Tensor:
    return mask.to(torch.int32) * int(event)


def _padded(tokens: Tensor, kept: Tensor) -> Tensor:
    column = torch.arange(tokens.shape[1], device=tokens.device)
    last = tokens.gather(1, kept[:, None] - 1)
    return torch.where(column < kept[:, None], tokens, last)
