"""Requests, batches and slots. Facts: X §2.3 (row order), §2.4 (dummies), §3.1 (attributes), §3.2 (pause)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch


class LlmRequestState(Enum):
    CONTEXT_INIT = 1
    GENERATION_IN_PROGRESS = 2
    GENERATION_COMPLETE = 3


@dataclass
class SamplingConfig:
    """Lists with one value, or None, as in the C++ configuration."""

    temperature: list[float] | None = None
    top_k: list[int] | None = None
    top_p: list[float] | None = None


@dataclass
class LlmRequest:
    """One request, single beam. `py_*` names are upstream's; the token list stands for the C++ request's."""

    py_request_id: int
    prompt: Sequence[int]
    py_max_new_tokens: int
    py_end_id: int = -1
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int | None = None
    presence_penalty: float = 0.0
    is_dummy: bool = False

    state: LlmRequestState = LlmRequestState.CONTEXT_INIT
    py_seq_slot: int | None = None
    py_batch_idx: int | None = None
    py_is_draft: bool = False
    py_is_first_draft: bool = False
    py_stop_words_list: list | None = None
    py_draft_tokens: list[int] = field(default_factory=list)
    py_draft_tokens_effective_len: int = 0
    py_draft_logits: torch.Tensor | None = None
    py_target_probs: torch.Tensor | None = None
    py_num_accepted_draft_tokens: int = 0
    py_num_accepted_draft_tokens_indices: list[int] = field(default_factory=list)
    py_num_draft_tokens_verified: int = 0
    py_rewind_len: int = 0
    py_decoding_iter: int = 0
    context_current_position: int = 0
    context_chunk_size: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.prompt_len = self.py_prompt_len = self.py_orig_prompt_len = len(self.tokens)
        self.max_new_tokens = self.py_max_new_tokens

    @property
    def seq_slot(self) -> int | None:
        return self.py_seq_slot

    @property
    def is_context_init_state(self) -> bool:
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        return self.state is LlmRequestState.GENERATION_COMPLETE

    @property
    def output(self) -> list[int]:
        return self.tokens[self.py_orig_prompt_len :]

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self.tokens)

    def add_new_token(self, token: int, beam: int) -> int:
        self.tokens.append(int(token))
        return len(self.tokens)

    def finish_by(self, reason: str, beam: int) -> None:
        self.state, self.finish_reason = LlmRequestState.GENERATION_COMPLETE, reason

    def receive(self, first_token: int) -> None:
        """As on a generation server once the context server is done: the first token never passes its sampler."""
        self.state, self.context_current_position = LlmRequestState.GENERATION_IN_PROGRESS, self.prompt_len
        self.py_decoding_iter = 1
        self.add_new_token(first_token, 0)

    def pause(self) -> None:
        """What was generated becomes prompt; the Python slot stays as it was, stale."""
        self.max_new_tokens -= len(self.tokens) - self.prompt_len
        self.prompt_len = len(self.tokens)
        self.state, self.context_current_position = LlmRequestState.CONTEXT_INIT, 0
        self.py_batch_idx, self.py_draft_tokens = None, []


def dummy_request(draft_len: int, request_id: int = -1) -> LlmRequest:
    """A generation row that is nobody's: padding of a graph batch, or of attention data parallelism."""
    request = LlmRequest(request_id, [0], py_max_new_tokens=1 << 20, is_dummy=True)
    request.state = LlmRequestState.GENERATION_IN_PROGRESS
    request.py_draft_tokens = [0] * draft_len
    return request


@dataclass
class ScheduledRequests:
    """Contexts first, those that are not in their last chunk foremost; then generation."""

    context_requests_chunking: list[LlmRequest] = field(default_factory=list)
    context_requests_last_chunk: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def context_requests(self) -> list[LlmRequest]:
        return self.context_requests_chunking + self.context_requests_last_chunk

    @property
    def num_context_requests(self) -> int:
        return len(self.context_requests)

    def all_requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests

    def sampled_requests(self) -> list[LlmRequest]:
        return self.context_requests_last_chunk + self.generation_requests


def handle_stop_criteria(request: LlmRequest, new_token: int) -> bool:
    """End id first, then length, then stop words."""
    if new_token == request.py_end_id:
        request.finish_by("END_ID", 0)
        return True
    if request.get_num_tokens(0) - request.prompt_len >= request.max_new_tokens:
        request.finish_by("LENGTH", 0)
        return True
    if any(request.output[-len(word) :] == word for word in request.py_stop_words_list or []):
        request.finish_by("STOP_WORDS", 0)
        return True
    return False


def get_draft_token_length(request: LlmRequest) -> int:
    return len(request.py_draft_tokens)


class SlotPool:
    """Sequence slots: the lowest free one is given out; a dummy gets none."""

    def __init__(self, num_slots: int) -> None:
        self.free = list(range(num_slots))

    def assign(self, requests: Sequence[LlmRequest], holders: dict[int, int]) -> None:
        for request in requests:
            if not request.is_dummy and request.py_request_id not in holders:
                holders[request.py_request_id] = request.py_seq_slot = self.free.pop(0)

    def release(self, request: LlmRequest, holders: dict[int, int]) -> None:
        slot = holders.pop(request.py_request_id, None)
        if slot is not None:
            self.free = sorted([*self.free, slot])


class KvCacheManager:
    """How many tokens each request's cache holds. Facts: A §4 (rewind), X §1.6 (accepted + rewound = verified)."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def prepare_resources(self, batch: ScheduledRequests) -> None:
        for request in batch.context_requests:
            if request.context_current_position == 0:
                self.lengths[request.py_request_id] = 0
            self.lengths[request.py_request_id] += request.context_chunk_size
        for request in batch.generation_requests:
            if not request.is_dummy:
                self.lengths[request.py_request_id] += 1 + len(request.py_draft_tokens)

    def update_resources(self, batch: ScheduledRequests) -> None:
        for request in batch.generation_requests:
            if request.state is LlmRequestState.GENERATION_IN_PROGRESS and not request.is_dummy:
                self.lengths[request.py_request_id] -= request.py_rewind_len
