"""The command line: `python -m scripts.installer COMMAND PATH`, behind `make check|apply|status|diff|export|revert`.
It reads arguments, runs one command and prints its report; exit status 0 (fine), 1 (the tree does not fit) or 2
(wrong usage, or a broken series). This module must not know how a command does its work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from . import commands
from .errors import InstallerError
from .report import Report, emit
from .series import Series, load_series
from .tree import Tree, locate

_SERIES = Path(__file__).resolve().parents[2] / "patches" / "series.toml"
_PROGRAM = "python -m scripts.installer"
_HELP_WIDTH = 100
# Taking back what was applied must work even with a broken series.
_NEED_NO_SERIES = {"status", "revert"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(words[0] if words else "").parse_args(words)
    tree: Tree | None = None
    series: Series | None = None
    try:
        if options.command == "check-series":
            return emit(_check_series(options.series), options.json)
        tree = locate(options.path)
        series = _series(options)
        report = _COMMANDS[options.command](tree, series, options)
    except InstallerError as error:
        report = Report(
            options.command,
            root=str(tree.root) if tree else None,
            version=_version(tree),
            series=series.version if series else None,
            problems=(error,),
        )
    return emit(report, options.json)


def _series(options: argparse.Namespace) -> Series | None:
    try:
        return load_series(options.series)
    except InstallerError:
        if options.command in _NEED_NO_SERIES:
            return None
        raise


def _version(tree: Tree | None) -> str | None:
    try:
        return tree.version() if tree else None
    except InstallerError:
        return None


def _check_series(path: Path) -> Report:
    try:
        series = load_series(path)
    except InstallerError as error:
        return Report("check-series", problems=(error,))
    from .validate import validate  # no other command needs it

    problems = validate(series)
    headline = "" if problems else f"series {series.version}: {len(series.patches)} patches, every rule's cases hold"
    return Report("check-series", headline, series=series.version, problems=tuple(problems))


_COMMANDS: dict[str, Callable[..., Report]] = {
    "check": lambda tree, series, options: commands.check(tree, series),
    "apply": lambda tree, series, options: commands.apply(tree, series),
    "status": lambda tree, series, options: commands.status(tree, series),
    "diff": lambda tree, series, options: commands.diff(tree, series, with_overlay=not options.no_overlay),
    "export": lambda tree, series, options: commands.export(tree, series, options.folder),
    "revert": lambda tree, series, options: commands.revert(tree, series, force=options.force),
}

_HELP = {
    "check": "recognise the tree's window and look for every anchor",
    "apply": "add the overlay and patch the tree",
    "status": "say what is applied and whether the files still match",
    "diff": "print what apply changes as a unified diff",
    "export": "write numbered patches for git am",
    "revert": "restore the tree to the byte",
    "check-series": "check the series and run the test cases of its rules",
}


def _parser(word: str) -> argparse.ArgumentParser:
    """The parser for the command that the first word names; for all, if it names none. Building all of them would
    take longer than most commands do."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.partition("\n\n")[0])
    actions = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog=_PROGRAM)
    for name in [word] if word in _HELP else _HELP:
        # A fixed width: asking the terminal for its own is slow.
        layout = partial(argparse.HelpFormatter, width=_HELP_WIDTH)
        action = actions.add_parser(name, help=_HELP[name], description=_HELP[name], formatter_class=layout)
        if name != "check-series":
            action.add_argument("path", type=Path, metavar="PATH", help="checkout, site-packages or package folder")
        if name == "export":
            action.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
        if name == "diff":
            action.add_argument("--no-overlay", action="store_true", help="leave out the files that are added")
        if name == "revert":
            action.add_argument("--force", action="store_true", help="give up on edited files, keeping a copy of each")
        action.add_argument("--json", action="store_true", help="print the report as JSON")
        action.add_argument("--series", type=Path, default=_SERIES, metavar="FILE", help="another series.toml")
    return parser
