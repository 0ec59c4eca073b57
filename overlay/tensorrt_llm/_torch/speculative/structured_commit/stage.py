"""The commit stage: between acceptance and everything that consumes accepted tokens.

Vocabulary of this module, used for nothing else: *draft* tokens are proposed; a *window* is what acceptance
returns for a row, [W] columns of which the first `length` are *accepted* (accepted drafts, then one *bonus* or
*recovered* token); *committed* is what the stage lets pass. A *slot* is the place of a request's state.

`commit` is a pure function of its inputs and the device state: no host synchronisation, static shapes, stable
addresses, no communication. Ranks that are given the same inputs commit the same tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import repair
from .checks import check_bindings, check_shapes, check_values
from .counters import CounterReader
from .errors import StageError
from .policy import COUNTERS, CommitConfig, Event, Policy
from .table import IN_BLOCK, IN_HEADER, UNTRACKED, StructureTable


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


class CommitStage:
    """Structure-checked commit for up to `num_slots` requests.

    Args:
        table: the format's automaton over the model's vocabulary.
        config: policy and bounds.
        num_slots: N; slots 0 … N−1 belong to requests, N is for rows without one (dummies, padding).
        max_window: the widest window, draft length + 1.
        device: where the state lives and `commit` runs.

    Attributes:
        state: [N + 1] int32, may be read: the state of each slot (see `StructureTable`).
        steps: [N + 1] int64, commits per slot so far, the counter of its random stream.
        repairs: [N + 1] int32, repairs of the request in each slot.
        counters: [len(COUNTERS)] int64 totals, in the order of `COUNTERS`; rows without a slot are not counted.
        counter_reader: copies them out without waiting.
    """

    def __init__(
        self,
        table: StructureTable,
        config: CommitConfig | None = None,
        *,
        num_slots: int,
        max_window: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1 or max_window < 1:
            raise StageError(f"num_slots ({num_slots}) and max_window ({max_window}) must be 1 or more")
        self.config = config or CommitConfig()
        self.table = table.to(device)
        self.num_slots, self.max_window = num_slots, max_window
        self.device = torch.device(device)
        self.state = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.steps = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.repairs = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.counter_reader = CounterReader(self.counters)
        self._owners: dict[int, Hashable] = {}
        self._from_stray = self.table.transitions[self.table.stray].long()
        self._class_legal = self.table.transitions >= 0
        self._class_index = self.table.token_class.long()
        flags = self.table.state_flags.new_zeros(self.table.num_states + 2)
        flags[: self.table.num_states] = self.table.state_flags
        flags[UNTRACKED] = 0
        self._in_header = (flags & IN_HEADER) != 0
        self._open = (flags & (IN_BLOCK | IN_HEADER)) != 0

    def bind(
        self,
        slots: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        *,
        owners: Sequence[Hashable] | None = None,
        in_context: Sequence[bool] | None = None,
        tracked: Sequence[bool] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        """Set the state of slots from what their requests hold so far. Host side, outside any captured graph.

        Args:
            slots: the slot of each request, all different.
            token_ids: prompt and generated tokens of each request.
            owners: an identity for each request. If given, a slot is written only when its owner changed or the
                request is in its context phase; otherwise the device knows more than the host and is kept.
            in_context: whether each request is in its context phase (prefill, chunk, resume). Default: no.
            prompt_lengths: how many tokens of each request are its prompt; the rest was committed as output.
            tracked: False for a request that must be let alone, such as one that ignores end tokens.

        Raises:
            StageError: lengths differ, a slot is out of range or named twice. Nothing is written then.
        """
        check_bindings(self.num_slots, slots, token_ids, owners, in_context, tracked, prompt_lengths)
        written, states = [], []
        for i, slot in enumerate(slots):
            in_phase = in_context is not None and in_context[i]
            if owners is not None and self.owned_by(slot, owners[i]) and not in_phase:
                continue
            written.append(slot)
            prompt_length = None if prompt_lengths is None else prompt_lengths[i]
            is_tracked = tracked is None or tracked[i]
            states.append(self.table.host.locate(token_ids[i], prompt_length) if is_tracked else UNTRACKED)
        for i, slot in enumerate(slots):
            if owners is not None:
                self._owners[slot] = owners[i]
            else:
                self._owners.pop(slot, None)
        if written:
            index = torch.tensor(written, dtype=torch.int64).to(self.device, non_blocking=True)
            values = torch.tensor(states, dtype=torch.int32).to(self.device, non_blocking=True)
            self.state.index_copy_(0, index, values)
            self.repairs.index_fill_(0, index, 0)

    def owned_by(self, slot: int, owner: Hashable) -> bool:
        """Whether `bind` last wrote `slot` for `owner`."""
        return slot in self._owners and self._owners[slot] == owner

    def legal_tokens(self, state: int) -> Tensor:
        """[V] bool: the tokens that are legal in `state`."""
        return self._class_legal[state][self._class_index]

    def untrack_(self, slots: Tensor) -> None:
        """Set `slots` [B] int64 untracked, in place: for rows whose tokens the stage will not see."""
        self.state.index_fill_(0, slots, UNTRACKED)

    def commit(
        self,
        tokens: Tensor,
        lengths: Tensor,
        slots: Tensor,
        *,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        source_rows: Tensor | None = None,
        words: Tensor | None = None,
        redraw: bool = True,
    ) -> CommitOutput:
        """Commit one window per row. The inputs are not changed; the stage's state and counters are, in place.

        Under `off` and `observe` the given tensors themselves are returned.

        Args:
            tokens: [B, W] int32, accepted tokens; columns at or past a row's length may hold anything.
            lengths: [B] int32, accepted tokens per row, bonus or recovered token included. Outside [1, W] they are
                clamped and the row is flagged `OUT_OF_RANGE`.
            slots: [B] int64, each slot at most once; N, or anything out of range, for rows without one.
            probs: [B, W, V] float, the target's sampling distribution at each column. Illegal tokens are redrawn
                from its legal part.
            logits: [B, W, V] float, instead of `probs`: the target's logits.
            temperature: [B] float, with `logits`; None or ≤ `GREEDY_TEMPERATURE` = greedy, redrawn as the best
                legal token. top_k: [B] int32 and top_p: [B] float, with `logits`; None = no limit.
            source_rows: [B, W] int64, with `probs` or `logits` of shape [M, V]: the row of each column, as for the
                accepted path of a tree.
            words: [B, 2] int64 random 32-bit words to use instead of the stage's own stream, to replay a step.
            redraw: False where a repairing policy has no distribution at hand: a window is cut before its illegal
                token, and an illegal first token is let through.

        Returns:
            `CommitOutput`.

        Raises:
            StageError: a wrong shape, dtype or device; a repairing policy without probabilities or logits; with
                `config.check`, a wrong value. State and counters are as before then.
        """
        given = repair.Distribution(probs, logits, temperature, top_k, top_p, source_rows, words)
        check_shapes(self, tokens, lengths, slots, given, redraw)
        policy = self.config.policy
        if policy is Policy.OFF:
            return CommitOutput(tokens, lengths, torch.zeros_like(lengths))
        if self.config.check:
            check_values(self, tokens, lengths, slots, probs)
        if tokens.shape[0] == 0:
            return CommitOutput(tokens, lengths, torch.zeros_like(lengths))
        slot = torch.where((slots >= 0) & (slots < self.num_slots), slots, self.num_slots)
        window = self._read(tokens, lengths, slot)
        if policy.repairs:
            result = self._commit_repairing(tokens, slot, window, given if redraw else None)
        else:
            result = self._commit_plain(tokens, lengths, window)
        output, new_state, cuts = result
        repaired = (output.events & Event.REPAIRED) != 0
        self.state.index_copy_(0, slot, torch.where(slot < self.num_slots, new_state, UNTRACKED).to(torch.int32))
        self.steps.index_add_(0, slot, torch.ones_like(slot))
        self.repairs.index_add_(0, slot, repaired.to(torch.int32))
        self._count(output, slot < self.num_slots, window, cuts)
        return output

    def commit_(self, tokens: Tensor, lengths: Tensor, slots: Tensor, **distribution: Tensor) -> Tensor:
        """`commit`, written back into `tokens` and `lengths` in place.

        Returns:
            events: [B] int32.
        """
        output = self.commit(tokens, lengths, slots, **distribution)
        if output.tokens is not tokens:
            tokens.copy_(output.tokens)
        if output.lengths is not lengths:
            lengths.copy_(output.lengths)
        return output.events

    def read_counters(self) -> dict[str, int]:
        """The counters by name. Waits for the device; `counter_reader` does not."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    def _read(self, tokens: Tensor, lengths: Tensor, slot: Tensor) -> _Window:
        table = self.table
        width = tokens.shape[1]
        length = lengths.long().clamp(1, width)
        column = torch.arange(width, device=tokens.device)
        inside = column < length[:, None]
        known = (tokens >= 0) & (tokens < table.vocab_size)
        token_class = self._class_index[torch.where(inside & known, tokens, 0)]
        state = self.state[slot].long()
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
        spent = self.repairs[slot] >= self.config.max_repairs if given is not None else at == 0
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
            rows = urgency.argsort(stable=True)[: min(self.config.repair_rows, tokens.shape[0])]
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
        """How many columns `gate` or `rollback` let pass (W + 1 = no limit), and the event of a row that is held."""
        width = window.state.shape[0] - 1
        column = torch.arange(width, device=legal_end.device)
        if self.config.policy is Policy.GATE:
            header = self._in_header[window.state]
            first = _first(header[1:].T & (column < legal_end[:, None]), width)
            return torch.where(header[0], 1, torch.where(first < width, first + 1, width + 1)), Event.GATED
        if self.config.policy is Policy.ROLLBACK:
            is_open = self._open[window.state]
            opens = ~is_open[:-1].T & is_open[1:].T & (column < legal_end[:, None])
            last = torch.where(opens, column, 0).amax(dim=1)
            still_open = is_open.gather(0, legal_end[None])[0]
            return torch.where(still_open & (last > 0), last, width + 1), Event.ROLLED_BACK
        return torch.full_like(legal_end, width + 1), Event.GATED

    def _redraw(self, rows: Tensor, slot: Tensor, window: _Window, given: repair.Distribution) -> tuple[Tensor, Tensor]:
        """Replacement for the first illegal token of `rows` [R]: (tokens [R] int32, without legal mass [R] bool)."""
        table, width = self.table, window.state.shape[0] - 1
        at = window.illegal[rows].clamp(max=width - 1)
        state = window.state[at, rows]
        legal = self._class_legal[state].gather(1, self._class_index.expand(len(rows), -1))
        if given.words is None:
            words = repair.random_words(self.config.seed, slot[rows], self.steps[slot[rows]])
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
        self.counters.add_(totals)


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
