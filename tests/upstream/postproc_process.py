"""A post-processing worker: a process of its own, which inherits only variables that TensorRT-LLM hands on.

Facts: serving.md §7 (arguments travel once, with the first response; afterwards this process's copy is the only live
one), executor.md (spawned processes inherit `TLLM_` and `TRTLLM_` variables). Run as a module: jobs come and outputs go
as pickles.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common.results import Output, Result


@dataclass
class Job:
    """One request: responses as (tokens, text, finish and stop reason) and the arguments that travel with the first."""

    request_id: int
    post_processor: str
    args: dict[str, Any]
    steps: list[tuple[list[int], str, str | None, int | None]]


def run_worker(root: Path, jobs: list[Job]) -> list[list[tuple[Any, dict]]]:
    """For each job and response: what the worker puts out, (result, metrics)."""
    inherited = {k: v for k, v in os.environ.items() if k.startswith(("TLLM_", "TRTLLM_"))}
    paths = [str(Path(__file__).resolve().parents[2]), str(root)]
    environment = {**inherited, "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "HOME": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.postproc_process"],
        input=pickle.dumps(jobs),
        env=environment,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    return pickle.loads(done.stdout)


def _work(jobs: list[Job]) -> list[list[tuple[Any, dict]]]:
    from tensorrt_llm.serve import postprocess_handlers as handlers

    everything = []
    for job in jobs:
        harmony = "harmony" in job.post_processor
        made = (handlers.ChatCompletionPostprocArgs if harmony else handlers.ChatPostprocArgs)(**job.args)
        record = Result(job.request_id, [Output()])
        outputs = []
        for tokens, text, finish_reason, stop_reason in job.steps:
            output = record.outputs[0]
            output._last_token_ids_len, output._last_text_len = len(output.token_ids), len(output.text)
            output.token_ids = output.token_ids + tokens
            output.text, output.finish_reason, output.stop_reason = text, finish_reason, stop_reason
            record._done = finish_reason is not None
            metrics = record.metrics_dict  # taken before the post-processor runs, as upstream does
            if "stream" not in job.post_processor and not record._done:
                continue
            out = getattr(handlers, job.post_processor)(record, made)
            outputs.append((out if isinstance(out, list) else out.model_dump_json(), metrics))
        everything.append(outputs)
    return everything


if __name__ == "__main__":
    jobs = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps(_work(jobs)))
