"""Window w12 as first released: K is static, no step without drafts, a module function in the drafting loop."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from scripts.installer.cli import main as installer

from .common.engine import plain_greedy
from .paths import PATHS, SETTINGS, name
from .test_doubles import TARGET, decode
from .test_patched_repair import Decoded

WINDOW = "w12_early"
KNOWN = (
    "eagle3-strict",
    "mtp-strict",
    "mtp-thop",
    "eagle3-sampled",
    "mtp-relaxed",
    "two-model",
    "two-model-recovering",
)
ON = [replace(path, windows=(WINDOW,)) for path in PATHS if path.name in KNOWN]
GREEDY = [path for path in ON if path.law == "argmax"]


@pytest.mark.parametrize("path", ON, ids=name)
def test_patched_but_off_decodes_bit_identically(unpatched, patched, path):
    requests, before, _ = decode(unpatched[WINDOW], path, settings=SETTINGS["overlap"])
    _, after, _ = decode(patched(WINDOW), path, settings=SETTINGS["overlap"])
    assert after == before
    if path.law == "argmax":
        assert before.tokens == {r.py_request_id: plain_greedy(TARGET, r) for r in requests}


@pytest.mark.parametrize("path", [path for path in ON if not path.two_model], ids=name)
@pytest.mark.parametrize("way", SETTINGS)
def test_repair_commits_only_legal_tokens(patched, checkpoint, path, way):
    decoded = Decoded(patched(WINDOW), path, checkpoint, way=SETTINGS[way])
    assert not decoded.illegal
    assert not decoded.aside
    assert decoded.counters["repaired"] > 0
    if path in GREEDY:
        assert decoded.tokens == decoded.constrained


def test_the_patches_of_later_trees_have_no_place(unpatched):
    out = io.StringIO()
    with redirect_stdout(out):
        status = installer(["check", str(unpatched[WINDOW].root), "--json"])
    report = json.loads(out.getvalue())
    assert status == 0
    absent = {patch["id"] for patch in report["patches"] if patch["status"] == "not in this tree"}
    assert absent >= {"commit-single", "commit-relaxed-eagle3", "guard-linear"}
    assert "guard-module" in {patch["id"] for patch in report["patches"] if patch["status"] == "ready"}
