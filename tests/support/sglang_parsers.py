"""SGLang's parsers as peers: what they read in a finished answer."""

from __future__ import annotations

import json
from functools import cache

from scripts.sglang_parsers import sglang_module

TOOLS = ("f", "g", "h")

Call = tuple[str, object]
"""A call as read: its name and its decoded arguments."""


@cache
def _tools() -> list:
    protocol = sglang_module("entrypoints.openai.protocol")
    schema = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}
    return [protocol.Tool(type="function", function=protocol.Function(name=name, parameters=schema)) for name in TOOLS]


def calls_read(detector: str, text: str) -> list[Call]:
    """The calls that a detector (`module:Class` under `sglang.srt.function_call`) reads in a whole text."""
    module, name = detector.split(":")
    found = getattr(sglang_module(f"function_call.{module}"), name)().detect_and_parse(text, _tools())
    return [(call.name, _decoded(call.parameters)) for call in found.calls]


def calls_streamed(detector: str, deltas: list[str]) -> list[Call]:
    """The calls that a detector reads when the text arrives in `deltas`."""
    module, name = detector.split(":")
    parser = getattr(sglang_module(f"function_call.{module}"), name)()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in parser.parse_streaming_increment(delta, _tools()).calls:
            names.setdefault(call.tool_index, call.name or "")
            arguments[call.tool_index] = arguments.get(call.tool_index, "") + (call.parameters or "")
    return [(names[i], _decoded(arguments[i] or "{}")) for i in sorted(names)]


def _decoded(arguments: str) -> object:
    """Arguments as a client reads them; as they are if they are not JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def split_reasoning(detector: str, text: str, *, opened: bool) -> tuple[str, str]:
    """(reasoning, answer) as a reasoning detector splits them; `opened`: the prompt had opened reasoning."""
    parsed = getattr(sglang_module("parser.reasoning_parser"), detector)(force_reasoning=opened).detect_and_parse(text)
    return parsed.reasoning_text, parsed.normal_text
