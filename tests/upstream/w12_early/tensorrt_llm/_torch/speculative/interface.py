"""Facts: acceptance.md §2.2, §2.3 (column A1 as first released: K is the static draft length, the forced count takes
none, no `skip_drafting`)."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch

from tests.upstream.common import ops
from tests.upstream.common.acceptance import matching_prefix, unwritten
from tests.upstream.common.drafting import WorkerCommons
from tests.upstream.common.metadata import SpecMetadataFields


@dataclass
class SpecMetadata(SpecMetadataFields):
    allow_advanced_sampling: bool = False

    def populate_sampling_params_for_one_model(self, requests):
        if not self.allow_advanced_sampling or not self.spec_dec_mode.use_one_engine():
            return
        if self.temperatures is None:
            torch.manual_seed(0)
        per_request, _ = self.normalized(requests)
        self.allocate_sampling_rows(per_request)
        self.fill_sampling_rows(per_request)


class SpecWorkerBase(WorkerCommons, ABC):
    def __init__(self):
        super().__init__()
        self.seed = self.offset = None

    def _apply_force_accepted_tokens(self, num_accepted_tokens, num_contexts):
        if self.force_num_accepted_tokens:
            num_accepted_tokens[num_contexts:] = min(int(self.force_num_accepted_tokens), self.max_draft_len) + 1
        return num_accepted_tokens

    def _sample_and_accept_draft_tokens_base(self, logits, draft_tokens, num_contexts, batch_size, spec_metadata):
        accepted_tokens, num_accepted_tokens = unwritten(batch_size, self.max_draft_len + 1)
        chosen = self._sample_tokens_for_batch(torch.atleast_2d(logits), spec_metadata, num_contexts, batch_size)
        accepted_tokens[:num_contexts, 0] = chosen[:num_contexts]
        accepted_tokens[num_contexts:] = chosen[num_contexts:].reshape(-1, self.max_draft_len + 1)
        num_accepted_tokens[num_contexts:] += matching_prefix(draft_tokens, accepted_tokens[num_contexts:])
        num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts)
        return accepted_tokens, num_accepted_tokens

    def _sample_tokens_for_batch(self, logits, spec_metadata, num_contexts, batch_size):
        if not spec_metadata.allow_advanced_sampling:
            return logits.argmax(dim=-1)
        if self.seed is None:
            self.seed, self.offset = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.seed.add_(1)
        num_tokens = num_contexts + (batch_size - num_contexts) * (self.max_draft_len + 1)
        rows = spec_metadata.sampling_rows(slice(0, num_tokens))
        return ops.sampling_batch_spec_dec_one_model(logits, *rows, seed=self.seed, offset=self.offset)

    def sample_draft_tokens(self, logits, spec_metadata, batch_size, *, num_contexts=0, draft_step=None):
        return self.to_target_vocabulary(logits.argmax(dim=-1)).int()
