"""Ask a server for tool calls and count those that are lost: python -m ci.tool_calls --url URL --model NAME

Each request names one tool and everything the call needs, so a reply without a usable call is looked into:

    delivered   a call of an offered tool whose arguments are a JSON object with what the tool requires
    silent      no call, no text, and nothing that says so: the loss this project is about
    leaked      no call, but its markup in the text: the parser could not read it
    broken      a call that no client can run: unknown tool, arguments that are not JSON or lack a field
    declined    no call; the model answered in words
    cut         the length limit came first
    error       the request failed

Lost = silent + leaked + broken. Knows the OpenAI chat API and nothing of TensorRT-LLM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import openai
from rich.console import Console
from rich.progress import track
from rich.table import Table

OUTCOMES = ("delivered", "silent", "leaked", "broken", "declined", "cut", "error")
LOST = ("silent", "leaked", "broken")
MARKUP = (
    "<tool_call",
    "<|channel|>",
    "<|constrain|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<｜tool",
    "<|tool_call",
    "<invoke",
)
CITIES = ("Paris", "Nairobi", "Lima", "Oslo", "Kyoto", "Quito", "Perth", "Turin", "Accra", "Dhaka")


def tool(name: str, about: str, **properties: str) -> dict:
    """A tool's declaration; every property is required, its value is the JSON type."""
    schema = {n: {"type": kind} for n, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = (
    tool("get_weather", "Weather in a city on a day.", city="string", day="string"),
    tool("book_table", "Book a table at a restaurant.", restaurant="string", people="integer", time="string"),
    tool("convert_currency", "Convert an amount of money.", amount="number", source="string", target="string"),
)
REQUIRED = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in TOOLS}


@dataclass
class Call:
    """A tool call as it arrived, its pieces put together."""

    name: str = ""
    arguments: str = ""


@dataclass
class Reply:
    """What one request came to."""

    number: int
    streamed: bool
    outcome: str
    finish_reason: str | None = None
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    problem: str = ""


def prompts(count: int) -> list[str]:
    """So many different requests, the same every time, a third for each tool."""
    days = ("today", "tomorrow", "on Friday", "next Monday", "on 3 May", "at the weekend", "on Sunday")
    asked = [
        [f"Use the tool: what is the weather in {city} {day}?" for day, city in itertools.product(days, CITIES)],
        [
            f"Use the tool: book a table at 'Chez {city}' for {people} people at {hour}:30."
            for people, hour, city in itertools.product((2, 3, 5, 8), (12, 19), CITIES)
        ],
        [
            f"Use the tool: convert {amount} {source} to {target}."
            for amount, (source, target) in itertools.product(
                (10, 99.5, 250, 1_000, 7_500, 12, 64), itertools.permutations(("EUR", "USD", "JPY", "CHF"), 2)
            )
        ],
    ]
    mixed = [text for group in itertools.zip_longest(*asked) for text in group if text is not None]
    if count > len(mixed):
        raise ValueError(f"{count} requests asked for, {len(mixed)} different ones are known")
    return mixed[:count]


def classify(finish_reason: str | None, content: str, calls: Sequence[Call]) -> str:
    """One of `OUTCOMES`; see the module's text."""
    if any(_is_usable(call) for call in calls) and all(_is_usable(call) for call in calls):
        return "delivered"
    if finish_reason == "length":
        return "cut"
    if calls:
        return "broken"
    if not content.strip():
        return "silent"
    return "leaked" if any(mark in content for mark in MARKUP) else "declined"


def collect(
    url: str, model: str, count: int, streamed: bool, workers: int = 16, extra: dict | None = None, seed: int = 0
) -> list[Reply]:
    """Send `count` requests, `workers` at a time; replies in the order of the requests."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)

    def ask(number: int, text: str) -> Reply:
        request = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "tools": list(TOOLS),
            "temperature": 1.0,
            "max_tokens": 1_024,
            "seed": seed + number,
            "extra_body": extra or {},
        }
        try:
            reason, content, calls = _streamed(client, request) if streamed else _whole(client, request)
        except (openai.OpenAIError, ValueError) as error:  # a stream that breaks off is a ValueError of its decoder
            return Reply(number, streamed, "error", problem=f"{type(error).__name__}: {error}")
        return Reply(number, streamed, classify(reason, content, calls), reason, content, calls)

    with ThreadPoolExecutor(workers) as pool:
        pending = pool.map(ask, range(count), prompts(count))
        what = "streamed" if streamed else "unstreamed"
        return list(track(pending, what, count, console=Console(stderr=True), transient=True))


def table_of(runs: dict[str, Sequence[Reply]]) -> Table:
    """The table of lost calls: a row for each label and way of delivery."""
    table = Table("stage", "delivery", "requests", *OUTCOMES, "lost")
    for label, replies in runs.items():
        for streamed in (False, True):
            own = [r for r in replies if r.streamed == streamed]
            if own:
                counts = tally(own)
                numbers = (len(own), *(counts[o] for o in OUTCOMES), sum(counts[o] for o in LOST))
                table.add_row(label, "streamed" if streamed else "unstreamed", *map(str, numbers))
    return table


def tally(replies: Iterable[Reply]) -> Counter[str]:
    """How many replies had each outcome."""
    return Counter(reply.outcome for reply in replies)


def _whole(client: openai.OpenAI, request: dict) -> tuple[str | None, str, list[Call]]:
    choice = client.chat.completions.create(**request).choices[0]
    calls = [Call(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    return choice.finish_reason, choice.message.content or "", calls


def _streamed(client: openai.OpenAI, request: dict) -> tuple[str | None, str, list[Call]]:
    reason, content, calls = None, "", {}
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, Call())
                if piece.function:
                    call.name += piece.function.name or ""
                    call.arguments += piece.function.arguments or ""
    return reason, content, [calls[index] for index in sorted(calls)]


def _is_usable(call: Call) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    required = REQUIRED.get(call.name)
    return required is not None and isinstance(arguments, dict) and all(name in arguments for name in required)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m ci.tool_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="the name the server knows it by")
    parser.add_argument("--requests", type=int, default=200, help="streamed, and as many unstreamed")
    parser.add_argument("--label", default="as served", help="what to call this run in the table")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON that is added to each request")
    parser.add_argument("--json", type=Path, help="write every reply here")
    args = parser.parse_args()
    replies: list[Reply] = []
    for streamed in (False, True):
        replies += collect(args.url, args.model, args.requests, streamed, extra=args.extra)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in replies], indent=1, ensure_ascii=False))
    Console(width=140).print(table_of({args.label: replies}))
    return 1 if tally(replies)["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
