"""xgrammar's structural tags as peers: what one lets a model say, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache

import torch
import xgrammar
from torch import Tensor

from scripts.vocabularies import ChatVocabulary
from structured_commit import StructureTable

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}


class Tag:
    """A built-in tag, for tools `f` and `g`, over a vocabulary."""

    def __init__(self, family: str, chat: ChatVocabulary, terminals: tuple[str, ...], reasoning: str) -> None:
        vocabulary = chat.vocabulary
        spelled = [vocabulary.texts.get(i, b"") for i in range(vocabulary.size)]
        for name, token in vocabulary.controls.items():
            spelled[token] = name.encode()
        self.chat = chat
        self.size = vocabulary.size
        self.terminals = [vocabulary.controls[name] for name in terminals]
        info = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.RAW, vocab_size=self.size, stop_token_ids=self.terminals
        )
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
        tag = xgrammar.get_model_structural_tag(family, tools, reasoning=reasoning)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._compiled = compiler.compile_structural_tag(json.dumps(tag.model_dump()))

    def matcher(self) -> xgrammar.GrammarMatcher:
        """At the start of a turn."""
        return xgrammar.GrammarMatcher(self._compiled)

    def accepts(self, ids: list[int]) -> bool:
        """Whether `ids`, without a terminal, is a whole turn."""
        matcher = self.matcher()
        return all(matcher.accept_token(i) for i in ids) and bool(self.allowed(matcher)[self.terminals[0]])

    def accepted(self, texts: Mapping[str, str]) -> set[str]:
        """The names of those `texts` that are a whole turn, with their terminal or without."""
        found = set()
        for name, text in texts.items():
            ids = self.chat.encode(text.replace("⏎", "\n"))
            if ids and ids[-1] in self.terminals:
                ids.pop()
            if self.accepts(ids):
                found.add(name)
        return found

    def allowed(self, matcher: xgrammar.GrammarMatcher) -> Tensor:
        """[V] bool: the tokens that may follow."""
        mask = xgrammar.allocate_token_bitmask(1, self.size)
        matcher.fill_next_token_bitmask(mask)
        bits = (mask[0][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[: self.size].bool()


def allowed_only_by_the_tag(tag: Tag, table: StructureTable, text: str, state: int) -> Iterator[tuple[int, list[int]]]:
    """(state of the table, tokens that the tag allows there and the table refuses) along `text`.

    All tokens of the vocabulary are compared at each place. Ends where the tag refuses a token.
    """
    matcher, classes = tag.matcher(), table.token_class.long()
    for token in [*tag.chat.encode(text.replace("⏎", "\n")), None]:
        legal = table.transitions[state][classes] >= 0
        yield state, (tag.allowed(matcher) & ~legal).nonzero().flatten().tolist()
        if token is None or not matcher.accept_token(token):
            return
        state = table.host.step(state, token)
        assert state > 0, f"{tag.chat.spell(token)!r} is refused though the tag accepts it"


@cache
def tag_of(family: str, chat: ChatVocabulary, terminals: tuple[str, ...], reasoning: str) -> Tag:
    """One tag is compiled once."""
    return Tag(family, chat, terminals, reasoning)
