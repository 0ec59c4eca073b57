"""Loads a double as `tensorrt_llm`, apart from every other double in the process, and drives it.

A tree is copied, patched by the installer if asked, and imported while it is active; its modules leave `sys.modules`
when it is not, so that payloads (which import at run time) find the overlay of their own tree.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from scripts.installer.cli import main as installer

UPSTREAM = Path(__file__).resolve().parents[1]
WINDOWS = ("w12", "w13a", "w13b", "w14")
VARIANTS = {"w12_early": "w12"}  # files that lie over those of another window
PACKAGE = "tensorrt_llm"


@dataclass
class Tree:
    """One copy of a window's double."""

    window: str
    root: Path
    modules: dict[str, ModuleType] = field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While inside, `import tensorrt_llm` means this tree. May be nested, also with other trees."""
        outside = _taken_out()
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.root))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(self.root))
            self.modules = _taken_out()
            sys.modules.update(outside)

    def load(self, name: str) -> ModuleType:
        """A module of the tree by its name below the package, such as `_torch.speculative.interface`."""
        with self.active():
            return importlib.import_module(f"{PACKAGE}.{name}")


def copy_tree(window: str, folder: Path, *, patched: bool = False) -> Tree:
    """A fresh copy of a window's double in `folder`, patched by the real installer if asked."""
    root = folder / window
    for part in (VARIANTS.get(window), window):
        if part:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(UPSTREAM / part, root, ignore=ignored, dirs_exist_ok=True)
    if patched:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = installer(["apply", str(root)])
        if status:
            raise AssertionError(f"the installer refuses {window}: {output.getvalue()}")
    return Tree(window, root)


def _taken_out() -> dict[str, ModuleType]:
    """Remove every module of the package from `sys.modules` and return them."""
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}
