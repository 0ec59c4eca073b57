"""A hybrid target: beside the cache it has a recurrent state for each slot, and its logits come from that state alone.

Facts: W §5 (`update_mamba_states` right after acceptance, generation rows only), W §8 (a tree hands over the accepted
leaf's node), W §7 (nobody updates the state at draft length 0: the kernel writes it itself). The state is the tokens
it has taken in, so a step that commits n tokens and takes in another number says something else from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import AttentionMetadata
from .tables import Context, TableModel


class MambaHybridCacheManager:
    """States by cache line, and those behind each token of the step that is being verified."""

    def __init__(self, num_lines: int) -> None:
        self.states: list[Context] = [()] * num_lines
        self._intermediate: dict[int, list[Context]] = {}

    def update_mamba_states(
        self,
        attn_metadata: AttentionMetadata,
        num_accepted_tokens: Tensor,
        state_indices: Tensor | None = None,
        accepted_leaf_positions: Tensor | None = None,
    ) -> None:
        """Generation rows: the state behind the last verified token that was committed. In place."""
        contexts = attn_metadata.num_contexts
        at = num_accepted_tokens[contexts:] - 1 if accepted_leaf_positions is None else accepted_leaf_positions
        for line, position in zip(attn_metadata.lines[contexts:], at.tolist(), strict=True):
            self.states[line] = self._intermediate[line][position]

    def receive(self, line: int, tokens: Context) -> None:
        self.states[line] = tokens

    def take_in(self, line: int, start: int, tokens: list[int], parents, verifies: bool) -> list[Context]:
        """The state behind each token; the line's own moves on unless the tokens are still to be verified."""
        before = self.states[line] if start else ()
        after: list[Context] = []
        for i, token in enumerate(tokens):
            parent = i - 1 if parents is None else parents[i]
            after.append((*(before if parent < 0 else after[parent]), token))
        if verifies:
            self._intermediate[line] = after
        else:
            self.states[line] = after[-1]
        return after


class HybridModel(TableModel):
    """A table whose context is read from the recurrent state; the cache is kept beside it for whoever compares."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.recurrent = MambaHybridCacheManager(len(self.cache))

    def forward(self, input_ids: Tensor, attn_metadata: AttentionMetadata, gather_ids: Tensor) -> Tensor:
        places = self.write(input_ids, attn_metadata)
        states: list[Context] = []
        at = 0
        for row, (line, length) in enumerate(zip(attn_metadata.lines, attn_metadata.seq_lens.tolist(), strict=True)):
            in_context = row < attn_metadata.num_contexts
            parents = None if in_context else attn_metadata.tree_parents
            new = input_ids[at : at + length].tolist()
            states += self.recurrent.take_in(line, places[at][1], new, parents, not in_context and length > 1)
            at += length
        spare = len(self.cache) - 1
        rows = [
            torch.zeros(self.vocab_size) if places[i][0] == spare else self.logits_of(states[i]).float()
            for i in gather_ids.tolist()
        ]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
