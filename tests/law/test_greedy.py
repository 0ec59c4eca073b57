"""Strict acceptance under greedy decoding: with `repair` the committed stream is constrained greedy decoding.

Whatever was drafted, and whatever batch the request shared a step with.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from structured_commit import CommitConfig, CommitStage, StructureTable, strict_reference

from .instances import random_table

WORLDS, DRAFTERS, STREAM = 16, 12, 10


@pytest.mark.parametrize("policy", ["repair", "gate", "align"])
@pytest.mark.parametrize("how", ["no temperature", "temperature 0"])
@pytest.mark.parametrize("seed", range(10))
def test_repair_of_greedy_rows_is_constrained_greedy_decoding(policy, how, seed):
    choose = random.Random(seed)
    vocab, num_drafts = choose.randint(3, 9), choose.randint(1, 4)
    starts, table = random_table(choose, vocab, WORLDS)
    # The next token depends on the world and the two tokens before; ties are common on purpose.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(6, (WORLDS, vocab, vocab, vocab), generator=generator).float()

    expected = [_constrained_greedy(table, scores[w], int(starts[w])) for w in range(WORLDS)]
    streams = _decode(table, scores, starts, num_drafts, policy, how, generator)
    for row, stream in enumerate(streams):
        world = row % WORLDS
        assert stream == expected[world][: len(stream)]
        assert len(stream) >= min(STREAM, len(expected[world]))


def _constrained_greedy(table: StructureTable, scores: Tensor, state: int) -> list[int]:
    stream, previous, last = [], 0, 0
    while len(stream) < 2 * STREAM and state != table.ended:
        legal = [t for t in range(table.vocab_size) if table.host.step(state, t) >= 0]
        best = max(legal, key=lambda t: (float(scores[previous, last, t]), -t))
        stream.append(best)
        previous, last, state = last, best, table.host.step(state, best)
    return stream


def _decode(table, scores, starts, num_drafts, policy, how, generator) -> list[list[int]]:
    """Streams of WORLDS × DRAFTERS rows in one batch, each drafted at random, until all hold STREAM tokens."""
    rows = WORLDS * DRAFTERS
    world = torch.arange(rows) % WORLDS
    config = CommitConfig.of_rule(policy, repair_rows=rows, max_repairs=10**6)
    stage = CommitStage(table, config, num_slots=rows, max_window=num_drafts + 1)
    slots = torch.arange(rows)
    stage.state[:rows] = starts[world].int()
    temperature = None if how == "no temperature" else torch.zeros(rows)
    streams: list[list[int]] = [[] for _ in range(rows)]
    while any(len(s) < STREAM and stage.state[r] != table.ended for r, s in enumerate(streams)):
        drafts = torch.randint(table.vocab_size, (rows, num_drafts), generator=generator)
        context = torch.tensor([[0, 0, *s][-2:] for s in streams])
        path = torch.cat([context, drafts], dim=1)
        logits = torch.stack([scores[world, path[:, i], path[:, i + 1]] for i in range(num_drafts + 1)], dim=1)
        choice = (logits == logits.amax(dim=2, keepdim=True)).int().argmax(dim=2)
        window = strict_reference(drafts, choice)
        open_rows = (stage.state[:rows] != table.ended).tolist()
        out = stage.commit(window.tokens, window.lengths, slots, logits=logits, temperature=temperature)
        for row, is_open in enumerate(open_rows):
            if is_open:
                streams[row] += out.tokens[row, : int(out.lengths[row])].tolist()
    return streams
