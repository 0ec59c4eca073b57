"""What the serving side counts, from every process, and where people read it."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace

import pytest

from tests.unit.test_hooks import ONE_ENGINE, request

from .common.loading import WINDOWS
from .common.results import Output, Result
from .postproc_process import Job, run_worker
from .serving import TOOLS, Answer, Server, without_ids
from .test_serving_finish import BROKEN_HARMONY, HARMONY, OPEN_HERMES

pytestmark = pytest.mark.usefixtures("nothing_published")
WITH_COLLECTOR = [w for w in WINDOWS if w != "w12"]
KEY = "structured_commit_incomplete"


def job(served, text, kind, reason="stop"):
    """A request as the worker gets it."""
    harmony = served.format == "harmony"
    args = {"tools": TOOLS, "num_prompt_tokens": 3, **({} if harmony else {"tool_parser": "qwen3"})}
    names = {"stream": "chat_harmony_streaming" if harmony else "chat_stream"}
    names["whole"] = "chat_harmony" if harmony else "chat_response"
    steps = []
    for response in served.responses(text, 4, reason):
        output = response.outputs[0]
        steps.append((output.token_ids_diff, output.text, output.finish_reason, output.stop_reason))
    return Job(7, f"{names[kind]}_post_processor", args, steps)


@pytest.mark.parametrize(("window", "name"), [("w13b", "harmony"), ("w14", "hermes")])
def test_a_worker_process_delivers_and_counts_what_the_server_would(patched, served, window, name):
    text = BROKEN_HARMONY["unfinished header"] if name == "harmony" else OPEN_HERMES
    section = served[name].section(report_field=True)
    alone = Server(patched(window), served[name], section)
    expected = {"stream": alone.stream(text, 4), "whole": alone.whole(text)}
    server = Server(patched(window), served[name], section, workers=1, collector=True)
    assert "TRTLLM_STRUCTURED_COMMIT_SERVING" in os.environ
    outputs = run_worker(server.tree.root, [job(served[name], text, kind) for kind in ("stream", "whole")])
    chunks = [chunk for out, _ in outputs[0] for chunk in out]
    assert [without_ids(c) for c in chunks] == expected["stream"].raw[:-1]
    reply = Answer()
    reply.add(json.loads(outputs[1][-1][0])["choices"][0])
    assert (reply.content, reply.report) == (expected["whole"].content, expected["whole"].report)
    for worker_outputs in outputs:
        result = Result(7, [Output()], _done=True, metrics_dict=worker_outputs[-1][1])
        assert list(result.metrics_dict) == [KEY]
        with server.tree.active():
            asyncio.run(server.http._extract_metrics(result, None))
        assert KEY not in result.metrics_dict
        assert not any(server.collector.logged)  # nothing foreign is logged
    counted = server.overlay("serving.process").SERVING.finished
    assert [(policy, form, n) for (policy, form, _), n in counted.items()] == [("observe", name, 2)]


@pytest.mark.parametrize("window", WINDOWS)
def test_an_incomplete_reply_is_counted_once_whichever_metrics_the_server_reads(patched, served, window):
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    broken = BROKEN_HARMONY["unfinished header"]
    server.stream(broken)
    server.whole(broken)
    server.whole(HARMONY["answer"])
    finished = server.overlay("serving.process").SERVING.finished
    assert finished.total() == 2
    assert finished == server.overlay("serving.process").SERVING.incomplete
    shared = {}
    for metrics, candidates in (({}, [{}, {}]), (shared, [shared])):
        *_, last = served["harmony"].responses(broken, 100)
        last.metrics_dict, last.candidate_metrics = metrics, candidates
        with server.tree.active():
            server.handlers.chat_harmony_post_processor(last, server.args())
            asyncio.run(server.http._extract_metrics(last, None))
    assert finished.total() == 4


@pytest.mark.parametrize("window", WINDOWS)
def test_iteration_statistics_hold_the_stage_s_counters(patched, checkpoint, window):
    tree = patched(window)
    runtime = tree.load("_torch.speculative.structured_commit.runtime")
    hooks = tree.load("_torch.speculative.structured_commit.hooks")
    serialiser = _serialiser(tree)
    record = (SimpleNamespace(to_json_str=lambda: '{"iter": 1}'), None)
    with tree.active():
        runtime.RUNTIME.reset()
        assert json.loads(serialiser(record)) == {"iter": 1}
        runtime.RUNTIME.build(checkpoint.section("observe"), checkpoint.folder, 0, True)
        metadata = SimpleNamespace(spec_dec_mode=ONE_ENGINE)
        for step in range(2 * runtime.STATISTICS_EVERY + 1):
            hooks.bind(metadata, [request(0, checkpoint.prompts(1)[0], request_id=1)])
            if step < 5:
                runtime.RUNTIME.stage.counters[0] += 3
        shown = json.loads(serialiser(record))["structuredCommitStats"]
        runtime.RUNTIME.reset()
    assert (shown["policy"], shown["format"], shown["windows"], shown["aside"]) == ("observe", "toy", 15, 0)


def _serialiser(tree):
    if tree.window.startswith("w12"):
        return tree.load("executor.worker").GenerationExecutorWorker._stats_serializer
    return tree.load("executor.base_worker").BaseWorker._stats_serializer


@pytest.mark.parametrize(("window", "buffered"), [*((w, False) for w in WITH_COLLECTOR), ("w13b", True), ("w14", True)])
def test_prometheus_and_metrics_route_show_counters_and_incomplete_replies(
    patched,
    served,
    window,
    buffered,
    monkeypatch,
):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    counter = prometheus.Counter
    monkeypatch.setattr(prometheus, "Counter", lambda *a, **k: counter(*a, **k, registry=registry))
    server = Server(patched(window), served["harmony"], served["harmony"].section(), collector=True)
    if buffered:
        server.http._iteration_stats_buffer = []
    metrics = server.overlay("serving.prometheus").Metrics()
    monkeypatch.setattr(server.overlay("serving.iteration_stats"), "_METRICS", metrics)
    server.stream(BROKEN_HARMONY["unfinished header"])
    ((_, _, state),) = server.overlay("serving.process").SERVING.finished
    section = {"policy": "observe", "format": "harmony", "windows": 5, "repaired": 0, "aside": 0}
    records = [{"numActiveRequests": 1, "structuredCommitStats": {**section, "windows": n}} for n in (5, 9)]
    with server.tree.active():
        if buffered:
            server.stats = records
            asyncio.run(server.http.collect_iteration_stats())
        else:
            for record in records:
                server.collector.log_iteration_stats(dict(record))
            server.stats = records
        shown = asyncio.run(server.http.get_iteration_stats())
    assert [r["structuredCommitStats"]["windows"] for r in shown] == [5, 9]
    assert shown[-1]["structuredCommitStats"]["incomplete"] == [
        {"policy": "observe", "format": "harmony", "state": state, "replies": 1}
    ]
    labels = {"model_name": "m", "engine_type": "trtllm", "policy": "observe", "format": "harmony"}
    value = registry.get_sample_value
    assert value("trtllm_structured_commit_windows_total", labels) == 9
    assert value("trtllm_structured_commit_repaired_total", labels) is None
    assert value("trtllm_structured_commit_incomplete_total", {**labels, "state": state}) == 1


@pytest.mark.parametrize("window", WINDOWS)
def test_statistics_stay_as_they_were_while_nothing_is_configured(unpatched, patched, served, window):
    record = (SimpleNamespace(to_json_str=lambda: '{"iter": 1}'), None)
    for tree in (unpatched[window], patched(window)):
        server = Server(tree, served["hermes"], collector=True)
        server.stats = [{"iter": 1}]
        with tree.active():
            assert asyncio.run(server.http.get_iteration_stats()) == [{"iter": 1}]
            assert _serialiser(tree)(record) == '{"iter": 1}'


def test_a_new_executor_without_a_section_takes_the_published_settings_back(patched, served):
    Server(patched("w14"), served["hermes"], served["hermes"].section())
    assert "TRTLLM_STRUCTURED_COMMIT_SERVING" in os.environ
    server = Server(patched("w14"), served["hermes"])
    assert "TRTLLM_STRUCTURED_COMMIT_SERVING" not in os.environ
    assert not server.overlay("serving.process").SERVING.ready()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_variable_alone_serves_too_and_finds_the_checkpoint_by_the_tokenizer(
    patched,
    served,
    window,
    monkeypatch,
):
    name = "harmony"
    server = Server(patched(window), served[name])
    monkeypatch.setenv("TRTLLM_STRUCTURED_COMMIT", json.dumps(served[name].section()))
    server.overlay("serving.process").SERVING.reset()  # as in a process that nothing was published to
    made = server.args

    def with_tokenizer(**more):
        arguments = made(**more)
        arguments.tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(name_or_path=str(served[name].folder)))
        return arguments

    server.args = with_tokenizer
    assert server.whole(BROKEN_HARMONY["unfinished header"]).content != ""
    server.overlay("serving.process").SERVING.reset()
