import os
import tempfile
from pathlib import Path

import pytest

from tests.installer.kit import Place, make_place


@pytest.fixture
def place(tmp_path) -> Place:
    return make_place(tmp_path)


@pytest.fixture
def tmp_path():
    """A folder in memory where there is one: these tests write trees hundreds of times, each write to the disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
