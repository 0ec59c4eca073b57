"""The few ways in which the installer changes a tree. Each is on the disk when it returns, apart from names in a
folder, which `sync` makes last. This module must not know what is written or why."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """Mode and owner of a file, so that one that takes its place has the same."""

    mode: int
    user: int
    group: int

    @classmethod
    def of(cls, path: Path) -> Access:
        found = path.stat()
        return cls(found.st_mode & 0o7777, found.st_uid, found.st_gid)


class Disk:
    """Writes to the file system. Subclass it to watch or to refuse writes."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def write(self, path: Path, data: bytes, access: Access | None = None) -> None:
        """Writes a new file; one that has the name already is removed first, never written through."""
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if access is not None:
                _give(handle, access)
            os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name in one step; a file that has that name is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _give(handle: int, access: Access) -> None:
    now = os.fstat(handle)
    if (now.st_uid, now.st_gid) != (access.user, access.group):
        # Only root may give files away; the content matters more.
        with suppress(PermissionError):
            os.fchown(handle, access.user, access.group)
    os.fchmod(handle, access.mode)
