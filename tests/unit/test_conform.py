"""`conform` holds on the doubles, and names what differs on a tree where something moved."""

from __future__ import annotations

import ast
import builtins
import json
import re
import shutil

import pytest

from scripts import conform
from scripts.installer.rules import load_rule
from scripts.installer.series import load_series
from scripts.installer.tree import Tree
from tests.upstream.common.loading import UPSTREAM, WINDOWS, copy_tree

FACTS = conform._PATCHES / "facts.toml"
SERIES = conform._PATCHES / "series.toml"
INTERFACE = "tensorrt_llm/_torch/speculative/interface.py"
STRICT = "SpecWorkerBase._sample_and_accept_draft_tokens_base"


@pytest.fixture
def double(tmp_path):
    """A copy of the w13b double, and a function that edits one of its files."""
    root = tmp_path / "tree"
    shutil.copytree(UPSTREAM / "w13b", root, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(old: str, new: str, file: str = INTERFACE) -> None:
        text = (root / file).read_text(encoding="utf-8")
        assert old in text
        (root / file).write_text(text.replace(old, new), encoding="utf-8")

    return root, edit


def run(capsys, root, *arguments):
    status = conform.main([str(root), "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def differences(capsys, root):
    status, result = run(capsys, root)
    assert status == (1 if result["differences"] else 0)
    return [(d["place"], d["what"], d["found"]) for d in result["differences"]]


@pytest.mark.parametrize("window", WINDOWS)
def test_every_fact_holds_on_its_double_patched_or_not(capsys, tmp_path, window):
    status, before = run(capsys, UPSTREAM / window)
    assert (status, before["window"], before["differences"]) == (0, window, [])
    status, after = run(capsys, copy_tree(window, tmp_path, patched=True).root)
    assert (status, after["held"], after["absent"]) == (0, before["held"], before["absent"])


def test_a_renamed_parameter_is_reported(capsys, double):
    root, edit = double
    edit("_base(self, logits, draft_tokens, num_contexts,", "_base(self, logits, draft_tokens, contexts,")
    assert differences(capsys, root) == [
        (STRICT, "parameters", "logits, draft_tokens, contexts, batch_size, spec_metadata"),
        (STRICT, "bound at `return`", "without num_contexts"),
    ]


def test_a_return_too_many_is_reported(capsys, double):
    root, edit = double
    first = "        runtime_draft_len = draft_tokens.shape[-1]\n"
    edit(first, first + "        if batch_size == 0:\n            return self.no_rows()\n")
    assert differences(capsys, root) == [(STRICT, "returns", "2")]


def test_calls_in_another_order_are_reported(capsys, double):
    root, edit = double
    edit("self._accept_draft_tokens(logits, draft_tokens", "self._accept_draft_tokens(self.rows(), draft_tokens")
    edit("self._reshape_draft_tokens_for_accept(spec", "self._reshape_logits_for_accept(spec")
    edit("logits = self._reshape_logits_for_accept(", "logits = self._reshape_draft_tokens_for_accept(")
    ((place, what, found),) = differences(capsys, root)
    assert (place, what) == ("SpecWorkerBase.sample_and_accept_draft_tokens", "calls in order")
    assert found.startswith("_reshape_logits_for_accept, _reshape_draft_tokens_for_accept")


def test_a_reader_before_the_anchor_is_reported(capsys, double):
    root, edit = double
    anchor = "        num_accepted_draft_tokens = spec"
    file = "tensorrt_llm/_torch/speculative/drafting_loops.py"
    edit(anchor, "        attn_metadata.kv_lens_cuda += 0\n" + anchor, file)
    place = "LinearDraftingLoopWrapper.prepare_for_generation"
    what = "only after `assign num_accepted_draft_tokens`"
    assert differences(capsys, root) == [(place, what, "before it: kv_lens_cuda")]


def test_an_anchor_that_went_away_is_reported(capsys, double):
    root, edit = double
    edit(
        "    resources = {}\n    for resources",
        "    for stage",
        "tensorrt_llm/_torch/pyexecutor/py_executor_creator.py",
    )
    assert ("create_py_executor", "anchor", "missing") in differences(capsys, root)


def test_missing_fields_definitions_and_files_are_reported(capsys, double):
    root, edit = double
    edit("load_format:", "loading:", "tensorrt_llm/llmapi/llm_args.py")
    edit("def get_spec_worker(", "def make_spec_worker(", "tensorrt_llm/_torch/speculative/utils.py")
    (root / "tensorrt_llm/_torch/speculative/mtp.py").unlink()
    mtp = "MTPWorker.sample_and_accept_draft_tokens"
    assert differences(capsys, root) == [
        ("DecodingBaseConfig", "fields", "without load_format"),
        ("get_spec_worker", "definition", "missing"),
        (mtp, "file", "missing"),
        (mtp, "file", "missing"),
    ]


def test_an_optional_place_may_be_absent_but_not_different(capsys, double):
    root, edit = double
    file = "tensorrt_llm/_torch/speculative/eagle3_dynamic_tree.py"
    edit("_accepted_draft_indices_tensor[", "_indices[", file)
    assert [what for _, what, _ in differences(capsys, root)] == ["attributes", "attributes"]
    (root / file).unlink()
    assert differences(capsys, root) == []


def test_a_file_that_is_no_python_is_reported(capsys, double):
    root, edit = double
    edit("class MTPWorker", "class class MTPWorker", "tensorrt_llm/_torch/speculative/mtp.py")
    assert {what for _, what, _ in differences(capsys, root)} == {"syntax"}


def test_text_for_people_names_file_place_and_both_sides(capsys, double):
    root, edit = double
    edit("_base(self, logits, draft_tokens, num_contexts,", "_base(self, logits, draft_tokens, contexts,")
    assert conform.main([str(root)]) == 1
    out = capsys.readouterr().out
    assert f"interface.py\t{STRICT}\tparameters\tlogits, draft_tokens, num_contexts, batch_size, spec_metadata" in out
    assert out.splitlines()[-1].startswith("window w13b (TensorRT-LLM 1.3.0rc20): 2 things differ, ")


def test_exit_status_tells_a_strange_tree_from_wrong_usage(capsys, double, tmp_path):
    root, edit = double
    edit("_rejection_buffers_valid", "_buffers_fit")
    assert conform.main([str(root)]) == 1
    assert "fits no window" in capsys.readouterr().err
    assert conform.main([str(tmp_path / "nothing"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["name"] == "NotATree"
    (tmp_path / "facts.toml").write_text('[[fact]]\nwindow = ["w13b"]\n')
    assert conform.main([str(root), "--facts", str(tmp_path / "facts.toml")]) == 2
    with pytest.raises(SystemExit) as usage:
        conform.main([])
    assert usage.value.code == 2


def test_only_the_named_files_are_read(capsys, double, monkeypatch):
    root, _ = double
    seen = set()
    read = Tree.read
    monkeypatch.setattr(Tree, "read", lambda tree, path: seen.add(path) or read(tree, path))
    conform.main([str(root)])
    named = {file for fact in conform.load_facts(FACTS) for file in fact.files}
    assert seen <= named | {INTERFACE, "tensorrt_llm/version.py"}


def test_every_patch_has_a_fact_that_binds_what_its_payload_reads():
    series, facts = load_series(SERIES), conform.load_facts(FACTS)
    for patch in series.patches:
        own = [fact for fact in facts if fact.patch == patch.id]
        covered = {window for fact in own for window in fact.windows}
        # Late in w12 the Eagle3 worker learnt relaxed acceptance; only texts of later windows are held to it.
        assert covered >= set(patch.windows) - ({"w12"} if patch.id == "commit-relaxed-eagle3" else set()), patch.id
        bound = {name for fact in own for name in (*fact.bound, *fact.names)}
        assert payload_names(load_rule(series, patch).fix) <= bound | {"self"}, patch.id


def payload_names(fix: str) -> set[str]:
    """Names that a payload takes from around it."""
    text = re.sub(r"^(\s*)\$STMT$", r"\1pass", fix, flags=re.MULTILINE)
    text = re.sub(r"\$\w+", "None", text)
    text = re.sub(r"^(\s*)break\b", r"\1pass", text, flags=re.MULTILINE)
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    given = {"cls", "value", *dir(builtins)}
    return {n.id for n in names if not n.id.startswith("_structured_commit") and n.id not in given} - {
        "structured_commit"
    }
