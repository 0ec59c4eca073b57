"""What a CUDA graph would not forgive, found without a GPU by watching every operation.

A captured graph replays the same kernels on the same addresses: nothing in it may wait for the device, have a shape
that depends on values, bring data in from the host, or read a tensor that a replay does not find where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "is_nonzero", "equal.")
FROM_HOST = ("lift_fresh", "pin_memory")


class GraphWatch(TorchDispatchMode):
    """Records each operation with the shapes of its results, and fails on one that cannot be captured.

    Args:
        static: the tensors a replay finds in place: inputs, persistent state, tables. None = do not ask.
        host_side: for what runs before the graph: data may come from the host, waiting is still refused.

    Attributes:
        seen: each operation's name, and the shape and dtype of its results.
    """

    def __init__(self, static: Iterable[Tensor] | None = None, host_side: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[str, list]] = []
        self._known = None if static is None else {_storage(t) for t in static}
        self._kept: list[Tensor] = []  # so that no address is given out twice while we watch
        self._refused = WAITS if host_side else WAITS + FROM_HOST

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(w in name for w in self._refused), f"{name} waits for the device or reads the host"
        if func is torch.ops.aten.index.Tensor:
            masks = [a for a in tree_leaves(args[1]) if isinstance(a, Tensor) and a.dtype == torch.bool]
            assert not masks, f"{name} has a shape that depends on values"
        if self._known is not None:
            for tensor in _tensors((args, kwargs)):
                # A number that torch wraps into a tensor is a launch argument: no replay looks for it in memory.
                wrapped = tensor.dim() == 0 and tensor.device.type == "cpu" and tensor.numel() == 1
                assert _storage(tensor) in self._known or wrapped, f"{name} reads a tensor that no replay would find"
        out = func(*args, **(kwargs or {}))
        made = _tensors(out)
        if self._known is not None:
            self._kept += made
            self._known.update(map(_storage, made))
        self.seen.append((name, [(tuple(t.shape), t.dtype) for t in made]))
        return out


def tensors_of(thing: object, name: str = "", _seen: set[int] | None = None) -> dict[str, Tensor]:
    """Every tensor that an object holds, however deep, by the way to it."""
    seen = set() if _seen is None else _seen
    if isinstance(thing, Tensor):
        return {name: thing}
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type):
        return {}
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        parts = list(thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        parts = list(enumerate(thing))
    else:
        slots = [s for kind in type(thing).__mro__ for s in getattr(kind, "__slots__", ())]
        parts = [(s, getattr(thing, s)) for s in slots if hasattr(thing, s)] + list(
            getattr(thing, "__dict__", {}).items()
        )
    found: dict[str, Tensor] = {}
    for key, part in parts:
        found.update(tensors_of(part, f"{name}.{key}".lstrip("."), seen))
    return found


def addresses(thing: object) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """Where each tensor of an object lies; equal before and after a step that keeps nothing new and moves nothing."""
    return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in tensors_of(thing).items()}


def _tensors(tree: object) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
