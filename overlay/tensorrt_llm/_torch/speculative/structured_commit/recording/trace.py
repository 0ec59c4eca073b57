"""A trace: the last windows of one request around an incident, as a pair of files.

`NAME.json` says what the trace is about and names `NAME.safetensors`, which holds the windows. It appears after the
tensors and names their checksum, so what can be read is whole. Token ids only; texts and the prompt stand in it where
they were asked for. Knows no device and no stage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import TraceError
from ..policy import Event

VERSION = 1
MARK = "structured_commit_trace"  # the description's own version number stands under this name
ILLEGAL_STATE = -1
_TABLE = ("format", "format_digest", "vocabulary_digest", "vocabulary", "ended")
NO_TOKEN = -1
ACCEPTED, RECOVERED, BONUS, SAMPLED, REPAIRED = "accepted", "recovered", "bonus", "sampled", "repaired"
CUT, REJECTED = "cut", "rejected"
ROLES = (ACCEPTED, RECOVERED, BONUS, SAMPLED, REPAIRED, CUT, REJECTED)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A window as it came from the device. `illegal_at` is the column that the device found, or None."""

    number: int
    width: int
    events: int
    state: int
    state_after: int
    illegal_at: int | None
    accepted: tuple[int, ...]
    committed: tuple[int, ...]
    drafts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target had to choose from where a window left its format.

    Attributes:
        column: of the window, the first illegal one.
        tokens: the likeliest tokens, most likely first, and the one that stood there.
        probs: their probabilities. legal: whether each was legal.
        legal_mass: the probability of all legal tokens together.
    """

    column: int
    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    legal: tuple[bool, ...]
    legal_mass: float


@dataclass(frozen=True, slots=True)
class Mark:
    """One token of a window as it is shown.

    Attributes:
        token: its id. role: one of `ROLES`. state: the state after it, None where it led nowhere.
        legal: whether the format allowed it where it stood; None where it was not looked at.
    """

    token: int
    role: str
    state: int | None
    legal: bool | None


@dataclass(frozen=True, slots=True)
class Window:
    """One window of one request.

    Attributes:
        number: commits of its slot before this one; 31 bits.
        width: W of the step, draft length + 1; 1 where nothing was drafted.
        drafts: what was proposed, None where the acceptance function did not say.
        accepted: what acceptance returned, bonus or recovered token included.
        committed: what the stage let pass.
        states: before the first accepted token and after each; `ILLEGAL_STATE` behind the first illegal one, unless it
            was let through.
        state_after: where the stage stood after the window.
        events: what happened to it.
        illegal_at: the column of the first illegal token, or None.
        choice: the target's likeliest tokens in that column, where they were kept.
    """

    number: int
    width: int
    drafts: tuple[int, ...] | None
    accepted: tuple[int, ...]
    committed: tuple[int, ...]
    states: tuple[int, ...]
    state_after: int
    events: Event
    illegal_at: int | None = None
    choice: Choice | None = None

    def marks(self) -> Iterator[Mark]:
        """Each token and what became of it: committed ones, then those that were cut, then rejected drafts."""
        last = len(self.accepted) - 1
        repaired = bool(self.events & Event.REPAIRED)
        kept = len(self.committed) - repaired
        for i, token in enumerate(self.committed):
            state = self.state_after if i == len(self.committed) - 1 else self.states[i + 1]
            if repaired and i == kept:
                yield Mark(token, REPAIRED, state, True)
            else:
                yield Mark(token, self._role(i, last), state, self._legal(i))
        for i in range(kept, len(self.accepted)):
            state = self.states[i + 1]
            yield Mark(self.accepted[i], CUT, state if state >= 0 else None, self._legal(i))
        for token in (self.drafts or ())[max(last, 0) :]:
            yield Mark(token, REJECTED, None, None)

    def _role(self, column: int, last: int) -> str:
        if column < last:
            return ACCEPTED
        if self.width == 1:
            return SAMPLED
        return BONUS if last == self.width - 1 else RECOVERED

    def _legal(self, column: int) -> bool | None:
        if self.illegal_at is None or column < self.illegal_at:
            return True
        return False if column == self.illegal_at else None


@dataclass(frozen=True, slots=True)
class Trace:
    """The last windows of one request.

    Attributes:
        windows: in the order in which they were committed.
        reasons: why it was written: names of events, or what somebody asked for.
        request: `id`, `slot`, `rank`, `prompt_tokens` and `prompt_sha256`; with texts, `prompt` (ids) too.
        table: `format`, `format_digest`, `vocabulary_digest`, `vocabulary` (V), `ended`.
        policy: of the stage.
        states: number → name of each state that occurs.
        controls: name → id of the control tokens of the format.
        texts: id → text of each token that occurs; empty unless texts were asked for.
        consistent: whether the host's automaton reads the windows as the device did.
        written: when, in UTC.
    """

    windows: tuple[Window, ...]
    reasons: tuple[str, ...]
    request: dict
    table: dict
    policy: str
    states: dict[int, str]
    controls: dict[str, int]
    texts: dict[int, str] = field(default_factory=dict)
    consistent: bool = True
    written: str = ""

    def check_vocabulary(self, digest: str, what: str) -> None:
        """Refuse a vocabulary that is not the one whose ids the trace holds.

        Raises:
            TraceError: it is another one.
        """
        own = self.table["vocabulary_digest"]
        if own != digest:
            raise TraceError(
                f"the trace was recorded over vocabulary {own or '(unknown)'} (format {self.table['format']}), and "
                f"{what} has vocabulary {digest}: the ids mean other tokens there. Name the checkpoint that the server "
                "ran, or none to see ids"
            )


def write_trace(trace: Trace, folder: Path, name: str) -> int:
    """Write `NAME.safetensors`, then `NAME.json`. Each file appears whole or not at all.

    Returns:
        The bytes of both.

    Raises:
        OSError: the disk is full, the folder cannot be written. Nothing of the pair stays behind.
    """
    from safetensors.torch import save

    body = save(_tensors(trace.windows))
    text = json.dumps(_description(trace, f"{name}.safetensors", body), indent=1).encode() + b"\n"
    try:
        _write(folder / f"{name}.safetensors", body)
        _write(folder / f"{name}.json", text)
    except OSError:
        for suffix in (".json", ".safetensors"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
        raise
    return len(body) + len(text)


def read_trace(path: str | os.PathLike) -> Trace:
    """Read a trace by either file of its pair.

    Raises:
        TraceError: a file is missing, truncated, not a trace, or of another version.
    """
    path = Path(path)
    described = path.with_suffix(".json")
    if path.suffix not in (".json", ".safetensors"):
        raise TraceError(f"{path} is no trace: name the .json file of an incident")
    data = _read_description(described)
    tensors = _read_tensors(described, data["tensors"])
    try:
        return _assemble(data, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _damaged(described, f"{type(error).__name__}: {error}") from error


def _tensors(windows: Sequence[Window]) -> dict[str, Tensor]:
    width = max((len(w.accepted) for w in windows), default=1)
    drafted = max((len(w.drafts or ()) for w in windows), default=0)
    chosen = [(i, w.choice) for i, w in enumerate(windows) if w.choice is not None]
    top = max((len(c.tokens) for _, c in chosen), default=0)
    illegal = [NO_TOKEN if w.illegal_at is None else w.illegal_at for w in windows]
    return {
        "number": torch.tensor([w.number for w in windows], dtype=torch.int64),
        "width": _ints([w.width for w in windows]),
        "drafts": _padded([w.drafts or () for w in windows], drafted),
        "draft_length": _ints([NO_TOKEN if w.drafts is None else len(w.drafts) for w in windows]),
        "accepted": _padded([w.accepted for w in windows], width),
        "accepted_length": _ints([len(w.accepted) for w in windows]),
        "committed": _padded([w.committed for w in windows], width),
        "committed_length": _ints([len(w.committed) for w in windows]),
        "states": _padded([w.states for w in windows], width + 1),
        "state_after": _ints([w.state_after for w in windows]),
        "events": _ints([int(w.events) for w in windows]),
        "illegal_at": _ints(illegal),
        "choice_window": _ints([i for i, _ in chosen]),
        "choice_column": _ints([c.column for _, c in chosen]),
        "choice_length": _ints([len(c.tokens) for _, c in chosen]),
        "choice_tokens": _padded([c.tokens for _, c in chosen], top),
        "choice_probs": _padded([c.probs for _, c in chosen], top, torch.float64),
        "choice_legal": _padded([c.legal for _, c in chosen], top, torch.int32),
        "choice_legal_mass": torch.tensor([c.legal_mass for _, c in chosen], dtype=torch.float64),
    }


def _description(trace: Trace, tensors: str, body: bytes) -> dict:
    described = {
        MARK: VERSION,
        "written": trace.written,
        "reasons": list(trace.reasons),
        "request": trace.request,
        "table": trace.table,
        "policy": trace.policy,
        "consistent": trace.consistent,
        "states": {str(state): name for state, name in sorted(trace.states.items())},
        "controls": trace.controls,
        "tensors": {"file": tensors, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()},
    }
    if trace.texts:
        described["texts"] = {str(token): text for token, text in sorted(trace.texts.items())}
    return described


def _read_description(path: Path) -> dict:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise TraceError(
            f"there is no trace {path}; a recorder's folder holds pairs of .json and .safetensors"
        ) from error
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error}") from error
    except ValueError as error:
        raise _damaged(path, f"not whole JSON: {error}") from error
    if not isinstance(data, dict) or MARK not in data:
        raise TraceError(f"{path} is no trace of a recorder: it lacks {MARK!r}")
    if data[MARK] != VERSION:
        raise TraceError(
            f"trace {path} has version {data[MARK]}, and this reads version {VERSION}; replay it with the release of "
            "structured-commit that recorded it"
        )
    if not isinstance(data.get("tensors"), dict) or not {"file", "sha256"} <= set(data["tensors"]):
        raise _damaged(path, "it does not say where its tensors are")
    return data


def _read_tensors(described: Path, entry: dict) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = described.with_name(Path(str(entry["file"])).name)
    try:
        body = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}, which holds the windows of trace {described}: {error}") from error
    if hashlib.sha256(body).hexdigest() != entry["sha256"]:
        raise _damaged(
            path, f"{len(body)} bytes of {entry.get('bytes')}, and another checksum than {described.name} says"
        )
    try:
        return load(body)
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _assemble(data: dict, t: dict[str, Tensor]) -> Trace:
    lists = {name: tensor.tolist() for name, tensor in t.items()}
    choices = {}
    for row, window in enumerate(lists["choice_window"]):
        count = lists["choice_length"][row]
        tokens, probs, legal = (lists[f"choice_{name}"][row][:count] for name in ("tokens", "probs", "legal"))
        column, mass = lists["choice_column"][row], lists["choice_legal_mass"][row]
        choices[window] = Choice(column, tuple(tokens), tuple(probs), tuple(map(bool, legal)), mass)
    windows = []
    for i in range(len(lists["number"])):
        accepted, committed, drafted = (lists[f"{n}_length"][i] for n in ("accepted", "committed", "draft"))
        illegal = lists["illegal_at"][i]
        windows.append(
            Window(
                number=lists["number"][i],
                width=lists["width"][i],
                drafts=None if drafted < 0 else tuple(lists["drafts"][i][:drafted]),
                accepted=tuple(lists["accepted"][i][:accepted]),
                committed=tuple(lists["committed"][i][:committed]),
                states=tuple(lists["states"][i][: accepted + 1]),
                state_after=lists["state_after"][i],
                events=Event(lists["events"][i]),
                illegal_at=None if illegal < 0 else illegal,
                choice=choices.get(i),
            )
        )
    return Trace(
        windows=tuple(windows),
        reasons=tuple(data["reasons"]),
        request=dict(data["request"]),
        table={
            name: data["table"][name]
            for name in ("format", "format_digest", "vocabulary_digest", "vocabulary", "ended")
        },
        policy=data["policy"],
        states={int(state): name for state, name in data["states"].items()},
        controls={name: int(token) for name, token in data["controls"].items()},
        texts={int(token): text for token, text in data.get("texts", {}).items()},
        consistent=data["consistent"],
        written=data["written"],
    )


def _damaged(path: Path, what: str) -> TraceError:
    return TraceError(
        f"trace {path} is damaged or truncated: {what}. Copy both files of the pair again, or take another"
    )


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.int32) -> Tensor:
    filled = [[*row, *[NO_TOKEN] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype).view(len(rows), width)


def _write(path: Path, body: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(body)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
