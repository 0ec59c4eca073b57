"""Random automata, larger and less tidy than a format's."""

from __future__ import annotations

import random

import torch

from structured_commit import StructureTable, TableInfo
from structured_commit.table import IN_BLOCK, IN_HEADER, MAY_END, TERMINAL


def random_table(choose: random.Random) -> StructureTable:
    """A valid table: every tracked state has a legal token and a way to a legal end.

    State i leads to a state with a smaller number by some class, and state 1 may end, so that no state is dead.
    """
    num_states, num_classes = choose.randint(2, 24), choose.randint(2, 20)
    vocab = choose.choice((num_classes, num_classes + choose.randint(0, 12), choose.randint(num_classes, 160)))
    token_class = [*range(num_classes), *(choose.randrange(num_classes) for _ in range(vocab - num_classes))]
    choose.shuffle(token_class)
    terminals = set(choose.sample(range(num_classes), choose.randint(1, max(1, num_classes // 4))))
    others = [c for c in range(num_classes) if c not in terminals]
    density = choose.choice((0.1, 0.5, 0.9))
    rows, flags = [[0] * num_classes], [MAY_END]
    for state in range(1, num_states):
        may_end = state == 1 or choose.random() < 0.4
        flags.append(choose.choice((0, 0, IN_BLOCK, IN_HEADER, IN_BLOCK | IN_HEADER)) | MAY_END * may_end)
        row = [choose.randrange(1, num_states) if choose.random() < density else -1 for _ in range(num_classes)]
        for terminal in terminals:
            row[terminal] = 1 if may_end and choose.random() < 0.8 else -1
        row[choose.choice(others)] = choose.randrange(1, max(state, 2))
        rows.append(row)
    opener = choose.randrange(vocab)
    return StructureTable(
        torch.tensor(token_class, dtype=torch.int16),
        torch.tensor(rows, dtype=torch.int16),
        torch.tensor(flags, dtype=torch.uint8),
        torch.tensor([TERMINAL * (c in terminals) for c in range(num_classes)], dtype=torch.uint8),
        TableInfo(start=1, entries=((opener, choose.randrange(1, num_states)),)),
    )
