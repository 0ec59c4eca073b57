"""Exported patches go into the checkout they were made for with real `git am`, and `diff` with real `git apply`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.installer.diffs import unified
from tests.installer.kit import LOOP, OVERLAY, OVERLAY_FILES, SAMPLER, TREE, WORKER, make_place, snapshot, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_COMMITTER_NAME": "somebody",
    "GIT_COMMITTER_EMAIL": "somebody@example.com",
    "GIT_AUTHOR_NAME": "somebody",
    "GIT_AUTHOR_EMAIL": "somebody@example.com",
}


def git(place, *arguments):
    command = ["git", "-C", str(place.tree), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def commit(place):
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "start")


def contents(place):
    """The tree without git's folder, without ours, and without modes beyond what git keeps."""
    found = snapshot(place.tree)
    skipped = (".git", "tensorrt_llm/.structured_commit")
    return {path: content for path, (_, content) in found.items() if not path.startswith(skipped)}


def variant(**changes):
    tree = dict(TREE)
    for path, change in changes.values():
        tree[path] = change(tree[path])
    return tree


TREES = {
    "plain": TREE,
    "carriage returns": variant(
        w=(WORKER, lambda text: text.replace("\n", "\r\n")), s=(SAMPLER, lambda t: t.replace("\n", "\r\n"))
    ),
    "mixed newlines": variant(w=(WORKER, lambda text: text.replace("):\n", "):\r\n"))),
    "no last newline": variant(
        l=(LOOP, lambda text: text.rstrip("\n")), s=(SAMPLER, lambda text: text.replace("\n    return request\n", ""))
    ),
    "byte order mark": variant(w=(WORKER, lambda text: "\ufeff" + text)),
    "tabs": variant(w=(WORKER, lambda text: text.replace("    ", "\t"))),
    "another encoding": variant(s=(SAMPLER, lambda text: ("# coding: latin-1\n# é ü\n" + text).encode("latin-1"))),
    "form feeds and separators": variant(s=(SAMPLER, lambda text: "\x0c\n# a\u2028b\x85c\n" + text)),
    "lines like mail and diff headers": variant(
        s=(SAMPLER, lambda text: '"""\nFrom: a\nSubject: b\n---\ndiff --git a/x b/x\n-- \n"""\n' + text)
    ),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_git_am_makes_the_very_tree_that_apply_makes(tmp_path, tree):
    place = make_place(tmp_path, tree)
    commit(place)
    applied = make_place(tmp_path / "applied", tree)
    assert applied.run("apply").status == 0
    outcome = place.run("export", str(tmp_path / "out"))
    assert outcome.status == 0
    git(place, "am", "-q", *outcome.report["written"])
    assert contents(place) == contents(applied)
    assert git(place, "status", "--porcelain") == ""


def test_there_is_one_commit_for_the_overlay_and_one_per_patch_in_the_series_order(place, tmp_path):
    commit(place)
    outcome = place.run("export", str(tmp_path / "out"))
    names = [Path(name).name for name in outcome.report["written"]]
    assert names[:2] == ["0001-add-the-overlay-package.patch", "0002-commit-what-strict-acceptance-returns.patch"]
    git(place, "am", "-q", *outcome.report["written"])
    assert git(place, "log", "--reverse", "--format=%s").splitlines()[1:] == [
        "structured-commit: add the overlay package",
        "structured-commit: commit what strict acceptance returns",
        "structured-commit: commit what the fused op accepts",
        "structured-commit: stop adding tokens past the commit",
        "structured-commit: advance by what was committed — not more",
    ]
    assert "Patch stop in add_tokens." in git(place, "log", "--format=%b", "-1", "HEAD~1")
    assert git(place, "show", "--format=", "--name-only", "HEAD~4").split() == sorted(OVERLAY_FILES)
    assert git(place, "log", "-1", "--format=%an") == "structured-commit\n"


def test_the_date_of_exported_patches_can_be_fixed(place, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    outcome = place.run("export", str(tmp_path / "out"))
    first = Path(outcome.report["written"][0]).read_text(encoding="utf-8")
    assert "\nDate: Sun, 09 Sep 2001 01:46:40 +0000\n" in first


def test_executable_files_stay_executable(place, tmp_path):
    (place.tree / WORKER).chmod(0o755)
    commit(place)
    git(place, "am", "-q", *place.run("export", str(tmp_path / "out")).report["written"])
    assert (place.tree / WORKER).stat().st_mode & 0o111


def test_a_tree_with_the_patches_as_commits_counts_as_applied(place, tmp_path):
    commit(place)
    git(place, "am", "-q", *place.run("export", str(tmp_path / "out")).report["written"])
    before = snapshot(place.tree)
    assert place.run("check").status == 0
    assert place.run("apply").report["headline"] == "already applied, as commits: nothing to do"
    assert place.run("diff").report["diff"] is None
    assert place.run("export", str(tmp_path / "more")).problem["name"] == "NothingToExport"
    reverted = place.run("revert")
    assert (reverted.status, reverted.report["headline"]) == (0, "nothing is applied")
    assert "git am" in reverted.report["notes"][0]
    write(place.repo / "overlay" / OVERLAY / "hooks.py", "x = 1\n")
    assert place.run("apply").problem["name"] == "OverlayModified"
    assert {path: entry for path, entry in snapshot(place.tree).items() if ".git/" not in path} == {
        path: entry for path, entry in before.items() if ".git/" not in path
    }


def test_export_from_a_patched_tree_is_against_the_tree_as_it_was(place, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    before = [Path(name).read_bytes() for name in place.run("export", str(tmp_path / "one")).report["written"]]
    place.run("apply")
    outcome = place.run("export", str(tmp_path / "two"))
    assert [Path(name).read_bytes() for name in outcome.report["written"]] == before
    assert "run revert before git am" in outcome.report["notes"][0]


def test_a_folder_in_use_is_refused(place, tmp_path):
    write(tmp_path / "out" / "mine.txt", "x")
    outcome = place.run("export", str(tmp_path / "out"))
    assert (outcome.status, outcome.problem["name"]) == (2, "ExportFolderInUse")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_exporting_writes_nothing_into_the_tree(place, tmp_path):
    before = snapshot(place.tree)
    place.run("export", str(tmp_path / "out"))
    assert snapshot(place.tree) == before


def test_what_diff_prints_is_what_git_applies(tmp_path):
    for number, tree in enumerate(TREES.values()):
        place = make_place(tmp_path / str(number), tree)
        commit(place)
        applied = make_place(tmp_path / str(number) / "applied", tree)
        applied.run("apply")
        command = ["git", "-C", str(place.tree), "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, input=raw_diff(place), env=ENVIRONMENT, check=True)
        assert contents(place) == contents(applied)


def raw_diff(place):
    """The bytes that the command writes; a test's captured text would lose encodings."""
    from scripts.installer.commands import diff
    from scripts.installer.series import load_series
    from scripts.installer.tree import locate

    return diff(locate(place.tree), load_series(place.series)).diff


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\nb", b"a\nc"),
        (b"a\nb\n", b"a\nb"),
        (b"a", b"a\n"),
        (b"", b"a"),
        (b"a\r\n", b"a\n"),
        (None, b""),
        (None, b"x"),
    ],
)
def test_last_lines_and_empty_files_survive_git_apply(tmp_path, before, after):
    if before is not None:
        write(tmp_path / "f", before)
    command = ["git", "-C", str(tmp_path), "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, input=unified("f", before, after), env=ENVIRONMENT, check=True)
    assert (tmp_path / "f").read_bytes() == after
