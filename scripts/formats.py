"""`make formats`: what each built-in format costs over the o200k vocabulary with the family's control tokens added.

Prints states, classes, bytes on the device and compile time; `--json` prints the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.vocabularies import family_vocabulary
from structured_commit import builtin_format, compile_format, format_names


def measure(name: str) -> dict[str, object]:
    """Compile one format and report its size and the time it took."""
    form, vocabulary = builtin_format(name), family_vocabulary(name).vocabulary
    vocabulary.digest  # noqa: B018 - not a part of compiling
    began = time.perf_counter()
    table = compile_format(form, vocabulary)
    return {
        "format": name,
        "summary": form.summary,
        "vocabulary": table.vocab_size,
        "states": table.num_states,
        "classes": table.num_classes,
        "bytes": table.nbytes,
        "seconds": round(time.perf_counter() - began, 2),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="make formats", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    console = Console()
    rows = [measure(n) for n in track(format_names(), "compiling", console=Console(stderr=True), transient=True)]
    if args.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table("format", "states", "classes", "KB", "seconds", "what it is")
    for row in rows:
        numbers = (row["states"], row["classes"], int(row["bytes"]) // 1000, row["seconds"])
        table.add_row(str(row["format"]), *map(str, numbers), str(row["summary"]))
    console.print(table)


if __name__ == "__main__":
    main()
