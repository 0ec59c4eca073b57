"""Facts: workers.md §8 (Eagle3 tree worker before unification: relocation inside the acceptance method, drafts from
`_accept_token`, which is the converter's own output; two returns of one shape)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker

from tests.upstream.common.drafting import worker_forward
from tests.upstream.common.trees import TreeBuffers


class Eagle3OneModelDynamicTreeWorker(TreeBuffers, Eagle3OneModelWorker):
    forward = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(logits, attn, spec), "draft_tree"
    )

    def sample_and_accept_draft_tokens(self, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        accepted_tokens, num_accepted_tokens = self._sample_and_accept_dynamic_tree(
            logits, attn_metadata, spec_metadata, batch_size, num_contexts, num_gens
        )
        if num_gens > 0:
            self._relocate_kv_eagerly(attn_metadata, batch_size)
        return accepted_tokens, num_accepted_tokens

    def _sample_and_accept_dynamic_tree(self, logits, attn_metadata, spec_metadata, batch_size, num_contexts, num_gens):
        accepted_tokens = self._accepted_tokens_buf[:batch_size].zero_()
        num_accepted_tokens = self._num_accepted_tokens_buf[:batch_size].fill_(1)
        self._accepted_draft_indices_tensor[:batch_size] = -1
        target_tokens = self._target_tokens_buf[: len(logits)].copy_(logits.argmax(dim=-1))
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        self._accept_token = None
        if num_gens > 0:
            target_predict = target_tokens[num_contexts:].reshape(num_gens, self.tokens_per_gen_step)
            if self.spec_tree_manager is None:
                accepted_tokens[num_contexts:, 0] = target_predict[:, 0]
                return accepted_tokens, num_accepted_tokens
            _, index, count, self._accept_token = self.tree_ops_converter.verify_dynamic_tree_greedy_out(
                *self.tree_inputs(target_predict, spec_metadata.draft_tokens, attn_metadata), tree_valid=None
            )
            self.keep_path(index, count, self._accept_token, num_contexts)
        num_accepted_tokens = self._apply_force_accepted_tokens(num_accepted_tokens, num_contexts, self.max_draft_len)
        return accepted_tokens, num_accepted_tokens
