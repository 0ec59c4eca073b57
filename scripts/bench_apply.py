"""How long `check` and `apply` take on a large checkout, as a multiple of `git status` there, and how much memory.
Builds a scratch repository from a tree that the series fits plus 20,000 other Python files, then runs the three
commands in turn, several times, in one go, so that all of them meet the same machine. The installer is run as users
run it, interpreter start included. It must not look into the installer: only commands and their exit status count."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_REPOSITORY = Path(__file__).resolve().parents[1]
_PER_FOLDER = 100
_LINES_PER_FILE = 40
_REFERENCE = "git status"


@dataclass(frozen=True, slots=True)
class Timing:
    """One command: seconds of each run, their median, that as a multiple of `git status`, peak memory in MiB."""

    command: str
    seconds: tuple[float, ...]
    median: float
    ratio: float
    peak_mib: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        root = Path(folder) / "checkout"
        build_checkout(options.tree, root, options.files)
        timings = measure(root, options.series, options.runs, Path(folder) / "bytecode")
    for timing in timings:
        if timing.command == "apply" and timing.ratio >= 1:
            print(f"note: apply took {timing.ratio:.2f} times as long as {_REFERENCE}", file=sys.stderr)
    _print(timings, options.files)
    if options.json:
        record = {"files": options.files, "runs": options.runs, "timings": [asdict(timing) for timing in timings]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def build_checkout(tree: Path, root: Path, files: int) -> None:
    """A git repository with the tree, `files` other modules, and one commit of everything."""
    shutil.copytree(tree, root, ignore=shutil.ignore_patterns("__pycache__", ".git", ".structured_commit"))
    text = "".join(f"value_{line} = {line}\n" for line in range(_LINES_PER_FILE))
    for number in range(files):
        folder = root / "tensorrt_llm" / "others" / f"part_{number // _PER_FOLDER:03}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module_{number:05}.py").write_text(f"# {number}\n{text}", encoding="utf-8")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "everything"]):
        subprocess.run(["git", *_IDENTITY, "-C", str(root), *command], check=True)


def measure(root: Path, series: Path | None, runs: int, bytecode: Path) -> tuple[Timing, ...]:
    """Runs the commands in turn; each apply is reverted before the next turn, and the revert is timed as well.
    `start-up` is the installer without work: what Python and the libraries take to load."""
    # Modules are compiled once, as on a user's machine, even where the environment says not to keep byte code.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    chosen = ["--series", str(series)] if series else []
    commands = {
        _REFERENCE: ["git", "-C", str(root), "status"],
        "start-up": [sys.executable, "-m", "scripts.installer", "--help"],
        "check": _installer("check", root, chosen),
        "apply": _installer("apply", root, chosen),
        "revert": _installer("revert", root, chosen),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks = dict.fromkeys(commands, 0.0)
    for turn in range(runs + 1):
        for name, command in commands.items():
            taken, peak = _run(command, environment)
            if turn:  # the first turn only warms the caches
                seconds[name].append(taken)
                peaks[name] = max(peaks[name], peak)
    reference = statistics.median(seconds[_REFERENCE])
    return tuple(
        Timing(name, tuple(times), statistics.median(times), statistics.median(times) / reference, peaks[name])
        for name, times in seconds.items()
    )


_IDENTITY = ["-c", "user.name=bench", "-c", "user.email=bench@example.com", "-c", "commit.gpgsign=false"]


def _installer(command: str, root: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.installer", command, str(root), *options]


def _run(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall time in seconds and peak memory in MiB of one command, which must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=_REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{output.decode('utf-8', 'replace')}")
    return taken, usage.ru_maxrss / 1024


def _print(timings: tuple[Timing, ...], files: int) -> None:
    table = Table("command", "median ms", f"× {_REFERENCE}", "peak MiB", title=f"{files:,} other files", box=None)
    for timing in timings:
        table.add_row(timing.command, f"{timing.median * 1000:.0f}", f"{timing.ratio:.2f}", f"{timing.peak_mib:.0f}")
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_apply", description=__doc__)
    parser.add_argument("--tree", type=Path, required=True, help="a folder with a tensorrt_llm that the series fits")
    parser.add_argument("--files", type=int, default=20_000, help="other Python files (20000)")
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each command (9)")
    parser.add_argument("--series", type=Path, help="another series.toml")
    parser.add_argument("--scratch", type=Path, help="where to build the checkout (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
