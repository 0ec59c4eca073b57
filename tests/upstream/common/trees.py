"""One tree shape for all requests, and the buffers and ops of tree workers.

Facts: W §8 (persistent buffers, index tensor is node − 1 with −1 as padding, relocation reads the buffers, results are
index, count, token), W §6 (N logits rows in tree order, N − 1 drafts), X §1.5 (paths of a static tree).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from .ops import compute_probs_from_logits, draw, verify_tree

PARENTS = (-1, 0, 0, 1, 1, 2)  # node 0 is the root; two levels below it
DEPTH = 2
NUM_DRAFTS = len(PARENTS) - 1


def paths() -> Tensor:
    """[leaves, DEPTH + 1] int64: the nodes from the root to each leaf, −1 behind the end."""
    leaves = [i for i in range(1, len(PARENTS)) if i not in PARENTS]
    found = torch.full((len(leaves), DEPTH + 1), -1)
    for row, node in enumerate(leaves):
        path = []
        while node >= 0:
            path.append(node)
            node = PARENTS[node]
        found[row, : len(path)] = torch.tensor(path[::-1])
    return found


class SpecTreeManager:
    """The shape by slot; here every slot has the same one."""

    def __init__(self, num_slots: int) -> None:
        everyone = torch.arange(num_slots + 1)
        self.slot_storage = SimpleNamespace(
            all_ids_buf=everyone,
            has_tree=torch.ones(num_slots + 1, dtype=torch.bool),
            pack_retrieve_from_slots=lambda slots, num_gens: torch.tensor(PARENTS).expand(num_gens, -1),
        )
        self.retrieve_index = torch.tensor(PARENTS).expand(num_slots + 1, -1)
        self.retrieve_next_token = self.retrieve_next_sibling = self.retrieve_index

    def get_eagle_paths(self, slot: int) -> Tensor:
        return paths()


class TreeOpsConverter:
    """Verification ops. Candidates hold the root in column 0 and the drafts behind it."""

    def verify_dynamic_tree_greedy_out(self, candidates, retrieve_index, target_predict, num_gens, width, tree_valid):
        return (None, *verify_tree(target_predict, candidates[:, 1:], PARENTS, width))

    def verify_dynamic_tree_greedy_out_packed(
        self, candidates, retrieve, target_predict, num_gens, width, *, tree_valid
    ):
        return verify_tree(target_predict, candidates[:, 1:], PARENTS, width)

    def verify_dynamic_tree_rejection_out(
        self,
        drafts,
        logits,
        next_token,
        next_sibling,
        tree_valid,
        temps,
        top_ks,
        top_ps,
        num_gens,
        width,
        *,
        seed,
        offset,
    ):
        nodes = len(PARENTS)
        each = (limit.repeat_interleave(nodes) for limit in (temps, top_ks, top_ps))
        choice = draw(compute_probs_from_logits(logits, *each), seed, offset).long()
        return verify_tree(choice.reshape(num_gens, nodes), drafts, PARENTS, width)


class TreeBuffers:
    """Mixed into tree workers: their buffers, KV relocation and drafting."""

    def init_tree(self, max_batch_size: int, num_slots: int) -> None:
        nodes, self._max_path_len, self._max_batch_size = len(PARENTS), DEPTH + 1, max_batch_size
        self.tokens_per_gen_step = nodes
        self._accepted_tokens_buf = torch.zeros(max_batch_size, self._max_path_len, dtype=torch.int32)
        self._num_accepted_tokens_buf = torch.ones(max_batch_size, dtype=torch.int32)
        self._accepted_draft_indices_tensor = torch.full((max_batch_size, DEPTH), -1, dtype=torch.int32)
        self._target_tokens_buf = torch.zeros(max_batch_size * nodes, dtype=torch.int64)
        self._target_predict_buf = torch.zeros(max_batch_size, nodes, dtype=torch.int64)
        self._candidates_buf = torch.zeros(max_batch_size, nodes, dtype=torch.int64)
        self.spec_tree_manager: SpecTreeManager | None = SpecTreeManager(num_slots)
        self.tree_ops_converter = TreeOpsConverter()

    def tree_inputs(self, target_predict: Tensor, drafts: Tensor, attn_metadata) -> tuple:
        """The verify ops' positional arguments."""
        num_gens = len(target_predict)
        nodes = self._candidates_buf[:num_gens]
        nodes[:, 0], nodes[:, 1:] = target_predict[:, 0], drafts.reshape(num_gens, -1)
        slots = torch.tensor(attn_metadata.lines[attn_metadata.num_contexts :])
        retrieve = self.spec_tree_manager.slot_storage.pack_retrieve_from_slots(slots, num_gens)
        return nodes, retrieve, target_predict, num_gens, self._max_path_len

    def keep_path(self, index: Tensor, count: Tensor, token: Tensor, num_contexts: int) -> None:
        """Write what a verify op found into the buffers, for the rows behind the contexts."""
        rows = slice(num_contexts, num_contexts + len(count))
        self._accepted_tokens_buf[rows] = token.int()
        self._num_accepted_tokens_buf[rows] = count.int() + 1
        self._accepted_draft_indices_tensor[rows] = index[:, 1:].int() - 1

    def output(self, logits, accepted_tokens, num_accepted_tokens, next_draft_tokens) -> dict:
        found = super().output(logits, accepted_tokens, num_accepted_tokens, next_draft_tokens)
        indices = self._accepted_draft_indices_tensor[: len(accepted_tokens)]
        return {**found, "accepted_draft_tokens_indices": indices}

    def _relocate_kv_eagerly(self, attn_metadata, batch_size: int) -> None:
        """Move the accepted nodes' cache entries behind the root. Reads the buffers, not what acceptance returned."""
        starts = (attn_metadata.kv_lens_cuda - attn_metadata.seq_lens_cuda).tolist()
        for row in range(attn_metadata.num_contexts, batch_size):
            line = attn_metadata.kv_cache[attn_metadata.lines[row]]
            count = int(self._num_accepted_tokens_buf[row])
            nodes = self._accepted_draft_indices_tensor[row, : count - 1].long() + 1
            line[starts[row] + 1 : starts[row] + count] = line[starts[row] + nodes].clone()

    def accepted_leaves(self, attn_metadata) -> Tensor:
        """[G] int64: the node of each generation row's last accepted token, the root if it is the only one."""
        rows = slice(attn_metadata.num_contexts, attn_metadata.num_seqs)
        counts, indices = self._num_accepted_tokens_buf[rows].long(), self._accepted_draft_indices_tensor[rows].long()
        last = indices.gather(1, (counts - 2).clamp(min=0)[:, None])[:, 0] + 1
        return torch.where(counts > 1, last, 0)

    def draft_tree(
        self, input_ids, accepted_tokens, num_accepted_tokens, attn_metadata, spec_metadata, draft_model
    ) -> Tensor:
        """Grow each tree from the draft model, which reads `path_for_drafter`. Returns [R, N−1] int32."""
        path_tokens, num_contexts = self.path_for_drafter(accepted_tokens), attn_metadata.num_contexts
        self.memory = "tree"
        self.note_consumed(path_tokens, num_accepted_tokens)
        ends = attn_metadata.seq_lens_cuda.cumsum(0) - 1
        shifted = self._prepare_context_input_ids(
            input_ids, attn_metadata.num_ctx_tokens, ends, path_tokens, num_contexts
        )
        drafts, at = [], 0
        for row, (line, kv_len) in enumerate(
            zip(attn_metadata.lines, attn_metadata.kv_lens_cuda.tolist(), strict=True)
        ):
            start = kv_len - int(attn_metadata.seq_lens[row])
            if row < num_contexts:
                new, at = shifted[at : at + kv_len - start], at + kv_len - start
            else:
                new = path_tokens[row, : int(num_accepted_tokens[row])]
            draft_model.cache[line, start : start + len(new)] = new.long()
            drafts.append(grow(draft_model, line, start + len(new)))
        return torch.tensor(drafts, dtype=torch.int32)

    def path_for_drafter(self, accepted_tokens: Tensor) -> Tensor:
        """What the drafter conditions on: for Eagle3 the converter's own output (behind the contexts)."""
        accept_token = getattr(self, "_accept_token", None)
        if accept_token is None:
            return accepted_tokens.clone()
        contexts = len(accepted_tokens) - len(accept_token)
        return torch.cat([accepted_tokens[:contexts], accept_token.int()])


def grow(draft_model, line: int, length: int) -> list[int]:
    """The best tokens below each node, for nodes 1 … N−1, after the first `length` tokens of a cache line."""
    tokens: dict[int, int] = {}
    for node in range(len(PARENTS)):
        children = [i for i in range(1, len(PARENTS)) if PARENTS[i] == node]
        if children:
            path, at = [], node
            while at > 0:
                path.append(tokens[at])
                at = PARENTS[at]
            best = draft_model.next_logits(line, length, path[::-1]).topk(len(children)).indices.tolist()
            tokens.update(zip(children, best, strict=True))
    return [tokens[i] for i in range(1, len(PARENTS))]
