"""Workers that draft a whole block at once: PARD, DFlash, DSpark; and the manager of the lone suffix automaton.

Facts: W §5 (what each keeps of the request, how it moves KV lengths, what a step reads), W §6 (2K rows and 2K − 1
drafts of PARD, placeholder drafts of zeros in context rows), A §2.3 (one-hot rows), W §2 (`SAWorker`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tables import Context, Table, reader

MASK = (1 << 20) + 1  # the drafter's mask token
WINDOW = 4  # frames that DSpark keeps


def reads_masks(table: Table) -> Table:
    """A drafter that sees masks behind a context: each stands for what it would say there itself."""
    read = reader(table)

    def logits(context: Context) -> Tensor:
        end = len(context)
        while end and context[end - 1] == MASK:
            end -= 1
        seen = context[:end]
        for _ in range(len(context) - end):
            seen = (*seen, int(read(seen).argmax()))
        return read(seen)

    return logits


class BlockDrafting:
    """What the three have in common. Until mid July 2026 they draft by argmax and know nothing of rejection."""

    drafts_blocks = True

    def starts_of(self, attn_metadata) -> list[int]:
        """How many tokens each row's cache held before this step."""
        return (attn_metadata.kv_lens_cuda - attn_metadata.seq_lens_cuda).tolist()

    def block_logits(self, contexts: Sequence[Context], draft_len: int, draft_model) -> Tensor:
        """[G, K, V]: draft i from the context, its last committed token included, and i masks."""
        rows = [
            draft_model.logits_of((*context, *[MASK] * i)).float() for context in contexts for i in range(draft_len)
        ]
        vocab = draft_model.vocab_size
        return torch.stack(rows).view(-1, draft_len, vocab) if rows else torch.zeros(0, draft_len, vocab)

    def drafts_behind_contexts(self, gen_logits: Tensor, spec_metadata, num_contexts: int) -> Tensor:
        """[R, K] int32: zeros for context rows, then the block of each generation row."""
        batch_size, draft_len = num_contexts + len(gen_logits), gen_logits.shape[1]
        if hasattr(self, "write_context_onehot_draft_probs"):
            drafts = self.sample_draft_tokens(gen_logits, spec_metadata, batch_size, num_contexts=num_contexts)
            self.write_context_onehot_draft_probs(
                spec_metadata, num_contexts, len(gen_logits), draft_len, gen_logits.shape[-1]
            )
        else:
            drafts = gen_logits.argmax(dim=-1)
        return torch.cat([torch.zeros(num_contexts, draft_len, dtype=torch.int32), drafts.int()])

    def rewind_later(self, counts: Tensor, attn_metadata) -> None:
        """Generation rows move on by one for the drafter's positions; what they rewind by is kept for later."""
        contexts = attn_metadata.num_contexts
        self._kv_rewind_amount, self._kv_rewind_nc = 1 - counts[contexts:], contexts
        attn_metadata.kv_lens_cuda[contexts:] += 1

    def rewind_now(self, attn_metadata) -> None:
        attn_metadata.kv_lens_cuda[self._kv_rewind_nc :] -= self._kv_rewind_amount


class PardDrafting(BlockDrafting):
    """Rows of 2K tokens: the committed ones at their places in the drafter's cache, masks behind them."""

    memory = "parallel"

    @staticmethod
    def drafts_per_gen_step(draft_len: int) -> int:
        return 2 * draft_len - 1

    def real_drafts(self, spec_metadata, num_gens: int) -> Tensor:
        draft_len = self.max_draft_len
        return spec_metadata.draft_tokens.reshape(num_gens, 2 * draft_len - 1)[:, :draft_len]

    def rows_to_accept(self, logits: Tensor, num_contexts: int, num_gens: int) -> Tensor:
        """The K + 1 rows that acceptance reads of each generation row's 2K, behind the context rows."""
        draft_len, vocab = self.max_draft_len, logits.shape[-1]
        rows = logits[num_contexts:].reshape(num_gens, 2 * draft_len, vocab)[:, : draft_len + 1]
        return torch.cat([logits[:num_contexts], rows.reshape(-1, vocab)])

    def padded(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens in a new tensor of width 2K: what is written to the old one from here on reaches nobody."""
        width = 2 * self.max_draft_len - tokens.shape[1]
        return torch.cat([tokens, tokens.new_zeros(len(tokens), width)], dim=1) if width else tokens, counts

    def draft_parallel(self, input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model) -> Tensor:
        """[R, 2K − 1] int32, zeros behind the K drafts."""
        self.extend_automaton(tokens, counts, attn_metadata)
        self.note_consumed(tokens, counts)
        contexts, draft_len, width = attn_metadata.num_contexts, self.max_draft_len, 2 * self.max_draft_len
        attn_metadata.prepare_for_spec_dec()
        self.rewind_later(counts, attn_metadata)
        place = torch.arange(width)
        rows = torch.where(place < counts[contexts:, None], tokens[contexts:].long(), MASK)
        step_ids = torch.cat([input_ids[: attn_metadata.num_ctx_tokens].long(), rows.flatten()])
        first = attn_metadata.num_ctx_tokens + torch.arange(len(rows)) * width + counts[contexts:] - 1
        gather_ids = (first[:, None] + torch.arange(draft_len)).flatten()
        logits = draft_model.forward(step_ids, attn_metadata, gather_ids)
        gen_logits = logits.reshape(len(rows), draft_len, draft_model.vocab_size)
        drafts = self.drafts_behind_contexts(gen_logits, spec_metadata, contexts)
        attn_metadata.restore_from_spec_dec()
        self.rewind_now(attn_metadata)
        return torch.cat([drafts, drafts.new_zeros(len(drafts), draft_len - 1)], dim=1)


class DFlashDrafting(BlockDrafting):
    """Keeps the target's input tokens up to the committed length of each slot, as its context."""

    memory = "context"

    def init_context(self, num_slots: int, max_len: int) -> None:
        self._ctx_len = torch.zeros(num_slots + 1, dtype=torch.int64)
        self._ctx_tokens = torch.zeros(num_slots + 1, max_len, dtype=torch.int64)

    def held_context(self, slot: int) -> list[int]:
        return self._ctx_tokens[slot, : int(self._ctx_len[slot])].tolist()

    def draft_block(self, input_ids, tokens, counts, attn_metadata, spec_metadata, draft_model) -> Tensor:
        """Every draft from the context and the bonus token, all at once. Returns [R, K] int32."""
        self.update_recurrent(attn_metadata, counts)
        self.note_consumed(tokens, counts)
        attn_metadata.prepare_for_spec_dec()
        starts = self.starts_of(attn_metadata)
        self.rewind_later(counts, attn_metadata)
        at, contexts = 0, []
        for row, (slot, length) in enumerate(zip(attn_metadata.lines, attn_metadata.seq_lens.tolist(), strict=True)):
            in_context = row < attn_metadata.num_contexts
            read = length if in_context else int(counts[row])
            if in_context and starts[row] == 0:
                self._ctx_len[slot] = 0
            start = int(self._ctx_len[slot])
            self.store_context(slot, start, input_ids[at : at + read])
            self._ctx_len[slot] += read
            if not in_context:
                contexts.append((*self.context_for_drafter(slot), int(tokens[row, read - 1])))
            at += length
        gen_logits = self.block_logits(contexts, spec_metadata.runtime_draft_len, draft_model)
        drafts = self.drafts_behind_contexts(gen_logits, spec_metadata, attn_metadata.num_contexts)
        attn_metadata.restore_from_spec_dec()
        self.rewind_now(attn_metadata)
        return drafts

    def store_context(self, slot: int, start: int, new: Tensor) -> None:
        if slot < len(self._ctx_len) - 1:  # a dummy's context grows without end and is read by nobody
            self._ctx_tokens[slot, start : start + len(new)] = new.long()

    def context_for_drafter(self, slot: int) -> list[int]:
        return self.held_context(slot)


class DSparkDrafting(DFlashDrafting):
    """Keeps the last frames of each slot; a prompt token at place p stands in frame p + 1. Leaves metadata alone."""

    memory = "frames"

    def held_context(self, slot: int) -> list[int]:
        """The tokens of the frames that are kept, oldest first."""
        end = int(self._ctx_len[slot])
        return [int(self._ctx_tokens[slot, frame % WINDOW]) for frame in range(max(1, end - WINDOW + 1), end + 1)]

    def store_context(self, slot: int, start: int, new: Tensor) -> None:
        for i, token in enumerate(new.tolist()):
            self._ctx_tokens[slot, (start + 1 + i) % WINDOW] = token

    def rewind_later(self, counts: Tensor, attn_metadata) -> None:
        """Nothing to rewind."""

    def rewind_now(self, attn_metadata) -> None:
        """Nothing to rewind."""


class SaManager:
    """The lone automaton's state by request: all it was extended by since the request's last prefill chunk."""

    def __init__(self) -> None:
        self.histories: dict[int, list[int]] = {}
        self.contexts: set[int] = set()

    def prepare(self, request_ids: Sequence[int], num_contexts: int) -> None:
        self.contexts = set(request_ids[:num_contexts])

    def extend_ngram(self, request_ids, accepted_tokens, num_accepted_tokens, max_draft_len, *, max_ngram_size):
        """(match lengths [R], drafts [R, K] int32): what followed the last token when it was said before."""
        drafts = torch.zeros(len(request_ids), max_draft_len, dtype=torch.int32)
        matched = torch.zeros(len(request_ids), dtype=torch.int32)
        for row, request in enumerate(request_ids):
            said = [] if request in self.contexts else self.histories.get(request, [])
            said = said + accepted_tokens[row, : int(num_accepted_tokens[row])].tolist()
            self.histories[request] = said
            follow = follows(said)[:max_draft_len]
            drafts[row, : len(follow)] = torch.tensor(follow, dtype=torch.int32)
            matched[row] = bool(follow)
        return matched, drafts


def follows(said: list[int]) -> list[int]:
    """What stood behind the last token where it was said before."""
    found = next((i for i in range(len(said) - 2, -1, -1) if said[i] == said[-1]), len(said))
    return said[found + 1 :]
