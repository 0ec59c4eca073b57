"""`python -m scripts.demo`: real Harmony token streams under speculative decoding, without and with the stage.

Every request is decoded under each acceptance rule and each policy with the same random numbers; a second process
reads the streams with openai-harmony meanwhile. Exit status 0 if `repair` lost no call silently, else 1.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.vocabularies import harmony_vocabulary
from structured_commit import StructureTable, compile_format

from .conversations import draw_kinds
from .decoding import ACCEPTANCES, BATCH, MAX_TOKENS, NUM_DRAFTS, POLICIES, Requests, Run, decode
from .delivery import Delivery, describe_reply, receive_all
from .model import DRAFTER_ORDER, ORDER, World, build_world
from .recording import record_incidents
from .report import Example, Row, as_json, make_row, render_example, show

Advance = Callable[[str, int], None]  # told what is done ("decoded" or "read") and for how many requests


def measure(
    world: World,
    table: StructureTable,
    requests: Requests,
    executor: Executor,
    advance: Advance = lambda what, count: None,
) -> tuple[list[Row], Example | None]:
    """Decode all requests under every acceptance rule and policy, and read what they delivered in `executor`."""
    runs: dict[tuple[str, str], Run] = {}
    read: dict[tuple[str, str], Future[list[Delivery]]] = {}
    for acceptance in ACCEPTANCES:
        for policy in POLICIES:
            run = decode(
                world, table, requests, acceptance, policy, on_finished=lambda count: advance("decoded", count)
            )
            runs[acceptance, policy] = run
            streams = [(world.to_real(s.tokens), s.ended) for s in run.streams]
            future = executor.submit(receive_all, requests.kinds, streams)
            future.add_done_callback(lambda _: advance("read", len(requests)))
            read[acceptance, policy] = future
    deliveries = {key: future.result() for key, future in read.items()}
    rows = [make_row(*key, run, deliveries[key]) for key, run in runs.items()]
    return rows, find_example(world, table, requests, deliveries, executor)


def find_example(
    world: World,
    table: StructureTable,
    requests: Requests,
    deliveries: dict[tuple[str, str], list[Delivery]],
    executor: Executor,
) -> Example | None:
    """The first request that loses a call silently under `off` and delivers all it planned under `repair`."""
    for acceptance in ("rejection", "strict", "relaxed"):
        pairs = zip(deliveries[acceptance, "off"], deliveries[acceptance, "repair"], strict=True)
        for request, (off, repair) in enumerate(pairs):
            if off.silently_lost and repair.delivered == repair.planned:
                runs = [decode(world, table, requests, acceptance, p, only=request) for p in ("off", "repair")]
                streams = [run.streams[0] for run in runs]
                replies = [executor.submit(describe_reply, world.to_real(s.tokens), s.ended) for s in streams]
                return Example(request, acceptance, *(r.trace for r in runs), *(r.result() for r in replies))
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    console = Console()
    # The tensors are small: a second thread waits more than it works, and the other core has a process of its own.
    torch.set_num_threads(1)
    began = time.monotonic()
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        with console.status("Compiling the Harmony format and counting n-grams …"):
            executor.submit(receive_all, [], [])  # starts the process, which has its own imports to do
            chat = harmony_vocabulary()
            world = build_world(chat, options.seed)
            full = compile_format("harmony", chat.vocabulary)
            table = full.select(world.ids)
            kinds = draw_kinds(options.requests, random.Random(options.seed))
            requests = Requests(kinds, options.seed)
        columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            total = len(ACCEPTANCES) * len(POLICIES) * len(requests)
            tasks = {what: progress.add_task(what, total=total) for what in ("decoded", "read")}
            advance = lambda what, count: progress.advance(tasks[what], count)  # noqa: E731
            rows, example = measure(world, table, requests, executor, advance)
    seconds = time.monotonic() - began
    if options.json is not None:
        settings = {
            "requests": len(requests),
            "seed": options.seed,
            "drafts": NUM_DRAFTS,
            "batch": BATCH,
            "max_tokens": MAX_TOKENS,
            "orders": {"target": ORDER, "drafter": DRAFTER_ORDER},
            "local_vocabulary": len(world.ids),
            "seconds": round(seconds, 1),
        }
        options.json.write_text(json.dumps(as_json(rows, example, settings), indent=2) + "\n")
    show(console, rows, example and render_example(example, world, chat), len(requests))
    console.print(f"{seconds:.0f} s", style="dim", highlight=False)
    if options.record is not None and example is None:
        console.print("nothing recorded: no request lost a call that repair keeps", highlight=False)
    elif options.record is not None:
        losing = (requests, example.request, example.acceptance)
        for policy, trace in record_incidents(world, table, full, *losing, options.record).items():
            console.print(f"{policy}: make replay TRACE={trace}", highlight=False, soft_wrap=True)
    return int(any(row.policy == "repair" and row.calls.silently_lost for row in rows))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="for each row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of everything random (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write traces of the losing stream there")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error(f"--requests is {options.requests}; it must be 1 or more")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
