"""What a command has to say, as one immutable value, and its two faces: text for people, JSON for machines. The JSON
has the same keys for every command (`to_json` lists them); they only ever grow. This module must not decide anything
about a tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from .errors import InstallerError
from .matching import Finding, Status

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileLine:
    """One file of the overlay or of the tree, and how it stands."""

    path: str
    kind: str
    state: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one command. `headline` is the one sentence a person needs."""

    command: str
    headline: str = ""
    root: str | None = None
    version: str | None = None
    window: str | None = None
    series: str | None = None
    state: str | None = None
    patches: tuple[Finding, ...] = ()
    files: tuple[FileLine, ...] = ()
    problems: tuple[InstallerError, ...] = ()
    notes: tuple[str, ...] = ()
    diff: bytes = b""
    written: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        return max((problem.exit_status for problem in self.problems), default=0)


def to_json(report: Report) -> str:
    """The stable shape: every key stands in every answer, with null or an empty list where it does not apply."""
    return json.dumps(
        {
            "schema": _SCHEMA,
            "command": report.command,
            "ok": report.exit_status == 0,
            "exit_status": report.exit_status,
            "headline": report.headline,
            "tree": {"root": report.root, "version": report.version, "window": report.window},
            "series": {"version": report.series},
            "state": report.state,
            "patches": [_patch(finding) for finding in report.patches],
            "files": [{"path": f.path, "kind": f.kind, "state": f.state} for f in report.files],
            "problems": [_problem(problem) for problem in report.problems],
            "notes": list(report.notes),
            "diff": report.diff.decode("utf-8", "surrogateescape") if report.diff else None,
            "written": list(report.written),
        },
        indent=2,
    )


def print_report(report: Report, out: IO[str], err: IO[str]) -> None:
    """Text for people: results on `out`, refusals and notes on `err`."""
    if report.command == "check":
        _print_table(
            ("patch", "status", "where"),
            [(f.patch.id, str(f.status), _where(f)) for f in report.patches],
            out,
        )
    if report.command == "status":
        shown = [f for f in report.files if f.state != "matches"]
        _print_table(("file", "kind", "state"), [(f.path, f.kind, f.state) for f in shown], out)
    for name in report.written if report.command == "export" else ():
        print(name, file=out)
    if report.diff and report.command == "diff":
        _write_bytes(report.diff, out)
    if report.headline:
        print(report.headline, file=out)
    for note in report.notes:
        print(f"note: {note}", file=err)
    for problem in report.problems:
        print(_text(problem), file=err)


def _text(problem: InstallerError) -> str:
    lines = [f"error: {problem.place + ': ' if problem.place else ''}{problem.what} [{problem.name}]"]
    lines += [f"  {line}" for line in problem.detail.rstrip("\n").split("\n") if problem.detail]
    lines += [f"  next: {problem.next_step}"] if problem.next_step else []
    return "\n".join(lines)


def _where(finding: Finding) -> str:
    lines = ", ".join(map(str, finding.lines))
    where = f"{finding.file}:{lines}" if lines else finding.file
    where += f" {finding.patch.anchor}" if finding.patch.anchor else ""
    if finding.status in (Status.READY, Status.APPLIED):
        return where
    return f"{where}: {finding.reason}"


def _print_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], out: IO[str]) -> None:
    """A table with rules and colours on a terminal; plain columns, easy to grep and quick to print, elsewhere."""
    rows = list(rows)
    if not rows:
        return
    if out.isatty():
        _print_rich_table(head, rows, out)
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip(), file=out)


def _print_rich_table(head: tuple[str, ...], rows: list[tuple[str, ...]], out: IO[str]) -> None:
    from rich.console import Console  # slow to import, and only terminals need it
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, pad_edge=False)
    styles = {Status.READY: "green", Status.APPLIED: "green", Status.ABSENT: "dim"}
    for row in rows:
        table.add_row(row[0], Text(row[1], styles.get(row[1], "red")), *(Text(cell) for cell in row[2:]))
    Console(file=out).print(table)


def _write_bytes(data: bytes, out: IO[str]) -> None:
    out.flush()
    raw = getattr(out, "buffer", None)
    if raw is None:
        out.write(data.decode("utf-8", "replace"))
    else:
        raw.write(data)
        raw.flush()


def _patch(finding: Finding) -> dict[str, Any]:
    patch, nearest = finding.patch, finding.nearest
    return {
        "id": patch.id,
        "purpose": patch.purpose,
        "hook": patch.hook,
        "status": str(finding.status),
        "file": finding.file,
        "class": patch.class_name,
        "function": patch.function,
        "expected": patch.matches,
        "found": finding.found,
        "lines": list(finding.lines),
        "reason": finding.reason or None,
        "nearest": {"file": nearest.file, "line": nearest.line, "text": nearest.text} if nearest else None,
    }


def _problem(problem: InstallerError) -> dict[str, Any]:
    return {
        "name": problem.name,
        "what": problem.what,
        "place": problem.place or None,
        "next_step": problem.next_step or None,
        "detail": problem.detail or None,
    }


def emit(report: Report, as_json: bool) -> int:
    """Prints a report in the form asked for and returns the exit status."""
    if as_json:
        print(to_json(report))
    else:
        print_report(report, sys.stdout, sys.stderr)
    return report.exit_status
