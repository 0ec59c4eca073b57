"""Occurrence penalties, presence only. Facts: A §1.1 (`penalty_state`), §2.3 (applied to a clone; counted after
acceptance, columns below the count), A §1.6 step 7 (counts start anew on the last context chunk)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PenaltyState:
    counts: Tensor  # [slots + 1, V] int64
    presence: Tensor  # [slots + 1] float32


def make(num_slots: int, vocab_size: int) -> PenaltyState:
    counts = torch.zeros(num_slots + 1, vocab_size, dtype=torch.int64)
    return PenaltyState(counts, torch.zeros(num_slots + 1))


def populate(state: PenaltyState, requests: list) -> None:
    for request in requests:
        if request.is_context_init_state and request.is_last_context_chunk:
            state.counts[request.py_seq_slot] = 0
            state.presence[request.py_seq_slot] = request.presence_penalty


def penalized(state: PenaltyState, logits: Tensor, drafts: Tensor, num_contexts: int, slots: Tensor) -> Tensor:
    """A clone of `logits` in which each row is lowered for what was committed and for the drafts before it."""
    out = logits.clone()
    width = drafts.shape[1] + 1
    for row, slot in enumerate(slots.tolist()):
        first = row if row < num_contexts else num_contexts + (row - num_contexts) * width
        seen = state.counts[slot] > 0
        for column in range(1 if row < num_contexts else width):
            if column:
                seen = seen.clone()
                seen[drafts[row - num_contexts, column - 1].clamp(min=0)] = True
            out[first + column] -= state.presence[slot] * seen
    return out


def update_penalty_counts(state: PenaltyState, slots: Tensor, accepted_tokens: Tensor, lengths: Tensor) -> None:
    for row, slot in enumerate(slots.tolist()):
        for token in accepted_tokens[row, : int(lengths[row])].tolist():
            if 0 <= token < state.counts.shape[1]:
                state.counts[slot, token] += 1
