"""Every reason for which a tree is refused: the error's name, its place, exit status 1, and an untouched tree."""

import fcntl
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from scripts.installer.commands import apply
from scripts.installer.disk import Disk
from scripts.installer.errors import ReadOnlyTree, TreeBusy, WriteFailed
from scripts.installer.lock import locked
from scripts.installer.series import load_series
from scripts.installer.tree import locate
from tests.installer.kit import LOOP, OVERLAY, SAMPLER, TREE, WORKER, make_place, snapshot, write

STATE = "tensorrt_llm/.structured_commit"


def assert_refused(place, command, name, *arguments, status=1):
    before = snapshot(place.tree)
    outcome = place.run(command, *arguments)
    assert (outcome.status, outcome.problem["name"]) == (status, name)
    assert outcome.problem["next_step"]
    assert snapshot(place.tree) == before
    return outcome.problem


def test_a_path_without_the_package_is_wrong_usage(tmp_path):
    place = make_place(tmp_path, {"readme.txt": "x"})
    assert_refused(place, "apply", "NotATree", status=2)
    place.tree.joinpath("readme.txt").unlink()
    place.tree.rmdir()
    assert place.run("check").problem["what"] == "no such folder"


def test_a_misspelt_command_is_wrong_usage(place):
    with pytest.raises(SystemExit) as error:
        place.run("aply")
    assert error.value.code == 2


def test_a_window_that_no_name_fits_is_refused_with_what_each_lacks(place):
    place.edit(WORKER, "_names_of_window_two", "_unheard_of")
    for command in ("check", "apply", "diff"):
        problem = assert_refused(place, command, "WindowUnknown")
        assert f"one: {WORKER} has no `_names_of_window_one`" in problem["detail"]
        assert f"two: {WORKER} has no `_names_of_window_two`" in problem["detail"]


def test_a_window_is_not_recognised_by_comments_or_strings(place):
    place.edit(WORKER, "self._names_of_window_two(logits)", "'_names_of_window_two'  # _names_of_window_two")
    assert_refused(place, "apply", "WindowUnknown")


def test_two_windows_at_once_are_refused(place):
    place.edit_series(', lacks = ["_names_of_window_two"]', "")
    place.edit(WORKER, "counts is None", "self._names_of_window_one")
    problem = assert_refused(place, "apply", "WindowAmbiguous")
    assert "one, two" in problem["what"]


def test_a_removed_anchor_is_refused_with_the_nearest_line(place):
    place.edit(WORKER, "fused_op(state.logits", "fused_op_v2(state.logits")
    outcome = place.run("check")
    assert (outcome.status, outcome.statuses()["draft"]) == (1, "anchor missing")
    (draft,) = [patch for patch in outcome.report["patches"] if patch["id"] == "draft"]
    assert (draft["nearest"]["file"], draft["nearest"]["line"]) == (WORKER, 16)
    problem = assert_refused(place, "apply", "AnchorsDoNotFit")
    assert "draft: anchor missing" in problem["detail"]
    assert "nearest is line 16: chosen, counts = fused_op_v2" in problem["detail"]


def test_a_doubled_anchor_is_refused(place):
    place.edit(WORKER, "        return chosen\n", "        chosen, counts = fused_op(1)\n        return chosen\n")
    assert place.run("check").statuses()["draft"] == "ambiguous"
    problem = assert_refused(place, "apply", "AnchorsDoNotFit")
    assert "(lines 16, 18)" in problem["detail"]


def test_a_missing_file_that_is_not_optional_is_refused(place):
    (place.tree / SAMPLER).unlink()
    problem = assert_refused(place, "apply", "AnchorsDoNotFit")
    assert f"no file {SAMPLER}" in problem["detail"]


def test_patches_that_cover_the_same_statement_are_refused(place):
    rule = place.repo / "patches/worker/draft.yml"
    text = rule.read_text(encoding="utf-8").replace("pattern: chosen, counts = f", "pattern: return tokens, counts #")
    rule.write_text(text, encoding="utf-8")
    place.edit_series('function = "draft"', 'function = "accept"')
    problem = assert_refused(place, "apply", "PatchesOverlap")
    assert "`accept` and `draft`" in problem["what"]


def test_patches_inside_one_statement_are_refused_too(place):
    rule = place.repo / "patches/worker/draft.yml"
    text = rule.read_text(encoding="utf-8").replace("pattern: chosen, counts = f", "kind: if_statement #")
    rule.write_text(text, encoding="utf-8")
    accept = place.repo / "patches/worker/accept.yml"
    text = accept.read_text(encoding="utf-8").replace("return tokens, counts", "counts = [$$$N]")
    accept.write_text(text, encoding="utf-8")
    place.edit_series('function = "draft"', 'function = "accept"')
    assert_refused(place, "apply", "PatchesOverlap")


def test_a_result_that_would_not_compile_is_refused_with_its_line(place):
    rule = place.repo / "patches/sampler/stop.yml"
    rule.write_text(rule.read_text(encoding="utf-8").replace("hooks.add(", "hooks.add(("), encoding="utf-8")
    problem = assert_refused(place, "apply", "CannotCompile")
    assert problem["place"].startswith(f"{SAMPLER}, line 5")


def test_an_overlay_file_that_would_not_compile_is_refused(place):
    write(place.repo / "overlay" / OVERLAY / "hooks.py", "def f(:\n")
    assert_refused(place, "apply", "CannotCompile")


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"# coding: no-such-codec\nx = 1\n", b"# caf\xe9\nx = 1\n"], ids=["bom", "codec", "latin"]
)
def test_a_file_that_is_no_readable_source_is_refused(place, data):
    (place.tree / SAMPLER).write_bytes(data)
    assert assert_refused(place, "apply", "UnreadableSource")["place"] == SAMPLER


@pytest.mark.parametrize("path", [f"{OVERLAY}/hooks.py", OVERLAY, f"{OVERLAY}/data"])
def test_an_unknown_file_in_the_way_is_refused(place, path):
    write(place.tree / path, "mine\n")
    assert assert_refused(place, "apply", "FileInTheWay")["place"] == path
    assert place.run("check").problem["name"] == "FileInTheWay"


def test_a_modified_overlay_file_is_refused(place):
    place.run("apply")
    place.edit(f"{OVERLAY}/hooks.py", "return tokens", "return list(tokens)")
    for command in ("apply", "revert"):
        assert assert_refused(place, command, "OverlayModified")["place"] == f"{OVERLAY}/hooks.py"


def test_a_dirty_patched_file_is_refused_and_the_difference_shown(place):
    place.run("apply")
    place.edit(WORKER, "state.counts = counts", "state.counts = 2 * counts")
    assert assert_refused(place, "apply", "PatchedFileModified")["place"] == WORKER
    detail = assert_refused(place, "revert", "PatchedFileModified")["detail"]
    lines = [line for line in detail.splitlines() if line[:1] in "+-" and line[1:2] == " "]
    assert lines == ["-        state.counts = counts", "+        state.counts = 2 * counts"]


def test_the_difference_is_shown_even_if_the_series_is_gone(place):
    place.run("apply")
    place.edit(WORKER, "state.counts = counts", "state.counts = 2 * counts")
    place.series.unlink()
    assert "+        state.counts = 2 * counts" in place.run("revert").problem["detail"]


def test_a_forced_revert_keeps_a_copy_of_each_edited_file(place):
    before = snapshot(place.tree)
    place.run("apply")
    place.edit(WORKER, "state.counts = counts", "state.counts = 2 * counts")
    edited = (place.tree / WORKER).read_bytes()
    outcome = place.run("revert", "--force")
    copy = f"{WORKER}.structured-commit-edited"
    assert (outcome.status, outcome.report["written"]) == (0, [copy])
    after = snapshot(place.tree)
    assert after.pop(copy)[1] == edited
    assert after == before


def test_a_second_copy_does_not_overwrite_the_first(place):
    for factor in ("2", "3"):
        place.run("apply")
        place.edit(WORKER, "state.counts = counts", f"state.counts = {factor} * counts")
        place.run("revert", "--force")
    first = (place.tree / f"{WORKER}.structured-commit-edited").read_text(encoding="utf-8")
    second = (place.tree / f"{WORKER}.structured-commit-edited.2").read_text(encoding="utf-8")
    assert "2 * counts" in first
    assert "3 * counts" in second


def test_a_file_that_an_update_replaced_is_not_overwritten_with_the_old_one(place):
    place.run("apply")
    write(place.tree / WORKER, TREE[WORKER] + "\n# a newer upstream\n")
    newer = (place.tree / WORKER).read_bytes()
    problem = assert_refused(place, "apply", "PatchedFileModified")
    assert "holds none of our lines" in problem["what"]
    assert_refused(place, "revert", "PatchedFileModified")
    assert place.run("revert", "--force").status == 0
    assert (place.tree / WORKER).read_bytes() == newer
    assert (place.tree / SAMPLER).read_text(encoding="utf-8") == TREE[SAMPLER]
    assert place.run("apply").status == 0


def test_a_patched_file_that_is_gone_is_refused_and_comes_back_by_force(place):
    before = snapshot(place.tree)
    place.run("apply")
    (place.tree / WORKER).unlink()
    assert_refused(place, "apply", "PatchedFileModified")
    assert_refused(place, "revert", "PatchedFileModified")
    assert place.run("revert", "--force").status == 0
    assert snapshot(place.tree) == before


@pytest.mark.parametrize("link", [WORKER, "tensorrt_llm/_torch", "tensorrt_llm/_torch/speculative"])
def test_a_patched_path_through_a_link_is_refused(place, tmp_path, link):
    outside = tmp_path / "outside"
    (place.tree / link).rename(outside)
    (place.tree / link).symlink_to(outside)
    before = snapshot(tmp_path)
    problem = assert_refused(place, "apply", "PathLeavesTree")
    assert str(outside) in problem["what"]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("link", [OVERLAY, f"{OVERLAY}/hooks.py", STATE])
def test_a_path_to_be_added_through_a_link_is_refused(place, tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    (place.tree / link).parent.mkdir(parents=True, exist_ok=True)
    (place.tree / link).symlink_to(outside)
    assert_refused(place, "apply", "PathLeavesTree")
    assert list(outside.iterdir()) == []


def test_a_manifest_that_names_files_outside_the_tree_is_refused(place, tmp_path):
    place.run("apply")
    victim = tmp_path / "victim"
    victim.write_text("keep\n", encoding="utf-8")
    place.edit(f"{STATE}/manifest.json", f'"{OVERLAY}/hooks.py"', '"tensorrt_llm/../../victim"')
    assert_refused(place, "revert", "PathLeavesTree", "--force")
    assert victim.read_text(encoding="utf-8") == "keep\n"


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 99}', "[]"])
def test_a_damaged_manifest_is_refused(place, text):
    place.run("apply")
    write(place.tree / STATE / "manifest.json", text)
    for command in ("check", "apply", "status", "revert"):
        assert_refused(place, command, "StateDamaged")


def test_a_damaged_original_is_refused_before_anything_is_written(place):
    place.run("apply")
    for original in (place.tree / STATE / "originals").iterdir():
        original.write_bytes(b"")
    assert_refused(place, "revert", "StateDamaged")


def test_patches_without_a_manifest_are_not_mixed_with_ours(place):
    place.edit(SAMPLER, "request.add(token)", "hooks.add(request, token)  # structured-commit: stop")
    assert_refused(place, "apply", "PartlyPatched")


class Unwritable(Disk):
    """A disk on which one folder cannot be written."""

    def __init__(self, folder, error):
        self.folder, self.error = folder, error

    def write(self, path, data, access=None):
        if path.parent == self.folder:
            raise self.error
        super().write(path, data, access)

    def make_folder(self, path):
        if path.parent == self.folder:
            raise self.error
        super().make_folder(path)


@pytest.mark.parametrize("folder", ["tensorrt_llm", "tensorrt_llm/_torch", "tensorrt_llm/_torch/speculative"])
@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (OSError(30, "Read-only file system"), ReadOnlyTree),
        (OSError(13, "Permission denied"), ReadOnlyTree),
        (OSError(28, "No space left on device"), WriteFailed),
    ],
    ids=["read-only", "denied", "full"],
)
def test_a_folder_that_cannot_be_written_leaves_the_tree_untouched(place, folder, error, refusal):
    before = snapshot(place.tree)
    with pytest.raises(refusal):
        apply(locate(place.tree), load_series(place.series), Unwritable(place.tree / folder, error))
    assert snapshot(place.tree) == before


def _as_nobody(place, command):
    """The command's exit status in a child that gave up root; its JSON goes to nobody."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgid(65534)
            os.setuid(65534)
            outcome = place.run(command)
            status = outcome.status
            if outcome.report["problems"]:
                status = 10 if outcome.problem["name"] == "ReadOnlyTree" else 11
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_tree_of_somebody_else_can_be_checked_and_is_not_changed():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = make_place(Path(folder))
        before = snapshot(place.tree)
        assert _as_nobody(place, "check") == 0
        assert _as_nobody(place, "apply") == 10
        assert snapshot(place.tree) == before


def test_two_applies_at_once_leave_one_whole_application(place):
    applied = make_place(place.repo.parent / "alone")
    applied.run("apply")
    series = load_series(place.series)
    threads = [threading.Thread(target=apply, args=(locate(place.tree), series)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.run("status").report["state"] == "applied"
    strip = {f"{STATE}/manifest.json"}
    one, other = snapshot(place.tree), snapshot(applied.tree)
    assert {k: v for k, v in one.items() if k not in strip} == {k: v for k, v in other.items() if k not in strip}


def test_a_tree_that_stays_locked_is_busy(place):
    handle = os.open(place.tree / "tensorrt_llm", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(TreeBusy), locked(locate(place.tree), patience=0.1):
            pass
    finally:
        os.close(handle)
    with locked(locate(place.tree), patience=0.1) as exclusive:
        assert exclusive


def test_local_changes_are_patched_on_top_and_reported(place):
    def git(*arguments):
        subprocess.run(["git", "-C", str(place.tree), *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    assert place.run("check").report["notes"] == []
    place.edit(LOOP, "last = 0", "last = 1")
    before = (place.tree / LOOP).read_bytes()
    for command in ("check", "apply"):
        outcome = place.run(command)
        assert (outcome.status, outcome.report["notes"]) == (
            0,
            [f"{LOOP} has local changes, which are kept and patched on top"],
        )
    place.run("revert")
    assert (place.tree / LOOP).read_bytes() == before
