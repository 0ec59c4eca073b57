"""The flight recorder: the last windows of each request on the device, written out only when something structural
happened or somebody asked.

`before` and `after` stand around `commit`, also inside a captured graph; see `ring`. `next_step` runs on the host: once
in a quarter of a ring it starts a copy of 560 bytes that say what happened; a request's windows are copied only if
something did. Nothing here waits, raises, or changes what is committed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..log import log
from ..policy import Event
from ..repair import Distribution
from ..settings import RecordSettings
from ..stage import CommitStage
from .incidents import IncidentFiles, Note
from .ring import CHOICE, INT31, LOG, SCORES, STRUCTURAL, Before, WindowRing, read_choice, record_bytes

DEVICE_BYTES = 32 << 20  # of the ring of windows; bounds how many slots are recorded
WIDTH = 16  # columns of a window where nothing says how many there are
AT_ONCE = 4  # requests copied to the host in one step


@dataclass(slots=True)
class _Due:
    """A request that is to be written out, why, and the sequence numbers of its incidents."""

    note: Note
    reasons: list[str] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)


class Recorder:
    """Records what a stage commits.

    Args:
        stage: whose commits are recorded.
        settings: where to, how much.
        rank: of this process.
        width: the widest window that will come; a wider one stops the recorder.
        texts: id → text of a token, for traces that may hold texts.

    Attributes:
        ring: what is on the device.
        bytes_per_slot: of it.
        counts: `record_incidents` noticed; `record_written` to files; `record_missed`: without a trace of their own,
            because there were more at once than are followed up; `record_failed` writes.
    """

    def __init__(
        self,
        stage: CommitStage,
        settings: RecordSettings,
        *,
        rank: int = 0,
        width: int = WIDTH,
        texts: Callable[[int], str] | None = None,
    ) -> None:
        self.settings, self.device = settings, stage.device
        self.bytes_per_slot = record_bytes(width) * settings.windows
        slots = min(stage.num_slots, max(1, DEVICE_BYTES // self.bytes_per_slot))
        self.ring = WindowRing(stage, slots, settings.windows, width)
        self.counts: Counter[str] = Counter(record_incidents=0, record_written=0, record_missed=0, record_failed=0)
        self._files = IncidentFiles(stage, settings, rank, self.counts, texts)
        self._every = max(1, settings.windows // 4)
        self._steps = self._serial = self._listed = self._noticed = 0
        self._notes: dict[int, Note] = {}
        self._holders: dict[int, tuple[int, ...]] = {}  # slot → the numbers of its owner and of the one before
        self._due: deque[_Due] = deque()
        self._copied: list[_Due] = []  # those whose windows are on their way
        self._broken = False
        self._flag = _Copy(self.ring.log)
        rows = self.ring.windows_of.new_empty(AT_ONCE * settings.windows, self.ring.windows_of.shape[1])
        self._dump = _Copy(rows, torch.empty(SCORES, CHOICE, dtype=torch.float64, device=stage.device))

    def describe(self) -> str:
        """What it takes, for the log."""
        size = f"{self.bytes_per_slot} bytes a slot, {self.ring.nbytes / 2**20:.0f} MiB on the device"
        return f"the last {self.settings.windows} windows of {self.ring.slots} slots, {size}"

    def before(self, tokens: Tensor, lengths: Tensor, slots: Tensor) -> Before | None:
        """Note a window that is about to be committed in place; arguments as of `commit`."""
        return self._guarded(self.ring.before, tokens, lengths, slots)

    def after(
        self,
        before: Before | None,
        tokens: Tensor,
        lengths: Tensor,
        events: Tensor,
        given: Distribution,
        drafts: Tensor | None = None,
    ) -> None:
        """Record what was committed: tokens [B, W] int32, lengths [B] int32, events [B] int32.

        Args:
            before: what `before` returned.
            given: what the stage was given to draw from.
            drafts: [B, D] int, what was proposed; None where that is not known.
        """
        if before is not None:
            self._guarded(self.ring.after, before, tokens, lengths, events, given, drafts)

    def bind(
        self,
        slots: Sequence[int],
        requests: Sequence[object],
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int | None],
        new: Sequence[bool],
    ) -> None:
        """Say which request owns each slot. Host side, outside any captured graph.

        Args:
            requests: anything with `py_request_id` and, maybe, `py_client_id`; or the identity itself.
            new: False where the slot keeps its owner.
        """
        self._guarded(self._bind, slots, requests, token_ids, prompt_lengths, new)

    def next_step(self) -> None:
        """Begin a step: notice incidents, copy and write what is due. Never waits. Host side, once a step."""
        self._guarded(self._next_step)

    def write_now(self, request_id: object = None, reason: str = "asked for") -> None:
        """Write out one request by the executor's or the client's id, or all that own a slot. Takes a few steps."""
        for numbers in self._holders.values():
            for i, number in enumerate(numbers):
                if (request_id is None and i == 0) or str(request_id) in self._notes[number].names:
                    self._add_due(number, reason)

    def flush(self) -> None:
        """Write out what has happened so far. Waits for the device and the disk; for tools and tests."""
        for _ in range(2 * self._every + 4):
            self._settle()
        while self._due or self._copied:
            self._settle()
        self._files.flush()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.next_step()

    def _bind(self, slots, requests, token_ids, prompt_lengths, new) -> None:
        written, numbers = [], []
        for i, slot in enumerate(slots):
            if slot >= self.ring.slots or (not new[i] and slot in self._holders):
                continue
            self._serial = (self._serial + 1) & INT31
            holders = (self._serial, *self._holders.get(slot, ()))
            for forgotten in holders[2:]:
                self._notes.pop(forgotten, None)
            self._holders[slot] = holders[:2]
            prompt = token_ids[i][: prompt_lengths[i]]
            self._notes[self._serial] = Note.of(self._serial, slot, requests[i], prompt, self.settings.text)
            written.append(slot)
            numbers.append(self._serial)
        if written:
            index = torch.tensor(written, dtype=torch.int64).to(self.device, non_blocking=True)
            values = torch.tensor(numbers, dtype=torch.int32).to(self.device, non_blocking=True)
            self.ring.owner.index_copy_(0, index, values)

    def _next_step(self) -> None:
        self._steps += 1
        copied = self._dump.take()
        if copied is not None:
            self._hand_over(*copied)
        flagged = self._flag.take()
        if flagged is not None:
            self._look(*flagged)
        if self._due and not self._copied:
            self._start_dump()
        if self._steps % self._every == 0:
            self._flag.start()
            for name, reason in self._files.asked():
                self.write_now(name, reason)

    def _look(self, entries: list[list[int]]) -> None:
        """Find what is new in a copy of the log."""
        listed, noticed = entries[SCORES + 1][:2]
        fresh = sorted(row for row in entries[:SCORES] if row[0] > self._listed)
        for row in fresh:
            entry = dict(zip(LOG, row, strict=True))
            happened = [e.name.lower() for e in Event if e & entry["events"] & STRUCTURAL]
            self._add_due(entry["owner"], *happened, sequence=entry["sequence"])
        self.counts["record_incidents"] += noticed - self._noticed
        self.counts["record_missed"] += noticed - self._noticed - len(fresh)
        self._listed, self._noticed = listed, noticed

    def _add_due(self, number: int, *reasons: str, sequence: int | None = None) -> None:
        due = next((d for d in self._due if d.note.number == number), None)
        if due is None:
            note = self._notes.get(number)
            if note is None or len(self._due) >= self.settings.incidents:
                self.counts["record_missed"] += sequence is not None
                return
            due = _Due(note)
            self._due.append(due)
        due.reasons.extend(r for r in reasons if r not in due.reasons)
        if sequence is not None:
            due.sequences.append(sequence)

    def _start_dump(self) -> None:
        """Start to copy the windows of the first requests that are due, and what the target had to choose from."""
        self._copied = [self._due.popleft() for _ in range(min(AT_ONCE, len(self._due)))]
        rows, choices = self._dump.sources
        count = self.ring.windows
        for i, due in enumerate(self._copied):
            rows[i * count :][:count].copy_(self.ring.windows_of[due.note.slot * count :][:count])
        choices.fill_(-1)
        for place in {(s - 1) % SCORES for due in self._copied for s in due.sequences}:
            choices[place].copy_(self.ring.choice(place))
        self._dump.start()

    def _hand_over(self, rows: list[list[int]], choices: list[list[float]]) -> None:
        """Give what was copied to the thread that writes."""
        kept = {int(row[0]): row for row in choices if row[3] >= 0}
        count = self.ring.windows
        for i, due in enumerate(self._copied):
            own = [self.ring.decode(r) for r in rows[i * count :][:count] if r[0] == due.note.number]
            chosen = [read_choice(kept[s]) for s in due.sequences if s in kept]
            self._files.submit(due.note, own, due.reasons, dict(chosen))
        self._copied = []

    def _guarded(self, act: Callable, *args):
        if self._broken:
            return None
        try:
            return act(*args)
        except Exception as error:
            self._broken = True
            self._due.clear()
            self._copied = []
            self.counts["record_failed"] += 1
            what = f"{type(error).__name__}: {error}"
            log.warning(f"structured_commit: the flight recorder stops ({what}); serving goes on")
            return None


class _Copy:
    """Device tensors copied to the host without either waiting for the other.

    Attributes:
        sources: what is copied.
    """

    def __init__(self, *sources: Tensor) -> None:
        self.sources = sources
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in sources]
        self._event = torch.cuda.Event() if sources[0].is_cuda else None
        self._started = False

    def start(self) -> None:
        """Start a copy on the current stream; one that was not taken is replaced."""
        for host, source in zip(self._host, self.sources, strict=True):
            host.copy_(source, non_blocking=True)
        self._started = True
        if self._event is not None:
            self._event.record()

    def take(self) -> list[list] | None:
        """What the last started copy brought, as lists; None while there is none or it is on its way. Once only."""
        if not self._started or (self._event is not None and not self._event.query()):
            return None
        self._started = False
        return [host.tolist() for host in self._host]
