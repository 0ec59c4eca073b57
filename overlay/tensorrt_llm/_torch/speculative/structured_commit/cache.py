"""Compiled tables on disk, so that ranks that start together compile once and later starts not at all.

A file's name says what it was compiled from; a lock file keeps a second process from compiling the same table.
Where the folder cannot be used, the table is compiled in memory and a warning says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .compile import compile_format
from .errors import TableError
from .format import Format
from .log import log
from .table import FILE_VERSION, StructureTable
from .vocabulary import Vocabulary

LOCK_TIMEOUT_S = 120.0


def default_cache_dir() -> Path:
    """The folder for compiled tables, under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "structured_commit"


def cached_table(form: Format, vocabulary: Vocabulary, folder: str | Path | None = None) -> StructureTable:
    """The table of `form` over `vocabulary`, loaded if it was compiled before, else compiled and kept.

    Safe with any number of processes at once. A damaged file is compiled again.

    Raises:
        FormatError, VocabularyError, TableError: as `compile_format`.
    """
    folder = Path(folder) if folder is not None else default_cache_dir()
    path = folder / f"{form.name}-{form.digest}-{vocabulary.digest}-v{FILE_VERSION}.safetensors"
    table = _load(path, vocabulary)
    if table is not None:
        return table
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            table = _load(path, vocabulary)
            if table is None:
                table = compile_format(form, vocabulary)
                table.save(path)
            return table
    except OSError as error:
        log.warning(f"structured_commit: cannot keep tables in {folder} ({error}); compiling in memory")
        return compile_format(form, vocabulary)


def _load(path: Path, vocabulary: Vocabulary) -> StructureTable | None:
    if not path.is_file():
        return None
    try:
        return StructureTable.load(path, vocab_size=vocabulary.size)
    except TableError as error:
        log.warning(f"structured_commit: {error}")
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.05)
        yield
