"""`python -m scripts.replay`: report NVIDIA/TensorRT-LLM #17437 run to its end, and the verdict on its claims.

Exit status 0 if the figures support every sentence of the verdict, 1 if they do not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from .report import as_json, show
from .verdict import judge, measure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    console = Console()
    torch.set_num_threads(1)  # small tensors: a second thread waits more than it works
    with console.status("replaying …"):
        figures = measure(options.requests, options.seed)
    sentences = judge(figures)
    show(console, figures, sentences)
    if options.json is not None:
        settings = {"requests": options.requests, "seed": options.seed}
        options.json.write_text(json.dumps(as_json(figures, sentences, settings), indent=2) + "\n")
    return int(not all(sentence.holds for sentence in sentences))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.replay", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="streams a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of everything random (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error(f"--requests is {options.requests}; it must be 1 or more")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed is {options.seed}; it must be 0 or more and fit 63 bits")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
