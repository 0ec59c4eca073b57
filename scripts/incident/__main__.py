"""`python -m scripts.incident TRACE`: a flight recorder's trace in the terminal, and as a page beside it.

Exit status 0, 1 for a trace that cannot be read, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scripts.browser import BrowserError, Page
from structured_commit import StructuredCommitError
from structured_commit.recording.trace import read_trace

from .page import render
from .spelling import Speller
from .timeline import show

SIZE = (1000, 600)  # of the window for the picture, which is as high as the page


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    page = options.html or options.trace.with_suffix(".html")
    try:
        trace = read_trace(options.trace)
        spell = Speller(trace, options.checkpoint)
        page.write_text(render(trace, spell), encoding="utf-8")
        if options.png is not None:
            with Page(page, SIZE) as opened:
                options.png.write_bytes(opened.picture())
    except (StructuredCommitError, BrowserError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"replay: cannot write {error.filename}: {error.strerror}; say where with --html", file=sys.stderr)
        return 1
    console = Console()
    show(console, trace, spell)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.incident", description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path, help="the .json file of an incident")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="with the server's tokenizer, to see texts")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (default: beside the trace)")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="a picture of the page; needs a browser, see make browser"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
