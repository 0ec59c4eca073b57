"""Every command of the installer on every double: what apply does, export does too, and revert undoes to the byte."""

import subprocess

import pytest

from scripts.installer import commands
from scripts.installer.errors import InstallerError
from scripts.installer.series import load_series
from scripts.installer.tree import locate

from .common.loading import UPSTREAM, WINDOWS, copy_tree

SERIES = UPSTREAM.parents[1] / "patches" / "series.toml"
OURS = ("tensorrt_llm/.structured_commit", ".git")
MODULE = "tensorrt_llm/_torch/speculative/interface.py"


def contents(root):
    files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    named = {str(p.relative_to(root)): p.read_bytes() for p in files}
    return {name: data for name, data in named.items() if not name.startswith(OURS)}


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    return subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(params=WINDOWS)
def root(request, tmp_path):
    return copy_tree(request.param, tmp_path).root


def test_apply_status_diff_and_revert_on_every_double(root):
    series, before = load_series(SERIES), contents(root)
    assert commands.check(locate(root), series).exit_status == 0
    shown = commands.diff(locate(root), series).diff.decode()
    assert contents(root) == before
    assert commands.apply(locate(root), series).exit_status == 0
    applied = contents(root)
    changed = {name for name in applied if applied[name] != before.get(name)}
    assert {line.removeprefix("+++ b/") for line in shown.splitlines() if line.startswith("+++ b/")} == changed
    assert commands.status(locate(root), series).state == "applied"
    assert commands.apply(locate(root), series).exit_status == 0
    assert contents(root) == applied
    assert commands.revert(locate(root), series).exit_status == 0
    assert contents(root) == before


def test_exported_patches_make_the_tree_that_apply_makes(root, tmp_path_factory):
    series = load_series(SERIES)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "start")
    out = tmp_path_factory.mktemp("out")
    written = commands.export(locate(root), series, out).written
    git(root, "am", "-q", *[str(path) for path in written])
    exported = contents(root)
    git(root, "reset", "-q", "--hard", git(root, "rev-list", "--max-parents=0", "HEAD").stdout.strip())
    git(root, "clean", "-qfd")
    commands.apply(locate(root), series)
    assert contents(root) == exported


@pytest.mark.parametrize("change", ["removed", "doubled"])
def test_a_tree_with_an_anchor_removed_or_doubled_is_refused_untouched(root, change):
    path = root / MODULE
    anchor = "        return accepted_tokens, num_accepted_tokens\n"
    text = path.read_text()
    assert anchor in text
    at = text.index(anchor)
    changed = text[:at] + (anchor.replace("return", "pair =") if change == "removed" else anchor * 2)
    path.write_text(changed + text[at + len(anchor) :])
    before = contents(root)
    with pytest.raises(InstallerError, match="do not fit"):
        commands.apply(locate(root), load_series(SERIES))
    assert contents(root) == before
