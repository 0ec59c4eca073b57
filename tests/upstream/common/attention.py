"""Attention metadata as the workers read and edit it. Facts: W §5 (what draft loops save and change), A §5 item 6."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AttentionMetadata:
    """One step's rows. `kv_lens_cuda` counts the step's own tokens too; draft loops edit it and do not restore it."""

    def __init__(
        self,
        kv_lens: Tensor,
        seq_lens: Sequence[int],
        num_contexts: int,
        lines: Sequence[int],
        request_ids: Sequence[int],
        tree_parents: Sequence[int] | None = None,
    ) -> None:
        self.kv_lens_cuda = kv_lens.to(torch.int32)
        self._seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self._seq_lens_cuda = self._seq_lens.clone()
        self.num_contexts = num_contexts
        self.lines = list(lines)
        self.request_ids = list(request_ids)
        self.tree_parents = tree_parents
        self._saved: tuple | None = None
        self._context_lines = set(lines[:num_contexts])

    @property
    def num_seqs(self) -> int:
        return len(self.lines)

    @property
    def num_ctx_tokens(self) -> int:
        return int(self._seq_lens[: self.num_contexts].sum())

    @property
    def seq_lens(self) -> Tensor:
        return self._seq_lens

    @property
    def seq_lens_cuda(self) -> Tensor:
        return self._seq_lens_cuda

    def is_context_line(self, line: int) -> bool:
        return line in self._context_lines

    def on_update(self) -> None:
        if len(self._seq_lens) != self.num_seqs:
            raise AssertionError("sequence lengths do not fit the rows")

    def prepare_for_spec_dec(self) -> None:
        self._saved = (self._seq_lens.clone(), self._seq_lens_cuda.clone(), self.num_contexts, self.tree_parents)

    def restore_from_spec_dec(self) -> None:
        if self._saved is not None:
            self._seq_lens, self._seq_lens_cuda, self.num_contexts, self.tree_parents = self._saved
            self._saved = None

    def one_token_each(self) -> None:
        """From draft step 1 on: every row feeds one token and none is a context row any more."""
        self._seq_lens, self._seq_lens_cuda = torch.ones_like(self._seq_lens), torch.ones_like(self._seq_lens_cuda)
        self.num_contexts, self.tree_parents = 0, None
        self.on_update()
