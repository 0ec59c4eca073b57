"""The state of one Harmony stream, and a whole reply's messages. Facts: serving.md §3.

One `process` a token; an error anywhere in a batch loses all of the batch, and the parser stays as the error left it.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

from openai_harmony import HarmonyError, Role, StreamableParser

from scripts.vocabularies import HARMONY_CONTROLS, harmony_encoding

PARSE_ERRORS = (HarmonyError, UnicodeDecodeError, ValueError)
log = logging.getLogger("double.harmony")
_ids = itertools.count()


def channel_is_valid(generated: list[str], channel: str) -> bool:
    """No third channel where both analysis and final were seen."""
    if not generated or generated[-1] != channel:
        generated.append(channel)
    return not ("analysis" in generated and "final" in generated and len(generated) > 2)


class StreamState:
    """Deltas are mappings with `reasoning`, `content`, `tool_calls` or `should_stop`."""

    calls_on = ("commentary",)

    def __init__(self, request_id, encoding, available_tools=None, tool_choice=None):
        self.request_id, self.encoding = request_id, encoding
        self.parser = StreamableParser(encoding, role=Role.ASSISTANT)
        self.should_filter_tools = tool_choice == "none" or available_tools is not None
        self.available_tools = {t["function"]["name"] for t in available_tools or ()}
        self.tool_calls: dict[str, dict] = {}
        self.sent_tool_arguments: dict[str, bool] = {}
        self.tokens_processed = 0
        self.generated_channels: list[str] = []
        self.channel_started, self.current_channel_state = False, None

    def process_token_batch(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        deltas = []
        self.tokens_processed += len(tokens)
        for token in tokens:
            channel, recipient = self.parser.current_channel, self.parser.current_recipient
            self.parser.process(token)
            if (channel, recipient) != (self.parser.current_channel, self.parser.current_recipient):
                if channel == "commentary" and recipient and "functions." in recipient:
                    for call in self.tool_calls.values():
                        if call["name"] == recipient.split("functions.")[-1]:
                            call["active"] = False
                if self.current_channel_state == "commentary_preamble" and self.channel_started:
                    deltas.append({"content": "<|end|>", "tool_calls": []})
                self.channel_started, self.current_channel_state = False, None
            if self.parser.last_content_delta:
                delta = self._delta(self.parser.last_content_delta)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def _delta(self, text: str) -> dict[str, Any] | None:
        channel, recipient = self.parser.current_channel, self.parser.current_recipient
        if not channel_is_valid(self.generated_channels, channel):
            return {"should_stop": "Repeated message"}
        if channel in self.calls_on and recipient and "functions." in recipient:
            return self._call_delta(recipient.split("functions.")[-1], text)
        if channel == "analysis":
            return {"reasoning": text}
        if channel == "commentary":
            opening = "" if self.channel_started else "<|channel|>commentary<|message|>"
            self.channel_started, self.current_channel_state = True, "commentary_preamble"
            return {"content": opening + text, "tool_calls": []}
        return {"content": text} if channel == "final" else None

    def _call_delta(self, name: str, text: str) -> dict[str, Any] | None:
        if self.should_filter_tools and name not in self.available_tools:
            return None
        call = next((c for c in self.tool_calls.values() if c["name"] == name and c["active"]), None)
        if call is None:
            call = {"id": f"call_{next(_ids):08x}", "name": name, "arguments": "", "index": len(self.tool_calls)}
            self.tool_calls[call["id"]] = {**call, "active": True}
            call = self.tool_calls[call["id"]]
        call["arguments"] += text
        function = {"name": name, "arguments": text}
        return {"tool_calls": [{"id": call["id"], "function": function, "index": call["index"]}]}


class MergingStreamState(StreamState):
    """Later: calls on analysis too, and neighbouring deltas of one kind are merged."""

    calls_on = ("commentary", "analysis")

    def process_token_batch(self, tokens):
        return self._merge_consecutive_deltas(super().process_token_batch(tokens))

    @staticmethod
    def _merge_consecutive_deltas(deltas):
        merged: list[dict] = []
        for delta in deltas:
            before = merged[-1] if merged else {}
            if set(delta) == set(before) == {"reasoning"}:
                before["reasoning"] += delta["reasoning"]
            elif "content" in delta and delta.keys() == before.keys():
                before["content"] += delta["content"]
            elif (
                set(delta) == set(before) == {"tool_calls"}
                and delta["tool_calls"][0]["id"] == before["tool_calls"][0]["id"]
            ):
                before["tool_calls"][0]["function"]["arguments"] += delta["tool_calls"][0]["function"]["arguments"]
            else:
                merged.append(delta)
        return merged


def without_incomplete(tokens: list[int]) -> list[int]:
    """Cut from the last opener while no `<|message|>` follows it."""
    start, message = HARMONY_CONTROLS["<|start|>"], HARMONY_CONTROLS["<|message|>"]
    while start in tokens:
        at = len(tokens) - 1 - tokens[::-1].index(start)
        if message in tokens[at:]:
            break
        tokens = tokens[:at]
    return tokens


def whole_reply(token_ids: list[int], tools: list[dict] | None, tool_choice: str | None) -> dict[str, Any]:
    """One message: `content`, `reasoning`, `tool_calls`; the raw text of all tokens where the parser raises."""
    encoding = harmony_encoding()
    filtered = tool_choice == "none" or tools is not None
    known = {t["function"]["name"] for t in tools or ()}
    try:
        parsed = encoding.parse_messages_from_completion_tokens(without_incomplete(token_ids), role=Role.ASSISTANT)
    except PARSE_ERRORS:
        return {"content": encoding.decode_utf8(token_ids), "_harmony_parsing_failed": True}
    content, reasoning, calls, channels = [], [], [], []
    for message in parsed:
        if not channel_is_valid(channels, message.channel):
            continue
        text = "".join(part.text for part in message.content)
        if message.channel != "final" and message.recipient and message.recipient != "assistant":
            call = _call_of(message, text)
            if call is not None and not (filtered and call["function"]["name"] not in known):
                calls.append(call)
        else:
            (reasoning if message.channel == "analysis" else content).append(text)
    reply: dict[str, Any] = {"content": "\n".join(content) or (None if calls else "")}
    if "".join(reasoning).strip():
        reply["reasoning"] = "".join(reasoning).strip()
    if calls:
        reply["tool_calls"] = calls
    return reply


def _call_of(message, text: str) -> dict[str, Any] | None:
    """None, with a warning, where the content type is neither JSON that is valid nor code."""
    kind = message.content_type or ""
    if "<|constrain|>json" in kind:
        try:
            json.loads(text)
        except ValueError:
            log.warning("Failed to parse tool call arguments as JSON")
            return None
    elif "code" not in kind:
        log.warning("Unsupported message content type")
        return None
    function = {"name": message.recipient.split("functions.")[-1], "arguments": text}
    return {"id": f"call_{next(_ids):08x}", "type": "function", "function": function}
