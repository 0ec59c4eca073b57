"""What the six commands do on a tree that fits."""

import io
import os
import subprocess
import sys

import pytest

from scripts.installer import commands
from scripts.installer.report import print_report
from scripts.installer.series import load_series
from scripts.installer.tree import locate
from tests.installer.kit import LOOP, OVERLAY, SAMPLER, WORKER, make_place, snapshot

KEYS = {
    "schema",
    "command",
    "ok",
    "exit_status",
    "headline",
    "tree",
    "series",
    "state",
    "patches",
    "files",
    "problems",
    "notes",
    "diff",
    "written",
}


def test_check_recognises_the_window_and_finds_every_anchor(place):
    outcome = place.run("check")
    assert outcome.status == 0
    assert outcome.report["tree"] == {"root": str(place.tree), "version": "9.1.0rc3", "window": "two"}
    assert outcome.statuses() == dict.fromkeys(["accept", "draft", "stop", "guard"], "ready")
    (accept, *_) = outcome.report["patches"]
    assert accept == {
        "id": "accept",
        "purpose": "commit what strict acceptance returns",
        "hook": "commit",
        "status": "ready",
        "file": WORKER,
        "class": "Worker",
        "function": "accept",
        "expected": 1,
        "found": 1,
        "lines": [13],
        "reason": None,
        "nearest": None,
    }


def test_check_writes_nothing(place):
    before = snapshot(place.tree)
    place.run("check")
    assert snapshot(place.tree) == before


def test_apply_patches_and_adds_and_leaves_the_rest(place):
    before = snapshot(place.tree)
    outcome = place.run("apply")
    assert outcome.status == 0
    assert outcome.report["state"] == "applied"
    worker = (place.tree / WORKER).read_text(encoding="utf-8")
    assert (
        """        chosen, counts = fused_op(state.logits, state.drafts)  # one launch
        chosen, counts = hooks.commit_fused(chosen, counts)  # structured-commit: draft
        state.counts = counts
"""
        in worker
    )
    assert (
        """
        from .stage_kit import hooks
        tokens, counts = hooks.commit(tokens, counts)  # structured-commit: accept
        return tokens, counts

    def draft"""
        in worker
    )
    assert worker.endswith("class Other:\n    def accept(self, logits, counts):\n        return tokens, counts\n")
    assert "hooks.add(request, token)  # structured-commit: stop" in (place.tree / SAMPLER).read_text(encoding="utf-8")
    assert (place.tree / OVERLAY / "hooks.py").is_file()
    after = snapshot(place.tree)
    changed = {path for path in before if after[path] != before[path]}
    assert changed - {"tensorrt_llm", "tensorrt_llm/_torch"} == {WORKER, SAMPLER, LOOP}


def test_apply_keeps_the_mode_of_a_patched_file(place):
    (place.tree / WORKER).chmod(0o755)
    place.run("apply")
    assert (place.tree / WORKER).stat().st_mode & 0o777 == 0o755


def test_apply_twice_changes_nothing_the_second_time(place):
    place.run("apply")
    before = snapshot(place.tree)
    outcome = place.run("apply")
    assert outcome.status == 0
    assert outcome.report["headline"] == "already applied: nothing to do"
    assert snapshot(place.tree) == before


def test_revert_restores_every_byte_and_removes_what_was_added(place):
    before = snapshot(place.tree)
    place.run("apply")
    outcome = place.run("revert")
    assert outcome.status == 0
    assert snapshot(place.tree) == before


def test_revert_of_an_untouched_tree_says_so(place):
    before = snapshot(place.tree)
    outcome = place.run("revert")
    assert (outcome.status, outcome.report["headline"]) == (0, "nothing is applied")
    assert snapshot(place.tree) == before


def test_revert_works_without_a_readable_series(place):
    before = snapshot(place.tree)
    place.run("apply")
    place.series.write_text("not = [toml", encoding="utf-8")
    assert place.run("revert").status == 0
    assert snapshot(place.tree) == before


def test_revert_removes_the_byte_code_of_our_modules(place):
    before = snapshot(place.tree)
    place.run("apply")
    cache = place.tree / OVERLAY / "__pycache__"
    cache.mkdir()
    (cache / "hooks.cpython-312.pyc").write_bytes(b"x")
    place.run("revert")
    assert snapshot(place.tree) == before


@pytest.mark.parametrize("stranger", ["__pycache__/stranger.cpython-312.pyc", "notes.txt"])
def test_revert_leaves_what_others_put_beside_our_modules(place, stranger):
    place.run("apply")
    file = place.tree / OVERLAY / stranger
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x")
    outcome = place.run("revert")
    assert outcome.status == 0
    assert file.read_bytes() == b"x"
    assert not (place.tree / OVERLAY / "hooks.py").exists()
    assert any(OVERLAY in note for note in outcome.report["notes"])


def test_check_after_apply_finds_everything_applied(place):
    place.run("apply")
    outcome = place.run("check")
    assert outcome.status == 0
    assert set(outcome.statuses().values()) == {"already applied"}
    assert outcome.report["state"] == "applied"


def test_status_before_and_after(place):
    assert place.run("status").report["state"] == "not applied"
    place.run("apply")
    outcome = place.run("status")
    assert (outcome.status, outcome.report["state"], outcome.report["series"]["version"]) == (0, "applied", "7")
    kinds = {file["path"]: (file["kind"], file["state"]) for file in outcome.report["files"]}
    assert kinds[WORKER] == ("patched", "matches")
    assert kinds[f"{OVERLAY}/hooks.py"] == ("overlay", "matches")


def test_status_names_the_edited_file_and_fails(place):
    place.run("apply")
    place.edit(WORKER, "one launch", "two launches")
    outcome = place.run("status")
    assert (outcome.status, outcome.report["state"], outcome.problem["place"]) == (1, "changed", WORKER)


def test_a_newer_series_replaces_what_an_older_one_applied(place):
    before = snapshot(place.tree)
    place.run("apply")
    place.edit_series('version = "7"', 'version = "8"')
    rule = place.repo / "patches/sampler/stop.yml"
    rule.write_text(rule.read_text(encoding="utf-8").replace("hooks.add(", "hooks.more.add("), encoding="utf-8")
    (place.repo / "overlay" / OVERLAY / "more.py").write_text("x = 1\n", encoding="utf-8")
    outcome = place.run("apply")
    assert outcome.status == 0
    assert "hooks.more.add(request" in (place.tree / SAMPLER).read_text(encoding="utf-8")
    assert place.run("status").report["series"]["version"] == "8"
    place.run("revert")
    assert snapshot(place.tree) == before


def test_a_newer_series_that_does_not_fit_leaves_the_older_one_applied(place):
    place.run("apply")
    before = snapshot(place.tree)
    rule = place.repo / "patches/sampler/stop.yml"
    rule.write_text(rule.read_text(encoding="utf-8").replace(".add($TOKEN)", ".put($TOKEN)"), encoding="utf-8")
    assert place.run("apply").problem["name"] == "AnchorsDoNotFit"
    assert snapshot(place.tree) == before


def test_apply_writes_again_what_git_took_away(place):
    original = (place.tree / WORKER).read_bytes()
    place.run("apply")
    applied = snapshot(place.tree)
    (place.tree / WORKER).write_bytes(original)
    (place.tree / OVERLAY / "hooks.py").unlink()
    assert place.run("status").report["state"] == "changed"
    assert place.run("apply").status == 0
    assert snapshot(place.tree) == applied


def test_a_patch_for_a_file_this_window_lacks_is_left_out_if_optional(place):
    (place.tree / LOOP).unlink()
    outcome = place.run("check")
    assert outcome.status == 0
    assert outcome.statuses()["guard"] == "not in this tree"
    applied = place.run("apply")
    assert applied.status == 0
    assert applied.report["notes"] == ["1 optional patches have no place in this tree: guard"]
    assert place.run("revert").status == 0


def test_a_place_that_may_be_an_optional_patchs_is_pointed_at(place):
    place.edit(LOOP, "lengths + counts", "lengths * counts + 1 - 1")
    note = f"guard; `guard` may belong to {LOOP}:5, in a shape that its rule does not know"
    assert place.run("check").report["notes"][0].endswith(note)
    place.edit(LOOP, "self.last =", "self.first =")
    assert place.run("check").report["notes"] == ["1 optional patches have no place in this tree: guard"]


def test_a_class_that_moved_is_found_in_the_first_file_that_holds_it(place):
    moved = place.tree / "tensorrt_llm/_torch/speculative/moved.py"
    moved.write_text("from .worker import Worker\n", encoding="utf-8")
    found = {patch["id"]: patch["file"] for patch in place.run("check").report["patches"]}
    assert found["draft"] == WORKER
    moved.write_bytes((place.tree / WORKER).read_bytes())
    found = {patch["id"]: patch["file"] for patch in place.run("check").report["patches"]}
    assert found["draft"] == "tensorrt_llm/_torch/speculative/moved.py"


def test_the_other_window_gets_its_own_patches(place):
    place.edit(WORKER, "_names_of_window_two", "_names_of_window_one")
    outcome = place.run("check")
    assert outcome.report["tree"]["window"] == "one"
    assert list(outcome.statuses()) == ["accept", "stop", "guard"]


@pytest.mark.parametrize("inside", ["", "tensorrt_llm"])
def test_the_path_may_be_the_root_or_the_package(place, inside):
    inner = type(place)(place.repo, place.tree / inside)
    assert inner.run("check").report["tree"]["root"] == str(place.tree)


def test_a_checkout_in_a_folder_named_like_the_package_is_its_own_root(tmp_path):
    place = make_place(tmp_path)
    root = tmp_path / "tensorrt_llm"
    place.tree.rename(root)
    assert type(place)(place.repo, root).run("check").report["tree"]["root"] == str(root)


def test_apply_through_a_link_to_the_tree_works_on_the_tree(place, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(place.tree)
    outcome = type(place)(place.repo, link).run("apply")
    assert (outcome.status, outcome.report["tree"]["root"]) == (0, str(place.tree))


@pytest.mark.parametrize("command", ["check", "apply", "status", "diff", "export", "revert", "check-series"])
def test_the_json_of_every_command_has_the_same_keys(place, tmp_path, command):
    outcome = place.run(command, *([str(tmp_path / "out")] if command == "export" else []))
    assert set(outcome.report) == KEYS
    assert (outcome.status, outcome.report["ok"], outcome.report["command"]) == (0, True, command)
    place.edit(WORKER, "_names_of_window_two", "_unheard_of")
    outcome = place.run(command, *([str(tmp_path / "out2")] if command == "export" else []))
    assert set(outcome.report) == KEYS
    assert outcome.report["exit_status"] == outcome.status


def test_people_get_one_line_from_apply_and_a_row_per_patch_from_check(place):
    status, out, err = place.text("check")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["accept", "ready", f"{WORKER}:13", "Worker.accept"]
    assert out.splitlines()[-1] == "window two (TensorRT-LLM 9.1.0rc3): 4 ready"
    assert place.text("apply")[1] == "applied 4 patches to 3 files, added 3 (window two)\n"
    assert place.text("revert")[1] == "restored 3 files and removed 3\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_table_with_every_patch_and_status(place):
    report = commands.check(locate(place.tree), load_series(place.series))
    out = Terminal()
    print_report(report, out, io.StringIO())
    assert [line.split()[0] for line in out.getvalue().splitlines() if "ready" in line][:2] == ["accept", "draft"]


def test_the_module_runs_as_a_program_and_ends_quietly_without_a_reader(place):
    command = [sys.executable, "-m", "scripts.installer", "diff", str(place.tree), "--series", str(place.series)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_diff_shows_the_same_before_and_after_apply_and_changes_nothing(place):
    before = snapshot(place.tree)
    diff = place.run("diff").report["diff"]
    assert diff.startswith(f"diff --git a/{WORKER} b/{WORKER}\n")
    assert "+        tokens, counts = hooks.commit(tokens, counts)  # structured-commit: accept\n" in diff
    assert f"diff --git a/{OVERLAY}/hooks.py b/{OVERLAY}/hooks.py\nnew file mode 100644\n" in diff
    assert snapshot(place.tree) == before
    assert OVERLAY not in place.run("diff", "--no-overlay").report["diff"]
    place.run("apply")
    assert place.run("diff").report["diff"] == diff


def test_files_the_series_does_not_name_are_never_opened(place):
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and watching else None)
    watching = True
    place.run("check")
    place.run("apply")
    watching = False
    assert not [name for name in opened if name.endswith("unrelated.py")]
