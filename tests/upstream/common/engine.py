"""The driver: one loaded tree, one configuration, requests decoded to the end.

`Engine` goes the way a server goes: arguments, `create_py_executor`, executor loop. Everything runs while its tree is
the active `tensorrt_llm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .configs import llm_args
from .executor import Run
from .loading import Tree
from .model_engine import Weights
from .requests import LlmRequest, SamplingConfig
from .tables import Context, Table, reader


class Engine:
    """An executor of `tree` over two tables.

    Args:
        speculative: the section a user writes, such as {"decoding_type": "Eagle3", "max_draft_len": 3}.
        weights: the tables and what else comes with the checkpoint.
        checkpoint: folder of the checkpoint, for the stage.
        settings: of `TorchLlmArgs`.
    """

    def __init__(
        self,
        tree: Tree,
        speculative: dict[str, Any],
        weights: Weights,
        *,
        checkpoint: str | None = None,
        **settings: Any,
    ) -> None:
        self.tree = tree
        with tree.active():
            self.llm_args = llm_args(tree.load("llmapi.llm_args"), speculative, **settings)
            self.llm_args._double = weights
            creator = tree.load("_torch.pyexecutor.py_executor_creator")
            self.executor = creator.create_py_executor(self.llm_args, checkpoint, None)

    @property
    def worker(self) -> Any:
        return self.executor.model_engine.worker

    def run(self, requests: Iterable[LlmRequest], pause_at: dict[int, int] | None = None) -> Run:
        with self.tree.active():
            return self.executor.run(requests, pause_at)


def requests_for(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 12,
    end_id: int = -1,
    temperature: float | None = None,
    top_k: int | None = None,
    first_id: int = 100,
) -> list[LlmRequest]:
    """A request for each prompt, with lengths that differ so that they end at different steps."""
    return [
        LlmRequest(
            first_id + i,
            prompt,
            py_max_new_tokens=max_new_tokens + i,
            py_end_id=end_id,
            sampling_config=SamplingConfig([temperature] if temperature else None, [top_k] if top_k else None),
        )
        for i, prompt in enumerate(prompts)
    ]


def plain_greedy(table: Table, request: LlmRequest) -> list[int]:
    """What the target says without speculation."""
    logits, tokens = reader(table), list(request.prompt)
    while len(tokens) - len(request.prompt) < request.py_max_new_tokens:
        context: Context = tuple(tokens)
        tokens.append(int(logits(context).argmax()))
        if tokens[-1] == request.py_end_id:
            break
    return tokens[len(request.prompt) :]
