"""Ranks that behave badly: `hang` waits for a message that never comes, `raise` fails on one rank only.

python -m tests.multi_gpu.badly hang|raise
"""

from __future__ import annotations

import os
import sys

from .together import WORLD, end_together


def main() -> None:
    sys.stdout.write(f"pid {os.getpid()}\n")
    sys.stdout.flush()
    if sys.argv[1] == "raise" and WORLD.Get_rank() == 1:
        raise RuntimeError("this rank fails")
    WORLD.recv(source=(WORLD.Get_rank() + 1) % WORLD.Get_size())


if __name__ == "__main__":
    end_together(main)
