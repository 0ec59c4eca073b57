"""The six commands on a tree, each a function that returns a report. They put the parts together: read the state,
decide in `plan`, write through `transaction`. Refusals leave as exceptions; the command line turns them into reports.
This module must not know about arguments or output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import diffs
from .disk import Disk
from .errors import ExportFolderInUse, InstallerError, OverlayModified, PatchedFileModified, SeriesInvalid
from .export import export as make_mails
from .guards import (
    interrupted,
    refuse_changes,
    refuse_files_in_the_way,
    refuse_other_overlay,
    says_the_same,
    settled_state,
)
from .lock import locked
from .matching import Status
from .plan import Assessment, Change, assess, make_plan, read_overlay
from .report import FileLine, Report
from .series import Series
from .state import FileState, Manifest, base_reader, file_states, read_state
from .transaction import TakenBack, apply_plan, take_back
from .tree import LocalChanges, Tree

_NO_LOCKS = "this file system has no locks: make sure that no other apply or revert runs on this tree"


def check(tree: Tree, series: Series) -> Report:
    """Window and anchors, patch by patch, and whatever else would make apply refuse."""
    state = settled_state(tree)
    assessment = assess(series, tree.read)
    local = LocalChanges(tree, _untouched(assessment, state.manifest))
    problems: tuple[InstallerError, ...] = ()
    try:
        refuse_changes(tree, state.manifest)
        overlay = read_overlay(series)
        plan = make_plan(series, assessment, overlay)
        if plan.patches:
            refuse_files_in_the_way(tree, plan, state.manifest)
        elif not state.manifest:
            refuse_other_overlay(tree, overlay)
    except SeriesInvalid:
        raise
    except InstallerError as error:
        problems = (error,)
    return Report(
        "check",
        _counts(tree, assessment),
        patches=assessment.findings,
        state="applied" if state.manifest else "not applied",
        problems=problems,
        notes=(*_left_out(assessment), *_local_notes(local)),
        **_about(tree, series, assessment.window.id),
    )


def apply(tree: Tree, series: Series, disk: Disk | None = None) -> Report:
    """Everything or nothing. An interrupted earlier run is taken back first; an older application is replaced."""
    disk = disk or Disk()
    with locked(tree) as exclusive:
        notes = [] if exclusive else [_NO_LOCKS]
        state = read_state(tree)
        if state.pending:
            take_back(tree, state, disk)
            notes.append("an apply or revert that had been interrupted was taken back first")
            state = read_state(tree)
        states = refuse_changes(tree, state.manifest)
        assessment = assess(series, base_reader(tree, state.manifest))
        local = LocalChanges(tree, _untouched(assessment, state.manifest))
        overlay = read_overlay(series)
        plan = make_plan(series, assessment, overlay)
        about = _about(tree, series, plan.window)
        if not plan.patches:
            refuse_other_overlay(tree, overlay)
            return Report("apply", "already applied, as commits: nothing to do", state="applied", **about)
        refuse_files_in_the_way(tree, plan, state.manifest)
        if state.manifest:
            if says_the_same(state.manifest, plan) and set(states.values()) == {FileState.MATCHES}:
                return Report("apply", "already applied: nothing to do", state="applied", **about)
            take_back(tree, state, disk)
            notes.append(f"what series {state.manifest.series_version} had applied was taken back first")
        manifest = apply_plan(tree, plan, tree.version(), disk)
    files = _file_lines(manifest, dict.fromkeys((r.path for r in manifest.files), FileState.MATCHES))
    added = sum(record.added for record in manifest.files)
    return Report(
        "apply",
        f"applied {len(plan.patches)} patches to {len(files) - added} files, added {added} (window {plan.window})",
        patches=tuple(replace(f, status=Status.APPLIED) if f.edits else f for f in assessment.findings),
        files=files,
        state="applied",
        notes=(*notes, *_left_out(assessment), *_local_notes(local)),
        **about,
    )


def status(tree: Tree, series: Series | None) -> Report:
    """What is applied, by which version of the series, and whether the files still match."""
    state = read_state(tree)
    record = state.pending or state.manifest
    about: dict[str, Any] = {"root": str(tree.root), "version": tree.version()}
    if record is None:
        notes = _foreign_overlay(tree, series)
        if state.leftovers:
            notes += ("an apply was interrupted before it changed anything; revert cleans up",)
        return Report("status", "not applied", state="not applied", notes=notes, **about)
    states = file_states(tree, record)
    about |= {"series": record.series_version, "window": record.window, "files": _file_lines(record, states)}
    if series and series.version != record.series_version:
        about["notes"] = (f"the series at hand is version {series.version}; apply brings the tree up to it",)
    if state.pending:
        return Report("status", "interrupted", state="interrupted", problems=(interrupted(tree),), **about)
    what = f"series {record.series_version}, window {record.window}, {len(record.patches)} patches"
    changed = sum(file_state is not FileState.MATCHES for file_state in states.values())
    if not changed:
        return Report("status", f"{what}: applied, every file matches", state="applied", **about)
    try:
        refuse_changes(tree, record)
        problem: InstallerError = PatchedFileModified(
            "some files are not as apply left them", next_step="run apply to write them again, or revert"
        )
    except InstallerError as error:
        problem = error
    headline = f"{what}: {changed} of {len(states)} files changed since"
    return Report("status", headline, state="changed", problems=(problem,), **about)


def diff(tree: Tree, series: Series, *, with_overlay: bool = True) -> Report:
    """What apply does, or did, to the tree as it was; patched files first."""
    state = settled_state(tree)
    assessment = assess(series, base_reader(tree, state.manifest))
    plan = make_plan(series, assessment, read_overlay(series))
    changes = sorted(plan.changes, key=lambda change: change.before is None) if plan.patches else []
    shown = [change for change in changes if with_overlay or change.before is not None]
    data = b"".join(diffs.unified(c.path, c.before, c.after, _mode(tree, c)) for c in shown)
    return Report("diff", diff=data, **_about(tree, series, plan.window))


def export(tree: Tree, series: Series, folder: Path) -> Report:
    """Writes numbered patches that `git am` applies to this very checkout."""
    state = settled_state(tree)
    assessment = assess(series, base_reader(tree, state.manifest))
    overlay = read_overlay(series)
    plan = make_plan(series, assessment, overlay)
    local = LocalChanges(tree, _untouched(assessment, state.manifest))
    mails = make_mails(series, assessment, overlay, {change.path: _mode(tree, change) for change in plan.changes})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportFolderInUse("not an empty folder", place=str(folder), next_step="name a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for mail in mails:
        (folder / mail.name).write_bytes(mail.data)
    notes = [f"{path} has local changes: git am wants them committed or stashed" for path in local.paths()]
    if state.manifest:
        notes.append("the tree is patched now: run revert before git am")
    written = tuple(str(folder / mail.name) for mail in mails)
    return Report("export", written=written, notes=tuple(notes), **_about(tree, series, plan.window))


def revert(tree: Tree, series: Series | None, *, force: bool = False, disk: Disk | None = None) -> Report:
    """Restores every byte and removes what was added. Needs no series; with one, it can show edits more exactly."""
    with locked(tree) as exclusive:
        state = read_state(tree)
        record = state.pending or state.manifest
        try:
            done = take_back(tree, state, disk or Disk(), force=force)
        except (PatchedFileModified, OverlayModified) as error:
            error.detail = _differences(tree, series, record) if record else ""
            raise
    about: dict[str, Any] = {"root": str(tree.root), "version": tree.version(), "state": "not applied"}
    if record is None:
        return Report("revert", "nothing is applied", notes=_foreign_overlay(tree, series), **about)
    removed = sum(file.added for file in record.files)
    restored = len(record.files) - removed - len(done.left_as_is)
    return Report(
        "revert",
        f"restored {restored} files and removed {removed}",
        window=record.window,
        series=record.series_version,
        notes=(*_revert_notes(done), *(() if exclusive else (_NO_LOCKS,))),
        written=done.copies,
        **about,
    )


def _about(tree: Tree, series: Series, window: str) -> dict[str, Any]:
    return {"root": str(tree.root), "version": tree.version(), "window": window, "series": series.version}


def _untouched(assessment: Assessment, manifest: Manifest | None) -> set[str]:
    """The files whose content is not ours yet, which alone can show local changes."""
    ours = {record.path for record in manifest.files} if manifest else set()
    return {finding.file for finding in assessment.having(Status.READY)} - ours


def _differences(tree: Tree, series: Series | None, record: Manifest) -> str:
    """What was edited, against the files as apply left them; against the originals if those cannot be made again."""
    before = base_reader(tree, record)
    applied: dict[str, bytes] = {}
    try:
        if series:
            plan = make_plan(series, assess(series, before), read_overlay(series))
            applied = {change.path: change.after for change in plan.changes}
    except InstallerError:
        pass  # the series has moved on; the originals still show what differs
    edited = [path for path, state in file_states(tree, record).items() if state is FileState.EDITED]
    parts = [diffs.edited(path, applied.get(path) or before(path) or b"", tree.read(path) or b"") for path in edited]
    return b"".join(parts).decode("utf-8", "replace")


def _foreign_overlay(tree: Tree, series: Series | None) -> tuple[str, ...]:
    for path in read_overlay(series) if series else ():
        if tree.exists(path):
            return (f"{path} stands here without a manifest; if it came with git am, take those commits back",)
    return ()


def _revert_notes(done: TakenBack) -> tuple[str, ...]:
    notes = [f"a copy of the edited file was kept: {copy}" for copy in done.copies]
    notes += [f"left as it is, for it holds none of our lines: {path}" for path in done.left_as_is]
    notes += [f"not removed, for something else lies in it: {folder}" for folder in done.folders_kept]
    return tuple(notes)


def _local_notes(local: LocalChanges) -> tuple[str, ...]:
    return tuple(f"{path} has local changes, which are kept and patched on top" for path in local.paths())


def _left_out(assessment: Assessment) -> tuple[str, ...]:
    absent = assessment.having(Status.ABSENT)
    if not absent:
        return ()
    names = ", ".join(finding.patch.id for finding in absent)
    alike = [f"`{f.patch.id}` may belong to {f.nearest.file}:{f.nearest.line}" for f in absent if f.nearest]
    hint = f"; {', '.join(alike)}, in a shape that its rule does not know" if alike else ""
    return (f"{len(absent)} optional patches have no place in this tree: {names}{hint}",)


def _file_lines(manifest: Manifest, states: Mapping[str, FileState]) -> tuple[FileLine, ...]:
    kinds = {True: "overlay", False: "patched"}
    return tuple(FileLine(r.path, kinds[r.added], str(states[r.path])) for r in manifest.files)


def _mode(tree: Tree, change: Change) -> int:
    return 0o644 if change.before is None else tree.mode(change.path)


def _counts(tree: Tree, assessment: Assessment) -> str:
    counts = ", ".join(f"{number} {status}" for status in Status if (number := len(assessment.having(status))))
    version = tree.version() or "of unknown version"
    return f"window {assessment.window.id} (TensorRT-LLM {version}): {counts}"
