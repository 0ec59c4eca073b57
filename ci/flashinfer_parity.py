"""The reference rejection rule against flashinfer's kernel on this GPU, bit for bit: python -m ci.flashinfer_parity

Every output of every window is compared: tokens, the accepted count, the emitted count. Exit status: 0 all equal,
1 some differ, 3 no GPU here, 4 no flashinfer.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from structured_commit import rejection_reference
from structured_commit.reference import KERNELS

VOCABULARIES = (7, 1_000, 32_000, 128_256, 151_936, 201_088)
DRAFTS = (1, 3, 7)
ROWS = (1, 4, 33)
KINDS = ("random", "peaked", "sparse", "equal", "disjoint")


def kernel_of(version: str) -> str:
    """The name under which the reference knows the kernel of a flashinfer release.

    Raises:
        ValueError: an older release than any that was read.
    """
    numbers = _numbers(version)
    older = [name for name in KERNELS if _numbers(name) <= numbers]
    if not older:
        raise ValueError(f"flashinfer {version} is older than {min(KERNELS, key=_numbers)}, the first that was read")
    return max(older, key=_numbers)


def windows(kind: str, rows: int, drafts: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draft probabilities [n, K, V], draft tokens [n, K] int32 and target probabilities [n, K+1, V], on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def law(count: int, scale: float) -> Tensor:
        logits = torch.randn(rows, count, vocab, generator=generator) * scale
        if kind == "sparse":  # what top-k leaves
            least = logits.topk(min(5, vocab), dim=-1).values[..., -1:]
            logits = torch.where(logits < least, -torch.inf, logits)
        return logits.softmax(-1)

    target = law(drafts + 1, 6.0 if kind == "peaked" else 1.5)
    draft = target[:, :drafts].clone() if kind == "equal" else law(drafts, 6.0 if kind == "peaked" else 1.5)
    if kind == "disjoint":
        even = torch.arange(vocab) % 2 == 0
        draft = torch.where(even, draft, 0.0)
        target = torch.where(even, 0.0, target)
        draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(rows, drafts).int()
    return draft, tokens, target


def cases() -> Iterator[tuple[str, int, int, int, int]]:
    """Kind, rows, drafts, vocabulary and seed of every comparison."""
    for seed, (vocab, drafts, rows, kind) in enumerate(
        (v, k, n, kind) for v in VOCABULARIES for k in DRAFTS for n in ROWS for kind in KINDS
    ):
        yield kind, rows, drafts, vocab, seed


def kernel_outputs(draft: Tensor, tokens: Tensor, target: Tensor, seed: int, offset: int) -> tuple[Tensor, ...]:
    """Tokens [n, K+1], accepted [n] and emitted [n] of flashinfer's kernel."""
    from flashinfer.sampling import chain_speculative_sampling

    counts = [torch.zeros(len(tokens), dtype=torch.int32, device="cuda") for _ in range(2)]
    given = (draft.cuda(), tokens.cuda(), target.cuda(), *counts)
    out = chain_speculative_sampling(*given, deterministic=True, seed=seed, offset=offset)
    return tuple(t.cpu() for t in out)


def differing_rows(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> list[int]:
    """Rows in which any output differs."""
    differs = torch.zeros(len(ours[0]), dtype=torch.bool)
    for mine, other in zip(ours, theirs, strict=True):
        differs |= (mine != other.to(mine.dtype)).reshape(len(mine), -1).any(1)
    return differs.nonzero().flatten().tolist()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m ci.flashinfer_parity", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: the kernel cannot run. tests/unit/test_reference.py needs none.", file=sys.stderr)
        return 3
    try:
        import flashinfer
    except ImportError as error:
        print(f"flashinfer cannot be imported ({error}); install flashinfer-python", file=sys.stderr)
        return 4
    kernel = kernel_of(flashinfer.__version__)
    compared, different = 0, []
    for kind, rows, drafts, vocab, seed in cases():
        window = windows(kind, rows, drafts, vocab, seed)
        offset = 4 * (seed % 3) + seed % 4
        ours = rejection_reference(*window, seed, offset, flashinfer=kernel)
        for row in differing_rows(tuple(ours), kernel_outputs(*window, seed, offset)):
            different.append({"kind": kind, "rows": rows, "drafts": drafts, "vocab": vocab, "seed": seed, "row": row})
        compared += rows
    figures = {
        "flashinfer": flashinfer.__version__,
        "kernel": kernel,
        "device": torch.cuda.get_device_name(),
        "windows": compared,
        "different": different,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2))
    print(f"flashinfer {flashinfer.__version__} (as {kernel}) on {figures['device']}: {compared} windows, "
          f"{len(different)} differ")  # fmt: skip
    for case in different[:10]:
        print(f"  {case}")
    return 1 if different else 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


if __name__ == "__main__":
    sys.exit(main())
