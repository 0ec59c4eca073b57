"""The host side of the flight recorder: from what was copied off the device to files, and what people ask for.

Files are written by one thread of their own, so a slow disk does not hold up a step; a full one costs the trace, a
count and one line in the log. The folder holds the newest traces, bounded by count and size. Its subfolder `ask` is how
another process, or a person, asks for a trace: a file there is named after a request, or `all`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ..log import log
from ..policy import Event
from .trace import ILLEGAL_STATE, Choice, Recorded, Trace, Window, write_trace

if TYPE_CHECKING:
    from ..host import HostTwin
    from ..settings import RecordSettings
    from ..stage import CommitStage

ASK = "ask"
EVERYTHING = "all"
ASKED_FOR = 60.0  # seconds after which a file in `ask` is taken away: every process has seen it by then
MAX_PROMPT = 4_096  # prompt tokens in a trace that may hold them, the last ones
BACKLOG = 64  # traces that wait for the disk


@dataclass(frozen=True, slots=True)
class Note:
    """What the host knows of the owner of a slot.

    Attributes:
        number: of the owner, as the rings carry it. slot: its slot.
        names: what it may be asked for by: its id in the executor, and its client's.
        prompt: its last tokens, where traces may hold them.
    """

    number: int
    slot: int
    names: tuple[str, ...]
    prompt_tokens: int
    prompt_sha256: str
    prompt: tuple[int, ...] | None

    @classmethod
    def of(cls, number: int, slot: int, request: object, prompt: Sequence[int], text: bool) -> Note:
        """Take down a request by `py_request_id` and `py_client_id`, or by itself where it has neither."""
        ids = [getattr(request, name, None) for name in ("py_request_id", "py_client_id")]
        names = tuple(dict.fromkeys(str(i) for i in ids if i is not None)) or (str(request),)
        digest = hashlib.sha256(array("q", prompt).tobytes()).hexdigest()
        return cls(number, slot, names, len(prompt), digest, tuple(prompt[-MAX_PROMPT:]) if text else None)


def ask_for_trace(folder: str | os.PathLike, request_id: object, reason: str) -> None:
    """Ask the recorder that writes to `folder`, in whichever process it runs, for the trace of a request.

    Args:
        request_id: the executor's or the client's id of the request.

    Raises:
        OSError: the folder cannot be written.
    """
    where = Path(folder) / ASK
    where.mkdir(parents=True, exist_ok=True)
    partial = where / f".{request_id}.{os.getpid()}.partial"
    partial.write_text(json.dumps({"reason": reason}))
    partial.replace(where / str(request_id))


class IncidentFiles:
    """A folder of traces."""

    def __init__(
        self,
        stage: CommitStage,
        settings: RecordSettings,
        rank: int,
        counts: Counter[str],
        texts: Callable[[int], str] | None,
    ) -> None:
        self._table, self._policy = stage.table, stage.config.policy.value
        self._settings, self._rank, self._counts = settings, rank, counts
        self._texts = texts if settings.text else None
        self._folder = Path(settings.folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structured-commit-recorder")
        self._waiting: list[Future] = []
        self._made = 0
        self._said: set[str] = set()
        self._seen: dict[str, int] = {}

    def submit(
        self, note: Note, recorded: Sequence[Recorded], reasons: Sequence[str], choices: Mapping[int, Choice]
    ) -> None:
        """Write a trace, later. `choices` by the number of their window."""
        self._waiting = [f for f in self._waiting if not f.done()]
        if not recorded or len(self._waiting) >= BACKLOG:
            self._counts["record_missed"] += 1
            return
        self._made += 1
        name = f"incident-{_now('%Y%m%dT%H%M%S.%fZ')}-rank{self._rank}-{os.getpid()}-{self._made:06d}"
        self._waiting.append(self._thread.submit(self._write, name, note, recorded, tuple(reasons), dict(choices)))

    def flush(self) -> None:
        """Wait until what was submitted is written."""
        for future in self._waiting:
            future.result()

    def asked(self) -> Iterator[tuple[str | None, str]]:
        """(request, reason) of each new file in `ask`; None = all requests."""
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder / ASK):
                if entry.name.startswith("."):
                    continue
                with contextlib.suppress(OSError):  # another rank may take it away meanwhile
                    changed = entry.stat().st_mtime_ns
                    found[entry.name] = changed
                    if self._seen.get(entry.name) != changed:
                        yield (None if entry.name == EVERYTHING else entry.name), _reason(entry.path)
                    elif time.time() - changed / 1e9 > ASKED_FOR:
                        os.unlink(entry.path)
        self._seen = found

    def _write(
        self,
        name: str,
        note: Note,
        recorded: Sequence[Recorded],
        reasons: tuple[str, ...],
        choices: dict[int, Choice],
    ) -> None:
        try:
            trace = self._trace(note, recorded, reasons, choices)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_trace(trace, self._folder, name)
            self._counts["record_written"] += 1
            self._rotate()
        except Exception as error:
            self._counts["record_failed"] += 1
            kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
            if kind not in self._said:
                self._said.add(kind)
                log.warning(
                    f"structured_commit: a trace could not be written to {self._folder} ({error}); serving goes on, "
                    "record_failed counts; said once"
                )

    def _trace(
        self, note: Note, recorded: Sequence[Recorded], reasons: tuple[str, ...], choices: dict[int, Choice]
    ) -> Trace:
        host, info = self._table.host, self._table.info
        ordered = _in_order(recorded)
        read = [_read(host, window, choices.get(window.number)) for window in ordered]
        windows = tuple(window for window, _ in read)
        states = {s for w in windows for s in (*w.states, w.state_after) if s != ILLEGAL_STATE}
        tokens = {t for w in windows for t in (*(w.drafts or ()), *w.accepted, *w.committed)}
        tokens.update(t for w in windows if w.choice for t in w.choice.tokens)
        request = {
            "id": note.names[0],
            "names": list(note.names),
            "slot": note.slot,
            "rank": self._rank,
            "prompt_tokens": note.prompt_tokens,
            "prompt_sha256": note.prompt_sha256,
        }
        if note.prompt is not None:
            request["prompt"] = list(note.prompt)
            tokens.update(note.prompt)
        return Trace(
            windows=windows,
            reasons=reasons,
            request=request,
            table={
                "format": info.format,
                "format_digest": info.format_digest,
                "vocabulary_digest": info.vocabulary_digest,
                "vocabulary": self._table.vocab_size,
                "ended": self._table.ended,
            },
            policy=self._policy,
            states={state: host.describe(state) for state in states},
            controls=dict(info.controls),
            texts={t: self._texts(t) for t in tokens} if self._texts is not None else {},
            consistent=all(agrees for _, agrees in read),
            written=_now("%Y-%m-%dT%H:%M:%S.%fZ"),
        )

    def _rotate(self) -> None:
        """Delete this rank's oldest traces beyond what the folder may hold; the newest one stays."""
        pairs = sorted(self._folder.glob(f"incident-*-rank{self._rank}-*.json"), reverse=True)
        held = 0
        for i, described in enumerate(pairs):
            tensors = described.with_suffix(".safetensors")
            with contextlib.suppress(OSError):
                held += described.stat().st_size + tensors.stat().st_size
            if i and (i >= self._settings.incidents or held > self._settings.megabytes << 20):
                described.unlink(missing_ok=True)
                tensors.unlink(missing_ok=True)


def _read(host: HostTwin, window: Recorded, choice: Choice | None) -> tuple[Window, bool]:
    """A window with the states along it, and whether they say what the device said."""
    state, states, illegal_at = window.state, [window.state], None
    let_through = bool(window.events & Event.UNTRACKED)
    for column, token in enumerate(window.accepted):
        following = host.step(state, token) if state != ILLEGAL_STATE else ILLEGAL_STATE
        if following < 0 and illegal_at is None:
            illegal_at = column
        if following < 0 and state != ILLEGAL_STATE and let_through:
            following = host.let_through(token)
        state = following
        states.append(state)
    before_last = states[len(window.committed) - 1]
    final = host.step(before_last, window.committed[-1])
    if final < 0 and let_through:
        final = host.let_through(window.committed[-1])
    agrees = illegal_at == window.illegal_at and final == window.state_after
    events = Event(window.events)
    read = Window(
        number=window.number,
        width=window.width,
        drafts=window.drafts,
        accepted=window.accepted,
        committed=window.committed,
        states=tuple(states),
        state_after=window.state_after,
        events=events,
        illegal_at=illegal_at,
        choice=choice,
    )
    return read, agrees


def _in_order(recorded: Sequence[Recorded]) -> list[Recorded]:
    """Oldest first; numbers have 31 bits and may have started again."""
    ordered = sorted(recorded, key=lambda w: w.number)
    gap = next((i for i in range(1, len(ordered)) if ordered[i].number - ordered[i - 1].number > 1 << 30), 0)
    return ordered[gap:] + ordered[:gap]


def _reason(path: str) -> str:
    try:
        return str(json.loads(Path(path).read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "asked for"


def _now(form: str) -> str:
    return datetime.now(timezone.utc).strftime(form)
