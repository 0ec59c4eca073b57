"""The stage in fused kernels: one launch to commit, and for a repairing policy a second one whose programs leave at
once where nothing is to be redrawn.

The host side: which tensors go in, how they are strided, where results go. Launches do not depend on values and
nothing waits, so a CUDA graph can capture them; results and scratch come from torch's allocator, whose addresses a
graph keeps. Importing this module imports Triton.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from .kernel import commit_kernel
from .kernel_repair import repair_kernel
from .packed import pack
from .plain import CommitOutput
from .policy import Policy
from .repair import Distribution

if TYPE_CHECKING:
    from .stage import CommitStage

ROWS = 32  # rows of a program: one warp, one thread a row
SCAN = 512  # marks that a repair program looks at in one go
BLOCK = 4096  # tokens of the vocabulary that it looks at in one go
REPAIR_WARPS = 16
_INT32_MAX = 2**31 - 1


class FusedCommit:
    """`CommitStage.commit` in Triton kernels. Reads the stage's table and settings, writes its state."""

    name = "triton"

    def __init__(self, stage: CommitStage) -> None:
        self.stage, self.config = stage, stage.config
        self.packed = pack(stage.table)
        self._state = (stage.state, stage.steps, stage.repairs, stage.counters)
        self._block = min(BLOCK, triton.next_power_of_2(stage.table.vocab_size))
        self._blocks = triton.next_power_of_2(triton.cdiv(stage.table.vocab_size, self._block))
        if stage.device.type == "cuda":
            self._warm_up()

    def commit(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> CommitOutput:
        """As `CommitStage.commit`, its arguments checked; `given` is None where nothing can be redrawn."""
        if self.config.policy is Policy.OBSERVE:
            return CommitOutput(tokens, lengths, self._run(tokens, lengths, slots, given, tokens, lengths))
        new_tokens = torch.empty(tokens.shape, dtype=torch.int32, device=tokens.device)
        new_lengths = torch.empty(lengths.shape, dtype=torch.int32, device=tokens.device)
        events = self._run(tokens, lengths, slots, given, new_tokens, new_lengths)
        return CommitOutput(new_tokens, new_lengths, events)

    def commit_(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution | None) -> Tensor:
        """`commit`, written straight into `tokens` and `lengths`. Returns the events."""
        return self._run(tokens, lengths, slots, given, tokens, lengths)

    def _run(
        self,
        tokens: Tensor,
        lengths: Tensor,
        slots: Tensor,
        given: Distribution | None,
        new_tokens: Tensor,
        new_lengths: Tensor,
    ) -> Tensor:
        batch, width = tokens.shape
        redraws = given is not None and self.config.policy.repairs
        # Four rows of B: events, urgency, the illegal column, the state before it.
        results = torch.empty(4 if self.config.policy.repairs else 1, batch, dtype=torch.int32, device=tokens.device)
        events, marks = results[0], (results if len(results) > 1 else results.expand(4, -1))[1:]
        with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
            self._launch_commit(tokens, lengths, slots, new_tokens, new_lengths, events, marks, redraws)
            if redraws:
                self._launch_repair(slots, given, new_tokens, new_lengths, events, marks, width)
        return events

    def _launch_commit(
        self,
        tokens: Tensor,
        lengths: Tensor,
        slots: Tensor,
        new_tokens: Tensor,
        new_lengths: Tensor,
        events: Tensor,
        marks: Tensor,
        redraws: bool,
    ) -> None:
        packed, table, (batch, width) = self.packed, self.stage.table, tokens.shape
        commit_kernel[(triton.cdiv(batch, ROWS),)](
            tokens,
            lengths,
            slots,
            new_tokens,
            new_lengths,
            events,
            *marks,
            *self._state,
            packed.token_class,
            packed.transitions,
            packed.escape_token,
            packed.flags,
            batch,
            width,
            table.vocab_size,
            self.stage.num_slots,
            table.num_classes,
            table.ended,
            packed.illegal,
            min(self.config.max_repairs, _INT32_MAX),
            *tokens.stride(),
            *lengths.stride(),
            *slots.stride(),
            *new_tokens.stride(),
            *new_lengths.stride(),
            POLICY=self.config.rule,
            REDRAWS=redraws,
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _launch_repair(
        self,
        slots: Tensor,
        given: Distribution,
        new_tokens: Tensor,
        new_lengths: Tensor,
        events: Tensor,
        marks: Tensor,
        width: int,
    ) -> None:
        packed, table, batch = self.packed, self.stage.table, len(slots)
        programs = min(self.config.repair_rows, batch)
        source = given.probs if given.probs is not None else given.logits
        kind = "probs" if given.probs is not None else "greedy" if given.temperature is None else "sampled"
        filters = (given.temperature, given.top_k, given.top_p)
        rows_given, words = given.source_rows, given.words
        repair_kernel[(programs,)](
            source,
            *(slots if f is None else f for f in filters),
            slots if rows_given is None else rows_given,
            slots if words is None else words,
            slots,
            new_tokens,
            new_lengths,
            events,
            *marks,
            *self._state,
            packed.token_class,
            packed.transitions,
            packed.escape_token,
            batch,
            width,
            table.vocab_size,
            self.stage.num_slots,
            table.num_classes,
            table.ended,
            packed.illegal,
            self.config.seed & 0xFFFFFFFF,
            self.config.seed >> 32,
            *(source.stride() if rows_given is None else (source.stride(0), 0, source.stride(1))),
            *(0 if f is None else f.stride(0) for f in filters),
            *((0, 0) if rows_given is None else rows_given.stride()),
            *((0, 0) if words is None else words.stride()),
            *slots.stride(),
            *new_tokens.stride(),
            *new_lengths.stride(),
            source.shape[0],
            KIND=kind,
            HAS_TOP_K=given.top_k is not None,
            HAS_TOP_P=given.top_p is not None,
            HAS_SOURCE_ROWS=rows_given is not None,
            HAS_WORDS=words is not None,
            SCAN=SCAN,
            BLOCK=self._block,
            BLOCKS=self._blocks,
            num_warps=REPAIR_WARPS,
            enable_fp_fusion=False,
        )

    def _warm_up(self) -> None:
        """Compile what a server is likely to launch now, on a row without a slot, not inside its first request."""
        if self.config.policy is Policy.OFF:
            return
        stage, device = self.stage, self.stage.device
        tokens = torch.zeros(1, 1, dtype=torch.int32, device=device)
        row = tokens[0], torch.full((1,), stage.num_slots, dtype=torch.int64, device=device)
        scores = torch.zeros(1, 1, stage.table.vocab_size, device=device)
        one = torch.ones(1, device=device)
        limits = one.int(), one
        sampled = Distribution(None, scores, one), Distribution(None, scores, one, *limits)
        for given in (None, Distribution(probs=scores), Distribution(logits=scores), *sampled):
            self.commit(tokens, *row, given)
        stage.steps[stage.num_slots].zero_()
