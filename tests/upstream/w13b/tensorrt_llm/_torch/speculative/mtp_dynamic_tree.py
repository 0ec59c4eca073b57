"""Facts: workers.md §8 (MTP tree worker: spec before attn, greedy only, relocation in forward, drafts from
`accepted_tokens`, two returns of one shape)."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker

from tests.upstream.common.drafting import worker_forward
from tests.upstream.common.trees import TreeBuffers


class MTPEagleDynamicTreeWorker(TreeBuffers, MTPEagleWorker):
    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(ids, logits, spec, attn),
        "relocate_and_draft",
    )

    def relocate_and_draft(self, input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model):
        self._relocate_kv_eagerly(attn_metadata, attn_metadata.num_seqs)
        self.update_recurrent(attn_metadata, counts, self.accepted_leaves(attn_metadata))
        return self.draft_tree(input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model)

    def sample_and_accept_draft_tokens(self, input_ids, logits, spec_metadata, attn_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        logits = torch.atleast_2d(logits)
        accepted_tokens = self._accepted_tokens_buf[:batch_size].zero_()
        num_accepted_tokens = self._num_accepted_tokens_buf[:batch_size].fill_(1)
        self._accepted_draft_indices_tensor[:batch_size] = -1
        target_tokens = self._target_tokens_buf[: len(logits)].copy_(logits.argmax(dim=-1))
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        if num_gens > 0:
            target_predict = target_tokens[num_contexts:].reshape(num_gens, self.tokens_per_gen_step)
            if self.spec_tree_manager is None:
                accepted_tokens[num_contexts:, 0] = target_predict[:, 0]
                return accepted_tokens, num_accepted_tokens
            verified = self.tree_ops_converter.verify_dynamic_tree_greedy_out_packed(
                *self.tree_inputs(target_predict, spec_metadata.draft_tokens, attn_metadata), tree_valid=None
            )
            self.keep_path(*verified, num_contexts)
        num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, self.max_draft_len)
        return accepted_tokens, num_accepted_tokens
