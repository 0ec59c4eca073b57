"""The refusals that need a look at the tree beyond its anchors: files edited since apply, strangers where overlay
files go, an earlier run that did not finish. Each returns quietly or raises; none writes. This module must not know
which command asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import FileInTheWay, InstallerError, OverlayModified, PatchedFileModified, TreeInterrupted
from .plan import Plan
from .state import FileState, Manifest, State, digest, file_states, read_state
from .tree import Tree

_FORCE = "undo the edit, or run revert with --force, which keeps a copy; then apply"
_UPDATED = "if the tree was updated or reset under the overlay, run revert with --force, then apply"


def settled_state(tree: Tree) -> State:
    """The state of a tree that no apply or revert is changing."""
    state = read_state(tree)
    if state.pending:
        raise interrupted(tree)
    return state


def interrupted(tree: Tree) -> TreeInterrupted:
    return TreeInterrupted(
        "an apply or revert is under way here, or was interrupted",
        place=str(tree.root),
        next_step="run apply to complete it, or revert to take it back",
    )


def refuse_changes(tree: Tree, manifest: Manifest | None) -> dict[str, FileState]:
    """How the files of the record stand; refused if someone edited one or a patched one is gone. Files that are
    original again and overlay files that are gone are fine: they can simply be written once more."""
    states = file_states(tree, manifest) if manifest else {}
    for record in manifest.files if manifest else ():
        if error := _change(record.path, states[record.path], record.added):
            raise error
    return states


def refuse_files_in_the_way(tree: Tree, plan: Plan, manifest: Manifest | None) -> None:
    ours = {record.path for record in manifest.files} if manifest else set()
    for change in plan.changes:
        if change.before is not None:
            continue
        parents = [str(parent) for parent in Path(change.path).parents][:-1]
        blocked = [parent for parent in parents if tree.exists(parent) and not tree.at(parent).is_dir()]
        if blocked or (change.path not in ours and tree.exists(change.path)):
            raise FileInTheWay(
                "something that apply did not put there is in the way of an overlay file",
                place=blocked[0] if blocked else change.path,
                next_step="move it away or remove it, then apply",
            )


def refuse_other_overlay(tree: Tree, overlay: Mapping[str, bytes]) -> None:
    """For a tree that has the patches as commits: the overlay must be there too, and be this one."""
    for path, data in overlay.items():
        if tree.read(path) != data:
            raise OverlayModified(
                "the patches stand in the tree as commits, but this overlay file is missing or differs",
                place=path,
                next_step="take those commits back, then apply or export this version",
            )


def says_the_same(manifest: Manifest, plan: Plan) -> bool:
    """Whether a plan would only write what is recorded as written."""
    after = {change.path: digest(change.after) for change in plan.changes}
    recorded = {record.path: record.after for record in manifest.files}
    return (manifest.series_version, manifest.window, recorded) == (plan.series_version, plan.window, after)


def _change(path: str, state: FileState, added: bool) -> InstallerError | None:
    if added and state is FileState.EDITED:
        return OverlayModified("an overlay file was edited since apply", place=path, next_step=_FORCE)
    if state is FileState.REPLACED:
        what = "a patched file was replaced since apply: it holds none of our lines any more"
        return PatchedFileModified(what, place=path, next_step=_UPDATED)
    if state is FileState.EDITED:
        return PatchedFileModified("a patched file was edited since apply", place=path, next_step=_FORCE)
    if state is FileState.MISSING and not added:
        return PatchedFileModified("a patched file is gone since apply", place=path, next_step=_UPDATED)
    return None
