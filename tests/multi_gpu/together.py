"""Ranks end together: one that fails takes all others with it, at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def end_together(main: Callable[[], None]) -> None:
    """Run `main`; if it raises, say why and abort every rank of the run."""
    try:
        main()
    except BaseException:
        sys.stderr.write(f"[rank {WORLD.Get_rank()}] {traceback.format_exc()}")
        sys.stderr.flush()
        WORLD.Abort(1)
