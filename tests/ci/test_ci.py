"""What `ci/` does on a GPU machine, as far as a CPU can tell: the client and its table against a real HTTP server, the
server's start and end, the scripts' syntax, and what they say where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from ci import flashinfer_parity, serve, tool_calls
from ci.tool_calls import Call, classify, collect, prompts, table_of, tally
from structured_commit import rejection_reference

from .chat_server import WAYS, chat_server

ROOT = Path(__file__).parents[2]
NAMES = list(WAYS)


def way_of(text: str) -> str:
    """Requests take the ways in turn."""
    return NAMES[prompts(200).index(text) % len(NAMES)]


@pytest.fixture(scope="module")
def replies():
    with chat_server(way_of) as server:
        found = {streamed: collect(server.url, "m", 60, streamed, workers=4) for streamed in (False, True)}
        return found, list(server.requests)


@pytest.mark.parametrize("streamed", [False, True])
def test_every_way_to_lose_a_call_is_told_apart(replies, streamed):
    found = replies[0][streamed]
    assert [r.number for r in found] == list(range(60))
    assert [r.outcome for r in found] == [WAYS[NAMES[n % len(NAMES)]] for n in range(60)]
    assert all(r.problem.startswith("InternalServerError") == (r.outcome == "error") for r in found)


def test_pieces_of_a_stream_are_put_together_as_the_whole_reply(replies):
    whole, streamed = (replies[0][s] for s in (False, True))
    for one, other in zip(whole, streamed, strict=True):
        assert (one.content, one.calls, one.finish_reason) == (other.content, other.calls, other.finish_reason)


def test_requests_offer_the_tools_and_differ(replies):
    requests = replies[1]
    assert len(requests) == 120
    texts = Counter(r["messages"][-1]["content"] for r in requests)
    assert len(texts) == 60
    assert set(texts.values()) == {2}
    assert all([t["function"]["name"] for t in r["tools"]] == list(tool_calls.REQUIRED) for r in requests)
    assert len(set(prompts(200))) == 200
    with pytest.raises(ValueError, match="1000 requests asked for"):
        prompts(1_000)


def test_the_table_counts_each_outcome_and_adds_up_the_lost(replies):
    runs = {"off": [*replies[0][False], *replies[0][True]], "on": replies[0][False][:2]}
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table_of(runs))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines() if "streamed" in line]
    each = Counter(WAYS.values())
    counts = [str(5 * each[outcome]) for outcome in tool_calls.OUTCOMES]
    lost = str(5 * (each["silent"] + each["leaked"] + each["broken"]))
    assert rows[0] == ["off", "unstreamed", "60", *counts, lost]
    assert rows[1] == ["off", "streamed", "60", *counts, lost]
    assert rows[2] == ["on", "unstreamed", "2", "2", "0", "0", "0", "0", "0", "0", "0"]
    assert len(rows) == 3
    assert tally(runs["on"]) == {"delivered": 2}


@pytest.mark.parametrize(
    ("reason", "content", "calls", "outcome"),
    [
        ("stop", "", [], "silent"),
        (None, "", [], "silent"),
        ("length", "", [], "cut"),
        ("stop", "text with <|channel|> in it", [], "leaked"),
        ("tool_calls", "", [Call("get_weather", '{"city": "x", "day": "y"}')], "delivered"),
        ("length", "", [Call("get_weather", '{"city": "x", "day": "y"}')], "delivered"),
        ("length", "", [Call("get_weather", '{"city": "x')], "cut"),
        ("tool_calls", "", [Call("get_weather", '["x"]')], "broken"),
        ("tool_calls", "", [Call("", "")], "broken"),
    ],
)
def test_a_reply_is_classified(reason, content, calls, outcome):
    assert classify(reason, content, calls) == outcome


def test_the_client_alone_prints_the_table(tmp_path):
    with chat_server(lambda text: "good" if "weather" in text else "nothing") as server:
        command = ["-m", "ci.tool_calls", "--url", server.url, "--model", "m", "--requests", "9", "--label", "here"]
        done = run_python(*command, "--json", str(tmp_path / "replies.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == 2
    written = json.loads((tmp_path / "replies.json").read_text())
    assert Counter((r["streamed"], r["outcome"]) for r in written) == {
        (False, "delivered"): 3,
        (False, "silent"): 6,
        (True, "delivered"): 3,
        (True, "silent"): 6,
    }


def test_serving_off_and_on_ends_in_the_table_and_leaves_no_server(tmp_path):
    server = tmp_path / "bin" / "trtllm-serve"
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec {sys.executable} -m tests.ci.chat_server "$@"\n')
    server.chmod(0o755)
    (tmp_path / "model").mkdir()
    command = ["-m", "ci.serve", "--out", str(tmp_path / "out"), "--requests", "12", "--model", str(tmp_path / "model")]
    done = run_python(*command, "--draft", str(tmp_path / "model"), path=str(server.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.replace("│", " ").split() for line in done.stdout.splitlines() if "streamed" in line]
    assert [(r[0], r[1], r[2], r[3], r[4], r[-1]) for r in rows] == [
        ("off", "unstreamed", "12", "8", "4", "4"),
        ("off", "streamed", "12", "8", "4", "4"),
        ("on", "unstreamed", "12", "12", "0", "0"),
        ("on", "streamed", "12", "12", "0", "0"),
    ]
    off, on = (yaml.safe_load((tmp_path / "out" / f"serve_{label}.yaml").read_text()) for label in ("off", "on"))
    assert "structured_commit" not in off["speculative_config"]
    assert on["speculative_config"].pop("structured_commit")["policy"] == "repair"
    assert on == off
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_does_not_start_is_said_with_its_log(tmp_path):
    server = tmp_path / "trtllm-serve"
    server.write_text("#!/bin/sh\necho no such model\nexit 7\n")
    server.chmod(0o755)
    done = run_python("-m", "ci.serve", "--out", str(tmp_path), "--model", ".", "--draft", ".", path=str(tmp_path))
    assert done.returncode == 4
    assert "stage off: trtllm-serve ended with status 7" in done.stderr
    assert "no such model" in done.stderr


def test_the_verdict_names_what_is_wrong(replies):
    good = [r for r in replies[0][False] if r.outcome == "delivered"]
    silent = [r for r in replies[0][False] if r.outcome == "silent"]
    failed = [r for r in replies[0][False] if r.outcome == "error"]
    logs = {"off": "", "on": "… structured_commit active: …"}
    assert serve.verdict({"off": good + silent, "on": good}, logs) == []
    assert "10 calls were lost in silence" in serve.verdict({"off": good, "on": good + silent}, logs)[0]
    assert "not one call was delivered" in serve.verdict({"off": silent, "on": good}, logs)[0]
    assert "5 requests failed, the first with Internal" in serve.verdict({"off": good + failed, "on": good}, logs)[0]
    swapped = serve.verdict({"off": good, "on": good}, {"off": logs["on"], "on": ""})
    assert [line.partition(": the server's log ")[0] for line in swapped] == ["off", "on"]


@pytest.mark.parametrize(
    ("version", "kernel"),
    [("0.6.4", "0.6.4"), ("0.6.18", "0.6.4"), ("0.7.1", "0.6.4"), ("0.7.2.post1", "0.7.2"), ("0.7.10", "0.7.4")],
)
def test_a_flashinfer_release_has_its_kernel(version, kernel):
    assert flashinfer_parity.kernel_of(version) == kernel


def test_an_older_flashinfer_is_refused():
    with pytest.raises(ValueError, match=r"0\.5\.3 is older than 0\.6\.4"):
        flashinfer_parity.kernel_of("0.5.3")


@pytest.mark.parametrize("kind", flashinfer_parity.KINDS)
def test_parity_windows_are_valid_and_a_changed_output_is_found(kind):
    draft, tokens, target = flashinfer_parity.windows(kind, 4, 3, 1_000, seed=1)
    for law in (draft, target):
        assert torch.allclose(law.sum(-1), torch.ones(()))
    assert (draft.gather(2, tokens.long().unsqueeze(-1)) > 0).all()
    ours = tuple(rejection_reference(draft, tokens, target, 5, 2))
    assert flashinfer_parity.differing_rows(ours, ours) == []
    for output in range(3):
        other = [t.clone() for t in ours]
        other[output][2] += 1
        assert flashinfer_parity.differing_rows(ours, tuple(other)) == [2]
    if kind == "disjoint":
        assert ours[2].eq(0).all()


def test_parity_covers_every_vocabulary_length_and_kind_once():
    seen = list(flashinfer_parity.cases())
    assert len({case[:4] for case in seen}) == len({case[4] for case in seen}) == len(seen) == 6 * 3 * 3 * 5


@pytest.mark.parametrize("script", ["gpu.sh", "inside.sh"])
def test_the_scripts_are_valid_shell(script):
    subprocess.run(["bash", "-n", str(ROOT / "ci" / script)], check=True)


def bash(script: str, *arguments: str, path: Path, **env: str) -> subprocess.CompletedProcess:
    """A script with nothing on its path but a few tools and what lies in `path`."""
    for name in ("dirname", "grep", "mkdir", "bash", "tee", "python3"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        if not (path / name).exists():
            (path / name).symlink_to(sys.executable if name == "python3" else found)
    command = ["bash", str(ROOT / "ci" / script), *arguments]
    env = {"PATH": str(path), "HOME": str(path), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=path)


def fake(path: Path, name: str, body: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{body}\n")
    (path / name).chmod(0o755)


def test_without_a_gpu_the_command_says_so(tmp_path):
    done = bash("gpu.sh", path=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("no NVIDIA GPU here")
    fake(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert bash("gpu.sh", path=tmp_path).returncode == 3


def test_without_docker_the_command_says_so_and_with_it_mounts_and_names_the_image(tmp_path):
    fake(tmp_path, "nvidia-smi", "echo GPU 0: NVIDIA H100")
    done = bash("gpu.sh", path=tmp_path)
    assert done.returncode == 4
    assert "no docker here" in done.stderr
    fake(tmp_path, "docker", 'echo docker "$@"')
    done = bash("gpu.sh", "unit", "parity", path=tmp_path, TAG="1.3.0rc13")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "--gpus all" in last
    assert f"--volume {ROOT}:/structured-commit" in last
    assert last.endswith("nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc13 bash ci/inside.sh unit parity")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_each_gpu_step_says_that_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    inside = bash("inside.sh", path=tmp_path)
    assert inside.returncode == 3
    assert "no CUDA device" in inside.stderr
    assert bash("inside.sh", "everything", path=tmp_path).returncode == 2
    monkeypatch.setattr(sys, "argv", ["ci.flashinfer_parity"])
    assert flashinfer_parity.main() == 3
    assert "no CUDA device here" in capsys.readouterr().err


def test_the_workflow_runs_the_command_on_both_kinds_of_machine():
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert set(job["strategy"]["matrix"]["machine"]) == {"h100", "sm_120"}
    assert job["runs-on"] == ["self-hosted", "${{ matrix.machine }}"]
    assert any("bash ci/gpu.sh" in step.get("run", "") for step in job["steps"])


def run_python(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess:
    paths = [str(ROOT), str(ROOT / "overlay/tensorrt_llm/_torch/speculative")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PATH"] = os.pathsep.join((path, env["PATH"]))
    return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
