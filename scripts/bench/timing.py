"""Medians of interleaved rounds, so that what slows the machine for a while slows every contender alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

SHORTEST_SAMPLE = 2e-3  # seconds; cheaper calls are repeated inside one sample


@dataclass(frozen=True)
class Cost:
    """Seconds per call: the median of the rounds and the two quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def compare(calls: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, Cost]:
    """The cost of each call; every round runs all of them in turn."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, round(SHORTEST_SAMPLE / max(_seconds(call, 1, device), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(_seconds(call, repeats[name], device))
    return {name: _cost(times) for name, times in samples.items()}


def _seconds(call: Callable[[], object], repeats: int, device: str) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _cost(times: list[float]) -> Cost:
    if len(times) < 2:
        return Cost(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Cost(median, low, high)
