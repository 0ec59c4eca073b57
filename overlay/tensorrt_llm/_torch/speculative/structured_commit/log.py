"""The logger: TensorRT-LLM's own where the package lies inside it, the standard library's elsewhere."""

from __future__ import annotations

import logging

try:
    from ....logger import logger as log
except ImportError:  # imported on its own
    log = logging.getLogger("structured_commit")
