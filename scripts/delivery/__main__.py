"""`make delivery`: the table before and after, parser by parser; `--json` prints the same as JSON."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from .disagreements import CASES
from .measure import Count, measure
from .parsers import FAMILIES


def main() -> int:
    """Entry point; 1 if any aligned stream differs."""
    parser = argparse.ArgumentParser(prog="make delivery", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200, help="turns for each parser (200)")
    parser.add_argument("--pairs", type=int, help="at most so many pairs of boundaries for each turn (all)")
    parser.add_argument("--parser", action="append", choices=FAMILIES, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    names, began = args.parser or list(FAMILIES), time.perf_counter()
    counts = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * args.turns)
        for name in names:
            progress.update(task, description=name)
            counts.append(measure(name, args.turns, pairs=args.pairs, progress=lambda: progress.advance(task)))
    if args.json:
        print(json.dumps([asdict(count) for count in counts], indent=2, ensure_ascii=False))
    else:
        _print(counts, time.perf_counter() - began)
    return int(any(count.after for count in counts))


def _print(counts: list[Count], seconds: float) -> None:
    console = Console()
    title = "streams that a client reads otherwise than at once"
    table = Table(*(Column(name, no_wrap=True) for name in ("parser", "turns", "calls", "streams")), title=title)
    for column in ("without", "its calls", "with"):
        table.add_column(column, justify="right", no_wrap=True)
    for count in counts:
        share = f"{count.before} ({count.before / max(count.streams, 1):.1%})"
        row = (count.turns, count.calls, count.streams, share, count.calls_before, count.after)
        table.add_row(count.parser, *map(str, row))
    console.print(table)
    for count in counts:
        if count.wrong:
            console.print(f"{count.parser}: {count.wrong}", markup=False)
        for case in CASES[count.parser]:
            turns = count.disagreeing[case.name]
            if turns:
                console.print(f"{count.parser}: {turns} turns, {case.name}: {case.fault}", markup=False, soft_wrap=True)
    console.print(f"{seconds:.0f} s; the turns named above are compared with what comes token by token", style="dim")


if __name__ == "__main__":
    raise SystemExit(main())
