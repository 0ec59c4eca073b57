"""A table as the kernels read it: the same automaton in the narrowest integers that hold it.

`StructureTable` keeps int16 throughout; here a class fits a byte in most formats, and so does a state. Built once
per stage, on its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .table import ILLEGAL, StructureTable

BYTE = 255


@dataclass(frozen=True, slots=True)
class PackedTable:
    """The tensors that a kernel gathers from.

    Attributes:
        token_class: [V] uint8 where there are at most 256 classes, else int16.
        transitions: [S + 2, C] uint8 where there are at most 255 states, else int16; `illegal` marks what is illegal.
        escape_token: [S + 2] int32. flags: [S + 2] uint8, `state_flags` or 0.
        illegal: 255 or −1.
    """

    token_class: Tensor
    transitions: Tensor
    escape_token: Tensor
    flags: Tensor
    illegal: int

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        parts = (self.token_class, self.transitions, self.escape_token, self.flags)
        return sum(t.numel() * t.element_size() for t in parts)


def pack(table: StructureTable) -> PackedTable:
    """`table` for a kernel, on the table's device."""
    narrow_class = table.num_classes <= BYTE + 1
    narrow_state = table.num_states + 2 <= BYTE  # the ended and the stray state included; 255 itself is taken
    illegal = BYTE if narrow_state else ILLEGAL
    follow = table.transitions
    if narrow_state:
        follow = torch.where(follow == ILLEGAL, BYTE, follow).to(torch.uint8)
    return PackedTable(
        token_class=table.token_class.to(torch.uint8) if narrow_class else table.token_class,
        transitions=follow,
        escape_token=table.escape_token,
        flags=table.extended_flags,
        illegal=illegal,
    )
