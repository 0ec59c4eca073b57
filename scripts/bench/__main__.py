"""`make bench`: what the stage costs, and what its peers cost, on this machine in one run.

Prints tables; `--json FILE` writes every figure, `--png FILE` a picture of cost against batch size and draft length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from structured_commit import format_names

from . import accepted, compiling
from .contenders import LLGuidance, XGrammar, acceptance_call, host_call, stage_call
from .report import Cell, Results, draw, show
from .timing import compare
from .workload import World

BATCHES = (1, 4, 16, 64, 256, 1024)
DRAFT_LENGTHS = (1, 2, 4, 8, 16)
ILLEGAL = (0.0, 0.01, 1.0)
BATCH, DRAFT_LENGTH = 64, 8  # where one axis is fixed
LARGEST_PEER_BATCH = 256
ACCEPTED_SHARES = (0.0, 0.001, 0.01, 0.05)
ACCEPTED_POLICIES = ("off", "repair", "align", "gate")


def backends(device: str) -> tuple[str, ...]:
    """The stage's implementations that run on a device, its own choice first."""
    return ("host", "torch") if device == "cpu" else ("triton", "torch")


def measure(device: str, rounds: int, progress: Progress) -> Results:
    """Every figure of the benchmark."""
    world = World(device)
    axes = [(b, DRAFT_LENGTH) for b in BATCHES] + [(BATCH, k) for k in DRAFT_LENGTHS if k != DRAFT_LENGTH]
    grid = [(b, k, share) for b in BATCHES for k in DRAFT_LENGTHS for share in ILLEGAL]
    total = len(axes) + len(grid) + len(ACCEPTED_SHARES) * len(ACCEPTED_POLICIES) + len(format_names()) + 1
    task = progress.add_task("measuring", total=total)

    def done() -> None:
        progress.advance(task)

    results = Results(device=device, rounds=rounds, threads=torch.get_num_threads(), torch=torch.__version__)
    peers = (XGrammar(world), LLGuidance(world))
    for size, draft_length in axes:
        batch = world.batch(size, draft_length, 0.0)
        calls = {f"stage ({name})": stage_call(world, batch, backend=name) for name in backends(device)}
        calls["host scan"] = host_call(world, batch)
        if size <= LARGEST_PEER_BATCH:
            for peer in peers:
                calls |= peer.calls(batch)
        costs = compare(calls, rounds, device)
        results.axes += [Cell(name, size, draft_length, 0.0, cost) for name, cost in costs.items()]
        done()
    for size, draft_length, share in grid:
        batch = world.batch(size, draft_length, share)
        name = backends(device)[0]
        costs = compare({f"stage ({name})": stage_call(world, batch, backend=name)}, rounds, device)
        results.grid += [Cell(name, size, draft_length, share, cost) for name, cost in costs.items()]
        done()
    batch = world.batch(BATCH, DRAFT_LENGTH, 0.0)
    name, call = acceptance_call(world, batch)
    costs = compare({name: call, "stage": stage_call(world, batch)}, min(rounds, 3), device)
    results.acceptance = [Cell(n, BATCH, DRAFT_LENGTH, 0.0, cost) for n, cost in costs.items()]
    done()
    results.accepted = accepted.measure(world, ACCEPTED_SHARES, ACCEPTED_POLICIES, done)
    for form in format_names():
        results.compiled.append(compiling.measure(form))
        done()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw cost against batch size and draft length")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that each median is taken over")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    console, began = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        results = measure(options.device, options.rounds, progress)
    show(results, console)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(results.as_dict(), indent=1) + "\n")
    if options.png:
        draw(results, options.png)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
