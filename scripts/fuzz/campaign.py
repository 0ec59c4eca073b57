"""Many cases, in several processes. Apart from `__main__`, whose functions a spawned process cannot find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count, islice
from multiprocessing import get_context

import torch

from .compare import run_case

CHUNK = 20  # cases per task


def run_cases(numbers: Sequence[int], backend: str | None) -> int:
    """How many windows the cases compared; raises `MismatchError` at the first difference."""
    torch.set_num_threads(1)
    return sum(run_case(number, backend) for number in numbers)


def fuzz(first: int, windows: int, jobs: int, backend: str | None, advance=lambda done: None) -> tuple[int, int]:
    """Run cases from `first` on until so many windows were compared: (windows, cases)."""
    done = cases = 0
    for numbers, compared in _results(_chunks(first), jobs, backend):
        done, cases = done + compared, cases + len(numbers)
        advance(done)
        if done >= windows:
            break
    return done, cases


def _chunks(first: int) -> Iterator[range]:
    return (range(start, start + CHUNK) for start in count(first, CHUNK))


def _results(chunks: Iterable[range], jobs: int, backend: str | None) -> Iterator[tuple[range, int]]:
    chunks = iter(chunks)
    if jobs == 1:
        yield from ((numbers, run_cases(numbers, backend)) for numbers in chunks)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        try:
            running: dict[Future[int], range] = {}
            while True:
                for numbers in islice(chunks, 2 * jobs - len(running)):
                    running[pool.submit(run_cases, numbers, backend)] = numbers
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
