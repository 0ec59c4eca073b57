from collections.abc import Callable

import pytest

from .common.loading import VARIANTS, WINDOWS, Tree, copy_tree
from .serving import Served
from .toy import Checkpoint


@pytest.fixture(scope="session")
def unpatched(tmp_path_factory) -> dict[str, Tree]:
    """One copy of each double as it is."""
    return {window: copy_tree(window, tmp_path_factory.mktemp("unpatched")) for window in (*WINDOWS, *VARIANTS)}


@pytest.fixture(scope="session")
def patched(tmp_path_factory) -> Callable[[str], Tree]:
    """One copy of each double that the installer has patched, made when first asked for."""
    made: dict[str, Tree] = {}

    def tree(window: str) -> Tree:
        if window not in made:
            made[window] = copy_tree(window, tmp_path_factory.mktemp("patched"), patched=True)
        return made[window]

    return tree


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """A checkpoint folder with a tokenizer and a format over it."""
    return Checkpoint.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def served(tmp_path_factory) -> dict[str, Served]:
    """Checkpoints over the real o200k vocabulary, by format."""
    return {name: Served.write(tmp_path_factory.mktemp(name), name) for name in ("harmony", "hermes")}


@pytest.fixture
def nothing_published(monkeypatch) -> None:
    """No settings in the environment, whatever a test publishes there."""
    for name in ("TRTLLM_STRUCTURED_COMMIT", "TRTLLM_STRUCTURED_COMMIT_SERVING"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
