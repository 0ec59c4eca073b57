"""From settings and a checkpoint folder to a compiled table: the first thing in each process.

Reads files only; where the table was compiled before, by whichever process, it is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from .cache import cached_table
from .checkpoint import read_model_type, read_vocabulary, resolve_auto
from .errors import FormatError, StructuredCommitError, VocabularyError
from .format import Format, resolve_format
from .settings import AUTO, Settings
from .table import StructureTable
from .vocabulary import Vocabulary


class Structure(NamedTuple):
    """A compiled format, and what it was compiled from."""

    table: StructureTable
    form: Format
    vocabulary: Vocabulary


def load_structure(settings: Settings, folder: str | os.PathLike | None) -> Structure:
    """The table for a checkpoint, from the cache or compiled.

    Raises:
        StructuredCommitError: there is no such folder, no tokenizer in it, or no format for it.
    """
    where = settings.checkpoint or folder
    if where is None or not Path(where).is_dir():
        raise StructuredCommitError(
            f"structured_commit: the checkpoint {where!r} is not a local folder; set structured_commit.checkpoint to "
            "the folder that holds config.json and the tokenizer"
        )
    path = Path(where)
    try:
        _, size = read_model_type(path)
    except FormatError:
        if settings.format == AUTO:
            raise
        size = None
    try:
        vocabulary = read_vocabulary(path, size)
    except VocabularyError as error:
        raise VocabularyError(f"structured_commit: {error}") from error
    form = resolve_auto(path, vocabulary) if settings.format == AUTO else resolve_format(settings.format)
    return Structure(cached_table(form, vocabulary, settings.cache_dir), form, vocabulary)
