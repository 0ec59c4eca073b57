"""Fields and helpers of `SpecMetadata` that are alike in all windows.

Facts: A §1.1 (fields), §1.3 (graph views: a shallow copy, then `__post_init__` again), §1.4 (sentinels, one row per
context and K + 1 per generation row).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .requests import LlmRequest, LlmRequestState

DISABLED_TOP_K = torch.iinfo(torch.int32).max


class Sampling(NamedTuple):
    """One request's parameters with sentinels in place of what is not used, and its logits rows."""

    temperature: float
    top_k: int
    top_p: float
    num_tokens: int


@dataclass
class SpecMetadataFields:
    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    spec_dec_mode: Any
    vocab_size: int
    num_seq_slots: int = 0
    use_rejection_sampling: bool = False
    enable_penalty: bool = False
    is_spec_dec_tree: bool = False
    is_cuda_graph: bool = False
    runtime_draft_len: int = 0
    runtime_tokens_per_gen_step: int = 1
    draft_tokens: Tensor | None = None
    request_ids: list[int] | None = None
    slot_ids: Tensor | None = None
    gather_ids: Tensor | None = None
    temperatures: Tensor | None = None
    top_ks: Tensor | None = None
    top_ps: Tensor | None = None
    draft_probs: Tensor | None = None
    batch_slot_ids: Tensor | None = None
    spec_resource_manager: Any = None
    mtp_hidden_states_manager: Any = None
    sa_manager: Any = None

    def __post_init__(self) -> None:
        """Upstream allocates per-view buffers here; nothing to do."""

    def prepare(self) -> None:
        """Per-step copies; nothing to do."""

    def create_cuda_graph_metadata(self, max_batch_size: int):
        if self.is_cuda_graph:
            return self
        cuda_graph_metadata = copy.copy(self)
        cuda_graph_metadata.is_cuda_graph = True
        cuda_graph_metadata.max_num_requests = max_batch_size
        cuda_graph_metadata.__post_init__()
        return cuda_graph_metadata

    def normalized(self, requests: list[LlmRequest]) -> tuple[list[Sampling], bool]:
        """Each request's parameters, and whether every one of them is greedy."""
        found, all_greedy = [], True
        for request in requests:
            config = request.sampling_config
            temperature, top_k, top_p = (
                values[0] if values else None for values in (config.temperature, config.top_k, config.top_p)
            )
            in_generation = request.state is LlmRequestState.GENERATION_IN_PROGRESS
            per_step = self.runtime_tokens_per_gen_step if self.is_spec_dec_tree else self.runtime_draft_len + 1
            num_tokens = per_step if in_generation else 1
            greedy = not temperature or top_k == 1
            all_greedy &= greedy
            found.append(
                Sampling(1e-5, DISABLED_TOP_K, 1.0, num_tokens)
                if greedy
                else Sampling(temperature, top_k or DISABLED_TOP_K, top_p or 1.0, num_tokens)
            )
        return found, all_greedy

    def fill_sampling_rows(self, sampling: list[Sampling]) -> None:
        rows = [(s.temperature, s.top_k, s.top_p) for s in sampling for _ in range(s.num_tokens)]
        temperatures, top_ks, top_ps = zip(*rows, strict=True)
        self.temperatures[: len(rows)] = torch.tensor(temperatures, dtype=torch.float32)
        self.top_ks[: len(rows)] = torch.tensor(top_ks, dtype=torch.int32)
        self.top_ps[: len(rows)] = torch.tensor(top_ps, dtype=torch.float32)

    def allocate_sampling_rows(self, sampling: list[Sampling]) -> None:
        """Grown when the batch does not fit; a regrow moves the addresses."""
        rows = sum(s.num_tokens for s in sampling)
        size = max((self.max_total_draft_tokens + 1) * self.max_num_requests, rows)
        if self.temperatures is None or self.temperatures.numel() < size:
            self.temperatures = torch.ones(size)
            self.top_ks = torch.zeros(size, dtype=torch.int32)
            self.top_ps = torch.ones(size)

    def sampling_rows(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return self.temperatures[rows], self.top_ks[rows], self.top_ps[rows]
