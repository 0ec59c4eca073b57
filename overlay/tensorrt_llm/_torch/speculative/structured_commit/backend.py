"""Which implementation a stage runs on: fused kernels where Triton runs, a look first on a CPU, else plain torch.

All give the same outputs to the bit, so nothing but speed depends on the choice. Imports Triton only where it is
wanted.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .errors import StageError
from .log import log
from .plain import CommitOutput, PlainCommit

if TYPE_CHECKING:
    from .repair import Distribution
    from .stage import CommitStage

OLDEST_TRITON, OLDEST_INTERPRETER = (3, 3), (3, 5)  # the oldest that were tried with all kernels
INTERPRETER = "TRITON_INTERPRET"  # Triton's own switch: "1" runs kernels in Python, on the CPU
_said: set[str] = set()


class Backend(Protocol):
    """What `CommitStage` needs of an implementation; arguments are checked and the batch has a row."""

    name: str

    def commit(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> CommitOutput: ...

    def commit_(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> Tensor: ...


def choose_backend(stage: CommitStage) -> Backend:
    """The implementation that `stage.config.backend` asks for.

    Raises:
        StageError: `triton` or `host` was asked for by name and cannot run here.
    """
    wanted = stage.config.backend
    if wanted == "torch":
        return PlainCommit(stage)
    if wanted == "host" or (wanted == "auto" and stage.device.type == "cpu"):
        if stage.device.type != "cpu":
            raise StageError(
                f"backend 'host' looks at values, and on {stage.device.type} that waits for the device at every step; "
                "use 'auto'"
            )
        try:
            from .host_commit import HostCommit
        except ImportError as error:  # numpy comes with torch's users, not with torch
            if wanted == "host":
                raise StageError(f"backend 'host' cannot be used: {error}; install numpy, or use 'torch'") from error
            return PlainCommit(stage)
        return HostCommit(stage)
    problem = _obstacle(stage.device)
    if problem is None:
        try:
            from .fused import FusedCommit

            return FusedCommit(stage)
        except Exception as error:  # a compiler that is missing or fails is no reason not to serve
            problem = f"its kernels do not compile here ({type(error).__name__}: {error})"
    if wanted == "triton":
        raise StageError(f"backend 'triton' cannot be used: {problem}; or use backend 'auto' or 'torch'")
    message = f"structured_commit runs in plain torch, more slowly, not in fused kernels: {problem}"
    if message not in _said:
        _said.add(message)
        log.warning(message)
    return PlainCommit(stage)


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on `device`, or None."""
    try:
        version = import_module("triton").__version__
    except Exception as error:
        return f"Triton cannot be imported ({error}); install the one that belongs to this torch"
    oldest = OLDEST_TRITON if device.type == "cuda" else OLDEST_INTERPRETER
    if _numbers(version) < oldest:
        named = ".".join(map(str, oldest))
        return f"Triton {version} is older than {named}; install the one that belongs to this torch"
    if device.type != "cuda" and os.environ.get(INTERPRETER) != "1":
        return (
            f"the stage is on {device.type} and Triton runs there only in its interpreter; set {INTERPRETER}=1 before "
            "Python starts"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)
