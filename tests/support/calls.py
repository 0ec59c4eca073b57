"""A table small enough to read: text, and calls with a header and a body, over six tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from structured_commit import StructureTable, TableInfo
from structured_commit.table import CLOSES, IN_BLOCK, IN_HEADER, MAY_END, OPENS, TERMINAL

TEXT, OPEN, NAME, BODY, CLOSE, END = range(6)
VOCAB = 6
IN_TEXT, IN_THE_HEADER, IN_THE_BODY = 1, 2, 3
ENDED, STRAY = 4, 5
_NO = -1


def calls_table() -> StructureTable:
    """`text* (OPEN name* BODY (text|name)* CLOSE text*)* END?`; OPEN also stands before a turn."""
    return StructureTable(
        token_class=torch.arange(VOCAB, dtype=torch.int16),
        next_state=torch.tensor(
            [
                [0, 0, 0, 0, 0, 0],
                [IN_TEXT, IN_THE_HEADER, _NO, _NO, _NO, 0],
                [_NO, _NO, IN_THE_HEADER, IN_THE_BODY, _NO, _NO],
                [IN_THE_BODY, _NO, IN_THE_BODY, _NO, IN_TEXT, _NO],
            ],
            dtype=torch.int16,
        ),
        state_flags=torch.tensor([MAY_END, MAY_END, IN_BLOCK | IN_HEADER, IN_BLOCK], dtype=torch.uint8),
        class_flags=torch.tensor([0, OPENS, 0, 0, CLOSES, TERMINAL], dtype=torch.uint8),
        info=TableInfo(format="calls", start=IN_TEXT, entries=((OPEN, IN_THE_HEADER),)),
    )


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def certain(*tokens: int, width: int | None = None) -> Tensor:
    """[1, W, V] probabilities: all mass of column i on `tokens[i]`, the last one repeated up to `width`."""
    ids = list(tokens) + [tokens[-1]] * ((width or len(tokens)) - len(tokens))
    return torch.nn.functional.one_hot(torch.tensor([ids]), VOCAB).float()
