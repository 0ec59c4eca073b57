"""The stage twice, in torch and in kernels, and rows to give to both. Needs Triton, or its interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.fuzz.case import Case
from structured_commit import CommitConfig, CommitOutput, CommitStage, StructureTable
from tests.support.calls import VOCAB

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Pair:
    """Two stages in the same state, one in torch, one in kernels."""

    def __init__(self, table: StructureTable, num_slots: int, max_window: int, **config) -> None:
        self.torch, self.triton = (
            CommitStage(
                table.to(DEVICE),
                CommitConfig(backend=backend, **config),
                num_slots=num_slots,
                max_window=max_window,
                device=DEVICE,
            )
            for backend in ("torch", "triton")
        )
        assert (self.torch.backend, self.triton.backend) == ("torch", "triton")

    def set(self, name: str, values) -> None:
        for stage in (self.torch, self.triton):
            tensor = getattr(stage, name)
            tensor[: len(values)] = torch.as_tensor(values).to(tensor)

    def commit(self, tokens, lengths, slots, **given) -> CommitOutput:
        """Commit with both; whatever differs fails."""
        moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        rows = tokens.to(DEVICE), lengths.to(DEVICE), slots.to(DEVICE)
        expected = self.torch.commit(*rows, **moved)
        out = self.triton.commit(*rows, **moved)
        for name, got, wanted in zip(out._fields, out, expected, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            assert torch.equal(got, wanted), name
        self.compare()
        return out

    def compare(self) -> None:
        for name in ("state", "steps", "repairs", "counters"):
            assert torch.equal(getattr(self.triton, name), getattr(self.torch, name)), name


def distribution(kind: str, rows: int, width: int, vocab: int, generator: torch.Generator) -> dict:
    """Coarse scores, so that there are zeros and ties."""
    if kind == "none":
        return {"redraw": False}
    scores = torch.randint(0, 4, (rows, width, vocab), generator=generator).float()
    if kind == "probs":
        return {"probs": torch.nan_to_num(scores / scores.sum(dim=2, keepdim=True))}
    if kind == "greedy":
        return {"logits": scores}
    return {
        "logits": scores,
        "temperature": torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, (rows,), generator=generator)],
        "top_k": torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=generator),
    }


def windows(rows: int, width: int, generator: torch.Generator, low: int = 0, high: int = VOCAB):
    tokens = torch.randint(low, high, (rows, width), generator=generator, dtype=torch.int32)
    return tokens, torch.randint(1, width + 1, (rows,), generator=generator, dtype=torch.int32)


class OnDevice(CommitStage):
    """A stage on the device at hand, for callers that know the CPU only."""

    def __init__(self, table: StructureTable, config: CommitConfig, **sizes: int) -> None:
        super().__init__(table, config, device=DEVICE, **sizes)

    def commit(self, *rows: torch.Tensor, **given) -> CommitOutput:
        moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        return super().commit(*(t.to(DEVICE) for t in rows), **moved)

    def untrack_(self, slots: torch.Tensor) -> None:
        super().untrack_(slots.to(DEVICE))


def small_cases(rule: str, count: int) -> Iterator[int]:
    """Numbers of fuzzer cases that are quick to interpret."""
    number = 0
    while count:
        case = Case(number)
        if case.config.rule == rule and case.num_slots <= 8 and case.width <= 5 and case.config.repair_rows <= 8:
            count -= 1
            yield number
        number += 1
