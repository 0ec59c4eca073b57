"""What the installer notes down in a tree, under `tensorrt_llm/.structured_commit/`: a manifest of what was applied
and the originals of the files it changed. The same record is a `pending.json` while a tree is being changed, in
either direction, and a `manifest.json` while it is applied; so a reader can always tell. This module reads, checks
and compares; it must not write, and must not know about rules.

    manifest.json   applied: every file was written
    pending.json    an apply or revert is under way, or was interrupted: the tree has to be rolled back
    originals/      the patched files as they were, each named by its SHA-256
    .gitignore      keeps all of this out of the checkout's commits"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from .errors import StateDamaged
from .rules import MARKER
from .tree import PACKAGE, Tree

FOLDER = f"{PACKAGE}/.structured_commit"
MANIFEST, PENDING = f"{FOLDER}/manifest.json", f"{FOLDER}/pending.json"
ORIGINALS, IGNORE = f"{FOLDER}/originals", f"{FOLDER}/.gitignore"
_FORMAT = 1


class FileState(StrEnum):
    MATCHES = "matches"
    ORIGINAL = "original again"
    EDITED = "edited"
    REPLACED = "replaced"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: what it was (`before` is None for an added one) and what it became, by SHA-256."""

    path: str
    before: str | None
    after: str
    mode: int | None

    @property
    def added(self) -> bool:
        return self.before is None


@dataclass(frozen=True, slots=True)
class Edited:
    """A file edited since, which a forced revert gave up on: its SHA-256 then, and where its copy is. Without a
    copy the file stays as it is."""

    path: str
    seen: str
    copy: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is needed to tell what was applied and to take it back."""

    series_version: str
    window: str
    tree_version: str | None
    patches: tuple[str, ...]
    files: tuple[FileRecord, ...]
    folders: tuple[str, ...]
    edited: tuple[Edited, ...] = field(default=())

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class State:
    """What a tree's folder of ours says. `leftovers`: the folder is there, but holds neither record."""

    manifest: Manifest | None
    pending: Manifest | None
    leftovers: bool


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def temporary(path: str) -> str:
    """Where the new content of a file waits, beside the file, until it takes its place."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.structured-commit.tmp"


def original_path(record: FileRecord) -> str:
    return f"{ORIGINALS}/{record.before}"


def read_state(tree: Tree) -> State:
    manifest, pending = _read(tree, MANIFEST), _read(tree, PENDING)
    leftovers = manifest is None and pending is None and tree.exists(FOLDER)
    return State(manifest, pending, leftovers)


def read_original(tree: Tree, record: FileRecord) -> bytes:
    """The bytes of a patched file as they were, checked against the record."""
    data = tree.read(original_path(record))
    if data is None or digest(data) != record.before:
        raise StateDamaged(
            "the original that was kept of this file is missing or damaged",
            place=record.path,
            next_step="restore the file from git or from the wheel, then run revert again",
        )
    return data


def file_state(tree: Tree, record: FileRecord) -> FileState:
    """How a file of the tree compares with its record. Replaced: it was edited and holds no line of ours, as after
    `git checkout` or `pip install` of another version."""
    data = tree.read(record.path)
    if data is None:
        return FileState.MISSING
    current = digest(data)
    if current == record.after:
        return FileState.MATCHES
    if current == record.before:
        return FileState.ORIGINAL
    ours = record.added or MARKER.encode() in data
    return FileState.EDITED if ours else FileState.REPLACED


def file_states(tree: Tree, manifest: Manifest) -> dict[str, FileState]:
    return {record.path: file_state(tree, record) for record in manifest.files}


def base_reader(tree: Tree, manifest: Manifest | None) -> Callable[[str], bytes | None]:
    """Reads files as they were before anything was applied."""
    records = {record.path: record for record in manifest.files} if manifest else {}

    def read(path: str) -> bytes | None:
        record = records.get(path)
        if record is None:
            return tree.read(path)
        return None if record.added else read_original(tree, record)

    return read


def _read(tree: Tree, path: str) -> Manifest | None:
    data = tree.read(path)
    if data is None:
        return None
    try:
        values = json.loads(data)
        known = values.pop("format") == _FORMAT
        return _manifest(values) if known else _unknown_format(path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateDamaged(
            f"not readable: {error}",
            place=path,
            next_step=f"restore the package from git or from the wheel, and remove the folder {FOLDER}",
        ) from None


def _manifest(values: dict[str, Any]) -> Manifest:
    lists = {
        "patches": str,
        "folders": str,
        "files": lambda v: FileRecord(**v),
        "edited": lambda v: Edited(**v),
    }
    for key, make in lists.items():
        values[key] = tuple(make(value) for value in values[key])
    return Manifest(**values)


def _unknown_format(path: str) -> Manifest:
    raise StateDamaged(
        "written by another version of the installer",
        place=path,
        next_step="run revert with the version of structured-commit that applied it",
    )
