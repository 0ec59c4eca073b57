"""Facts: workers.md §5 (`NGramWorker` E: the pool takes T and n, then rollback, then the next tokens), §7 (draft length
0: the pool is fed from the dictionary), acceptance.md §6 item 7 (an extra slot for dummies, a row mask)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase


class NGramPool:
    """What each slot has said; drafts what followed the last token when it was said before."""

    def __init__(self):
        self.history = {}

    def extend_and_draft(self, tokens, counts, slot_ids_cuda, row_mask_cuda, batch_size, runtime_draft_len):
        drafts = torch.zeros(batch_size, runtime_draft_len, dtype=torch.int32)
        for row in row_mask_cuda.nonzero()[:, 0].tolist():
            said = self.history.setdefault(int(slot_ids_cuda[row]), [])
            said += tokens[row, : int(counts[row])].tolist()
            found = next((i for i in range(len(said) - 2, -1, -1) if said[i] == said[-1]), len(said))
            follow = said[found + 1 :][:runtime_draft_len]
            drafts[row, : len(follow)] = torch.tensor(follow, dtype=torch.int32)
        return drafts


class NGramWorker(SpecWorkerBase):
    memory = "history"

    def __init__(self, spec_config, model_config=None):
        super().__init__()
        self.spec_config, self.model_config, self.pool = spec_config, model_config, NGramPool()

    def _forward_impl(
        self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model, **unused
    ):
        if spec_metadata.runtime_draft_len == 0:
            out = self.skip_drafting(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
            self.extend(out["new_tokens"], out["new_tokens_lens"], attn_metadata, spec_metadata)
            return out
        self._execute_guided_decoder_if_present(logits)
        accepted_tokens, num_accepted_tokens = self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
        next_draft_tokens = self.extend(accepted_tokens, num_accepted_tokens, attn_metadata, spec_metadata)
        self._rollback_guided_decoder_after_verify(num_accepted_tokens)
        return self.output(logits, accepted_tokens, num_accepted_tokens, next_draft_tokens)

    def extend(self, tokens, counts, attn_metadata, spec_metadata):
        if spec_metadata.runtime_draft_len:
            self.update_recurrent(attn_metadata, counts)
        self.note_consumed(tokens, counts)
        mask = torch.tensor([request_id >= 0 for request_id in attn_metadata.request_ids])
        rows = (attn_metadata.num_seqs, spec_metadata.runtime_draft_len)
        return self.pool.extend_and_draft(tokens, counts, spec_metadata.slot_ids, mask, *rows)

    def history_of(self, slot, request_id, spec_metadata):
        return self.pool.history[slot]
