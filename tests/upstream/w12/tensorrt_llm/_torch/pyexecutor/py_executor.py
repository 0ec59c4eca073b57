"""Facts: executor.md §1.6, §1.7 (acceptance is decided again on the device under overlap)."""

from __future__ import annotations

import torch

from tests.upstream.common.acceptance import matching_prefix
from tests.upstream.common.spec_sampler import SampleStateTensorsSpec
from tests.upstream.common.two_model import TwoModelLoop


class PyExecutor(TwoModelLoop):
    def _accept_draft_tokens(self, scheduled_batch, target_outputs, target_inputs):
        target_tokens = target_outputs.new_tokens.squeeze(-1)
        new_tokens = torch.zeros_like(target_outputs.new_tokens)
        device, batch_size = target_tokens.device, target_tokens.shape[1]
        num_accepted_tokens = target_tokens.new_zeros(batch_size, dtype=torch.int32)
        if target_inputs is not None and target_inputs.next_draft_tokens is not None:
            behind = slice(scheduled_batch.num_context_requests, None)
            drafts = target_inputs.next_draft_tokens[behind].int()
            num_accepted_tokens[behind] = matching_prefix(drafts, target_tokens.T[behind])
            batch_indices = torch.arange(batch_size, device=device)
            new_tokens[0, batch_indices, 0] = target_tokens[num_accepted_tokens.long(), batch_indices]
        else:
            batch_indices = torch.arange(batch_size, device=device)
            new_tokens[0, batch_indices, 0] = target_tokens[0]
        return SampleStateTensorsSpec(new_tokens), num_accepted_tokens
