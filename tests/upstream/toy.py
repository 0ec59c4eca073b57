"""A checkpoint small enough to decode from tables: a byte-level tokenizer with four control tokens, and a chat format
in which words are free, calls stand in braces and one control token may never come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from structured_commit import StructureTable, compile_format, read_format
from structured_commit.checkpoint import read_vocabulary

from .common.requests import LlmRequest
from .common.tables import Context, blurred, random_table

FORMAT = {
    "name": "toy",
    "turn_openers": ["«<|im_start|>»assistant\\n"],
    "turn": "(?:‹text›|‹call›)*",
    "rules": {"text": ".", "call": "(?<header>«<tool_call>»[{])(?<block>[ab]*[}]«</tool_call>»)"},
    "terminals": ["<|im_end|>"],
    "never": ["<|im_start|>"],
}
_CONTROLS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_WEIGHTS = {"a": 1.0, "b": 1.0, "{": 0.5, "}": 0.5, "<|im_end|>": -1.0, "<|im_start|>": -0.5}  # added to the logits
_NEVER = -50.0


@dataclass(frozen=True)
class Checkpoint:
    """What lies in the folder, and tables over its vocabulary that often say what the format forbids."""

    folder: Path
    table: StructureTable
    ids: dict[str, int]

    @classmethod
    def write(cls, folder: Path) -> Checkpoint:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(_CONTROLS))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": "toy", "vocab_size": len(alphabet) + 4}))
        (folder / "toy.json").write_text(json.dumps(FORMAT))
        ids = {text: tokenizer.encode(text).ids[0] for text in (*_CONTROLS, *"ab{}assistant\n")}
        vocabulary = read_vocabulary(folder)
        return cls(folder, compile_format(read_format(folder / "toy.json"), vocabulary), ids)

    @property
    def vocab_size(self) -> int:
        return self.table.vocab_size

    @property
    def end_id(self) -> int:
        return self.ids["<|im_end|>"]

    @property
    def thinking_tokens(self) -> tuple[int, int]:
        """What begins and ends a thinking phase, where relaxed acceptance is on."""
        return self.ids["a"], self.ids["}"]

    def section(self, policy: str = "repair", **more: Any) -> dict[str, Any]:
        """The `structured_commit` section for this checkpoint."""
        settings = {"format": str(self.folder / "toy.json"), "cache_dir": str(self.folder / "tables")}
        return {"policy": policy, "max_repairs": 10_000, "repair_rows": 16, **settings, **more}

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts of different lengths that end behind a turn opener; every third is already inside a call."""
        opener = [self.ids["<|im_start|>"], *(self.ids[c] for c in "assistant\n")]
        call = [self.ids["<tool_call>"], self.ids["{"]]
        return [
            [self.ids["a"]] * (1 + i) + opener + [self.ids["b"]] * i + (call if i % 3 == 2 else [])
            for i in range(count)
        ]

    def target(self, seed: int = 4) -> Callable[[Context], Tensor]:
        """Logits [V] over the few tokens that matter."""
        used = [self.ids[text] for text in (*_CONTROLS, *"ab{}")]
        add = torch.tensor([_WEIGHTS.get(text, 0.0) for text in (*_CONTROLS, *"ab{}")])
        small, rows = random_table(len(used), seed, order=3, scale=1.5), {}

        def logits(context: Context) -> Tensor:
            key = context[-3:]
            if key not in rows:
                row = torch.full((self.vocab_size,), _NEVER)
                rows[key] = row.index_copy(0, torch.tensor(used), small(key) + add)
            return rows[key]

        return logits

    def drafter(self, target: Callable[[Context], Tensor]) -> Callable[[Context], Tensor]:
        """Agrees with the target's favourites most of the time."""
        return blurred(target, self.vocab_size, noise=0.4)

    def first_illegal(self, request: LlmRequest, tokens: list[int]) -> int | None:
        """Index of the first of a request's tokens that its format does not allow."""
        return self.table.host.first_illegal(tokens, self.table.host.locate(list(request.prompt)))

    def constrained(self, target: Callable[[Context], Tensor], request: LlmRequest) -> list[int]:
        """What the target says without speculation when at each place only the legal tokens compete."""
        host, tokens = self.table.host, list(request.prompt)
        state = host.locate(tokens)
        while len(tokens) - len(request.prompt) < request.py_max_new_tokens:
            order = target(tuple(tokens)).argsort(descending=True).tolist()
            token = next(t for t in order if host.step(state, t) >= 0)
            tokens.append(token)
            state = host.step(state, token)
            if token == request.py_end_id:
                break
        return tokens[len(request.prompt) :]
