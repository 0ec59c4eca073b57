"""A checkpoint with gpt-oss's real vocabulary and the built-in Harmony format, and tables over the few tokens of a
conversation; all other 201,000 tokens are as good as impossible, so that no row has to be kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.tables import compiled
from scripts.vocabularies import HARMONY_CONTROLS, HARMONY_SIZE, harmony_vocabulary, o200k_texts

from .common.requests import LlmRequest
from .common.tables import Context, random_table
from .toy import Checkpoint

PROMPT = "<|start|>user<|message|>{}<|end|><|start|>assistant"
SAID = (
    "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>final<|message|>It is blue."
    "<|return|>",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|end|><|start|>assistant"
    "<|channel|>final<|message|>blue<|return|>",
)
_LIKELY, _IMPOSSIBLE = 2.0, -50.0


@dataclass(frozen=True)
class HarmonyCheckpoint(Checkpoint):
    """`ids` names control tokens; `used` are the tokens that the tables speak of."""

    used: tuple[int, ...] = ()
    follows: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def write(cls, folder: Path) -> HarmonyCheckpoint:
        lines = (base64.b64encode(text) + b" %d\n" % rank for rank, text in sorted(o200k_texts().items()))
        (folder / "tiktoken.model").write_bytes(b"".join(lines))
        decoder = {str(token): {"content": control} for control, token in HARMONY_CONTROLS.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "vocab_size": HARMONY_SIZE}))
        said = [harmony_vocabulary().encode(text) for text in SAID]
        used = tuple(sorted({token for ids in said for token in ids}))
        follows = frozenset(pair for ids in said for pair in pairwise(ids))
        return cls(folder, compiled("harmony")[0], dict(HARMONY_CONTROLS), used, follows)

    @property
    def end_id(self) -> int:
        return self.ids["<|return|>"]

    @property
    def thinking_tokens(self) -> tuple[int, int]:
        return self.ids["<|channel|>"], self.ids["<|end|>"]

    def section(self, policy: str = "repair", **more: Any) -> dict[str, Any]:
        return {"policy": policy, "cache_dir": str(self.folder / "tables"), "repair_rows": 16, **more}

    def prompts(self, count: int) -> list[list[int]]:
        return [harmony_vocabulary().encode(PROMPT.format("weather? " * i)) for i in range(1, count + 1)]

    def target(self, seed: int = 4) -> Callable[[Context], Tensor]:
        return self._table(seed, 1.5)

    def drafter(self, target: Callable[[Context], Tensor]) -> Callable[[Context], Tensor]:
        noise = random_table(len(self.used), 1, scale=0.4)
        index = torch.tensor(self.used)
        return lambda context: target(context).index_add(0, index, noise(context))

    def _table(self, seed: int, scale: float) -> Callable[[Context], Tensor]:
        small, index = random_table(len(self.used), seed, order=3, scale=scale), torch.tensor(self.used)

        def logits(context: Context) -> Tensor:
            likely = torch.tensor([_LIKELY * ((context[-1], token) in self.follows) for token in self.used])
            return torch.full((HARMONY_SIZE,), _IMPOSSIBLE).index_copy(0, index, small(context) + likely)

        return logits

    def constrained(self, target: Callable[[Context], Tensor], request: LlmRequest) -> list[int]:
        host, tokens = self.table.host, list(request.prompt)
        state = host.locate(tokens)
        while len(tokens) - len(request.prompt) < request.py_max_new_tokens:
            order = target(tuple(tokens)).topk(len(self.used)).indices.tolist()
            tokens.append(next(t for t in order if host.step(state, t) >= 0))
            state = host.step(state, tokens[-1])
            if tokens[-1] == request.py_end_id:
                break
        return tokens[len(request.prompt) :]
