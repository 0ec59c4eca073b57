"""Counters on the device, read on the host without making either wait for the other."""

from __future__ import annotations

import torch
from torch import Tensor

from .policy import COUNTERS


class CounterReader:
    """Copies a counter tensor out asynchronously.

    Args:
        counters: [len(COUNTERS)] int64, on any device.
    """

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        self._host = torch.zeros(len(COUNTERS), dtype=torch.int64, pin_memory=counters.is_cuda)
        self._event: torch.cuda.Event | None = None
        self._started = False

    def start(self) -> None:
        """Start a copy on the current stream; an unfinished one is replaced."""
        self._host.copy_(self._counters, non_blocking=True)
        self._started = True
        if self._counters.is_cuda:
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def read(self) -> dict[str, int] | None:
        """The counters of the last started copy by name, or None while there is none or it is on its way."""
        if not self._started or (self._event is not None and not self._event.query()):
            return None
        return dict(zip(COUNTERS, self._host.tolist(), strict=True))
