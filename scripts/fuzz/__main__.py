"""`python -m scripts.fuzz`: the stage against its definition on random automata, windows, schedules and policies.

Exit status 0 if all windows agree, 1 at a difference, which is printed with the command that makes it again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .campaign import fuzz
from .case import Case
from .compare import MismatchError, run_case


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=1_000_000, help="how many to compare")
    parser.add_argument("--first", type=int, default=0, metavar="CASE", help="where to start")
    parser.add_argument("--case", type=int, help="run this one case and say what is in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--backend", help="the stage's implementation; its own choice if not given")
    options = parser.parse_args(arguments)
    if options.windows < 1 or options.jobs < 1:
        parser.error("--windows and --jobs must be 1 or more")
    console = Console()
    try:
        if options.case is not None:
            case = Case(options.case)
            console.print(f"case {options.case}: {case.config}", highlight=False)
            console.print(
                f"{case.table.num_states} states, {case.table.num_classes} classes, {case.table.vocab_size} tokens, "
                f"{case.num_slots} slots, {case.num_steps} steps, windows of {case.width}",
                highlight=False,
            )
            done, cases = run_case(options.case, options.backend), 1
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            with Progress(TextColumn("windows"), *columns, console=console) as progress:
                task = progress.add_task("", total=options.windows)
                done, cases = fuzz(
                    options.first,
                    options.windows,
                    options.jobs,
                    options.backend,
                    lambda n: progress.update(task, completed=min(n, options.windows)),
                )
    except MismatchError as mismatch:
        console.print(f"[bold red]different[/]: {mismatch}", highlight=False, markup=True)
        return 1
    console.print(f"{done:,} windows in {cases:,} cases: the stage, its definition and the host twin agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
