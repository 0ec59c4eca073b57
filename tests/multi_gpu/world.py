"""What a rank sees of the others, with every call counted, whoever makes it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .together import WORLD, end_together

CALLS: Counter[str] = Counter()
_ASKS = ("Get_rank", "Get_size", "Abort")  # these send nothing


class _Counted:
    """A communicator that counts what is called on it."""

    def __getattr__(self, name: str):
        value = getattr(WORLD, name)
        return _counting(f"MPI.{name}", value) if callable(value) and name not in _ASKS else value


def _counting(name: str, function: Callable) -> Callable:
    def counted(*args, **kwargs):
        CALLS[name] += 1
        return function(*args, **kwargs)

    return counted


def _count_all_calls() -> None:
    """From here on whoever takes the world communicator, or a function of torch.distributed, is counted."""
    MPI.COMMWORLD = _Counted()
    kinds = ("send", "recv", "isend", "irecv", "broadcast", "reduce", "gather", "scatter", "barrier", "all_", "batch_")
    names = [n for n in dir(dist) if n.startswith(kinds)]
    for name in names:
        for module in (dist, dist.distributed_c10d):
            function = getattr(module, name, None)
            if callable(function):
                setattr(module, name, _counting(f"dist.{name}", function))


class World:
    """The ranks of this run. Tensors travel over NCCL where each rank has a GPU of its own, else over MPI.

    Attributes:
        rank, size: this rank, and how many there are.
        device: where tensors live.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMMWORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.device = torch.device("cpu")
        if torch.cuda.device_count() >= self.size:
            self.device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self.device)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.comm.bcast(_free_port(), 0)))
            dist.init_process_group("nccl", rank=self.rank, world_size=self.size)

    def gather(self, own: Tensor) -> Tensor:
        """[size, ...] from each rank's [...]: one collective."""
        everyone = torch.empty(self.size, *own.shape, dtype=own.dtype, device=own.device)
        if own.is_cuda:
            dist.all_gather_into_tensor(everyone.flatten(0, 1), own.contiguous())
        else:
            self.comm.Allgather(own.contiguous().numpy(), everyone.numpy())
        return everyone

    def gather_objects(self, own: object) -> list:
        """Each rank's object, in rank order: one collective."""
        return self.comm.allgather(own)

    def say(self, text: str) -> None:
        """One line for the test to read, in one write, so that ranks do not interleave."""
        sys.stdout.write(f"[rank {self.rank}] {text}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Fails if anything in the block communicates."""
    before = CALLS.total()
    yield
    assert CALLS.total() == before, f"communication where there must be none: {dict(CALLS)}"


def run(main: Callable[[World], None]) -> None:
    """Entry point of a program of ranks."""

    def counted() -> None:
        _count_all_calls()
        main(World())
        if dist.is_initialized():
            dist.destroy_process_group()

    end_together(counted)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
