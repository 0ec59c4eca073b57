"""Models that are tables: the logits of a context, and a cache of token ids in place of keys and values.

A row's context is read back from the cache up to its KV length, so a wrong rewind, a wrong length or a token that was
replaced for some readers only shows as wrong logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .attention import AttentionMetadata

UNWRITTEN = -1000
Context = tuple[int, ...]
Table = Callable[[Context], Tensor] | Mapping[Context, Sequence[float]]


def random_table(vocab_size: int, seed: int = 0, order: int = 2, scale: float = 3.0) -> Callable[[Context], Tensor]:
    """Logits [V] that depend on the last `order` tokens and on nothing else; the same in every process."""
    rows: dict[Context, Tensor] = {}

    def logits(context: Context) -> Tensor:
        key = context[-order:]
        if key not in rows:
            chosen = random.Random(f"{seed}:{key}")
            rows[key] = torch.tensor([chosen.gauss(0, scale) for _ in range(vocab_size)], dtype=torch.float32)
        return rows[key]

    return logits


def blurred(table: Table, vocab_size: int, noise: float, seed: int = 1) -> Callable[[Context], Tensor]:
    """A drafter that resembles `table`: its logits plus noise."""
    read, other = reader(table), random_table(vocab_size, seed, scale=noise)
    return lambda context: read(context) + other(context)


def reader(table: Table) -> Callable[[Context], Tensor]:
    """A function of the context; a mapping is asked for the longest of its suffixes that it holds."""
    if not isinstance(table, Mapping):
        return table

    def logits(context: Context) -> Tensor:
        key = next(context[i:] for i in range(len(context) + 1) if context[i:] in table)
        return torch.as_tensor(table[key], dtype=torch.float32)

    return logits


class TableModel:
    """A causal model over `table`; the cache has a line for each slot, and a last one that dummies share.

    `complete` says that each place must be written before it is read; a drafter's cache has holes where a step had
    no drafts.
    """

    def __init__(self, table: Table, vocab_size: int, num_lines: int, max_len: int, complete: bool = True) -> None:
        self.logits_of, self.vocab_size = reader(table), vocab_size
        self.cache = torch.full((num_lines, max_len), UNWRITTEN, dtype=torch.int64)
        self.d2t, self.complete = None, complete

    @property
    def model(self) -> TableModel:
        return self

    def forward(self, input_ids: Tensor, attn_metadata: AttentionMetadata, gather_ids: Tensor) -> Tensor:
        """Logits [len(gather_ids), V] of the chosen tokens among `input_ids`, all rows concatenated."""
        places = self.write(input_ids, attn_metadata)
        rows = [self._row(*places[i], attn_metadata) for i in gather_ids.tolist()]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)

    def write(self, input_ids: Tensor, attn_metadata: AttentionMetadata) -> list[tuple[int, int, int]]:
        """Put each row's tokens at the end of its cache: (line, first new place, index in the row) of each."""
        places = []
        kv_lens, seq_lens = attn_metadata.kv_lens_cuda.tolist(), attn_metadata.seq_lens_cuda.tolist()
        for line, kv_len, seq_len in zip(attn_metadata.lines, kv_lens, seq_lens, strict=True):
            start = kv_len - seq_len
            self.cache[line, start:kv_len] = input_ids[len(places) : len(places) + seq_len].long()
            places += [(line, start, i) for i in range(seq_len)]
        return places

    def next_logits(self, line: int, length: int, path: Sequence[int] = ()) -> Tensor:
        """Logits [V] after the first `length` tokens of a line, then `path`."""
        context = (*self.cache[line, :length].tolist(), *path)
        if line == len(self.cache) - 1:
            return torch.zeros(self.vocab_size)
        if self.complete and UNWRITTEN in context:
            raise AssertionError(f"cache line {line} is read at a place never written: {context}")
        return self.logits_of(context).float()

    def _row(self, line: int, start: int, index: int, attn_metadata: AttentionMetadata) -> Tensor:
        parents = attn_metadata.tree_parents
        if parents is None or attn_metadata.is_context_line(line):
            return self.next_logits(line, start + index + 1)
        path = []
        while index >= 0:
            path.append(int(self.cache[line, start + index]))
            index = parents[index]
        return self.next_logits(line, start, path[::-1])
