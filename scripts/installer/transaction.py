"""Carrying out a plan so that a tree is never left half-way. The record of what will change, and the originals, are
on the disk before the first file of the tree is touched; every file changes in one step, by a rename. Killed at any
point, the tree is as it was, or `pending.json` says how to take it back, which the next apply or revert does first.
This module must not decide what to change."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .disk import Access, Disk
from .errors import InstallerError, OverlayModified, PatchedFileModified, ReadOnlyTree, WriteFailed
from .plan import Plan
from .state import (
    FOLDER,
    IGNORE,
    MANIFEST,
    ORIGINALS,
    PENDING,
    Edited,
    FileRecord,
    FileState,
    Manifest,
    State,
    digest,
    file_state,
    original_path,
    read_original,
    temporary,
)
from .tree import PACKAGE, Tree

_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_COPY_SUFFIX = ".structured-commit-edited"


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What a roll-back did, beyond restoring what nobody had touched."""

    copies: tuple[str, ...]
    left_as_is: tuple[str, ...]
    folders_kept: tuple[str, ...]


def apply_plan(tree: Tree, plan: Plan, tree_version: str | None, disk: Disk) -> Manifest:
    """Writes everything, or puts everything back and says why. The tree must carry no record of ours."""
    manifest = _manifest(tree, plan, tree_version)
    try:
        _note_down(tree, plan, manifest, disk)
        _stage(tree, plan, manifest, disk)
        _swap(tree, manifest, disk)
        disk.rename(tree.at(PENDING), tree.at(MANIFEST))
        disk.sync(tree.at(FOLDER))
    except BaseException as error:
        trouble = _put_back(tree, manifest, disk)
        if isinstance(error, OSError):
            raise _named(tree, error, trouble) from None
        raise
    return manifest


def take_back(tree: Tree, state: State, disk: Disk, *, force: bool = False) -> TakenBack:
    """Restores every file of the record and removes what was added. Files that someone edited since are refused
    before anything is written; with `force` a copy of each is put beside it first."""
    record = state.pending or state.manifest
    if record is None:
        _clear(tree, disk)
        return TakenBack((), (), ())
    try:
        record = _begin(tree, state, _with_edits(tree, record, force), disk)
        return _restore(tree, record, disk)
    except OSError as error:
        raise _named(tree, error, "run revert again: it goes on where this stopped") from None


def _manifest(tree: Tree, plan: Plan, tree_version: str | None) -> Manifest:
    files, folders = [], dict[str, None]()
    for change in plan.changes:
        before = None if change.before is None else digest(change.before)
        mode = None if change.before is None else tree.mode(change.path)
        files.append(FileRecord(change.path, before, digest(change.after), mode))
        parents = [str(parent) for parent in reversed(Path(change.path).parents)]
        folders.update({parent: None for parent in parents if parent != "." and not tree.exists(parent)})
    return Manifest(plan.series_version, plan.window, tree_version, plan.patches, tuple(files), tuple(folders))


def _note_down(tree: Tree, plan: Plan, manifest: Manifest, disk: Disk) -> None:
    disk.make_folder(tree.at(FOLDER))
    _clear(tree, disk, and_folder=False)
    disk.write(tree.at(IGNORE), b"*\n")
    disk.make_folder(tree.at(ORIGINALS))
    for record, change in zip(manifest.files, plan.changes, strict=True):
        if change.before is not None:
            disk.write(tree.at(original_path(record)), change.before)
    disk.sync(tree.at(ORIGINALS))
    _write_pending(tree, manifest, disk)
    disk.sync(tree.at(PACKAGE))


def _write_pending(tree: Tree, manifest: Manifest, disk: Disk) -> None:
    disk.write(tree.at(temporary(PENDING)), manifest.to_json())
    disk.rename(tree.at(temporary(PENDING)), tree.at(PENDING))
    disk.sync(tree.at(FOLDER))


def _stage(tree: Tree, plan: Plan, manifest: Manifest, disk: Disk) -> None:
    """Every new content beside its place: a folder that cannot be written or a full disk shows here, before any
    file of the tree has changed."""
    for folder in manifest.folders:
        disk.make_folder(tree.at(folder))
    for change in plan.changes:
        access = None
        if change.before is not None:
            if tree.read(change.path) != change.before:
                what = "the file changed while apply was at work"
                raise PatchedFileModified(what, place=change.path, next_step="run apply again")
            access = Access.of(tree.at(change.path))
        disk.write(tree.at(temporary(change.path)), change.after, access)


def _swap(tree: Tree, manifest: Manifest, disk: Disk) -> None:
    for record in manifest.files:
        disk.rename(tree.at(temporary(record.path)), tree.at(record.path))
    _sync_parents(tree, [*manifest.folders, *(record.path for record in manifest.files)], disk)


def _with_edits(tree: Tree, record: Manifest, force: bool) -> Manifest:
    """The record with every edited file accounted for; refused if there are any and this is not forced."""
    known = {edited.path: edited for edited in record.edited}
    edits, fresh = [], dict[FileRecord, FileState]()
    for file in record.files:
        state, seen = file_state(tree, file), digest(tree.read(file.path) or b"")
        if not file.added and state not in (FileState.ORIGINAL, FileState.REPLACED):
            read_original(tree, file)  # refuses now, not half-way, if it cannot be restored
        if state in (FileState.MATCHES, FileState.ORIGINAL) or (state is FileState.MISSING and file.added):
            continue
        if file.path in known and known[file.path].seen == seen:
            edits.append(known[file.path])
            continue
        fresh[file] = state
        edits.append(Edited(file.path, seen, _copy_path(tree, file.path) if state is FileState.EDITED else None))
    if fresh and not force:
        kind = PatchedFileModified if any(not file.added for file in fresh) else OverlayModified
        raise kind(
            f"changed since apply: {', '.join(f'{file.path} ({state})' for file, state in fresh.items())}",
            place=next(iter(fresh)).path,
            next_step="undo those changes, or run revert with --force, which keeps a copy of each edited file "
            "and leaves files alone that hold none of our lines any more",
        )
    return replace(record, edited=tuple(edits))


def _copy_path(tree: Tree, path: str) -> str:
    """Beside the file, under a name that is free or already holds the same bytes."""
    data, number = tree.read(path), 1
    while True:
        copy = path + _COPY_SUFFIX + (f".{number}" if number > 1 else "")
        if not tree.exists(copy) or tree.read(copy) == data:
            return copy
        number += 1


def _begin(tree: Tree, state: State, record: Manifest, disk: Disk) -> Manifest:
    """From here on the tree counts as being rolled back."""
    for edited in record.edited:
        if edited.copy is not None:
            disk.write(
                tree.at(temporary(edited.path)),
                tree.read(edited.path) or b"",
                Access.of(tree.at(edited.path)),
            )
            disk.rename(tree.at(temporary(edited.path)), tree.at(edited.copy))
            disk.sync(tree.at(edited.copy).parent)
    if state.pending is None and record == state.manifest:
        disk.rename(tree.at(MANIFEST), tree.at(PENDING))
        disk.sync(tree.at(FOLDER))
        return record
    if record != state.pending:
        _write_pending(tree, record, disk)
    disk.remove(tree.at(MANIFEST))
    return record


def _restore(tree: Tree, record: Manifest, disk: Disk) -> TakenBack:
    """Patched files first, so that none calls an overlay that is gone. Every step may have been done before."""
    left = []
    for file in sorted(record.files, key=lambda file: file.added):
        state = file_state(tree, file)
        disk.remove(tree.at(temporary(file.path)))
        if file.added:
            disk.remove(tree.at(file.path))
        elif state is FileState.REPLACED:
            left.append(file.path)
        elif state is not FileState.ORIGINAL:
            _restore_file(tree, file, disk)
    kept = tuple(folder for folder in reversed(record.folders) if not _remove_folder(tree, folder, record, disk))
    _sync_parents(tree, [*record.folders, *(file.path for file in record.files)], disk)
    _clear(tree, disk)
    return TakenBack(tuple(e.copy for e in record.edited if e.copy), tuple(left), kept)


def _restore_file(tree: Tree, file: FileRecord, disk: Disk) -> None:
    place, data = tree.at(file.path), read_original(tree, file)
    access = Access.of(place if place.exists() else tree.at(original_path(file)))
    if file.mode is not None:
        access = replace(access, mode=file.mode)
    disk.write(tree.at(temporary(file.path)), data, access)
    disk.rename(tree.at(temporary(file.path)), place)


def _remove_folder(tree: Tree, folder: str, record: Manifest, disk: Disk) -> bool:
    """Removes a folder that we made, with the byte code of our modules, unless something else lies in it."""
    place = tree.at(folder)
    if not place.is_dir():
        return True
    modules = {Path(file.path).stem for file in record.files if str(Path(file.path).parent) == folder}
    cache = place / "__pycache__"
    if cache.is_dir() and not cache.is_symlink():
        compiled = list(cache.iterdir())
        if all(file.suffix == ".pyc" and file.name.partition(".")[0] in modules for file in compiled):
            for file in compiled:
                disk.remove(file)
            disk.remove_folder(cache)
    if any(place.iterdir()):
        return False
    disk.remove_folder(place)
    return True


def _clear(tree: Tree, disk: Disk, *, and_folder: bool = True) -> None:
    """Empties our own folder, the record last: while it is there, the tree counts as being rolled back."""
    folder, originals = tree.at(FOLDER), tree.at(ORIGINALS)
    for place in (originals, folder):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            if not file.is_dir() and file.name != Path(PENDING).name:
                disk.remove(file)
    if originals.is_dir():
        disk.remove_folder(originals)
    disk.remove(tree.at(PENDING))
    if and_folder and folder.is_dir():
        disk.remove_folder(folder)
        disk.sync(tree.at(PACKAGE))


def _sync_parents(tree: Tree, paths: Iterable[str], disk: Disk) -> None:
    for parent in dict.fromkeys(tree.at(path).parent for path in paths):
        if parent.is_dir():
            disk.sync(parent)


def _put_back(tree: Tree, manifest: Manifest, disk: Disk) -> str:
    """Undoes a failed apply; returns the next step for the user if that failed too."""
    try:
        if tree.exists(FOLDER):
            _restore(tree, manifest, disk)
    except (OSError, InstallerError) as error:
        return f"putting everything back failed too ({error}); run revert, which goes on from here"
    return ""


def _named(tree: Tree, error: OSError, next_step: str = "") -> InstallerError:
    place = str(error.filename2 or error.filename or tree.root)
    if error.errno in _NOT_WRITABLE:
        return ReadOnlyTree(
            f"the tree cannot be written ({error.strerror})",
            place=place,
            next_step=next_step or "make it writable for this user, or work on a copy; nothing was changed",
        )
    return WriteFailed(
        f"writing failed ({error.strerror})",
        place=place,
        next_step=next_step or "everything was put back; remove the cause (is the disk full?), then apply again",
    )
