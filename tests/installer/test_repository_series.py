"""The series that this repository ships: complete, in step with the hooks it calls, and true to its own cases."""

import ast
import inspect
import re
import shutil
from pathlib import Path

import pytest

from scripts.installer.plan import read_overlay
from scripts.installer.series import load_series
from scripts.installer.validate import validate
from structured_commit import hooks

SERIES = Path("patches/series.toml")


def test_every_rule_is_in_the_series_and_every_case_holds():
    assert validate(load_series(SERIES)) == []


def test_every_hook_that_a_patch_calls_exists_and_takes_the_arguments():
    called = set()
    for rule in Path("patches").rglob("*.yml"):
        for name, arguments in re.findall(
            r"_structured_commit\.(\w+)\((.*?)\)(?:\s+#|:|;|\s*$)", rule.read_text(), re.M
        ):
            call = ast.parse(re.sub(r"\$+\w+", "captured", f"f({arguments})"), mode="eval").body
            parameters = inspect.signature(getattr(hooks, name)).parameters
            keywords = {k.arg for k in call.keywords}
            assert keywords <= set(parameters), rule
            required = [p for p in parameters.values() if p.default is p.empty and p.name not in keywords]
            assert len(required) <= len(call.args) <= len(parameters), (rule, name)
            called.add(name)
    assert called == set(hooks.__all__)


@pytest.mark.parametrize("name", hooks.__all__)
def test_every_hook_says_what_it_is_for(name):
    assert getattr(hooks, name).__doc__


def test_the_overlay_is_the_package_and_nothing_that_tools_left_beside_it(tmp_path):
    source = tmp_path / "repository"
    for part in ("patches", "overlay"):
        shutil.copytree(part, source / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    package = source / "overlay/tensorrt_llm/_torch/speculative/structured_commit"
    expected = {str(p.relative_to(source / "overlay")) for p in (source / "overlay").rglob("*") if p.is_file()}
    assert {Path(name).suffix for name in expected} == {".py", ".json"}
    for left in (package / "__pycache__/stage.pyc", package.with_suffix(".egg-info") / "PKG-INFO"):
        left.parent.mkdir()
        left.write_text("")
    assert set(read_overlay(load_series(source / "patches/series.toml"))) == expected
