"""Facts: serving.md §8."""

# ruff: noqa: UP006, UP007, UP035, UP045 - forms that upstream uses

from __future__ import annotations

from typing import List, Literal, Optional, Union

from pydantic import Field

from tests.upstream.common.protocol import (
    ChatCompletionToolsParam,
    ChatMessage,
    DeltaMessage,
    OpenAIBaseModel,
    Reply,
    UsageInfo,
)

__all__ = ["ChatCompletionToolsParam"]


class ChatCompletionResponseChoice(OpenAIBaseModel):
    index: int
    message: ChatMessage
    finish_reason: Optional[str] = None
    stop_reason: Optional[Union[int, str]] = None
    avg_decoded_tokens_per_iter: Optional[float] = Field(default=None)


class ChatCompletionResponse(Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: List[ChatCompletionResponseChoice]
    usage: UsageInfo


class ChatCompletionResponseStreamChoice(OpenAIBaseModel):
    index: int
    delta: DeltaMessage
    finish_reason: Optional[str] = None
    stop_reason: Optional[Union[int, str]] = None
    avg_decoded_tokens_per_iter: Optional[float] = Field(default=None)


class ChatCompletionStreamResponse(Reply):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: List[ChatCompletionResponseStreamChoice]
    usage: Optional[UsageInfo] = Field(default=None)
