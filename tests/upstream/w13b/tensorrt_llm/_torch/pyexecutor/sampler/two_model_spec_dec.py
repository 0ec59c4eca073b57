"""Facts: executor.md §1.5 (the three variants: order of appending, counting and stop checks; accepted nodes of a
tree; rejection may return without a last token)."""

from __future__ import annotations

from typing import cast

import torch

from tests.upstream.common.requests import get_draft_token_length, handle_stop_criteria
from tests.upstream.common.torch_sampler import (
    DEFAULT_BEAM_IDX,
    TwoModelDispatch,
    add_token,
    get_rejected_indices,
    sample_rejected,
)


class TwoModelSpecDecHandler(TwoModelDispatch):
    def __init__(self, sampler):
        self._sampler, self.max_seq_len = sampler, sampler.max_seq_len

    def _process_draft_tokens_greedy(self, request, new_tokens, finish_reasons):
        new_token = add_token(request, new_tokens, beam_idx=DEFAULT_BEAM_IDX)
        if self._sampler.finish_if_reason(request, finish_reasons, step=0) or get_draft_token_length(request) == 0:
            return 0
        num_accepted = 0
        for draft_token in request.py_draft_tokens:
            if draft_token != new_token:
                break
            num_accepted += 1
            new_token = add_token(request, new_tokens, beam_idx=DEFAULT_BEAM_IDX, step=num_accepted)
            if self._sampler.finish_if_reason(request, finish_reasons, step=num_accepted):
                break
        return num_accepted

    def _process_draft_tokens_tree(
        self, request, new_tokens_tensor, new_tokens_list, finish_reasons, spec_tree_manager
    ):
        slot = request.py_seq_slot
        best, best_length = None, 0
        for path in spec_tree_manager.get_eagle_paths(slot):
            path = path[path >= 0]
            chosen = new_tokens_tensor[path, slot, DEFAULT_BEAM_IDX]
            drafts = torch.tensor([request.py_draft_tokens[node - 1] for node in path[1:].tolist()])
            length = 1 + int((drafts == chosen[:-1]).int().cumprod(0).sum())
            if length > best_length:
                best, best_length = path, length
        num_accepted_draft_tokens = 0
        for idx in best[:best_length]:
            step = cast(int, idx.item())
            add_token(request, new_tokens_list, beam_idx=DEFAULT_BEAM_IDX, step=step)
            num_accepted_draft_tokens += 1
            if self._sampler.finish_if_reason(request, finish_reasons, step=step):
                break
        request.py_num_accepted_draft_tokens_indices = (best[1:num_accepted_draft_tokens] - 1).tolist()
        return num_accepted_draft_tokens - 1

    def _process_draft_tokens_rejection_sampling(self, request, new_tokens_list, new_tokens_tensor):
        draft_probs, target_probs = request.py_draft_logits.softmax(dim=-1), request.py_target_probs
        generator = self._sampler.generator
        rejected_indices = get_rejected_indices(draft_probs, target_probs, generator, request.py_draft_tokens)
        sample_last = len(rejected_indices) > 0
        num_initially_accepted = int(rejected_indices[0]) if sample_last else get_draft_token_length(request)
        num_accepted = num_initially_accepted
        for i in range(num_accepted):
            new_tokens_tensor[i, request.seq_slot, DEFAULT_BEAM_IDX] = request.py_draft_tokens[i]
            request.add_new_token(request.py_draft_tokens[i], DEFAULT_BEAM_IDX)
            if handle_stop_criteria(request, request.py_draft_tokens[i], max_seq_len=self.max_seq_len):
                return i + 1
        if sample_last:
            new_token = sample_rejected(draft_probs, target_probs, generator, num_accepted)
            new_tokens_tensor[num_accepted, request.seq_slot, DEFAULT_BEAM_IDX] = new_token
            request.add_new_token(new_token, DEFAULT_BEAM_IDX)
        else:
            new_token = add_token(request, new_tokens_list, beam_idx=DEFAULT_BEAM_IDX, step=num_accepted)
        handle_stop_criteria(request, new_token, max_seq_len=self.max_seq_len)
        return num_accepted
