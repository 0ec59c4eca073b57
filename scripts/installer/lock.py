"""One apply or revert at a time on a tree. The lock is held on the package folder itself, so it leaves nothing
behind, whatever happens to the process. This module must not know what is done under the lock."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import TreeBusy
from .tree import PACKAGE, Tree

_PAUSE = 0.05
# NFS locks only what is open for writing, which a folder never is; some file systems lock nothing at all.
_CANNOT_LOCK = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def locked(tree: Tree, patience: float = 30.0) -> Iterator[bool]:
    """Holds the tree; waits up to `patience` seconds for another run. Yields False where locks do not exist."""
    handles: list[int] = []
    try:
        yield any(_lock(handle, tree, patience) for handle in _candidates(tree, handles))
    finally:
        for handle in handles:
            os.close(handle)


def _candidates(tree: Tree, handles: list[int]) -> Iterator[int]:
    package = tree.at(PACKAGE)
    for place, flags in ((package, os.O_RDONLY), (package / "__init__.py", os.O_RDWR)):
        try:
            handles.append(os.open(place, flags | os.O_CLOEXEC))
        except OSError:
            continue
        yield handles[-1]


def _lock(handle: int, tree: Tree, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TreeBusy(
                    "another apply or revert is at work on this tree",
                    place=str(tree.root),
                    next_step="wait for it to end, then run this again",
                ) from None
            time.sleep(_PAUSE)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            return False
