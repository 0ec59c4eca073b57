"""The finish guard asks for a trace of a request that ended inside a block, from whichever process judges the reply."""

from __future__ import annotations

import json

import pytest

from .postproc_process import run_worker
from .serving import Server
from .test_serving_counters import job
from .test_serving_finish import HERMES, OPEN_HERMES

pytestmark = pytest.mark.usefixtures("nothing_published")


@pytest.mark.parametrize("process", ["server", "worker"])
def test_a_reply_that_ends_inside_a_block_is_asked_for_and_no_other(patched, served, tmp_path, process):
    section = served["hermes"].section(record={"folder": str(tmp_path / "traces")})
    server = Server(patched("w13b"), served["hermes"], section, workers=int(process == "worker"))
    for text in (HERMES["call"], OPEN_HERMES):
        assert not (tmp_path / "traces").exists()
        if process == "worker":
            run_worker(server.tree.root, [job(served["hermes"], text, "whole")])
        else:
            server.stream(text, 4)
    (asked,) = (tmp_path / "traces" / "ask").iterdir()
    assert asked.name == "7"
    assert json.loads(asked.read_text()) == {"reason": "ended inside a block"}
