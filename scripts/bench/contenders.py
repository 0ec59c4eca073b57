"""What is timed on one batch: the stage, the peers, acceptance itself, and what one would write first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import llguidance
import llguidance.torch
import torch
import xgrammar

from scripts.demo.conversations import TOOLS
from structured_commit import CommitConfig, CommitStage
from structured_commit.reference import rejection_reference

from .workload import Batch, World

Call = Callable[[], object]

HARMONY_LARK = r"""
%llguidance {}
start: message (<|end|> <|start|> "assistant" message)*
message: thought | answer | call
thought: <|channel|> "analysis" <|message|> TEXT
answer: <|channel|> "final" <|message|> TEXT
call: <|channel|> "commentary to=functions." NAME <|constrain|> "json" <|message|> arguments
    | " to=functions." NAME <|channel|> "commentary json" <|message|> arguments
arguments: %json {"type": "object"}
TEXT: /(.|\n)*/
NAME: /[a-z_]+/
"""


def stage_call(world: World, batch: Batch, policy: str = "repair", **config: object) -> Call:
    """One commit. Putting the states back afterwards is timed too: a request moves on, a benchmark does not."""
    config = CommitConfig(policy=policy, max_repairs=2**31 - 1, **config)
    size, width = batch.tokens.shape
    stage = CommitStage(world.table, config, num_slots=size, max_window=width, device=world.device)

    def call() -> None:
        stage.state[:size].copy_(batch.states)
        stage.commit(batch.tokens, batch.lengths, batch.slots, probs=world.probs, source_rows=batch.source_rows)

    return call


def host_call(world: World, batch: Batch) -> Call:
    """A loop over rows and tokens in Python, after the tokens were fetched; looks, and repairs nothing."""
    host, states = world.table.host, batch.states.tolist()

    def call() -> list[int | None]:
        windows = batch.tokens.tolist()
        return [host.walk(window, state).illegal_at for window, state in zip(windows, states, strict=True)]

    return call


class XGrammar:
    """xgrammar with its own tag for Harmony, and its batch interface with as many threads as there are cores, or one,
    whichever is faster here: `threads` of `batch_fill_next_token_bitmask`."""

    def __init__(self, world: World) -> None:
        vocabulary = world.chat.vocabulary
        self.size = vocabulary.size
        info = xgrammar.TokenizerInfo(
            spelled(world), xgrammar.VocabType.RAW, vocab_size=self.size, stop_token_ids=world.terminals
        )
        names = [{"type": "function", "function": {"name": t, "parameters": {"type": "object"}}} for t in sorted(TOOLS)]
        tag = xgrammar.get_model_structural_tag("harmony", names, reasoning=True)
        self.compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_structural_tag(
            json.dumps(tag.model_dump())
        )

    def calls(self, batch: Batch) -> dict[str, Call]:
        matchers = [xgrammar.GrammarMatcher(self.compiled) for _ in batch.rows]
        for matcher, row in zip(matchers, batch.rows, strict=True):
            if not all(matcher.accept_token(token) for token in row.before):
                raise ValueError(f"xgrammar refuses {row.before}")
        columns = [list(column) for column in zip(*(row.window for row in batch.rows), strict=True)]
        bitmask = xgrammar.allocate_token_bitmask(len(matchers), self.size)
        drafts = len(columns) - 1

        def masks(batched: xgrammar.BatchGrammarMatcher) -> Call:
            def call() -> None:
                for column in columns[:-1]:
                    batched.batch_fill_next_token_bitmask(matchers, bitmask)
                    _all(batched.batch_accept_token(matchers, column))
                batched.batch_fill_next_token_bitmask(matchers, bitmask)
                if drafts:
                    batched.batch_rollback(matchers, drafts)

            return call

        def accept() -> None:
            for column in columns:
                _all(one.batch_accept_token(matchers, column))
            one.batch_rollback(matchers, len(columns))

        one, many = xgrammar.BatchGrammarMatcher(1), xgrammar.BatchGrammarMatcher("auto")
        return {
            "xgrammar masks, 1 thread": masks(one),
            "xgrammar masks, threads": masks(many),
            "xgrammar accept": accept,
        }


class LLGuidance:
    """llguidance with the same language as a Lark grammar, its executor (the call for draft tokens: all masks of a
    window at once, on its own threads) and its default slices."""

    def __init__(self, world: World) -> None:
        vocabulary = world.chat.vocabulary
        self.size = vocabulary.size
        self.tokenizer = ll_tokenizer(
            spelled(world), list(vocabulary.controls.values()), world.terminals, world.chat.encode
        )
        self.grammar = llguidance.LLMatcher(self.tokenizer, HARMONY_LARK)
        self.executor = llguidance.LLExecutor()

    def calls(self, batch: Batch) -> dict[str, Call]:
        matchers = [self.grammar.deep_copy() for _ in batch.rows]
        for matcher, row in zip(matchers, batch.rows, strict=True):
            if not matcher.consume_tokens(row.before):
                raise ValueError(f"llguidance refuses {row.before}: {matcher.get_error()}")
        width = batch.width
        bitmask = llguidance.torch.allocate_token_bitmask(len(matchers) * width, self.size)
        windows = [row.window for row in batch.rows]
        work = [(m, i * width, w[:-1]) for i, (m, w) in enumerate(zip(matchers, windows, strict=True))]

        def masks() -> None:
            llguidance.torch.fill_next_token_bitmask_par_with_draft_tokens(self.executor, work, bitmask)

        def accept() -> None:
            _all([m.consume_tokens(w) for m, w in zip(matchers, windows, strict=True)])
            for matcher in matchers:
                matcher.rollback(width)

        return {"llguidance masks": masks, "llguidance accept": accept}


def acceptance_call(world: World, batch: Batch) -> tuple[str, Call]:
    """Acceptance on the same batch, and its name: flashinfer's kernel behind a softmax where there is one, else the
    reference rejection rule alone."""
    rows = world.probs[batch.source_rows]
    drafts, draft_probs = batch.tokens[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if world.device == "cpu":
        return "rejection rule (reference)", lambda: rejection_reference(draft_probs, drafts, rows, 1, 0)
    from flashinfer.sampling import chain_speculative_sampling

    logits = rows.clamp(min=1e-30).log()
    return "softmax and flashinfer", lambda: chain_speculative_sampling(
        draft_probs, drafts, torch.softmax(logits, dim=-1), seed=1, offset=0
    )


def spelled(world: World) -> list[bytes]:
    """The bytes of each token, control tokens by name."""
    vocabulary = world.chat.vocabulary
    texts = [vocabulary.texts.get(i, b"") for i in range(vocabulary.size)]
    for name, token in vocabulary.controls.items():
        texts[token] = name.encode()
    return texts


def ll_tokenizer(
    texts: list[bytes], special: list[int], ends: list[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """llguidance's view of a vocabulary."""

    @dataclasses.dataclass
    class Plain:
        tokens: list[bytes]
        special_token_ids: list[int]
        eos_token_id: int
        bos_token_id: int | None = None

        def __call__(self, text: str) -> list[int]:
            return encode(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Plain(texts, special, ends[0])), eos_token=ends)


def _all(accepted: list[bool]) -> None:
    if not all(accepted):
        raise ValueError("a peer refused a token of a turn that it should accept")
