"""Facts: workers.md §2 (`SAWorker`: a method with a leading underscore, spec before attn, that binds the pair from the
strict base called with keywords), §5 (the automaton takes all rows, contexts too), §6 (drafts in any shape); age A."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase

from tests.upstream.common.drafting import worker_forward


class SAWorker(SpecWorkerBase):
    memory = "history"

    def __init__(self, spec_config, model_config=None):
        super().__init__()
        self.spec_config, self.model_config = spec_config, model_config
        self._max_matching_ngram_size = spec_config.max_matching_ngram_size

    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self._sample_and_accept_draft_tokens(ids, logits, spec, attn),
        "_generate_draft_tokens",
    )

    def _sample_and_accept_draft_tokens(self, input_ids, logits, spec_metadata, attn_metadata):
        num_gens = attn_metadata.num_seqs - attn_metadata.num_contexts
        draft_tokens = spec_metadata.draft_tokens
        if draft_tokens is None or draft_tokens.numel() != num_gens * self.max_draft_len:
            draft_tokens = torch.zeros(num_gens * self.max_draft_len, dtype=torch.int32)
        accepted_tokens, num_accepted_tokens = self._sample_and_accept_draft_tokens_base(
            logits=logits,
            draft_tokens=draft_tokens.reshape(num_gens, self.max_draft_len),
            num_contexts=attn_metadata.num_contexts,
            batch_size=attn_metadata.num_seqs,
            spec_metadata=spec_metadata,
        )
        return accepted_tokens, num_accepted_tokens

    def _generate_draft_tokens(self, input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model):
        self.note_consumed(tokens, counts)
        _, draft_tokens = spec_metadata.sa_manager.extend_ngram(
            spec_metadata.request_ids,
            tokens,
            counts,
            self.max_draft_len,
            max_ngram_size=self._max_matching_ngram_size,
        )
        return draft_tokens

    def history_of(self, slot, request_id, spec_metadata):
        return spec_metadata.sa_manager.histories[request_id]
