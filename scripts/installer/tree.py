"""The tree that is patched: a checkout of TensorRT-LLM or a folder with an installed one. This module finds its root,
reads single files of it by their path, and refuses paths that a symbolic link would lead elsewhere. It never walks
the tree, never imports it and never writes to it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import NotATree, PathLeavesTree, UnreadableSource

PACKAGE = "tensorrt_llm"
_VERSION = re.compile(r"""^__version__\s*(?::[^=]*)?=\s*["']([^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder that holds the `tensorrt_llm` package. Paths inside are relative to it, with slashes."""

    root: Path

    def at(self, path: str) -> Path:
        """Where a path of the tree lies; refused if it climbs or any part of it is a symbolic link."""
        place = str(self.root)
        for part in path.split("/"):
            if part in ("", ".", ".."):
                raise PathLeavesTree(
                    f"`{path}` is not a plain path inside the tree",
                    place=path,
                    next_step="if it stands in the tree's manifest, that was tampered with: restore the tree by hand",
                )
            place = os.path.join(place, part)
            if os.path.islink(place):
                raise PathLeavesTree(
                    f"{os.path.relpath(place, self.root)} is a symbolic link to {os.readlink(place)}",
                    place=path,
                    next_step="put a real file or folder there, or run this on the tree that it points to",
                )
        return Path(place)

    def read(self, path: str) -> bytes | None:
        """The bytes of one file; None if there is none."""
        place = self.at(path)
        try:
            return place.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UnreadableSource(
                f"cannot be read: {error.strerror}", place=path, next_step="make it readable for this user"
            ) from None

    def mode(self, path: str) -> int:
        return stat.S_IMODE(self.at(path).stat().st_mode)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.at(path))

    def version(self) -> str | None:
        """The version the tree says it has, read as text; it decides nothing."""
        data = self.read(f"{PACKAGE}/version.py")
        found = _VERSION.search(data.decode("utf-8", "replace")) if data else None
        return found.group(1) if found else None


def locate(path: Path) -> Tree:
    """The tree that a user means: a checkout, a site-packages folder, or the package folder itself."""
    real = Path(os.path.realpath(path))
    for root in (real, real.parent if real.name == PACKAGE else real):
        if any((root / PACKAGE / name).is_file() for name in ("__init__.py", "version.py")):
            return Tree(root)
    raise NotATree(
        f"no `{PACKAGE}` package here" if real.is_dir() else "no such folder",
        place=str(path),
        next_step=f"give a TensorRT-LLM checkout, or the folder that holds an installed `{PACKAGE}`",
    )


class LocalChanges:
    """Asks git, in the background, which of some files differ from the last commit. Such files are patched as they
    are: users carry changes of their own, and `revert` brings those back. Silent where there is no git."""

    def __init__(self, tree: Tree, paths: Iterable[str]) -> None:
        self._process = None
        wanted = sorted(set(paths))
        if not wanted or not (tree.root / ".git").exists():
            return
        import subprocess  # slow to import, and only checkouts need it

        command = ["git", "-C", str(tree.root), "diff", "--name-only", "-z", "HEAD", "--", *wanted]
        try:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "1"},
            )
        except OSError:
            return

    def paths(self) -> tuple[str, ...]:
        if self._process is None:
            return ()
        output, _ = self._process.communicate()
        return tuple(name.decode("utf-8", "replace") for name in output.split(b"\0") if name)
