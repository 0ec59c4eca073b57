"""Serve a small tool-calling model with speculation, the stage off and on, and print the table of lost calls.

python -m ci.serve --out FOLDER

Starts `trtllm-serve` twice; each time asks for 200 tool calls unstreamed and 200 streamed. Replies, server logs and
configurations are left in FOLDER. Exit status: 0 all well; 1 a request failed, a call was lost in silence with the
stage on, or the log does not say what it must; 4 the server did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from .tool_calls import Reply, collect, table_of, tally

MODEL, DRAFT = "Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3"
ACTIVE = "structured_commit active"
STAGES = {"off": None, "on": {"policy": "repair", "report_every": 500}}


class ServerError(RuntimeError):
    """The server ended, or was not ready in time."""


def local_checkpoint(name: str) -> str:
    """The folder of a checkpoint; one that is not a folder is downloaded from the hub."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    return snapshot_download(name)


def options(draft: str, section: dict | None, speculative: dict | None = None) -> dict:
    """What goes into the file for --extra_llm_api_options (JSON is YAML)."""
    config = dict(speculative or {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": draft})
    if section is not None:
        config["structured_commit"] = section
    return {"speculative_config": config, "kv_cache_config": {"free_gpu_memory_fraction": 0.6}}


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path, patience: float) -> Iterator[None]:
    """Run the server for the length of the block; nothing of it is left behind.

    Raises:
        ServerError: with the end of its log.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + patience
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                how = (
                    f"ended with status {process.returncode}" if process.poll() is not None else "was not ready in time"
                )
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                raise ServerError(f"{command[0]} {how}; the end of {log}:\n{tail}")
            time.sleep(1)
        yield
    finally:
        for way in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, way)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


def verdict(runs: dict[str, list[Reply]], logs: dict[str, str]) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    wrong = []
    for label, replies in runs.items():
        counts = tally(replies)
        if counts["error"]:
            first = next(r.problem for r in replies if r.outcome == "error")
            wrong.append(f"{label}: {counts['error']} requests failed, the first with {first}")
        if not counts["delivered"]:
            wrong.append(f"{label}: not one call was delivered")
        if (ACTIVE in logs[label]) != (STAGES[label] is not None):
            said = "does not say" if STAGES[label] is not None else "says"
            wrong.append(f"{label}: the server's log {said} {ACTIVE!r}")
    if tally(runs["on"])["silent"]:
        wrong.append(f"on: {tally(runs['on'])['silent']} calls were lost in silence")
    return wrong


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m ci.serve", description=__doc__.splitlines()[0])
    get = os.environ.get
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--model", default=get("MODEL") or MODEL, help="folder or hub name; also MODEL=")
    parser.add_argument("--draft", default=get("DRAFT") or DRAFT, help="folder or hub name; also DRAFT=")
    parser.add_argument(
        "--tool-parser", default=get("TOOL_PARSER") or "qwen3", help="also TOOL_PARSER=; none = no such"
    )
    parser.add_argument("--speculative", type=json.loads, help="JSON: another speculative_config, needs no draft")
    parser.add_argument("--requests", type=int, default=int(get("REQUESTS") or 200))
    parser.add_argument("--extra", type=json.loads, default={"chat_template_kwargs": {"enable_thinking": False}})
    parser.add_argument("--patience", type=float, default=1_800, help="seconds until the server must be ready")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = local_checkpoint(args.model)
    draft = "" if args.speculative else local_checkpoint(args.draft)
    runs, logs = {}, {}
    for label, section in STAGES.items():
        port = _free_port()
        config, log = args.out / f"serve_{label}.yaml", args.out / f"serve_{label}.log"
        config.write_text(json.dumps(options(draft, section, args.speculative), indent=2))
        command = ["trtllm-serve", model, "--backend", "pytorch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--extra_llm_api_options", str(config)]
        command += [] if args.tool_parser == "none" else ["--tool_parser", args.tool_parser]
        try:
            with serving(command, port, log, args.patience):
                url = f"http://127.0.0.1:{port}/v1"
                runs[label] = [
                    reply
                    for streamed in (False, True)
                    for reply in collect(url, model, args.requests, streamed, extra=args.extra)
                ]
        except (ServerError, FileNotFoundError) as error:
            print(f"stage {label}: {error}", file=sys.stderr)
            return 4
        logs[label] = log.read_text(errors="replace")
        replies = [asdict(reply) for reply in runs[label]]
        (args.out / f"replies_{label}.json").write_text(json.dumps(replies, indent=1, ensure_ascii=False))
    Console(width=140).print(table_of(runs))
    wrong = verdict(runs, logs)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
