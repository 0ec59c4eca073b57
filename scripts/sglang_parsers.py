"""SGLang's parsers, entered by the side door.

Its wheel is installed without dependencies (they would pull in CUDA), and its package root starts the whole
server. So the root is entered by its path only, and the two names that it imports for notebooks are left empty;
the parsers themselves run as they are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

VERSION = "0.5.23"  # whose readings the tests and the delivery table name


@cache
def sglang_module(name: str) -> types.ModuleType:
    """`sglang.srt.<name>`."""
    if "sglang" not in sys.modules:
        spec = importlib.util.find_spec("sglang")
        if spec is None or importlib.metadata.version("sglang") != VERSION:
            raise ModuleNotFoundError(f"sglang {VERSION} is not installed; `make` sets it up")
        root = types.ModuleType("sglang")
        root.__path__ = list(spec.submodule_search_locations)
        sys.modules["sglang"] = root
    with _notebook():
        return importlib.import_module(f"sglang.srt.{name}")


@contextmanager
def _notebook() -> Iterator[None]:
    """What SGLang imports of IPython, while it does; others ask whether IPython is there, and believe it."""
    if "IPython" in sys.modules or importlib.util.find_spec("IPython") is not None:
        yield
        return
    display = types.ModuleType("IPython.display")
    display.HTML = display.display = None
    stubs = {"IPython": types.ModuleType("IPython"), "IPython.display": display}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
