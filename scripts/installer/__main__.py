"""Makes `python -m scripts.installer` work, and ends quietly when the reader of the output or the user goes away;
everything else is in `cli`."""

import os
import sys

from .cli import main

try:
    status = main()
    sys.stdout.flush()
except BrokenPipeError:
    # Python would complain about the lost output once more when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 0
except KeyboardInterrupt:
    status = 130
sys.exit(status)
