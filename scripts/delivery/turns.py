"""Generated turns of ten families: pieces of one assistant turn with 0 to 4 calls, from a seed.

A turn is a list of parts, (kind, text), so that deltas can be cut at, before and behind a named place. Its text is what
a server hands to its parsers: control tokens by their spelling, the last terminal trimmed. What a turn means is not
kept here: the judge is the parser itself, reading the whole text at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

THOUGHT, TEXT, OPEN, BODY, CLOSE, JOIN = "thought", "text", "open", "body", "close", "join"
KINDS = (THOUGHT, TEXT, OPEN, BODY, CLOSE, JOIN)

Part = tuple[str, str]

NAMES = ("f", "g", "get_weather")
STRINGS = (
    "",
    "Paris",
    'a "b" {c} [d], e',
    "}",
    '"}',
    '{"k": [1, {"z": "}"}]}',
    "空 🌤️ é",
    "a; b",
    "\\ back\\n",
    "it is so, isn't it",
    "line\nfeed",
    "<b>x</b> a < b",
    "</x",
    "); {",
    "a" * 40,
)
TEXTS = ("Looking.", "a < b", "空は青い 🌤️", "So [1] {x}:", "On it;", "Let me\nlook.")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, and a word on what is particular about it."""

    parts: tuple[Part, ...]
    name: str = "generated"

    @property
    def text(self) -> str:
        """The whole turn without its terminal."""
        return "".join(text for _, text in self.parts)


def arguments(choose: random.Random) -> dict[str, object]:
    """Arguments for any of the tools: empty, flat or nested."""
    keys = choose.sample("sxoab", choose.choice((0, 1, 1, 2, 3, 5)))
    return {key: _value(choose, key) for key in keys}


def _value(choose: random.Random, key: str) -> object:
    if key == "s":
        return choose.choice(STRINGS)
    if key == "x":
        return choose.choice((0, 1, -20, 12345678))
    if key == "b":
        return choose.random() < 0.5
    depth = choose.choice((0, 1, 1, 2, 3, 5))
    return _nested(choose, depth, list) if key == "a" else _nested(choose, depth, dict)


def _nested(choose: random.Random, depth: int, kind: type) -> object:
    size = choose.randint(1, 2) if depth else 0
    inner = [_inner(choose, depth - 1) for _ in range(size)]
    return inner if kind is list else dict(zip("kz", inner, strict=False))


def _inner(choose: random.Random, depth: int) -> object:
    if depth < 0 or choose.random() < 0.3:
        return choose.choice((1, None, True, 0.5, choose.choice(STRINGS)))
    return _nested(choose, depth, choose.choice((list, dict)))


def _calls(choose: random.Random) -> list[tuple[str, dict]]:
    return [(choose.choice(NAMES), arguments(choose)) for _ in range(choose.choice((0, 1, 1, 2, 2, 3, 4)))]


def _json(choose: random.Random, value: object, pretty: bool = True) -> str:
    return json.dumps(value, ensure_ascii=False, indent=choose.choice((None, None, 1)) if pretty else None)


def qwen25(choose: random.Random) -> list[Part]:
    """Hermes calls between tags on lines of their own."""
    parts = _opening(choose, "<think>\n", "\n</think>\n\n")
    for i, (name, given) in enumerate(_calls(choose)):
        if i:
            parts.append((JOIN, choose.choice(("\n", "\n", "\nAnd:\n"))))
        head, body = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": ', _json(choose, given)
        parts += [(OPEN, "<tool_call>\n" + head), (BODY, body + "}"), (CLOSE, "\n</tool_call>")]
    return parts + _ending(choose)


def qwen3_coder(choose: random.Random) -> list[Part]:
    """Function and parameter tags inside a wrapper."""
    parts = _opening(choose, "<think>\n", "\n</think>\n\n")
    for i, (name, given) in enumerate(_calls(choose)):
        if i:
            parts.append((JOIN, choose.choice(("\n", "\n", " And "))))
        values = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in given.items())
        parts += [(OPEN, f"<tool_call>\n<function={name}>\n"), (BODY, values), (CLOSE, "</function>\n</tool_call>")]
    return parts + _ending(choose)


def deepseekv31(choose: random.Random) -> list[Part]:
    """A section of calls with control tokens between name and object."""
    parts = _opening(choose, "<think>", "</think>")
    calls = _calls(choose)
    for i, (name, given) in enumerate(calls):
        opener = "<｜tool▁calls▁begin｜>" if i == 0 else ""
        parts += [
            (OPEN, f"{opener}<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
            (BODY, _json(choose, given)),
            (CLOSE, "<｜tool▁call▁end｜>" + "<｜tool▁calls▁end｜>" * (i + 1 == len(calls))),
        ]
    return parts + (_ending(choose) if calls else [])


def kimik2(choose: random.Random) -> list[Part]:
    """A section of calls with numbered ids."""
    parts = _opening(choose, "<think>", "</think>")
    calls, first = _calls(choose), choose.choice((0, 3))
    for i, (name, given) in enumerate(calls):
        opener = "<|tool_calls_section_begin|>" if i == 0 else ""
        parts += [
            (OPEN, f"{opener}<|tool_call_begin|>functions.{name}:{first + i}<|tool_call_argument_begin|>"),
            (BODY, _json(choose, given)),
            (CLOSE, "<|tool_call_end|>" + "<|tool_calls_section_end|>" * (i + 1 == len(calls))),
        ]
    return parts + (_ending(choose) if calls else [])


def glm47(choose: random.Random) -> list[Part]:
    """Pairs of key and value between tags."""
    parts = _opening(choose, "<think>", "</think>")
    for i, (name, given) in enumerate(_calls(choose)):
        if i:
            parts.append((JOIN, choose.choice(("", "\n", " And "))))
        pairs = "".join(
            f"<arg_key>{k}</arg_key><arg_value>{_plain(v)}</arg_value>{choose.choice(('', chr(10)))}"
            for k, v in given.items()
        )
        parts += [(OPEN, f"<tool_call>{name}"), (BODY, pairs), (CLOSE, "</tool_call>")]
    return parts + _ending(choose)


def gemma4(choose: random.Random) -> list[Part]:
    """Calls in a notation of their own, strings between two <|"|>."""
    parts = _opening(choose, "<|channel>thought\n", "\n<channel|>")
    for i, (name, given) in enumerate(_calls(choose)):
        if i:
            parts.append((JOIN, choose.choice(("", "", "\n", " And "))))
        inner = ",".join(f"{k}:{_gemma(v)}" for k, v in given.items())
        parts += [(OPEN, f"<|tool_call>call:{name}{{"), (BODY, inner + "}"), (CLOSE, "<tool_call|>")]
    return parts + _ending(choose)


def llama32(choose: random.Random) -> list[Part]:
    """JSON calls joined by `;`, with or without the tag."""
    calls = _calls(choose)
    if not calls:
        return [(TEXT, choose.choice(TEXTS))]
    tag = choose.choice(("", "<|python_tag|>", "<|python_tag|>"))
    parts: list[Part] = [(TEXT, choose.choice(TEXTS))] if tag and choose.random() < 0.3 else []
    for i, (name, given) in enumerate(calls):
        if i:
            parts.append((JOIN, ";"))
        key = choose.choice(("parameters", "parameters", "arguments"))
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{key}": '
        parts += [(OPEN, (tag if i == 0 else "") + head), (BODY, _json(choose, given) + "}")]
    return parts


def mistral(choose: random.Random) -> list[Part]:
    """Names and arguments behind control tokens, or one JSON list."""
    parts = _opening(choose, "[THINK]", "[/THINK]")
    calls = _calls(choose)
    if calls and choose.random() < 0.3:
        for i, (name, given) in enumerate(calls):
            head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": '
            parts += [(OPEN, ("[TOOL_CALLS] [" if i == 0 else ", ") + head), (BODY, _json(choose, given, False) + "}")]
        return [*parts, (CLOSE, "]")]
    for name, given in calls:
        parts += [(OPEN, f"[TOOL_CALLS]{name}[ARGS]"), (BODY, _json(choose, given))]
    return parts


def minimax(choose: random.Random) -> list[Part]:
    """Invokes and parameters in ordinary text, several invokes in a block."""
    parts = _opening(choose, "<think>\n", "\n</think>\n\n")
    calls = _calls(choose)
    blank = choose.choice(("", "\n"))
    for i, (name, given) in enumerate(calls):
        begins = i == 0 or choose.random() < 0.3
        if begins and i:
            parts[-1] = (CLOSE, parts[-1][1] + "</minimax:tool_call>")
            parts.append((JOIN, choose.choice(("\n", " And "))))
        values = "".join(f'<parameter name="{k}">{_plain(v)}</parameter>{blank}' for k, v in given.items())
        opener = f"<minimax:tool_call>{blank}" if begins else ""
        parts += [(OPEN, f'{opener}<invoke name="{name}">{blank}'), (BODY, values), (CLOSE, f"</invoke>{blank}")]
    if calls:
        parts[-1] = (CLOSE, parts[-1][1] + "</minimax:tool_call>")
    return parts + _ending(choose)


def gpt_oss(choose: random.Random) -> list[Part]:
    """Harmony messages; the terminal stays, since this parser looks for it."""
    parts: list[Part] = []
    calls = _calls(choose)
    start = "<|start|>assistant"
    if choose.random() < 0.6:
        parts.append((THOUGHT, f"<|channel|>analysis<|message|>{choose.choice(TEXTS)}<|end|>"))
    if calls and choose.random() < 0.3:
        opener = start if parts else ""
        parts.append((TEXT, f"{opener}<|channel|>commentary<|message|>{choose.choice(TEXTS)}<|end|>"))
    for name, given in calls:
        opener = start if parts else ""
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        parts += [(OPEN, opener + head), (BODY, _json(choose, given)), (CLOSE, "<|call|>")]
    if not calls:
        opener = start if parts else ""
        parts.append((TEXT, f"{opener}<|channel|>final<|message|>{choose.choice(TEXTS)}<|return|>"))
    return parts


def _opening(choose: random.Random, opener: str, closer: str) -> list[Part]:
    parts: list[Part] = []
    if choose.random() < 0.3:
        parts.append((THOUGHT, f"{opener}{choose.choice(TEXTS)}{closer}"))
    if choose.random() < 0.6:
        parts.append((TEXT, choose.choice(TEXTS)))
    return parts


def _ending(choose: random.Random) -> list[Part]:
    return [(TEXT, choose.choice(("\n", " Done.", "\nDone < 1.")))] if choose.random() < 0.2 else []


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


WRITERS: dict[str, Callable[[random.Random], list[Part]]] = {
    writer.__name__: writer
    for writer in (*(gemma4, qwen25, qwen3_coder, deepseekv31, kimik2, glm47, llama32, mistral, minimax, gpt_oss),)
}


def turns(parser: str, count: int, seed: int = 41967) -> list[Turn]:
    """`count` turns of a parser's format; the same for the same seed."""
    choose = random.Random(f"{parser} {seed}")
    return [Turn(tuple(part for part in WRITERS[parser](choose) if part[1])) for _ in range(count)]
