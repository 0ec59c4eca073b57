"""The doubles decode: alone as the target does, and patched but off as they did before."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout

import pytest

from scripts.installer.cli import main as installer

from .common.drafting import SaRecorder
from .common.engine import plain_greedy, requests_for
from .common.loading import UPSTREAM, WINDOWS
from .common.tables import blurred, random_table
from .paths import PATHS, SETTINGS, cases, name

VOCAB = 12
TARGET = random_table(VOCAB, order=3)
DRAFTER = blurred(TARGET, VOCAB, noise=1.0)
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11], [3, 3]]
MODULES = (
    "llmapi.llm_args",
    "_torch.pyexecutor.py_executor_creator",
    "_torch.pyexecutor.py_executor",
    "_torch.speculative.utils",
)
BY_NAME = {path.name: path for path in PATHS}


def unpatched_run(tree, path, way, cache={}):  # noqa: B006
    """The run of an unpatched double, which several tests compare with: made once."""
    key = tree.window, path.name, way
    if key not in cache:
        cache[key] = decode(tree, path, settings=SETTINGS[way])[:2]
    return cache[key]


def decode(tree, path, *, settings=(), stage=None, prompts=PROMPTS, pause_at=None, **request):
    engine = path.engine(tree, TARGET, DRAFTER, VOCAB, stage=stage, **dict(settings))
    prompts = prompts[:4] if path.two_model else prompts
    requests = requests_for(prompts, max_new_tokens=9, end_id=0, temperature=path.temperature, **request)
    return requests, engine.run(requests, pause_at), engine


@pytest.mark.parametrize(("window", "path", "way"), cases(law="argmax"), ids=name)
def test_greedy_speculation_says_what_the_target_says_alone(unpatched, window, path, way):
    requests, run = unpatched_run(unpatched[window], path, way)
    assert run.tokens == {r.py_request_id: plain_greedy(TARGET, r) for r in requests}
    if "without" not in path.name:
        assert any(len(tokens) > 1 for step in run.steps for tokens in step.committed.values())


@pytest.mark.parametrize(("window", "path"), cases(settings=False), ids=name)
def test_patched_but_off_decodes_bit_identically(unpatched, patched, window, path):
    way = "overlap" if path.may_overlap() else "padded"
    _, before = unpatched_run(unpatched[window], path, way)
    _, after, _ = decode(patched(window), path, settings=SETTINGS[way])
    assert after == before


@pytest.mark.parametrize("window", WINDOWS)
def test_the_installer_finds_every_required_patch_ready(window):
    out = io.StringIO()
    with redirect_stdout(out):
        status = installer(["check", str(UPSTREAM / window), "--json"])
    report = json.loads(out.getvalue())
    assert (status, report["tree"]["window"]) == (0, window)
    found = {patch["id"]: patch["status"] for patch in report["patches"]}
    required = {"config", "build", "bind", "commit-strict", "commit-rejection", "commit-relaxed-mtp", "commit-thop-mtp"}
    if window == "w12":  # no rejection sampling in one model
        required -= {"commit-rejection"}
    assert {patch for patch, status in found.items() if status == "ready"} >= required
    assert set(found.values()) <= {"ready", "not in this tree"}


def test_every_patch_has_a_place_in_some_double(patched):
    ready, known = set(), set()
    for window in WINDOWS:
        out = io.StringIO()
        with redirect_stdout(out):
            installer(["check", str(UPSTREAM / window), "--json"])
        patches = json.loads(out.getvalue())["patches"]
        ready |= {patch["id"] for patch in patches if patch["status"] == "ready"}
        known |= {patch["id"] for patch in patches}
    assert known - ready == {"guard-module"}  # it has one in `w12_early`, which lies over w12


@pytest.mark.parametrize("window", WINDOWS)
def test_patched_doubles_import(patched, window):
    tree = patched(window)
    for module in MODULES:
        assert tree.load(module).__file__.startswith(str(tree.root))


def test_trees_loaded_side_by_side_do_not_mix(unpatched):
    first, second = (unpatched[window].load("_torch.speculative.interface") for window in ("w13a", "w14"))
    assert first is not second
    assert not hasattr(first.SpecWorkerBase, "_rollback_guided_decoder_after_verify")
    assert hasattr(second.SpecWorkerBase, "_rollback_guided_decoder_after_verify")
    assert not [module for module in sys.modules if module.partition(".")[0] == "tensorrt_llm"]


@pytest.mark.parametrize("window", WINDOWS)
def test_accepted_and_rewound_drafts_add_up(unpatched, window):
    _, run, _ = decode(unpatched[window], BY_NAME["eagle3-strict"])
    live = [
        (len(tokens) - 1 + step.rewinds[request], step.draft_len, step.kv_lens[request])
        for step in run.steps
        for request, tokens in step.committed.items()
        if request in step.kv_lens and step.rewinds[request] + len(tokens) > 1
    ]
    assert live
    assert all(verified == drafted for verified, drafted, _ in live)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_paused_request_resumes_where_it_was(unpatched, window):
    requests, run, _ = decode(unpatched[window], BY_NAME["eagle3-strict"], pause_at={2: 100, 4: 103})
    assert run.tokens == {r.py_request_id: plain_greedy(TARGET, r) for r in requests}


@pytest.mark.parametrize("window", WINDOWS)
def test_a_request_prefilled_elsewhere_starts_from_its_first_token(unpatched, window):
    path = BY_NAME["eagle3-strict"]
    engine = path.engine(unpatched[window], TARGET, DRAFTER, VOCAB, **SETTINGS["overlap"])
    requests = requests_for(PROMPTS, max_new_tokens=9, end_id=0)
    expected = {r.py_request_id: plain_greedy(TARGET, r) for r in requests}
    for request in requests[1:3]:
        request.receive(expected[request.py_request_id][0])
    assert engine.run(requests).tokens == expected


@pytest.mark.parametrize("window", WINDOWS)
def test_forced_acceptance_fabricates_lengths(unpatched, window, monkeypatch):
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "1")
    _, run, _ = decode(unpatched[window], BY_NAME["eagle3-strict"], prompts=PROMPTS[:1])
    assert {len(tokens) for step in run.steps[1:-1] for tokens in step.committed.values()} == {2}


@pytest.mark.parametrize("window", ["w13b", "w14"])
def test_penalties_count_what_was_committed(unpatched, window):
    path = BY_NAME["eagle3-strict"]
    penalized = type(path)(path.name, path.windows, path.speculative, {"enable_penalty": True})
    engine = penalized.engine(unpatched[window], TARGET, DRAFTER, VOCAB)
    (request,) = requests_for(PROMPTS[:1], max_new_tokens=9)
    request.presence_penalty = 4.0
    tokens = engine.run([request]).tokens[request.py_request_id]
    counts = engine.executor.model_engine.spec_metadata.penalty_state.counts[0]
    assert tokens != plain_greedy(TARGET, request)
    assert all(counts[token] >= tokens.count(token) for token in tokens)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_suffix_automaton_reads_what_is_committed(unpatched, window):
    for path in (BY_NAME["mtp-strict"], BY_NAME["eagle3-strict"]):
        engine = path.engine(unpatched[window], TARGET, DRAFTER, VOCAB)
        engine.worker.sa_enhancer = recorder = SaRecorder()
        (request,) = requests_for(PROMPTS[:1], max_new_tokens=9)
        tokens = engine.run([request]).tokens[request.py_request_id]
        assert recorder.stream()[: len(tokens) - 1] == tokens[1:]


def test_workers_of_the_template_age_must_not_define_forward(unpatched):
    for window in ("w13b", "w14"):
        base = unpatched[window].load("_torch.speculative.interface").SpecWorkerBase
        with pytest.raises(TypeError, match="_forward_impl"):
            type("Worker", (base,), {"forward": lambda self: None})
