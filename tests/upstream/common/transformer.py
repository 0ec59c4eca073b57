"""A small seeded transformer with a real key-value cache, in the tables' place. Facts: W §5 (KV lengths).

One layer of causal attention and an output head, float64 so that cached and whole forwards agree on every argmax. Keys
and values stand by cache line and place; a row reads those below its KV length, whatever was written there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import AttentionMetadata
from .tables import UNWRITTEN, Context

HIDDEN, HEADS, MAX_PLACES = 16, 2, 128


class Transformer:
    """Weights from a seed, over the `used` tokens of a vocabulary; `add` [used] is added to their logits.

    All other tokens get `never`. As a table it answers for a whole context without a cache; `make_model` gives the
    model that an engine runs.
    """

    def __init__(
        self, vocab_size: int, used: list[int], add: Tensor, *, seed: int, scale: float = 2.0, never: float = -50.0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

        self.vocab_size, self.used, self.add, self.never = vocab_size, torch.tensor(used), add.double(), never
        self.embedding = weight(vocab_size + 1, HIDDEN) * HIDDEN**0.5
        self.places = weight(MAX_PLACES, HIDDEN) * HIDDEN**0.5 / 2
        self.queries, self.keys, self.values, self.mix, self.up, self.down = (weight(HIDDEN, HIDDEN) for _ in range(6))
        self.head = weight(len(used), HIDDEN) * scale * HIDDEN**0.5

    def blurred(self, noise: float, seed: int) -> Transformer:
        """A drafter: the same weights with noise on the head."""
        other = Transformer.__new__(Transformer)
        other.__dict__.update(self.__dict__)
        generator = torch.Generator().manual_seed(seed)
        other.head = self.head + noise * torch.randn(self.head.shape, generator=generator, dtype=torch.float64)
        return other

    def keys_and_values(self, tokens: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """States, keys and values [n, HIDDEN] of tokens at places from `start` on. An id out of range is a hole's."""
        known = (tokens >= 0) & (tokens < self.vocab_size)
        states = self.embedding[torch.where(known, tokens, self.vocab_size)]
        states = states + self.places[start : start + len(tokens)]
        return states, states @ self.keys.T, states @ self.values.T

    def logits(self, state: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Logits [V] float64 of the last place, from its state and the keys and values up to it."""
        split = HEADS, HIDDEN // HEADS
        query = (state @ self.queries.T).view(split)
        weights = torch.einsum("hd,nhd->hn", query, keys.view(-1, *split)) / (HIDDEN // HEADS) ** 0.5
        seen = torch.einsum("hn,nhd->hd", weights.softmax(dim=-1), values.view(-1, *split)).flatten()
        state = state + seen @ self.mix.T
        state = state + torch.relu(state @ self.up.T) @ self.down.T
        state = state / state.norm() * HIDDEN**0.5
        row = torch.full((self.vocab_size,), self.never, dtype=torch.float64)
        return row.index_copy(0, self.used, self.head @ state / HIDDEN**0.5 + self.add)

    def __call__(self, context: Context) -> Tensor:
        states, keys, values = self.keys_and_values(torch.tensor(context), 0)
        return self.logits(states[-1], keys, values)

    def make_model(self, num_lines: int, max_len: int) -> CachedTransformer:
        return CachedTransformer(self, num_lines, max_len)


class CachedTransformer:
    """The model over its cache. `cache` holds the token of each place, for those who compare; logits never read it."""

    def __init__(self, weights: Transformer, num_lines: int, max_len: int) -> None:
        self.weights, self.logits_of, self.vocab_size, self.d2t = weights, weights, weights.vocab_size, None
        self.cache = torch.full((num_lines, max_len), UNWRITTEN, dtype=torch.int64)
        self.keys, self.values = (torch.zeros(num_lines, max_len, HIDDEN, dtype=torch.float64) for _ in range(2))

    @property
    def model(self) -> CachedTransformer:
        return self

    def forward(self, input_ids: Tensor, attn_metadata: AttentionMetadata, gather_ids: Tensor) -> Tensor:
        """Logits [len(gather_ids), V] of the chosen tokens among `input_ids`, all rows concatenated."""
        wanted, rows, at = set(gather_ids.tolist()), {}, 0
        kv_lens, seq_lens = attn_metadata.kv_lens_cuda.tolist(), attn_metadata.seq_lens_cuda.tolist()
        for line, kv_len, length in zip(attn_metadata.lines, kv_lens, seq_lens, strict=True):
            start, new = kv_len - length, input_ids[at : at + length].long()
            start = min(start, MAX_PLACES - length)  # the dummies' line has no end
            states, keys, values = self.weights.keys_and_values(new, start)
            place = slice(start, start + length)
            self.cache[line, place], self.keys[line, place], self.values[line, place] = new, keys, values
            for i in range(length):
                if at + i in wanted:
                    end = start + i + 1
                    rows[at + i] = self.weights.logits(states[i], self.keys[line, :end], self.values[line, :end])
            at += length
        return torch.stack([rows[i] for i in gather_ids.tolist()])
