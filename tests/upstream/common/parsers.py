"""Tool parsers of the doubles: SGLang's detectors, made when first asked for, and one that raises (serving.md §4)."""

from __future__ import annotations

from collections.abc import Callable

from scripts.sglang_parsers import sglang_module


def _detector(module: str, name: str) -> Callable[[], type]:
    def parser_class() -> type:
        return _with_finish(getattr(sglang_module(f"function_call.{module}"), name))

    return parser_class


def _with_finish(base: type) -> type:
    """Upstream's later base has an empty `finish`."""
    result = sglang_module("function_call.core_types").StreamingParseResult
    return type(base.__name__, (base,), {"finish": lambda self, tools: result()})


def _raising() -> type:
    """Hermes, but it raises where the text holds the word BOOM."""

    class Raising(_detector("qwen25_detector", "Qwen25Detector")()):
        def parse_streaming_increment(self, new_text, tools):
            if "BOOM" in new_text:
                raise RuntimeError("BOOM")
            return super().parse_streaming_increment(new_text, tools)

    return Raising


PARSERS: dict[str, Callable[[], type]] = {
    "qwen3": _detector("qwen25_detector", "Qwen25Detector"),
    "qwen3_coder": _detector("qwen3_coder_detector", "Qwen3CoderDetector"),
    "raising": _raising,
}
