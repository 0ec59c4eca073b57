"""What one-model workers share after acceptance: the draft loops and the assembly of the next step's tokens.

Facts: W §5 (consumers in order; step 0 feeds all K+1 columns, row n−1 is read; `kv_lens_cuda` of generation rows falls
by K − n, of context rows grows by 1), W §6 (contexts are shifted left by one, column 0 stands last), A §5 items 5–9,
W §5 `MTPWorker` (pools of the last K tokens, read up to n).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import AttentionMetadata
from .tables import TableModel


def worker_forward(accept: Callable, draft: str) -> Callable:
    """A worker's forward: guided decoder, acceptance, drafting, output.

    `accept(worker, input_ids, logits, attn_metadata, spec_metadata)` calls the worker's own method, whose argument
    order differs from class to class; `draft` names the worker's drafting method.
    """

    def forward(
        self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model, **unused
    ):
        if spec_metadata.runtime_draft_len == 0:
            return self.skip_drafting(
                input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model
            )
        self._execute_guided_decoder_if_present(logits)
        tokens, counts = accept(self, input_ids, logits, attn_metadata, spec_metadata)
        drafts = getattr(self, draft)(input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model)
        override = getattr(self.sa_enhancer, "maybe_override_all_draft_tokens", None)
        if override is not None:
            drafts[attn_metadata.num_contexts :] = override(drafts[attn_metadata.num_contexts :])
        if hasattr(self, "_rollback_guided_decoder_after_verify"):
            self._rollback_guided_decoder_after_verify(counts)
        return self.output(logits, tokens, counts, drafts)

    return forward


class WorkerCommons(nn.Module):
    """The parts of `SpecWorkerBase` that no patch touches and no window changed."""

    automaton_in_acceptance = False  # Eagle3 before its forward took over

    def __init__(self, use_separate_draft_kv_cache: bool = False) -> None:
        super().__init__()
        self.guided_decoder = None
        self.sa_enhancer = None
        self._d2t: Tensor | None = None
        self.use_separate_draft_kv_cache = use_separate_draft_kv_cache
        self.force_num_accepted_tokens = float(os.environ.get("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "0"))
        self.seen_by_drafter: tuple[Tensor, Tensor] | None = None

    @property
    def max_draft_len(self) -> int:
        return self.spec_config.max_draft_len

    def set_guided_decoder(self, guided_decoder) -> bool:
        self.guided_decoder = guided_decoder
        return True

    def _execute_guided_decoder_if_present(self, logits: Tensor) -> None:
        if self.guided_decoder is not None:
            self.guided_decoder.execute(logits)

    def _prepare_next_new_tokens(
        self, accepted_tokens, next_draft_tokens, batch_indices_cuda, batch_size, num_accepted_tokens
    ) -> Tensor:
        last = accepted_tokens[batch_indices_cuda[:batch_size], num_accepted_tokens.long() - 1]
        return torch.cat([last[:, None], next_draft_tokens], dim=1)

    def _prepare_context_input_ids(
        self, input_ids, num_ctx_tokens, gather_ids, accepted_tokens, num_contexts
    ) -> Tensor:
        if num_contexts == 0:
            return torch.zeros(0, dtype=torch.int32)
        shifted = torch.cat([input_ids[1:num_ctx_tokens], input_ids.new_zeros(1)]).int()
        shifted[gather_ids[:num_contexts]] = accepted_tokens[:num_contexts, 0].int()
        return shifted

    def to_target_vocabulary(self, draft_ids: Tensor) -> Tensor:
        """Ids of a reduced draft vocabulary, mapped by the offset of each; the same ids where there is no map."""
        return draft_ids if self._d2t is None else draft_ids + self._d2t[draft_ids.long()]

    def full_draft_probs(self, probs: Tensor) -> Tensor:
        """[n, K, V]: what a reduced draft vocabulary wrote in front, at the target's places."""
        if self._d2t is None:
            return probs
        ids = torch.arange(len(self._d2t))
        return torch.zeros_like(probs).index_copy_(2, ids + self._d2t, probs[..., : len(ids)])

    def output(self, logits, accepted_tokens, num_accepted_tokens, next_draft_tokens) -> dict:
        """The dictionary of every worker; trees add the accepted nodes."""
        rows = torch.arange(len(accepted_tokens))
        new = self._prepare_next_new_tokens(accepted_tokens, next_draft_tokens, rows, len(rows), num_accepted_tokens)
        return {
            "logits": logits,
            "new_tokens": accepted_tokens,
            "new_tokens_lens": num_accepted_tokens,
            "next_draft_tokens": next_draft_tokens,
            "next_new_tokens": new,
        }

    def note_consumed(self, accepted_tokens: Tensor, num_accepted_tokens: Tensor) -> None:
        """What the first reader saw, kept for the engine to compare with what the worker returns."""
        self.seen_by_drafter = (accepted_tokens.clone(), num_accepted_tokens.clone())

    def extend_automaton(self, accepted_tokens: Tensor, num_accepted_tokens: Tensor, attn_metadata) -> None:
        if self.sa_enhancer is not None:
            self.sa_enhancer.extend_and_prepare(
                accepted_tokens=accepted_tokens,
                num_accepted_tokens=num_accepted_tokens,
                num_contexts=attn_metadata.num_contexts,
            )

    def update_recurrent(self, attn_metadata, num_accepted_tokens: Tensor, leaves: Tensor | None = None) -> None:
        """A hybrid target's states take the tokens of the generation rows that were committed."""
        manager = getattr(attn_metadata, "kv_cache_manager", None)
        if manager is not None and attn_metadata.num_seqs > attn_metadata.num_contexts:
            manager.update_mamba_states(
                attn_metadata=attn_metadata, num_accepted_tokens=num_accepted_tokens, accepted_leaf_positions=leaves
            )

    def draft_chain(
        self,
        input_ids: Tensor,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata,
        draft_model: TableModel,
    ) -> Tensor:
        """Draft K tokens one after another from the draft model's own cache. Returns [R, K] int32."""
        self.memory = "chain"
        if not self.automaton_in_acceptance:
            self.extend_automaton(accepted_tokens, num_accepted_tokens, attn_metadata)
        self.update_recurrent(attn_metadata, num_accepted_tokens)
        self.note_consumed(accepted_tokens, num_accepted_tokens)
        num_contexts, batch_size = attn_metadata.num_contexts, attn_metadata.num_seqs
        draft_len = spec_metadata.runtime_draft_len
        attn_metadata.prepare_for_spec_dec()
        starts = attn_metadata.seq_lens_cuda.cumsum(0) - attn_metadata.seq_lens_cuda
        gather_ids = starts + num_accepted_tokens - 1
        gather_ids[:num_contexts] = (starts + attn_metadata.seq_lens_cuda - 1)[:num_contexts]
        contexts = self._prepare_context_input_ids(
            input_ids, attn_metadata.num_ctx_tokens, gather_ids, accepted_tokens, num_contexts
        )
        step_ids = torch.cat([contexts, accepted_tokens[num_contexts:].flatten()])
        drafts = []
        for step in range(draft_len):
            logits = draft_model.forward(step_ids, attn_metadata, gather_ids)
            step_ids = self.sample_draft_tokens(
                logits, spec_metadata, batch_size, num_contexts=num_contexts, draft_step=step
            )
            drafts.append(step_ids)
            if step == 0:
                attn_metadata.kv_lens_cuda[num_contexts:] -= draft_len - num_accepted_tokens[num_contexts:]
                attn_metadata.kv_lens_cuda[:num_contexts] += 1
                attn_metadata.one_token_each()
                gather_ids = torch.arange(batch_size)
            else:
                attn_metadata.kv_lens_cuda += 1
        attn_metadata.restore_from_spec_dec()
        return torch.stack(drafts, dim=1).int()

    def draft_from_pools(
        self,
        input_ids: Tensor,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata,
        draft_model: TableModel,
    ) -> Tensor:
        """Draft from slot pools that hold the last tokens of each request, as MTP's layers do. Returns [R, K] int32."""
        self.memory = "pools"
        self.note_consumed(accepted_tokens, num_accepted_tokens)
        pool, slots = spec_metadata.mtp_hidden_states_manager.past_tokens, spec_metadata.slot_ids.tolist()
        counts, at, paths = num_accepted_tokens.tolist(), 0, []
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            read = length if row < attn_metadata.num_contexts else counts[row]
            past = torch.cat([pool[slots[row]], input_ids[at : at + read].long()])
            pool[slots[row]] = past[-pool.shape[1] :]
            paths.append([*pool[slots[row]].tolist(), int(accepted_tokens[row, counts[row] - 1])])
            at += length
        attn_metadata.kv_lens_cuda[attn_metadata.num_contexts :] -= (
            spec_metadata.runtime_draft_len + 1 - num_accepted_tokens[attn_metadata.num_contexts :]
        )
        drafts = []
        for step in range(spec_metadata.runtime_draft_len):
            logits = torch.stack([draft_model.logits_of(tuple(path)) for path in paths])
            tokens = self.sample_draft_tokens(logits, spec_metadata, len(paths), draft_step=step)
            paths = [[*path, token] for path, token in zip(paths, tokens.tolist(), strict=True)]
            drafts.append(tokens)
        return torch.stack(drafts, dim=1).int()


class MtpHiddenStatesManager:
    """Slot pools of MTP and of relaxed acceptance; the last row is for rows without a slot. Facts: W §4, §5."""

    def __init__(self, num_slots: int, draft_len: int) -> None:
        self.past_tokens = torch.zeros(num_slots + 1, max(draft_len, 1), dtype=torch.int64)
        self.mtp_relaxed_delta_pool = torch.zeros(num_slots + 1)
        self.sa_manager = None

    @property
    def relaxed_delta_pool(self) -> Tensor:
        return self.mtp_relaxed_delta_pool


class SaRecorder:
    """Stands for the suffix automaton: keeps what its generation rows were extended by, and when. Facts: W §3."""

    def __init__(self) -> None:
        self.extended: list[list[list[int]]] = []

    def extend_and_prepare(self, *, accepted_tokens, num_accepted_tokens, num_contexts, **unused) -> None:
        counts = num_accepted_tokens.tolist()
        rows = range(num_contexts, len(counts))
        self.extended.append([accepted_tokens[row, : counts[row]].tolist() for row in rows])

    def stream(self) -> list[int]:
        """Everything that a lone request was extended by."""
        return [token for rows in self.extended for token in (rows[0] if rows else [])]
