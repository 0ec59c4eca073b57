"""Facts: serving.md §1.8 to §1.13, §2, §3."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.upstream.common.protocol import (
    ChatMessage,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
    usage_of,
)
from tests.upstream.common.results import PostprocArgs

from .chat_utils import make_tool_call_id
from .harmony_adapter import handle_non_streaming_response, handle_streaming_response
from .openai_protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatCompletionToolsParam,
)
from .tool_parser.tool_parser_factory import ToolParserFactory


@dataclass(kw_only=True)
class ChatPostprocArgs(PostprocArgs):
    role: str = "assistant"
    model: str = "m"
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: str | None = "auto"
    tool_parser: str | None = None
    tool_parser_dict: dict = field(default_factory=dict)
    has_tool_call: dict[int, bool] = field(default_factory=dict)
    tool_call_id_type: str = "random"


def apply_tool_parser(args, output_index, text, streaming):
    calls = []
    if args.tool_parser is not None and args.tools is not None:
        if output_index not in args.tool_parser_dict:
            args.tool_parser_dict[output_index] = ToolParserFactory.create_tool_parser(args.tool_parser)
        tool_parser = args.tool_parser_dict[output_index]
        if streaming:
            result = tool_parser.parse_streaming_increment(text, args.tools)
            text, calls = result.normal_text, result.calls
        else:
            result = tool_parser.detect_and_parse(text, args.tools)
            text, calls = result.normal_text, result.calls
        if args.tool_choice == "none":
            return text, []
        if calls:
            args.has_tool_call[output_index] = True
    return text, calls


def chat_stream_post_processor(rsp, args):
    def yield_first_chat(role):
        choice_data = ChatCompletionResponseStreamChoice(index=0, delta=DeltaMessage(role=role))
        chunk = ChatCompletionStreamResponse(choices=[choice_data], model=args.model)
        return chunk.model_dump_json(exclude_none=True)

    res = []
    if args.first_iteration:
        res.append(f"data: {yield_first_chat(args.role)} \n\n")
        args.first_iteration = False
    for output in rsp.outputs:
        i = output.index
        delta_text, calls = apply_tool_parser(args, i, output.text_diff, True)
        tool_calls = [
            DeltaToolCall(
                id=make_tool_call_id(args.tool_call_id_type, c.name, c.tool_index) if c.name else None,
                index=c.tool_index,
                function=DeltaFunctionCall(name=c.name or None, arguments=c.parameters),
            )
            for c in calls
        ]
        if not (tool_calls or delta_text or output.finish_reason or output.token_ids_diff):
            continue
        delta_message = DeltaMessage(content=delta_text, tool_calls=tool_calls or None)
        choice = ChatCompletionResponseStreamChoice(index=i, delta=delta_message, stop_reason=output.stop_reason)
        if output.finish_reason is not None:
            called = output.finish_reason == "stop" and args.has_tool_call.get(i, False)
            choice.finish_reason = "tool_calls" if called else output.finish_reason
        chunk = ChatCompletionStreamResponse(choices=[choice], model=args.model)
        res.append(f"data: {chunk.model_dump_json(exclude_none=True)}\n\n")
    return res


def chat_response_post_processor(rsp, args):
    choices = []
    for output in rsp.outputs:
        text, calls = apply_tool_parser(args, output.index, output.text, False)
        tool_calls = [ToolCall(function=FunctionCall(name=c.name or "", arguments=c.parameters)) for c in calls]
        choice = ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(role=args.role, content=text, tool_calls=tool_calls),
            stop_reason=output.stop_reason,
        )
        called = output.finish_reason == "stop" and args.has_tool_call.get(output.index, False)
        choice.finish_reason = "tool_calls" if called else output.finish_reason
        choices.append(choice)
    usage = usage_of(args.num_prompt_tokens, rsp.outputs)
    return ChatCompletionResponse(model=args.model, choices=choices, usage=usage)


@dataclass(kw_only=True)
class ChatCompletionPostprocArgs(PostprocArgs):
    model: str = "m"
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: str | None = "auto"
    request_id: int | None = None


def chat_harmony_post_processor(rsp, args):
    response = handle_non_streaming_response(
        tools=args.tools,
        tool_choice=args.tool_choice,
        outputs=rsp.outputs,
        model=args.model,
        num_prompt_tokens=args.num_prompt_tokens,
    )
    return response


def chat_harmony_streaming_post_processor(rsp, args):
    response = handle_streaming_response(
        tools=args.tools,
        tool_choice=args.tool_choice,
        result=rsp,
        model=args.model,
        request_id=str(rsp.id),
        done=rsp._done,
        num_prompt_tokens=args.num_prompt_tokens,
        first_iteration=args.first_iteration,
    )
    args.first_iteration = False
    return response
