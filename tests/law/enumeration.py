"""Every outcome of rejection sampling as weighted windows, and the law of streams that a commit rule makes of them.

Exact up to float64: nothing is sampled. A commit rule is a function from the windows behind all prefixes of one
length to what is committed of each, with its probability; the stage is one such rule, a test may bring its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .instances import Family


class Windows(NamedTuple):
    """Accepted windows behind prefixes of n tokens. prefix: [B] int64; tokens: [B, W] int64, garbage at and past
    a row's length; lengths: [B] int64; weight: [B] float64, given the prefix."""

    n: int
    prefix: Tensor
    tokens: Tensor
    lengths: Tensor
    weight: Tensor


class Commits(NamedTuple):
    """What a rule commits. row: [M] int64 into the windows; tokens: [M, W] int64; lengths: [M] int64;
    weight: [M] float64, given the window; ended: [M] bool, the stream ends with the last of these tokens."""

    row: Tensor
    tokens: Tensor
    lengths: Tensor
    weight: Tensor
    ended: Tensor


Rule = Callable[[Family, Windows], Commits]


class Law(NamedTuple):
    """The law of whole streams, for M worlds. ended[n]: [M·V^n] float64, streams of n tokens whose last one is a
    terminal that counts; cut: [M·V^L], streams that reached the length limit."""

    ended: tuple[Tensor, ...]
    cut: Tensor

    def by_world(self) -> Tensor:
        """[M, streams]; every row sums to one."""
        worlds = len(self.ended[0])
        return torch.cat([part.view(worlds, -1) for part in (*self.ended, self.cut)], dim=1)


def deviation(a: Law, b: Law) -> float:
    """The largest difference in the probability of one stream, in any world."""
    return float((a.by_world() - b.by_world()).abs().max())


def total_variation(a: Law, b: Law) -> Tensor:
    """[M] total variation distances: the largest difference in the probability of any set of streams."""
    return (a.by_world() - b.by_world()).abs().sum(dim=1) / 2


def rejection_windows(family: Family, n: int, prefixes: Tensor) -> Windows:
    """All windows of rejection sampling behind `prefixes` [P], each of n tokens.

    Draft d comes with probability q(d) and passes with min(1, p(d)/q(d)); a rejection draws from max(p − q, 0);
    after K passes a bonus token comes from p.
    """
    num_drafts, vocab = family.drafts_at(n), family.vocab
    origin, tokens = torch.arange(len(prefixes)), torch.zeros(len(prefixes), 0, dtype=torch.int64)
    path, weight = prefixes, torch.ones(len(prefixes), dtype=torch.float64)
    parts = []
    for column in range(num_drafts + 1):
        p = family.target[n + column][path]
        if column == num_drafts:
            parts.append(_extended(origin, tokens, weight[:, None] * p, num_drafts + 1))
            break
        q = family.drafter[n + column][path]
        passes = torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)
        rejected = (q * (1 - passes)).sum(dim=1, keepdim=True)
        residual = (p - q).clamp(min=0.0)
        total = residual.sum(dim=1, keepdim=True)
        residual = torch.where(total > 0, residual / total, 0.0)
        parts.append(_extended(origin, tokens, weight[:, None] * rejected * residual, num_drafts + 1))
        origin, tokens, weight = _spread(origin, tokens, weight[:, None] * q * passes)
        path = _follow(prefixes[origin], tokens, vocab)
    origin, tokens, lengths, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    return Windows(n, prefixes[origin], tokens, lengths, weight)


def stream_law(family: Family, rule: Rule) -> Law:
    """The law of streams of up to `family.length` tokens when every step's windows go through `rule`."""
    vocab, length, worlds = family.vocab, family.length, family.worlds
    live = [torch.zeros(worlds * vocab**n, dtype=torch.float64) for n in range(length + 1)]
    ended = [torch.zeros(worlds * vocab**n, dtype=torch.float64) for n in range(length + 1)]
    live[0][:] = 1.0
    for n in range(length):
        prefixes = live[n].nonzero()[:, 0]
        if not len(prefixes):
            continue
        windows = rejection_windows(family, n, prefixes)
        out = rule(family, windows)
        mass = live[n][windows.prefix[out.row]] * windows.weight[out.row] * out.weight
        kept = out.lengths.clamp(max=length - n)
        ends = out.ended & (kept == out.lengths)
        for width in range(1, int(kept.max()) + 1):
            rows = kept == width
            path = _follow(windows.prefix[out.row[rows]], out.tokens[rows, :width], vocab)
            for law, which in ((ended, ends[rows]), (live, ~ends[rows])):
                law[n + width].index_add_(0, path[which], mass[rows][which])
    return Law(tuple(ended), live[length])


def law_of(family: Family, step: Callable[[int], Tensor], ends: Tensor) -> Law:
    """The law of a model on its own: `step(n)` is [M·V^n, V], `ends` [V] bool the tokens that end a stream."""
    live = torch.ones(family.worlds, dtype=torch.float64)
    ended = [torch.zeros_like(live)]
    for n in range(family.length):
        joint = live[:, None] * step(n)
        ended.append(torch.where(ends, joint, 0.0).flatten())
        live = torch.where(ends, 0.0, joint).flatten()
    return Law(tuple(ended), live)


def sequences(windows: Windows, family: Family) -> Iterator[Tensor]:
    """For each column, [B] int64: the prefix before it, following the window; meaningless past a row's length."""
    for column in range(windows.tokens.shape[1]):
        yield _follow(windows.prefix, windows.tokens[:, :column], family.vocab)


def _follow(prefix: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    for column in range(tokens.shape[1]):
        prefix = prefix * vocab + tokens[:, column]
    return prefix


def _spread(origin: Tensor, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row, token = weight.nonzero(as_tuple=True)
    return origin[row], torch.cat([tokens[row], token[:, None]], dim=1), weight[row, token]


def _extended(origin: Tensor, tokens: Tensor, weight: Tensor, width: int) -> tuple[Tensor, ...]:
    origin, tokens, weight = _spread(origin, tokens, weight)
    lengths = torch.full_like(origin, tokens.shape[1])
    padding = torch.zeros(len(tokens), width - tokens.shape[1], dtype=torch.int64)
    return origin, torch.cat([tokens, padding], dim=1), lengths, weight
