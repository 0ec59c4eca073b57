"""Drives the serving side of a double: a checkpoint over the real o200k vocabulary, replies, and what a client gets."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.vocabularies import ChatVocabulary, family_vocabulary

from .common.loading import Tree
from .common.protocol import ChatCompletionToolsParam
from .common.results import Output, Result, responses

TOOLS = [ChatCompletionToolsParam(function={"name": n, "parameters": {"type": "object"}}) for n in ("f", "g")]
STOPS = {"harmony": ("<|return|>", "<|call|>"), "hermes": ()}
END = {"harmony": None, "hermes": "<|im_end|>"}
_IDS = re.compile(r"(call_|chatcmpl-tool-|chatcmpl-)[0-9a-f]{8,32}")
_CREATED = re.compile(r'"created": ?\d+')


@dataclass(frozen=True)
class Served:
    """A checkpoint folder, its format and its vocabulary."""

    folder: Path
    format: str
    chat: ChatVocabulary

    @classmethod
    def write(cls, folder: Path, name: str) -> Served:
        chat = family_vocabulary(name)
        vocabulary = chat.vocabulary
        lines = (b"%s %d" % (base64.b64encode(text), token) for token, text in vocabulary.texts.items())
        (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
        added = {str(token): {"content": text} for text, token in vocabulary.controls.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        config = {"model_type": "gpt_oss" if name == "harmony" else "qwen3", "vocab_size": vocabulary.size}
        (folder / "config.json").write_text(json.dumps(config))
        return cls(folder, name, chat)

    def section(self, policy: str = "observe", **more: Any) -> dict[str, Any]:
        """The `structured_commit` section."""
        return {"policy": policy, "format": self.format, "cache_dir": str(self.folder / "tables"), **more}

    def text(self, token_ids: Sequence[int]) -> str:
        """What the detokeniser gives: terminals are special and skipped, other control tokens are not."""
        shown = self.chat.vocabulary
        names = {t: n.encode() for n, t in shown.controls.items() if not n.startswith("<|")}
        return b"".join(names.get(t) or shown.texts.get(t, b"") for t in token_ids).decode("utf-8", "replace")

    def result(self, request_id: int = 7, prompt: bool = True) -> Result:
        """A request whose prompt ends behind a turn opener."""
        opener = "<|start|>assistant" if self.format == "harmony" else "<|im_start|>assistant\n"
        return Result(request_id, [Output()], self.chat.encode(opener) if prompt else None)

    def responses(self, text: str, step: int, reason: str = "stop", **more: Any):
        """A request's responses, `step` tokens each."""
        ids = self.chat.encode(text)
        steps = [ids[i : i + step] for i in range(0, len(ids), step)]
        controls = self.chat.vocabulary.controls
        stop_ids = frozenset(controls[n] for n in STOPS[self.format])
        end = END[self.format]
        return responses(self.result(**more), steps, self.text, reason, stop_ids, controls[end] if end else None)


@dataclass
class Answer:
    """What a client has once a reply is over."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    report: dict | None = None
    raw: list[str] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        (only,) = self.finish_reasons
        return only

    @property
    def call_list(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, (name, arguments) in sorted(self.calls.items())]

    def add(self, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or {}
        self.content += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for i, call in enumerate(message.get("tool_calls") or ()):
            entry = self.calls.setdefault(call.get("index", i), ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            self.finish_reasons.append(choice["finish_reason"])
        self.report = choice.get("structured_commit") or self.report

    @classmethod
    def of_chunks(cls, chunks: Sequence[str]) -> Answer:
        answer = cls(raw=[without_ids(c) for c in chunks])
        for chunk in chunks:
            payload = chunk.removeprefix("data: ").strip()
            if payload != "[DONE]":
                for choice in json.loads(payload)["choices"]:
                    answer.add(choice)
        return answer

    @classmethod
    def of_reply(cls, reply: Any) -> Answer:
        data = reply.model_dump()
        answer = cls(raw=[without_ids(json.dumps(data))])
        for choice in data["choices"]:
            answer.add(choice)
        return answer


def without_ids(text: str) -> str:
    """Text of a reply with every minted id and time replaced."""
    return _CREATED.sub('"created":0', _IDS.sub(r"\1ID", text))


class Server:
    """A double that serves a checkpoint; `section` is the `structured_commit` section, None = not configured."""

    def __init__(self, tree: Tree, served: Served, section: Any = None, workers: int = 0, collector: bool = False):
        self.tree, self.served = tree, served
        self.handlers = tree.load("serve.postprocess_handlers")
        self.executor = SimpleNamespace(create=lambda *args, **kwargs: self)
        if section is not None:  # a table is loaded once a tree, not once a test
            serving = self.overlay("serving.process")
            if not hasattr(serving.load_structure, "cache_info"):
                serving.load_structure = cache(serving.load_structure)
        spec = None if section is None else SimpleNamespace(structured_commit=section)
        args = SimpleNamespace(speculative_config=spec, num_postprocess_workers=workers, model=str(served.folder))
        with tree.active():
            tree.load("llmapi.llm")._TorchLLM(args, served.folder, self.executor)
        labels = {"model_name": "m", "engine_type": "trtllm"}
        self.collector = tree.load("metrics.collector").MetricsCollector(labels) if collector else None
        self.http = tree.load("serve.openai_server").OpenAIServer(self, self.collector, bool(workers))
        self.stats: list[dict] = []

    async def get_stats_async(self, timeout: float):
        while self.stats:
            yield self.stats.pop(0)

    def overlay(self, name: str):
        """A module of the overlay inside this tree."""
        return self.tree.load(f"_torch.speculative.structured_commit.{name}")

    def args(self, parser: str | None = "qwen3", tools: bool = True, tool_choice: str = "auto"):
        """Fresh arguments of a request."""
        given = {"tools": TOOLS if tools else None, "tool_choice": tool_choice, "num_prompt_tokens": 3}
        if self.served.format == "harmony":
            return self.handlers.ChatCompletionPostprocArgs(**given)
        return self.handlers.ChatPostprocArgs(tool_parser=parser, **given)

    def chunks(
        self, text: str, step: int, reason: str = "stop", stop_after: int | None = None, **more: Any
    ) -> list[str]:
        """A streamed reply as it leaves the route; `stop_after` responses the client is gone."""
        name = "chat_harmony_streaming" if self.served.format == "harmony" else "chat_stream"
        request = {k: more.pop(k) for k in ("request_id", "prompt") if k in more}
        args = self.args(**more)

        async def promise():
            for number, response in enumerate(self.served.responses(text, step, reason, **request)):
                if number == stop_after:
                    return
                yield response

        async def read():
            processor = getattr(self.handlers, f"{name}_post_processor")
            return [chunk async for chunk in self.http.stream(promise(), processor, args)]

        with self.tree.active():
            return asyncio.run(read())

    def stream(self, text: str, step: int = 4, reason: str = "stop", **more: Any) -> Answer:
        return Answer.of_chunks(self.chunks(text, step, reason, **more))

    def whole(self, text: str, step: int = 4, reason: str = "stop", **more: Any) -> Answer:
        return Answer.of_reply(self.reply(text, step, reason, **more))

    def reply(self, text: str, step: int = 4, reason: str = "stop", **more: Any):
        """A whole reply as the response model."""
        name = "chat_harmony" if self.served.format == "harmony" else "chat_response"
        request = {k: more.pop(k) for k in ("request_id", "prompt") if k in more}
        args = self.args(**more)

        async def promise():
            for response in self.served.responses(text, step, reason, **request):
                yield response

        async def read():
            return await self.http.whole(promise(), getattr(self.handlers, f"{name}_post_processor"), args)

        with self.tree.active():
            return asyncio.run(read())
