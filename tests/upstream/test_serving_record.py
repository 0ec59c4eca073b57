"""The finish guard asks for a trace of a request that ended inside a block, from whichever process judges the reply."""

from __future__ import annotations

import json

import pytest

from .postproc_process import run_worker
from .serving import Server
from .test_serving_counters import job
from .test_serving_finish import HERMES, OPEN_HERMES

pytestmark = pytest.mark.usefixtures("nothing_published")


def test_a_reply_that_ends_inside_a_block_is_asked_for_and_no_other(patched, served, tmp_path):
    folder = tmp_path / "traces"
    section = served["hermes"].section(record={"folder": str(folder)})
    server = Server(patched("w13b"), served["hermes"], section)
    server.stream(HERMES["call"], 4)
    assert not folder.exists()
    server.stream(OPEN_HERMES, 4)
    (asked,) = (folder / "ask").iterdir()
    assert asked.name == "7"
    assert json.loads(asked.read_text()) == {"reason": "ended inside a block"}


def test_a_post_processing_worker_asks_too(patched, served, tmp_path):
    folder = tmp_path / "traces"
    server = Server(patched("w13b"), served["hermes"], served["hermes"].section(record=str(folder)), workers=1)
    run_worker(server.tree.root, [job(served["hermes"], OPEN_HERMES, "whole")])
    assert [p.name for p in (folder / "ask").iterdir()] == ["7"]
