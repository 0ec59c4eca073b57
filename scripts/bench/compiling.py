"""What it costs to make each family's structure ready: time and memory, ours and the peers'.

xgrammar compiles its own tag for the family. llguidance has none; it is given the tools of that tag as its own
structural tags, begin, JSON body and end. Both over the same vocabulary: o200k with the family's control tokens.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import llguidance
import xgrammar

from scripts.vocabularies import family_vocabulary
from structured_commit import StructureTable, builtin_format, compile_format

from .contenders import ll_tokenizer

XGRAMMAR_FAMILY = {
    "harmony": "harmony",
    "hermes": "qwen_3",
    "qwen3_coder": "qwen_3_coder",
    "deepseek_v3_1": "deepseek_v3_1",
    "kimi_k2": "kimi",
    "glm_4_7": "glm_4_7",
    "gemma_4": "gemma_4",
    "llama_3": "llama",
    "minimax_m2": "minimax",
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("find", "write")]


@dataclass(frozen=True)
class Compiled:
    """One family.

    Attributes: seconds and bytes of the stage's table, seconds to load it from a file, the same of the peers;
        None where a peer knows no such family. llguidance's bytes are what the process grew by, for want of a figure.
    """

    format: str
    seconds: float
    bytes: int
    load_seconds: float
    xgrammar_seconds: float | None = None
    xgrammar_bytes: int | None = None
    llguidance_seconds: float | None = None
    llguidance_bytes: int | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(name: str) -> Compiled:
    """Compile one family everywhere. What is done once per vocabulary is not counted for anyone."""
    chat, form = family_vocabulary(name), builtin_format(name)
    vocabulary = chat.vocabulary
    vocabulary.digest  # noqa: B018 - once per vocabulary
    seconds, table = _timed(lambda: compile_format(form, vocabulary))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table.safetensors"
        table.save(path)
        load_seconds, _ = _timed(lambda: StructureTable.load(path))
    ours = (name, seconds, table.nbytes, load_seconds)
    family = XGRAMMAR_FAMILY.get(name)
    if family is None:
        return Compiled(*ours)
    texts = [vocabulary.texts.get(i, b"") for i in range(vocabulary.size)]
    for spelling, token in vocabulary.controls.items():
        texts[token] = spelling.encode()
    ends = [vocabulary.controls[t] for t in form.terminals if t in vocabulary.controls]
    tag = xgrammar.get_model_structural_tag(family, TOOLS, reasoning="auto" if name == "harmony" else "disabled")
    written = tag.model_dump()
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=ends)
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    xg_seconds, compiled = _timed(lambda: compiler.compile_structural_tag(json.dumps(written)))
    grammar = _ll_grammar(written)
    if grammar is None:
        return Compiled(*ours, xg_seconds, compiled.memory_size_bytes)
    tokenizer = ll_tokenizer(texts, list(vocabulary.controls.values()), ends, chat.encode)
    gc.collect()
    before = _resident()
    ll_seconds, matcher = _timed(lambda: llguidance.LLMatcher(tokenizer, grammar))
    if matcher.is_error():
        raise ValueError(f"llguidance refuses the tags of {name}: {matcher.get_error()}")
    matcher.compute_bitmask()  # it compiles lazily; its first mask is part of being ready
    return Compiled(*ours, xg_seconds, compiled.memory_size_bytes, ll_seconds, max(_resident() - before, 0))


def _ll_grammar(written: dict) -> str | None:
    """None where the family's tags hold no plain JSON body."""
    tags = []
    for tag in _tags(written):
        begin = tag["begin"] if isinstance(tag["begin"], str) else tag["begin"][0]
        end = tag["end"] if isinstance(tag["end"], str) else tag["end"][0]
        tags.append(llguidance.StructTag(trigger=begin[:1], begin=begin, grammar={"type": "object"}, end=end))
    return llguidance.StructTag.to_grammar(tags, assume_special=False) if tags else None


def _tags(node: object) -> Iterator[dict]:
    """The tags with a JSON body, wherever they stand in xgrammar's description."""
    if isinstance(node, dict):
        content = node.get("content")
        if node.get("type") == "tag" and isinstance(content, dict) and content.get("type") == "json_schema":
            yield node
        else:
            for value in node.values():
                yield from _tags(value)
    elif isinstance(node, list):
        for value in node:
            yield from _tags(value)


def _timed(make):
    began = time.perf_counter()
    made = make()
    return time.perf_counter() - began, made


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
