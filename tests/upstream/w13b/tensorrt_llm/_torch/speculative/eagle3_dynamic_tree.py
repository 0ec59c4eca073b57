"""Facts: workers.md §8; since about #15098 the greedy function samples when the batch is not all greedy, and a second
one serves rejection: target only, probabilities stay inside the op; both set `_accept_token`, both have two returns."""

from __future__ import annotations

import torch
from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker

from tests.upstream.common.drafting import worker_forward
from tests.upstream.common.trees import TreeBuffers


class Eagle3OneModelDynamicTreeWorker(TreeBuffers, Eagle3OneModelWorker):
    _forward_impl = worker_forward(
        lambda self, ids, logits, attn, spec: self.sample_and_accept_draft_tokens(ids, logits, attn, spec), "draft_tree"
    )

    def sample_and_accept_draft_tokens(self, input_ids, logits, attn_metadata, spec_metadata):
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens = batch_size - num_contexts
        accept = self._sample_and_accept_dynamic_tree
        if self._can_use_rejection_sampling(spec_metadata):
            accept = self._sample_and_accept_dynamic_tree_rejection
        accepted_tokens, num_accepted_tokens = accept(
            torch.atleast_2d(logits), attn_metadata, spec_metadata, batch_size, num_contexts, num_gens
        )
        if num_gens > 0:
            self._relocate_kv_eagerly(attn_metadata, batch_size)
        return accepted_tokens, num_accepted_tokens

    def _sample_and_accept_dynamic_tree(self, logits, attn_metadata, spec_metadata, batch_size, num_contexts, num_gens):
        accepted_tokens = self._accepted_tokens_buf[:batch_size].zero_()
        num_accepted_tokens = self._num_accepted_tokens_buf[:batch_size].fill_(1)
        self._accepted_draft_indices_tensor[:batch_size] = -1
        sampled = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        target_tokens = self._target_tokens_buf[: len(logits)].copy_(sampled)
        accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
        self._accept_token = None
        if num_gens > 0:
            target_predict = target_tokens[num_contexts:].reshape(num_gens, self.tokens_per_gen_step)
            if self.spec_tree_manager is None:
                accepted_tokens[num_contexts:, 0] = target_predict[:, 0]
                return accepted_tokens, num_accepted_tokens
            verified = self.tree_ops_converter.verify_dynamic_tree_greedy_out_packed(
                *self.tree_inputs(target_predict, spec_metadata.draft_tokens, attn_metadata), tree_valid=None
            )
            self._finalize_dynamic_tree_verify_outputs(*verified, num_contexts)
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, self.max_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _sample_and_accept_dynamic_tree_rejection(
        self, logits, attn_metadata, spec_metadata, batch_size, num_contexts, num_gens
    ):
        accepted_tokens = self._accepted_tokens_buf[:batch_size].zero_()
        num_accepted_tokens = self._num_accepted_tokens_buf[:batch_size].fill_(1)
        self._accepted_draft_indices_tensor[:batch_size] = -1
        if num_contexts > 0:
            contexts = self._sample_tokens_for_batch(logits[:num_contexts], spec_metadata, num_contexts, num_contexts)
            accepted_tokens[:num_contexts, 0] = contexts
        self._accept_token = None
        if num_gens > 0:
            if self.spec_tree_manager is None:
                accepted_tokens[num_contexts:, 0] = logits[num_contexts :: self.tokens_per_gen_step].argmax(dim=-1)
                return accepted_tokens, num_accepted_tokens
            shape = spec_metadata.draft_tokens.reshape(num_gens, -1), logits[num_contexts:]
            first = slice(num_contexts, len(logits), self.tokens_per_gen_step)
            seed, offset = self._rng_state_per_request(spec_metadata, num_contexts, batch_size)
            verified = self.tree_ops_converter.verify_dynamic_tree_rejection_out(
                *shape,
                self.spec_tree_manager.retrieve_next_token,
                self.spec_tree_manager.retrieve_next_sibling,
                None,
                *spec_metadata.sampling_rows(first),
                num_gens,
                self._max_path_len,
                seed=seed,
                offset=offset,
            )
            self._finalize_dynamic_tree_verify_outputs(*verified, num_contexts)
        num_accepted_tokens = self._apply_force_accepted_tokens(
            num_accepted_tokens, num_contexts, self.max_draft_len, spec_metadata=spec_metadata
        )
        return accepted_tokens, num_accepted_tokens

    def _finalize_dynamic_tree_verify_outputs(self, accept_index, accept_token_num, accept_token, num_contexts):
        self._accept_token = accept_token
        self.keep_path(accept_index, accept_token_num, accept_token, num_contexts)
