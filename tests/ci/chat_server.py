"""A server that speaks the OpenAI chat API over loopback and answers each request in a way that is known beforehand.

It stands where `trtllm-serve` would in the tests of `ci/`, as a library or, with the same command line, as a program:
with a `structured_commit` section in its configuration it loses no calls, without one it loses some.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ci.tool_calls import REQUIRED

# Ways to answer, and what a client must make of each.
WAYS = {
    "good": "delivered",
    "two calls": "delivered",
    "nothing": "silent",
    "blank": "silent",
    "markup": "leaked",
    "torn arguments": "broken",
    "unknown tool": "broken",
    "missing field": "broken",
    "one good, one torn": "broken",
    "words": "declined",
    "out of length": "cut",
    "refused": "error",
}
_MARKUP = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"'


def message_of(way: str) -> tuple[str | None, list[tuple[str, str]], str]:
    """Content, calls (name and arguments) and finish reason of a way to answer."""
    name, fields = next(iter(REQUIRED.items()))
    good = (name, json.dumps(dict.fromkeys(fields, "x")))
    torn = (name, good[1][:-3])
    answers = {
        "good": (None, [good], "tool_calls"),
        "two calls": ("Both:", [good, good], "tool_calls"),
        "nothing": (None, [], "stop"),
        "blank": (" \n", [], "stop"),
        "markup": (_MARKUP, [], "stop"),
        "torn arguments": (None, [torn], "tool_calls"),
        "unknown tool": (None, [("get_wether", good[1])], "tool_calls"),
        "missing field": (None, [(name, "{}")], "tool_calls"),
        "one good, one torn": (None, [good, torn], "tool_calls"),
        "words": ("It will be sunny.", [], "stop"),
        "out of length": (_MARKUP, [], "length"),
    }
    return answers[way]


def deltas(way: str) -> Iterator[dict]:
    """The same answer in pieces: content by character, each call's name once, its arguments in small parts."""
    content, calls, _ = message_of(way)
    yield {"role": "assistant", "content": ""}
    for piece in content or "":
        yield {"content": piece}
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": f"call_{index}", "type": "function"}
        yield {"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]}
        for start in range(0, len(arguments), 4):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[start : start + 4]}}]}


class ChatServer(ThreadingHTTPServer):
    """Answers request after request as `way_of(its text)` says; remembers the requests."""

    daemon_threads = True

    def __init__(self, way_of: Callable[[str], str], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.way_of, self.requests = way_of, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        way = self.server.way_of(request["messages"][-1]["content"])
        if way == "refused":
            self._send({"error": {"message": "no"}}, status=500)
        elif request.get("stream"):
            self._stream(way)
        else:
            content, calls, reason = message_of(way)
            tool_calls = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
            message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    def _send(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, way: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        reason = message_of(way)[2]
        for delta, finish in [*((d, None) for d in deltas(way)), ({}, reason)]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args) -> None:
        pass


@contextmanager
def chat_server(way_of: Callable[[str], str]) -> Iterator[ChatServer]:
    """The server, in a thread, for the length of the block."""
    with ChatServer(way_of) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """As `trtllm-serve MODEL --port N --extra_llm_api_options FILE …`."""
    given = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    options = json.loads(Path(given["--extra_llm_api_options"]).read_text())
    assert given["--backend"] == "pytorch"
    assert given["--tool_parser"] == "qwen3"
    section = options["speculative_config"].get("structured_commit")
    if section is not None:
        print(f"structured_commit active: policy={section['policy']}", flush=True)
    loses = section is None
    with ChatServer(lambda text: "nothing" if loses and "weather" in text else "good", int(given["--port"])) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
