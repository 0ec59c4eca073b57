"""Facts: executor.md §1.5 (the three variants: order of appending, counting and stop checks; accepted nodes of a
tree; rejection may return without a last token)."""

from __future__ import annotations

from typing import cast

import torch

from tests.upstream.common.requests import get_draft_token_length, handle_stop_criteria
from tests.upstream.common.torch_sampler import (
    TorchSamplerCommons,
    TwoModelDispatch,
    add_token,
    get_rejected_indices,
    replace_token,
    sample_rejected,
)


class TorchSampler(TwoModelDispatch, TorchSamplerCommons):
    def _process_draft_tokens_greedy(self, request, new_tokens, finish_reasons):
        new_token = add_token(request, new_tokens, beam_idx=0)
        if self.finish_if_reason(request, finish_reasons, step=0) or get_draft_token_length(request) == 0:
            return 0
        num_accepted = 0
        for draft_token in request.py_draft_tokens:
            if draft_token != new_token:
                break
            num_accepted += 1
            new_token = add_token(request, new_tokens, beam_idx=0, step=num_accepted)
            if self.finish_if_reason(request, finish_reasons, step=num_accepted):
                break
        return num_accepted

    def _process_draft_tokens_tree(
        self, request, new_tokens_tensor, new_tokens_list, finish_reasons, spec_tree_manager
    ):
        slot = request.py_seq_slot
        best, best_length = None, 0
        for path in spec_tree_manager.get_eagle_paths(slot):
            path = path[path >= 0]
            chosen = new_tokens_tensor[path, slot, 0]
            drafts = torch.tensor([request.py_draft_tokens[node - 1] for node in path[1:].tolist()])
            length = 1 + int((drafts == chosen[:-1]).int().cumprod(0).sum())
            if length > best_length:
                best, best_length = path, length
        num_accepted_draft_tokens = 0
        for idx in best[:best_length]:
            step = cast(int, idx.item())
            add_token(request, new_tokens_list, beam_idx=0, step=step)
            num_accepted_draft_tokens += 1
            if self.finish_if_reason(request, finish_reasons, step=step):
                break
        request.py_num_accepted_draft_tokens_indices = (best[1:num_accepted_draft_tokens] - 1).tolist()
        return num_accepted_draft_tokens - 1

    def _process_draft_tokens_rejection_sampling(self, request, new_tokens_list, new_tokens_tensor):
        draft_probs, target_probs = request.py_draft_logits.softmax(dim=-1), request.py_target_probs
        drafts, generator = request.py_draft_tokens, self.generator
        rejected = get_rejected_indices(draft_probs, target_probs, generator, drafts)
        sample_last = len(rejected) > 0
        num_initially_accepted = int(rejected[0]) if sample_last else get_draft_token_length(request)
        num_accepted = num_initially_accepted
        for i in range(num_accepted):
            replace_token(request, new_tokens_tensor, drafts[i], step=i)
            if handle_stop_criteria(request, drafts[i]):
                return i + 1
        if sample_last:
            new_token = sample_rejected(draft_probs, target_probs, generator, num_accepted)
            replace_token(request, new_tokens_tensor, new_token, step=num_accepted)
        else:
            new_token = add_token(request, new_tokens_list, beam_idx=0, step=num_accepted)
        handle_stop_criteria(request, new_token)
        return num_accepted
