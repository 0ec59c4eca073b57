"""The device side of the flight recorder: a ring of each request's last windows, written around `commit`.

`before` and `after` may stand inside a captured graph: the same operations on the same shapes whatever the values,
tensors that never move, no wait, nothing copied to the host. They change nothing of the stage.

Each slot has a ring of its last N windows. A window carries a number of its owner, so what a slot's earlier request
left is told apart. For the first rows of a step in which something structural happened, the target's scores at the
first illegal column are kept too, in a ring of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..policy import Event
from ..repair import GREEDY_TEMPERATURE, Distribution, filtered_probs
from ..stage import CommitStage
from ..table import UNTRACKED
from .trace import Choice, Recorded

STRUCTURAL = (
    Event.ILLEGAL
    | Event.REPAIRED
    | Event.ROLLED_BACK
    | Event.CUT
    | Event.ESCAPED
    | Event.UNTRACKED
    | Event.OUT_OF_RANGE
)
SCORES = 8  # vocabulary rows that are kept
ROWS = 4  # of them, written in one step at most
TOP = 8  # likeliest tokens of a kept row that are written out, beside the one that was illegal

# A window in the ring: these, then W accepted, W committed and W drafted tokens; all int32.
FIELDS = (
    "owner",
    "number",
    "events",
    "width",
    "accepted_length",
    "committed_length",
    "draft_length",
    "state",
    "state_after",
    "illegal_at",
)
LOG = ("sequence", "owner", "number", "events", "column", "state", "token", "kind")  # an incident in the log; all int64
CHOICE = 4 + 3 * (TOP + 1)  # numbers that `choice` gives
INT31 = 2**31 - 1
_NONE, _PROBS, _LOGITS = 0, 1, 2  # what a kept row of scores holds; 0 so that it can be multiplied away


class Before(NamedTuple):
    """What a window was before it was committed. B rows of W columns."""

    tokens: Tensor  # [B, W] int32
    lengths: Tensor  # [B] int32
    slot: Tensor  # [B] int64, the number of recorded slots for rows that are not recorded
    state: Tensor  # [B] int32
    number: Tensor  # [B] int64, commits of the slot before this one


class WindowRing:
    """The last windows of each slot, and the last incidents.

    Args:
        stage: whose commits are recorded.
        slots: how many of its slots are recorded, the first ones.
        windows: N, how many windows of each.
        width: W, columns of the widest window.

    Attributes:
        windows_of: [(slots + 1) · N, R] int32, see `FIELDS`; the last N for rows that are not recorded.
        owner: [slots + 1] int32, the number of each slot's owner; −1 = none.
        log: [SCORES + 2, len(LOG)] int64: the last incidents by sequence number modulo `SCORES`, a row for what is no
            incident, and a row of totals: incidents listed, and all.
    """

    def __init__(self, stage: CommitStage, slots: int, windows: int, width: int) -> None:
        self.stage, self.slots, self.windows, self.width = stage, slots, windows, width
        device = stage.device
        size = record_bytes(width) // 4
        self.windows_of = torch.full(((slots + 1) * windows, size), -1, dtype=torch.int32, device=device)
        self.owner = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.log = torch.zeros(SCORES + 2, len(LOG), dtype=torch.int64, device=device)
        self._totals = self.log[SCORES + 1, :2]
        self._scores = torch.zeros(SCORES + 1, stage.table.vocab_size, device=device)
        self._sampling = torch.zeros(SCORES + 1, 3, device=device)  # temperature, top-k, top-p
        self._walk = _Automaton(stage)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.windows_of, self.owner, self.log, self._scores, self._sampling, *self._walk.tensors)
        return sum(t.numel() * t.element_size() for t in tensors)

    def before(self, tokens: Tensor, lengths: Tensor, slots: Tensor) -> Before:
        """Note a window that is about to be committed in place; arguments as of `commit`."""
        slot = torch.where((slots >= 0) & (slots < self.slots), slots, self.slots)
        return Before(tokens.clone(), lengths.clone(), slot, self.stage.state[slot], self.stage.steps[slot])

    def after(
        self,
        before: Before,
        tokens: Tensor,
        lengths: Tensor,
        events: Tensor,
        given: Distribution,
        drafts: Tensor | None,
    ) -> None:
        """Record what was committed: tokens [B, W] int32, lengths [B] int32, events [B] int32; drafts [B, D] or None.

        Raises:
            ValueError: the window is wider than the ring's. By its shape, so before anything is captured.
        """
        width = tokens.shape[1]
        if width > self.width:
            raise ValueError(f"a window of {width} columns, wider than the {self.width} that were expected")
        illegal, violated = self._walk(before)
        number, owner = before.number & INT31, self.owner[before.slot]
        values = (
            owner,
            number,
            events,
            torch.full_like(owner, width),
            before.lengths,
            lengths,
            torch.full_like(owner, -1 if drafts is None else min(drafts.shape[1], self.width)),
            before.state,
            self.stage.state[before.slot],
            illegal,
        )
        columns = (before.tokens, tokens, tokens[:, :0] if drafts is None else drafts[:, : self.width])
        padded = [pad(c.to(torch.int32), (0, self.width - c.shape[1]), value=-1) for c in columns]
        record = torch.cat([torch.stack([v.to(torch.int32) for v in values], dim=1), *padded], dim=1)
        self.windows_of.index_copy_(0, before.slot * self.windows + number % self.windows, record)
        bad = ((events & int(STRUCTURAL)) != 0) & (before.slot < self.slots)
        column = illegal.clamp(max=width - 1)
        token = before.tokens.gather(1, column[:, None])[:, 0]
        self._note_incidents(bad, (owner, number, events, column, violated, token, illegal < width), given)

    def choice(self, place: int) -> Tensor:
        """[CHOICE] float64 of the incident at `place` in the log: its sequence number, its window's number, the column,
        the mass of what was legal (−1 where no scores were kept); then token, probability, legality of the likeliest
        and of the one that stood there. Made after an incident, outside any graph, so passes over a row of the
        vocabulary do no harm."""
        entry, table = dict(zip(LOG, self.log[place], strict=True)), self.stage.table
        scores = self._scores[place : place + 1]
        temperature, top_k, top_p = self._sampling[place : place + 1].unbind(1)
        greedy = temperature <= GREEDY_TEMPERATURE
        limits = torch.where(greedy, 0, top_k).long(), torch.where(greedy, 1.0, top_p)
        sampled = filtered_probs(scores, torch.where(greedy, 1.0, temperature), *limits)
        probs = torch.where(entry["kind"] == _PROBS, scores, sampled)[0].double().nan_to_num(0.0)
        # An index of one element: one without dimensions would be read on the host, and wait.
        state = entry["state"].clamp(max=table.stray)[None]
        legal = table.transitions.index_select(0, state)[0][table.token_class.long()] >= 0
        shown = torch.cat([probs.topk(min(TOP, len(probs))).indices, entry["token"].clamp(0, len(probs) - 1)[None]])
        columns = (shown.double(), probs[shown], legal[shown].double())
        mass = torch.where(entry["kind"] == _NONE, -1.0, (probs * legal).sum())
        head = [entry[name].double() for name in ("sequence", "number", "column")]
        return torch.cat([torch.stack([*head, mass]), *(pad(c, (0, TOP + 1 - len(c)), value=-1) for c in columns)])

    def decode(self, row: list[int]) -> Recorded:
        """A row of `windows_of`, on the host."""
        values = dict(zip(FIELDS, row[: len(FIELDS)], strict=True))
        columns = [row[len(FIELDS) + i * self.width :][: self.width] for i in range(3)]
        width, drafted = values["width"], values["draft_length"]
        lengths = (min(max(values[f"{name}_length"], 1), width) for name in ("accepted", "committed"))
        accepted, committed = (tuple(columns[i][:length]) for i, length in enumerate(lengths))
        return Recorded(
            number=values["number"],
            width=width,
            events=values["events"],
            state=values["state"],
            state_after=values["state_after"],
            illegal_at=values["illegal_at"] if values["illegal_at"] < width else None,
            accepted=accepted,
            committed=committed,
            drafts=None if drafted < 0 else tuple(columns[2][:drafted]),
        )

    def _note_incidents(self, bad: Tensor, values: tuple[Tensor, ...], given: Distribution) -> None:
        """Append the first of the rows [B] that are `bad` to the log, with the target's scores where it happened."""
        rows = (~bad).to(torch.int32).argsort(stable=True)[: min(ROWS, len(bad))]
        listed = bad[rows]
        sequence = self._totals[0] + listed.cumsum(0)
        place = torch.where(listed, (sequence - 1) % SCORES, SCORES)
        picked = [v[rows].to(torch.int64) for v in values]
        # Without an illegal token, as after a length out of range, there was nothing to choose.
        picked[-1] *= self._keep_scores(rows, picked[3], place, given)
        entries = torch.stack([sequence, *picked], dim=1)
        self.log.index_copy_(0, place, entries)
        self._totals.add_(torch.stack([listed.sum(), bad.sum()]))

    def _keep_scores(self, rows: Tensor, column: Tensor, place: Tensor, given: Distribution) -> int:
        source = given.probs if given.probs is not None else given.logits
        if source is None or source.shape[-1] != self._scores.shape[1]:
            return _NONE
        self._scores.index_copy_(0, place, given.scores(rows, column).float())
        if given.probs is not None:
            return _PROBS
        none = torch.zeros_like(place, dtype=torch.float32)
        limits = ((given.temperature, none), (given.top_k, none), (given.top_p, none + 1))
        chosen = [default if value is None else value[rows].float() for value, default in limits]
        self._sampling.index_copy_(0, place, torch.stack(chosen, dim=1))
        return _LOGITS


def record_bytes(width: int) -> int:
    """Bytes of a window of up to `width` columns in the ring."""
    return 4 * (len(FIELDS) + 3 * width)


def read_choice(row: list[float]) -> tuple[int, Choice]:
    """What `WindowRing.choice` gave, on the host: the number of its window, and what there was to choose from."""
    tokens, probs, legal = (row[4 + i * (TOP + 1) :][: TOP + 1] for i in range(3))
    shown = {int(t): i for i, t in enumerate(tokens) if t >= 0}  # the illegal one may be among the likeliest
    choice = Choice(
        column=int(row[2]),
        tokens=tuple(shown),
        probs=tuple(probs[i] for i in shown.values()),
        legal=tuple(bool(legal[i]) for i in shown.values()),
        legal_mass=row[3],
    )
    return int(row[1]), choice


class _Automaton:
    """The table with its dead end spelled out: finds the first illegal column of a window in W + 15 operations."""

    def __init__(self, stage: CommitStage) -> None:
        table = stage.table
        self._vocab = table.vocab_size
        follow = table.transitions.long()
        states, classes = follow.shape
        self._dead = states
        state = torch.arange(states, device=follow.device)
        tracked = (state != UNTRACKED) & (state < table.ended)
        # Two classes more: a token outside the vocabulary, and a column past the window's end.
        unknown = torch.where(tracked, self._dead, state)
        rows = torch.cat([torch.where(follow < 0, self._dead, follow), unknown[:, None], state[:, None]], dim=1)
        self._next = torch.cat([rows, rows.new_full((1, classes + 2), self._dead)]).contiguous()
        self._class = torch.cat([table.token_class.long(), follow.new_tensor([classes, classes + 1])])
        self.tensors = (self._next, self._class)

    def __call__(self, window: Before) -> tuple[Tensor, Tensor]:
        """The first illegal column, W if there is none, and the state before it (after the window): both [B] int64."""
        tokens, width = window.tokens, window.tokens.shape[1]
        column = torch.arange(width, device=tokens.device)
        inside = column < window.lengths.clamp(1, width)[:, None]
        known = torch.where((tokens >= 0) & (tokens < self._vocab), tokens, self._vocab)
        classes = self._class[torch.where(inside, known, self._vocab + 1)]
        path = [window.state.long()]
        for i in range(width):
            path.append(self._next[path[-1], classes[:, i]])
        states = torch.stack(path)
        illegal = (states[1:] != self._dead).sum(0)
        return illegal, states.gather(0, illegal[None])[0]
