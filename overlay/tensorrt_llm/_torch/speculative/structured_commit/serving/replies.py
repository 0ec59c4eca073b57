"""The finish guard's acts (I4): what client, log and counters get when a reply ends before its turn is complete.

Called by the post-processors, in whichever process they run, with a reply as far as it is made. State of a stream lies
on that stream's own arguments or parser state and goes with them: a client that disconnects leaves nothing behind here.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..log import log
from ..recording.incidents import ask_for_trace
from .finish import Finish, examine
from .harmony import Watch, feed, messages, undelivered
from .process import SERVING
from .tool_parsers import AlignedParser, inner_parser

KEY = "structured_commit_incomplete"  # in a request's metrics: [policy, format, state] of each incomplete reply
FIELD = "structured_commit"
_OF_THE_ENGINE = ("length", "timeout", "cancelled")


@dataclass
class Sent:
    """What one choice's stream has delivered so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: int = 0

    def add(self, message) -> None:
        """Add a delta, or a whole message."""
        self.content.append(message.content or "")
        self.reasoning.append(getattr(message, "reasoning_content", None) or "")
        self.calls += sum(1 for call in message.tool_calls or () if call.function and call.function.name)


def finish_chat(rsp, output, args, choice) -> None:
    """Before a choice of a chat reply is sent, streamed (once a chunk) or whole: if the reply ends here, see that
    nothing is lost in silence. Changes `choice` in place."""
    if SERVING.ready(getattr(args, "tokenizer", None)):
        SERVING.guarded(_finish_chat, None, rsp, output, args, choice)


def finish_harmony(rsp, args, response) -> None:
    """The same for a whole Harmony reply. Changes `response` in place."""
    if SERVING.ready(getattr(args, "tokenizer", None)) and SERVING.controls is not None:
        SERVING.guarded(_finish_harmony, None, rsp, args, response)


def feed_harmony(stream_state, tokens: Sequence[int]) -> list[dict]:
    """A batch of a Harmony stream's tokens: the deltas that `process_token_batch` makes of them, but a token that the
    parser refuses costs its message and not the batch."""
    if not SERVING.ready() or SERVING.controls is None:
        return stream_state.process_token_batch(tokens)
    deltas = SERVING.guarded(feed, None, stream_state, tokens, SERVING.controls, _watch(stream_state))
    return [] if deltas is None else deltas


def finish_harmony_stream(adapter, rsp, request_id, res, final_response, tools, tool_choice, model) -> None:
    """Before the last chunk of a Harmony stream: feed what was not fed, and see that nothing is lost in silence.

    Args:
        adapter: the process's Harmony adapter. request_id: its name for the stream.
        res: the chunks of this response; extended in place.
        final_response: the last chunk; changed in place.
        tools, tool_choice, model: as the adapter takes them.
    """
    if SERVING.ready() and SERVING.controls is not None:
        SERVING.guarded(
            _finish_harmony_stream, None, adapter, rsp, request_id, res, final_response, tools, tool_choice, model
        )


def _finish_chat(rsp, output, args, choice) -> None:
    streamed = hasattr(choice, "delta")
    index = output.index
    sent = vars(args).setdefault(FIELD, {}).setdefault(index, Sent()) if streamed else Sent()
    parser = getattr(args, "tool_parser_dict", {}).get(index)
    ends = _ends(output)
    if streamed and ends and isinstance(parser, AlignedParser):
        _deliver_rest(parser, args, index, choice)
    sent.add(choice.delta if streamed else choice.message)
    if not ends:
        return
    finish = _judge(rsp, output)
    text = ""
    if SERVING.settings.recover_text and args.tool_choice != "none":
        text = _dropped(finish, output, args.tools, inner_parser(parser), sent, streamed)
    if text:
        part = choice.delta if streamed else choice.message
        part.content = (part.content or "") + text
    _tell(rsp, output, finish, choice, text)


def _deliver_rest(parser: AlignedParser, args, index: int, choice) -> None:
    """Put what the parser still has to say into the last delta."""
    rest = parser.finish(args.tools)
    calls = [] if args.tool_choice == "none" else rest.calls
    if not (rest.normal_text or calls):
        return
    delta = choice.delta
    data = delta.model_dump(exclude_none=True)
    data["content"] = (delta.content or "") + rest.normal_text
    if calls:
        made = [
            {
                "index": call.tool_index,
                "id": _call_id(args, call) if call.name else None,
                "function": {"name": call.name or None, "arguments": call.parameters},
            }
            for call in calls
        ]
        data["tool_calls"] = [*data.get("tool_calls", ()), *made]
        args.has_tool_call[index] = True
        if choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
    choice.delta = type(delta)(**data)


def _call_id(args, call) -> str:
    try:
        from .....serve.chat_utils import make_tool_call_id
    except ImportError:
        return f"chatcmpl-tool-{uuid.uuid4().hex}"
    return make_tool_call_id(id_type=args.tool_call_id_type, func_name=call.name, idx=call.tool_index)


def _dropped(finish: Finish, output, tools, parser, sent: Sent, streamed: bool) -> str:
    """Text of a reply that no part of the answer holds."""
    content, reasoning = "".join(sent.content), "".join(sent.reasoning)
    ids = _without_terminals(output.token_ids)
    if finish.complete:
        lost = _held_back(parser) if streamed else ""
    elif finish.lost_from is None:
        lost = ""
    else:
        lost = SERVING.decode(ids[finish.lost_from :])
        if _bare(lost) in _bare(content + reasoning):
            lost = ""
        elif parser is not None and sent.calls > _calls_in(parser, SERVING.decode(ids[: finish.lost_from]), tools):
            lost = ""  # the open block was delivered as a call, as far as it went
    if lost or content.strip() or sent.calls or output.finish_reason != "stop":
        return lost
    if finish.complete and reasoning.strip():
        return ""
    whole = SERVING.decode(ids)
    return whole if _bare(whole) and _bare(whole) not in _bare(reasoning) else ""


def _held_back(parser) -> str:
    """Text of a complete turn that a parser still waits to tell from the beginning of a marker."""
    held = getattr(parser, "_buffer", "")
    if not isinstance(held, str) or not held.strip() or getattr(parser, "current_tool_name_sent", False):
        return ""
    own = (getattr(parser, name, "").strip() for name in ("bot_token", "eot_token"))
    return "" if any(marker in held for marker in (*_markers(), *own) if marker) else held  # what is left of a call


def _markers() -> tuple[str, ...]:
    return (*SERVING.structure.table.info.controls, *SERVING.structure.form.cuts)


def _bare(text: str) -> str:
    """Text without markers and white space, to find it in what was delivered."""
    for marker in _markers():
        text = text.replace(marker, "")
    return "".join(text.split())


def _calls_in(parser, text: str, tools) -> int:
    try:
        return len(type(parser)().detect_and_parse(text, tools).calls)
    except Exception:
        return 0


def _finish_harmony(rsp, args, response) -> None:
    output, choice = rsp.outputs[0], response.choices[0]
    if not _ends(output):
        return
    finish, message = _judge(rsp, output), choice.message
    if not finish.complete and output.finish_reason in _OF_THE_ENGINE:
        choice.finish_reason = output.finish_reason
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    text = ""
    if SERVING.settings.recover_text and args.tool_choice != "none":
        text = _harmony_text(output.token_ids, calls, [message.content or "", message.reasoning_content or ""], ())
    if text:
        message.content = (message.content or "") + text
    _tell(rsp, output, finish, choice, text)


def _finish_harmony_stream(adapter, rsp, request_id, res, final_response, tools, tool_choice, model) -> None:
    output, choice = rsp.outputs[0], final_response.choices[0]
    state = adapter.get_stream_state(request_id)
    fed = _watch(state).seen if state is not None else 0
    if fed < len(output.token_ids):  # older servers leave out the last response's tokens
        more, _ = adapter.create_openai_streaming_response(
            request_id=request_id,
            tokens=output.token_ids[fed:],
            available_tools=tools,
            model_name=model,
            tool_choice=tool_choice,
        )
        res.extend(more)
        state = adapter.get_stream_state(request_id)
    if state is None or not _ends(output):
        return
    finish = _judge(rsp, output)
    calls = [(c["name"], c["arguments"]) for c in state.tool_calls.values()]
    if calls and choice.finish_reason == "stop":
        choice.finish_reason = "tool_calls"
    text = ""
    if SERVING.settings.recover_text and tool_choice != "none":
        watch = _watch(state)
        delivered = ["".join(watch.content), "".join(watch.reasoning)]
        text = _harmony_text(output.token_ids, calls, delivered, watch.refused)
    if text:
        choice.delta.content = text
    _tell(rsp, output, finish, choice, text)


def _harmony_text(token_ids, calls, delivered: Sequence[str], refused) -> str:
    ids = _without_terminals(token_ids)
    lost = undelivered(messages(ids, SERVING.controls, SERVING.decode), calls, delivered, refused)
    pieces = [SERVING.decode(ids[begin:end]) for begin, end in lost]
    return "".join(piece for piece in pieces if not any(piece in text for text in delivered))


def _watch(stream_state) -> Watch:
    return vars(stream_state).setdefault(FIELD, Watch())


def _ends(output) -> bool:
    return output.finish_reason is not None and output.finish_reason != "not_finished"


def _judge(rsp, output) -> Finish:
    """Judge a reply from where its prompt ends; without a prompt (workers never see it), from the start of a turn."""
    host = SERVING.structure.table.host
    prompt = getattr(rsp, "prompt_token_ids", None)
    return examine(host, output.token_ids, host.locate(list(prompt)) if prompt else None)


def _without_terminals(token_ids: Sequence[int]) -> list[int]:
    controls, ids = SERVING.structure.vocabulary.controls, list(token_ids)
    terminals = {controls[name] for name in SERVING.structure.form.terminals if name in controls}
    while ids and ids[-1] in terminals:
        ids.pop()
    return ids


def _tell(rsp, output, finish: Finish, choice, text: str) -> None:
    where = f"structured_commit: request {rsp.id} choice {choice.index}"
    given = f"; {len(text)} characters that no parser delivered were sent as content" if text else ""
    if finish.complete:
        if text:
            log.warning(f"{where} ended complete (finish reason {choice.finish_reason}){given}")
        return
    form = SERVING.structure.form.name
    found = (SERVING.settings.policy, form, finish.state)
    SERVING.incomplete[found] += 1
    for metrics in _metrics_of(rsp):
        metrics.setdefault(KEY, []).append(list(found))
    if SERVING.settings.report_field and FIELD in type(choice).model_fields:
        setattr(choice, FIELD, {"state": finish.state, "open": finish.open, "began": finish.began})
    if finish.open is not None and SERVING.settings.record is not None:
        reason = f"ended inside a {finish.open}"
        SERVING.guarded(ask_for_trace, None, SERVING.settings.record.folder, rsp.id, reason)
    opened = "" if finish.open is None else f" inside a {finish.open} opened at token {finish.began}"
    broke = "" if finish.illegal_at is None else f"; token {finish.illegal_at} broke the format"
    say = log.info if output.finish_reason in _OF_THE_ENGINE else log.warning
    say(
        f"{where} ended{opened} of {len(output.token_ids)} (format {form}, state {finish.state}, finish reason "
        f"{choice.finish_reason}){broke}{given}"
    )


def _metrics_of(rsp) -> list[dict]:
    """The dictionaries of which the server reads one when the request is over; they travel from workers."""
    candidates = getattr(rsp, "candidate_metrics", None) or []
    found = [getattr(rsp, "metrics_dict", None), candidates[-1] if candidates else None]
    return [m for i, m in enumerate(found) if isinstance(m, dict) and not any(m is other for other in found[:i])]
