"""The two-model sampler around the three acceptance variants, which are the windows' own.

Facts: X §1.5 (order for one request, who is skipped, which variant, stop reasons precomputed for the sampled tokens),
§1.6 (appended = accepted + 1; accepted + rewound = verified).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ops import compute_probs_from_logits
from .requests import LlmRequest, LlmRequestState, ScheduledRequests, get_draft_token_length, handle_stop_criteria
from .spec_sampler import SampleStateTensorsSpec
from .trees import SpecTreeManager

FinishReasons = dict[tuple[int, int], str]  # (slot, step) → reason


@dataclass
class SampleState:
    device: SampleStateTensorsSpec
    requests: list[LlmRequest]
    new_tokens: Tensor
    finish_reasons: FinishReasons
    drafts: dict[int, list[int]] = field(default_factory=dict)


def add_token(request: LlmRequest, new_tokens: list, *, beam_idx: int, step: int = 0) -> int:
    token = new_tokens[step][request.py_seq_slot][beam_idx]
    request.add_new_token(token, beam_idx)
    return token


def replace_token(request: LlmRequest, new_tokens_tensor: Tensor, token: int, *, step: int) -> None:
    """Append a token that the sampler did not draw, and note it among those it did, in place."""
    new_tokens_tensor[step, request.seq_slot, 0] = token
    request.add_new_token(token, 0)


def get_rejected_indices(draft_probs: Tensor, target_probs: Tensor, generator, draft_tokens: list[int]) -> Tensor:
    steps = torch.arange(len(draft_tokens))
    p, q = target_probs[steps, draft_tokens], draft_probs[steps, draft_tokens]
    return (torch.rand(len(draft_tokens), generator=generator) * q >= p).nonzero()[:, 0]


def sample_rejected(draft_probs: Tensor, target_probs: Tensor, generator, num_accepted: int) -> int:
    """Raises when target and draft agree everywhere: there is nothing to draw from."""
    residual = (target_probs[num_accepted] - draft_probs[num_accepted]).clamp(min=0)
    return int(torch.multinomial(residual, 1, generator=generator))


class TwoModelDispatch:
    """Mixed into whatever holds the variants; `_sampler` is the sampler."""

    def process_draft_tokens(
        self, request, new_tokens_tensor, new_tokens_list, finish_reasons, resource_manager=None
    ) -> int:
        if resource_manager is not None:
            return self._process_draft_tokens_tree(
                request, new_tokens_tensor, new_tokens_list, finish_reasons, resource_manager
            )
        if request.sampling_config.temperature and request.py_draft_logits is not None and request.py_draft_tokens:
            return self._process_draft_tokens_rejection_sampling(request, new_tokens_list, new_tokens_tensor)
        return self._process_draft_tokens_greedy(request, new_tokens_list, finish_reasons)


class TorchSamplerCommons:
    """The rest of `TorchSampler`. `spec_dec` holds the variants."""

    def __init__(self, max_num_sequences: int, max_draft_len: int, max_total_draft_tokens: int) -> None:
        self.max_num_sequences = max_num_sequences
        self.new_tokens = torch.zeros(max_total_draft_tokens + 1, max_num_sequences, 1, dtype=torch.int32)
        self._force_num_accepted_tokens = 0
        self.generator = torch.Generator().manual_seed(1)
        self.spec_tree_manager: SpecTreeManager | None = None

    @property
    def spec_dec(self) -> TwoModelDispatch:
        return self

    def finish_if_reason(self, request: LlmRequest, finish_reasons: FinishReasons, *, step: int, beam_idx=0) -> bool:
        reason = finish_reasons.get((request.py_seq_slot, step))
        if reason:
            request.finish_by(reason, beam_idx)
            return True
        return handle_stop_criteria(request, -2)  # length only: no token is −2

    def sample_async(self, batch: ScheduledRequests, logits: Tensor) -> SampleState:
        """`logits`: one row per context, then one per token of each generation row."""
        finish_reasons: FinishReasons = {}
        at = 0
        for i, request in enumerate(batch.all_requests()):
            width = 1 if i < batch.num_context_requests else 1 + get_draft_token_length(request)
            rows = logits[at : at + width]
            at += width
            tokens = rows.argmax(-1)
            if request.sampling_config.temperature:
                n = len(rows)
                limits = torch.full((n,), request.sampling_config.temperature[0]), torch.full((n,), 1 << 30)
                probs = compute_probs_from_logits(rows, *limits, torch.ones(n))
                request.py_target_probs = probs
                tokens = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
            self.new_tokens[:width, request.py_seq_slot, 0] = tokens.int()
            for step, token in enumerate(tokens.tolist()):
                if token == request.py_end_id:
                    finish_reasons[request.py_seq_slot, step] = "END_ID"
        device = SampleStateTensorsSpec(self.new_tokens)
        drafts = {r.py_request_id: list(r.py_draft_tokens) for r in batch.generation_requests}
        return SampleState(device, batch.sampled_requests(), self.new_tokens.clone(), finish_reasons, drafts)

    def update_requests(self, state: SampleState, resource_manager: SpecTreeManager | None = None) -> None:
        new_tokens_list = state.new_tokens.tolist()
        for request in state.requests:
            if request.state is LlmRequestState.GENERATION_COMPLETE:
                continue
            # Under overlap the request holds the next step's drafts by now.
            later, request.py_draft_tokens = request.py_draft_tokens, state.drafts.get(request.py_request_id, [])
            tree = self.spec_tree_manager if request.py_draft_tokens else None
            accepted = self.spec_dec.process_draft_tokens(
                request, state.new_tokens, new_tokens_list, state.finish_reasons, tree
            )
            drafted = get_draft_token_length(request)
            request.py_num_accepted_draft_tokens = accepted if drafted else 0
            request.py_num_draft_tokens_verified = drafted
            request.py_rewind_len = drafted - accepted if drafted else 0
            request.py_decoding_iter += 1
            request.py_draft_tokens = later
