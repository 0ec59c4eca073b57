"""The ten parsers, each with its format, its tokenizer and its reasoning parser, and how a server uses them.

`deliver` is TensorRT-LLM's way of a stream, less the HTTP: text deltas pass the reasoning parser, its content passes
the tool parser, and at the end `finish` is asked; with or without the splitter before the tool parser.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from scripts.sglang_parsers import sglang_module
from scripts.tables import compiled, compiled_on
from scripts.vocabularies import ChatVocabulary
from structured_commit import StructureTable, builtin_format
from structured_commit.serving.delivery import AlignedDelivery, Splitter

logging.getLogger("sglang").setLevel(logging.CRITICAL)  # it reports every call that it drops

TYPES = {"x": "integer", "s": "string", "o": "object", "a": "array", "b": "boolean"}

Call = tuple[str, object]
"""A call as a client reads it: its name, its decoded arguments (or their text, where they are no JSON)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a client has of a turn."""

    calls: tuple[Call, ...]
    text: str


@dataclass(frozen=True)
class Family:
    """One parser.

    Attributes:
        parser: `module:Class` under `sglang.srt.function_call`.
        format: the built-in format it reads.
        reasoning: class under `sglang.srt.parser.reasoning_parser`, or None where the tool parser sees everything.
        tokenizer: of splintr's, and control tokens to name in it; None = o200k with the format's control tokens.
    """

    parser: str
    format: str
    reasoning: str | None
    tokenizer: tuple[str, ...] | None

    @cached_property
    def _compiled(self) -> tuple[StructureTable, ChatVocabulary]:
        return compiled_on(self.format, *self.tokenizer) if self.tokenizer else compiled(self.format)

    @cached_property
    def splitter(self) -> Splitter:
        """Of the format over this tokenizer."""
        return Splitter(self._compiled[0], builtin_format(self.format).cuts)

    def tokens(self, text: str) -> list[bytes]:
        """The text of each token; a control token is its spelling."""
        vocabulary = self._compiled[1].vocabulary
        names = {token: name for name, token in vocabulary.controls.items()}
        ids = self._compiled[1].encode(text)
        return [names[i].encode() if i in names else vocabulary.texts[i] for i in ids]

    def tool_parser(self):
        """A new one, as a factory makes it for each request."""
        module, name = self.parser.split(":")
        return getattr(sglang_module(f"function_call.{module}"), name)()

    def reasoning_parser(self):
        """A new one, or None."""
        if self.reasoning is None:
            return None
        return getattr(sglang_module("parser.reasoning_parser"), self.reasoning)(force_reasoning=False)

    def at_once(self, text: str) -> Reading:
        """The unstreamed answer."""
        reasoning = self.reasoning_parser()
        if reasoning is not None:
            text = reasoning.detect_and_parse(text).normal_text
        found = self.tool_parser().detect_and_parse(text, tools())
        return Reading(tuple((c.name, _decoded(c.parameters)) for c in found.calls), found.normal_text)


FAMILIES = {
    "gemma4": Family("gemma4_detector:Gemma4Detector", "gemma_4", "Gemma4Detector", None),
    "qwen25": Family("qwen25_detector:Qwen25Detector", "hermes", "Qwen3Detector", ("qwen3",)),
    "qwen3_coder": Family("qwen3_coder_detector:Qwen3CoderDetector", "qwen3_coder", "Qwen3Detector", ("qwen3",)),
    "deepseekv31": Family(
        "deepseekv31_detector:DeepSeekV31Detector", "deepseek_v3_1", "DeepSeekR1Detector", ("deepseek_v3", "｜DSML｜")
    ),
    "kimik2": Family("kimik2_detector:KimiK2Detector", "kimi_k2", "KimiK2Detector", ("kimi_k2",)),
    "glm47": Family("glm47_moe_detector:Glm47MoeDetector", "glm_4_7", "Glm45Detector", ("glm4",)),
    "llama32": Family("llama32_detector:Llama32Detector", "llama_3", None, ("llama3",)),
    "mistral": Family("mistral_detector:MistralDetector", "mistral", "MistralDetector", None),
    "minimax": Family("minimax_m2:MinimaxM2Detector", "minimax_m2", "Qwen3Detector", None),
    "gpt_oss": Family("gpt_oss_detector:GptOssDetector", "harmony", None, None),
}


@cache
def tools() -> list:
    """Three tools with a parameter of each type."""
    protocol = sglang_module("entrypoints.openai.protocol")
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
    names = ("f", "g", "get_weather")
    return [protocol.Tool(type="function", function=protocol.Function(name=n, parameters=schema)) for n in names]


def deltas_of(tokens: Sequence[bytes], cuts: Iterable[int]) -> list[str]:
    """The text deltas when tokens arrive in runs that end at `cuts` and at the end.

    As an incremental detokeniser gives them: half a character is held back until it is whole, so a delta can be empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deltas, at = [], 0
    for cut in [*cuts, len(tokens)]:
        deltas.append(decoder.decode(b"".join(tokens[at:cut])))
        at = cut
    deltas[-1] += decoder.decode(b"", final=True)
    return deltas


def deliver(family: Family, deltas: Sequence[str], aligned: bool) -> Reading:
    """What a client reads of a stream."""
    parser, reasoning = family.tool_parser(), family.reasoning_parser()
    delivery = AlignedDelivery(family.splitter) if aligned else None
    texts, items = [], []
    for i, delta in enumerate(deltas):
        last = i + 1 == len(deltas)
        if reasoning is not None:
            delta = reasoning.parse_streaming_increment(delta).normal_text
            if last:
                delta += reasoning.finish().normal_text
        results = [
            delivery.parse(parser, delta, tools(), last)
            if delivery
            else parser.parse_streaming_increment(delta, tools())
        ]
        if last:
            results.append(parser.finish(tools()))
        for result in results:
            texts.append(result.normal_text)
            items += result.calls
    return Reading(read_calls(items), "".join(texts))


def token_by_token(family: Family, texts: Iterable[str]) -> Reading:
    """What the parser makes of texts, each in its own tokens, that come one token at a time, without the splitter."""
    tokens = [token for text in texts for token in family.tokens(text)]
    return deliver(family, deltas_of(tokens, range(1, len(tokens))), aligned=False)


def read_calls(items: Iterable) -> tuple[Call, ...]:
    """As the server and a client do: a named item mints an id, arguments of the same index are concatenated to it."""
    calls: list[list[str]] = []
    of_index: dict[int, list[str]] = {}
    for item in items:
        if item.name or item.tool_index not in of_index:
            of_index[item.tool_index] = [item.name or "", ""]
            calls.append(of_index[item.tool_index])
        of_index[item.tool_index][1] += item.parameters or ""
    return tuple((name, _decoded(arguments)) for name, arguments in calls)


def _decoded(arguments: str) -> object:
    try:
        return _frozen(json.loads(arguments))
    except ValueError:
        return arguments


def _frozen(value: object) -> object:
    """Decoded JSON as something that can be compared and hashed, told apart from its text."""
    return json.dumps(value, sort_keys=True), "json"
