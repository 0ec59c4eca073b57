"""Facts: serving.md §3 (the last response's tokens are left out)."""

from __future__ import annotations

import logging

from scripts.vocabularies import HARMONY_CONTROLS, harmony_encoding
from tests.upstream.common.harmony_state import PARSE_ERRORS, StreamState, whole_reply
from tests.upstream.common.protocol import ChatMessage, DeltaFunctionCall, DeltaMessage, DeltaToolCall, usage_of

from .openai_protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)

logger = logging.getLogger("double.harmony")
_SERVE_HARMONY_ADAPTER = None


class HarmonyAdapter:
    def __init__(self):
        self.encoding = harmony_encoding()
        self._stream_states = {}

    def get_stream_state(self, request_id):
        return self._stream_states.get(request_id)

    def get_stop_tokens(self):
        return [HARMONY_CONTROLS["<|return|>"], HARMONY_CONTROLS["<|call|>"]]

    def cleanup_stream_state(self, request_id):
        self._stream_states.pop(request_id, None)

    def harmony_output_to_openai(self, tokens, available_tools=None, tool_choice=None):
        return whole_reply(tokens, available_tools, tool_choice)

    def stateful_stream_harmony_tokens_to_openai_deltas(
        self, request_id, tokens, available_tools=None, tool_choice=None
    ):
        stream_state = self._stream_states.get(request_id)
        if stream_state is None:
            stream_state = StreamState(request_id, self.encoding, available_tools, tool_choice)
            self._stream_states[request_id] = stream_state
        try:
            deltas = stream_state.process_token_batch(tokens)
            return deltas
        except PARSE_ERRORS:
            logger.error(f"Streaming: Failed to process token batch of {len(tokens)} tokens for request {request_id}")
            return []

    def create_openai_streaming_response(
        self, request_id, tokens, available_tools=None, model_name="harmony-model", tool_choice=None
    ):
        deltas = self.stateful_stream_harmony_tokens_to_openai_deltas(request_id, tokens, available_tools, tool_choice)
        sent = self._stream_states[request_id].sent_tool_arguments
        responses = []
        for delta in deltas:
            message = DeltaMessage()
            if "reasoning" in delta:
                message.reasoning = message.reasoning_content = delta["reasoning"]
            elif "content" in delta:
                message.content = delta["content"]
            elif "tool_calls" in delta:
                message.tool_calls = [_delta_call(call, sent) for call in delta["tool_calls"]]
            should_stop = "should_stop" in delta
            responses.append(_chunk(model_name, message, "stop" if should_stop else None))
            if should_stop:
                return responses, True
        return responses, False


def _delta_call(call, sent):
    again = call["id"] in sent
    sent[call["id"]] = True
    function = DeltaFunctionCall(
        name=None if again else call["function"]["name"], arguments=call["function"]["arguments"]
    )
    return DeltaToolCall(id=None if again else call["id"], index=call["index"], function=function)


def _chunk(model, delta, finish_reason=None, usage=None):
    choice = ChatCompletionResponseStreamChoice(index=0, delta=delta, finish_reason=finish_reason)
    chunk = ChatCompletionStreamResponse(model=model, choices=[choice], usage=usage)
    return f"data: {chunk.model_dump_json(exclude_none=True)}\n\n"


def get_harmony_adapter():
    global _SERVE_HARMONY_ADAPTER
    if _SERVE_HARMONY_ADAPTER is None:
        _SERVE_HARMONY_ADAPTER = HarmonyAdapter()
    return _SERVE_HARMONY_ADAPTER


def handle_streaming_response(tools, tool_choice, result, model, request_id, done, num_prompt_tokens):
    output = result.outputs[0]
    harmony_adapter = get_harmony_adapter()
    tools_dict = [tool.model_dump() for tool in tools] if tools else None
    tools_for_parser = None if tool_choice == "none" else tools_dict

    def end_streaming(res):
        harmony_adapter.cleanup_stream_state(request_id)
        usage = usage_of(num_prompt_tokens, result.outputs)
        final_usage_chunk = ChatCompletionStreamResponse(choices=[], model=model, usage=usage)
        res.append(f"data: {final_usage_chunk.model_dump_json(exclude_none=True)}\n\n")

    try:
        res = []
        if done:
            final_response = ChatCompletionStreamResponse(
                model=model,
                choices=[
                    ChatCompletionResponseStreamChoice(
                        index=0,
                        delta=DeltaMessage(),
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                    )
                ],
            )
            final_response_json = final_response.model_dump_json(exclude_none=True)
            res.append(f"data: {final_response_json}\n\n")
            end_streaming(res)
        else:
            responses, should_stop = harmony_adapter.create_openai_streaming_response(
                request_id=request_id,
                tokens=output.token_ids_diff,
                available_tools=tools_for_parser,
                model_name=model,
                tool_choice=tool_choice,
            )
            if True:
                res.append(_chunk(model, DeltaMessage(role="assistant")))
            res.extend(responses)
            if should_stop:
                end_streaming(res)
                result.abort()
        return res
    except Exception:
        harmony_adapter.cleanup_stream_state(request_id)
        raise


def handle_non_streaming_response(tools, tool_choice, outputs, model, num_prompt_tokens):
    harmony_adapter = get_harmony_adapter()
    tools_dict = [tool.model_dump() for tool in tools] if tools else None
    output = outputs[0]
    parsed_output = harmony_adapter.harmony_output_to_openai(
        output.token_ids, None if tool_choice == "none" else tools_dict, tool_choice
    )
    reasoning = parsed_output.get("reasoning")
    message = ChatMessage(
        role="assistant",
        content=parsed_output["content"],
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=parsed_output.get("tool_calls", []),
    )
    choice = ChatCompletionResponseChoice(
        index=0, message=message, finish_reason="tool_calls" if message.tool_calls else output.finish_reason
    )
    usage = usage_of(num_prompt_tokens, outputs)
    return ChatCompletionResponse(model=model, choices=[choice], usage=usage)
