"""Killed between any two writes, or in the middle of one, a tree is as it was, or the next apply or revert completes
it. Each case runs a command in a child process that dies at its n-th write, for every n, the hard way: no handler, no
`finally`, nothing flushed."""

import os
import shutil

import pytest

from scripts.installer.commands import apply, revert
from scripts.installer.disk import Disk
from scripts.installer.rules import MARKER
from scripts.installer.series import load_series
from scripts.installer.tree import locate
from tests.installer.kit import OVERLAY, SAMPLER, WORKER, make_place, snapshot, write

DIED = 9
STATE = "tensorrt_llm/.structured_commit"


class DyingDisk(Disk):
    """Dies before its n-th operation; if that is a write, half of the data is on the disk already."""

    def __init__(self, operations):
        self.left = operations

    def _count(self):
        self.left -= 1
        if self.left < 0:
            os._exit(DIED)

    def make_folder(self, path):
        self._count()
        super().make_folder(path)

    def write(self, path, data, access=None):
        if self.left == 0:
            path.unlink(missing_ok=True)
            path.write_bytes(data[: len(data) // 2])
        self._count()
        super().write(path, data, access)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, path):
        if path.exists():
            self._count()
        super().remove(path)

    def remove_folder(self, path):
        self._count()
        super().remove_folder(path)


def dies(operations, command, *arguments, **options):
    """Runs a command in a child that dies at its n-th write; False if it needed fewer."""
    child = os.fork()
    if child == 0:
        try:
            command(*arguments, disk=DyingDisk(operations), **options)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DIED)
    return status == DIED


def without_state(found):
    """A snapshot without our own folder, and without temporary files, which only the next run clears."""
    return {path: entry for path, entry in found.items() if not path.startswith(STATE) and not path.endswith(".tmp")}


def assert_never_half(place, before, after):
    """Whatever a user can import is all old or all new, or the tree says that it was interrupted."""
    now = without_state(snapshot(place.tree))
    if now not in (without_state(before), without_state(after)):
        outcome = place.run("status")
        assert (outcome.status, outcome.report["state"]) == (1, "interrupted")
        assert place.run("check").problem["name"] == "TreeInterrupted"


@pytest.fixture
def trees(tmp_path):
    """A tree, and how it looks before and after apply."""
    place = make_place(tmp_path)
    before = snapshot(place.tree)
    place.run("apply")
    after = snapshot(place.tree)
    place.run("revert")
    return place, before, after


def killed_at_every_write(place, command, **options):
    """Yields once for every n, with the tree as a command left it that died at its n-th write."""
    start = place.repo.parent / "start"
    shutil.copytree(place.tree, start, symlinks=True)
    operations, series = 0, load_series(place.series)
    while dies(operations, command, locate(place.tree), series, **options):
        yield operations
        operations += 1
        shutil.rmtree(place.tree)
        shutil.copytree(start, place.tree, symlinks=True)
    assert operations > 10


def test_a_killed_apply_is_taken_back_by_revert(trees):
    place, before, after = trees
    for _ in killed_at_every_write(place, apply):
        assert_never_half(place, before, after)
        assert place.run("revert").status == 0
        assert snapshot(place.tree) == before


def test_a_killed_apply_is_completed_by_apply(trees):
    place, before, after = trees
    for _ in killed_at_every_write(place, apply):
        assert place.run("apply").status == 0
        assert snapshot(place.tree) == after
        assert place.run("revert").status == 0
        assert snapshot(place.tree) == before


def test_a_killed_revert_is_completed_by_revert(trees):
    place, before, after = trees
    place.run("apply")
    for _ in killed_at_every_write(place, revert):
        assert_never_half(place, before, after)
        assert place.run("revert").status == 0
        assert snapshot(place.tree) == before


def test_a_killed_revert_is_followed_by_a_whole_apply(trees):
    place, _, after = trees
    place.run("apply")
    for _ in killed_at_every_write(place, revert):
        assert place.run("apply").status == 0
        assert snapshot(place.tree) == after


@pytest.mark.parametrize("first", [12, 17, 22])
def test_a_recovery_that_is_killed_too_is_completed(trees, first):
    place, before, _ = trees
    assert dies(first, apply, locate(place.tree), load_series(place.series))
    for _ in killed_at_every_write(place, revert):
        assert place.run("revert").status == 0
        assert snapshot(place.tree) == before


def test_a_killed_forced_revert_loses_no_edit(trees):
    place, before, _ = trees
    place.run("apply")
    place.edit(WORKER, "state.counts = counts", "state.counts = 2 * counts")
    edited = (place.tree / WORKER).read_bytes()
    for _ in killed_at_every_write(place, revert, force=True):
        assert place.run("revert", "--force").status == 0
        now = snapshot(place.tree)
        copies = [path for path in now if path.startswith(f"{WORKER}.structured-commit-edited")]
        assert [now.pop(path)[1] for path in copies] == [edited]
        assert now == before


def test_a_killed_upgrade_is_completed_by_apply(trees):
    place, before, _ = trees
    place.run("apply")
    place.edit_series('version = "7"', 'version = "8"')
    write(place.repo / "overlay" / OVERLAY / "more.py", "x = 1\n")
    upgraded = None
    for _ in killed_at_every_write(place, apply):
        assert place.run("apply").status == 0
        upgraded = upgraded or snapshot(place.tree)
        assert snapshot(place.tree) == upgraded
        place.run("revert")
        assert snapshot(place.tree) == before


def test_an_edit_after_an_interruption_is_refused_and_kept_by_force(trees):
    place, before, _ = trees
    for _ in killed_at_every_write(place, apply):
        if MARKER in (place.tree / SAMPLER).read_text(encoding="utf-8"):
            break
    place.edit(SAMPLER, "return request", "return [request]")
    edited = (place.tree / SAMPLER).read_bytes()
    for command in ("apply", "revert"):
        assert place.run(command).problem["name"] == "PatchedFileModified"
        assert (place.tree / SAMPLER).read_bytes() == edited
    assert place.run("revert", "--force").status == 0
    now = snapshot(place.tree)
    assert now.pop(f"{SAMPLER}.structured-commit-edited")[1] == edited
    assert now == before


class FailingDisk(Disk):
    """Raises at its n-th operation and at no other."""

    def __init__(self, operations, error):
        self.left, self.error = operations, error

    def _count(self):
        self.left -= 1
        if self.left == -1:
            raise self.error

    def write(self, path, data, access=None):
        self._count()
        super().write(path, data, access)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_an_apply_that_fails_at_any_write_puts_everything_back_at_once(trees, error):
    place, before, _ = trees
    tree, series = locate(place.tree), load_series(place.series)
    operations = 0
    while True:
        try:
            apply(tree, series, FailingDisk(operations, error))
        except BaseException:
            assert snapshot(place.tree) == before
            operations += 1
        else:
            break
    assert operations > 10
