"""`make formats`: what each built-in format costs over the o200k vocabulary with the family's control tokens added.

Prints states, classes, bytes on the device (the table; what the fused kernels read in its place), the time to compile
and the time to load what was compiled; `--json` prints the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.vocabularies import family_vocabulary
from structured_commit import StructureTable, builtin_format, compile_format, format_names
from structured_commit.packed import pack

LOADS = 5


def measure(name: str) -> dict[str, object]:
    """Compile one format and report its size and the time it took."""
    form, vocabulary = builtin_format(name), family_vocabulary(name).vocabulary
    vocabulary.digest  # noqa: B018 - not a part of compiling
    began = time.perf_counter()
    table = compile_format(form, vocabulary)
    seconds = round(time.perf_counter() - began, 2)
    return {
        "format": name,
        "summary": form.summary,
        "vocabulary": table.vocab_size,
        "states": table.num_states,
        "classes": table.num_classes,
        "bytes": table.nbytes,
        "packed_bytes": pack(table).nbytes,
        "seconds": seconds,
        "load_milliseconds": round(1000 * _load_seconds(table), 1),
    }


def _load_seconds(table: StructureTable) -> float:
    """Median over a few loads of the file that the cache keeps."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.safetensors"
        table.save(path)
        for _ in range(LOADS):
            began = time.perf_counter()
            StructureTable.load(path, table.vocab_size)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


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
    table = Table("format", "states", "classes", "KB", "packed KB", "seconds", "load ms", "what it is")
    for row in rows:
        sizes = (int(row[name]) // 1000 for name in ("bytes", "packed_bytes"))
        numbers = (row["states"], row["classes"], *sizes, row["seconds"], row["load_milliseconds"])
        table.add_row(str(row["format"]), *map(str, numbers), str(row["summary"]))
    console.print(table)


if __name__ == "__main__":
    main()
