"""A request's results as post-processors see them, response by response. Facts: serving.md §1.3 to §1.6, §7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

REASONS = ("stop", "length", "timeout", "cancelled")


@dataclass
class Output:
    """One sequence: everything so far, and what the last response added."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    _postprocess_result: Any = None
    _last_token_ids_len: int = 0
    _last_text_len: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass
class Result:
    """`prompt_token_ids` is there in the server's process only."""

    id: int
    outputs: list[Output]
    prompt_token_ids: list[int] | None = None
    _done: bool = False
    cached_tokens: int = 0
    metrics_dict: dict = field(default_factory=dict)
    candidate_metrics: list[dict] = field(default_factory=list)
    error: str | None = None
    aborted: bool = False

    @property
    def request_id(self) -> int:
        return self.id

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self.aborted = True


@dataclass
class PostprocArgs:
    first_iteration: bool = True
    num_prompt_tokens: int | None = None
    tokenizer: Any = None


def responses(
    result: Result,
    steps: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    finish_reason: str,
    stop_ids: frozenset[int] = frozenset(),
    end_id: int | None = None,
) -> Iterator[Result]:
    """The same result, updated by one response after the other.

    Args:
        steps: tokens of each response. The first token of `stop_ids` or the end id ends the request; the former are
            stop words and are removed from the ids, the latter stays.
        decode: text of ids as the detokeniser gives it.
        finish_reason: the engine's, where no such token comes.
    """
    output = result.outputs[0]
    for number, step in enumerate(steps):
        output._last_token_ids_len, output._last_text_len = len(output.token_ids), len(output.text)
        for token in step:
            if token in stop_ids:
                output.finish_reason, output.stop_reason = "stop", token
                break
            output.token_ids.append(token)
            if token == end_id:
                output.finish_reason = "stop"
                break
        output.text = decode(output.token_ids)
        if output.finish_reason is None and number == len(steps) - 1:
            output.finish_reason = finish_reason
        result._done = output.finish_reason is not None
        yield result
        if result._done:
            return
