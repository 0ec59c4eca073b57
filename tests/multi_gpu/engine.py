"""A small engine over tables: requests join, draft, are verified, committed and leave, all through the stage's hooks.

Every number that goes into a matrix product is a multiple of 1/64 and small, so products are exact however they are
sharded: one rank alone and any number of ranks compute the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import Tensor

from structured_commit import hooks, rejection_reference, strict_reference
from structured_commit.repair import draw, filtered_probs, legal_weights
from structured_commit.runtime import RUNTIME
from tests.upstream.common.requests import LlmRequest, LlmRequestState
from tests.upstream.toy import Checkpoint

from .world import World, nothing_sent

DRAFTS = 3
WIDTH = DRAFTS + 1
MAX_ROWS = 8
MAX_NEW_TOKENS = 24
TEMPERATURE, TOP_K, TOP_P = 0.9, 6, 0.95
_FEATURES, _ALIKE = 4, 0.5
_SIXTY_FOURTH = 64.0

Head = Callable[[Tensor], Tensor]  # hidden states [B, H] to draft logits [B, V]


class Model:
    """A target that is a table, and the hidden states and draft head of a drafter that often agrees with it."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self._table, self._rows = checkpoint.target(), {}
        self.used = [t for t in range(checkpoint.vocab_size) if self._table((0,))[t] > -40]
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(checkpoint.vocab_size, _FEATURES, generator=generator) * _ALIKE
        copied = torch.zeros(checkpoint.vocab_size, len(self.used))
        copied[self.used, range(len(self.used))] = 1.0
        bias = torch.full((checkpoint.vocab_size, 1), -50.0)
        bias[self.used] = 0.0
        self.head = _exact(torch.cat([copied, noise, bias], dim=1)).to(device)  # [V, H]

    def logits(self, contexts: Iterable[tuple[int, ...]]) -> Tensor:
        """[N, V] float32."""
        return torch.stack([self._row(c)[0] for c in contexts]).to(self.device)

    def hidden(self, contexts: Iterable[tuple[int, ...]]) -> Tensor:
        """[N, H] float32, N may be 0."""
        rows = [self._row(c)[1] for c in contexts]
        return torch.stack(rows).to(self.device) if rows else self.head.new_zeros(0, self.head.shape[1])

    def _row(self, context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        key = context[-3:]
        if key not in self._rows:
            logits = _exact(self._table(key))
            generator = torch.Generator().manual_seed(hash(key) % (1 << 31))  # a tuple of ints hashes alike everywhere
            noise = _exact(torch.randn(_FEATURES, generator=generator))
            self._rows[key] = logits, torch.cat([logits[self.used], noise, torch.ones(1)])
        return self._rows[key]


def whole_head(model: Model) -> Head:
    """The draft head of a rank that is alone."""
    return lambda hidden: hidden @ model.head.T


def sharded_head(model: Model, world: World, counted: list[int]) -> Head:
    """A draft head of which each rank holds a part of the vocabulary: one gather a draft, always of the same size."""
    whole = _gathered_head(model, world, counted)
    return lambda hidden: whole(_padded(hidden))[: len(hidden)]


def stacked_head(model: Model, world: World, counted: list[int]) -> Head:
    """LM-head tensor parallelism inside attention data parallelism: hidden states are padded, logits come stacked over
    the group, and each rank takes its own rows. Every rank takes part, with or without rows."""
    whole = _gathered_head(model, world, counted)

    def logits(hidden: Tensor) -> Tensor:
        counted[0] += 1
        stacked = whole(world.gather(_padded(hidden)).flatten(0, 1))
        return stacked[world.rank * MAX_ROWS :][: len(hidden)]

    return logits


def _gathered_head(model: Model, world: World, counted: list[int]) -> Head:
    vocab = len(model.head)
    padded = torch.nn.functional.pad(model.head, (0, 0, 0, -vocab % world.size))
    shard = padded.chunk(world.size)[world.rank]

    def logits(hidden: Tensor) -> Tensor:
        counted[0] += 1
        return torch.cat(list(world.gather(hidden @ shard.T)), dim=1)[:, :vocab]

    return logits


def _padded(hidden: Tensor) -> Tensor:
    return torch.nn.functional.pad(hidden, (0, 0, 0, MAX_ROWS - len(hidden)))


class Engine:
    """Decodes requests, K drafts a step, by rejection sampling or by strict acceptance of the target's samples.

    Attributes:
        running: requests in row order; contexts come first in a step.
        done: finished requests.
        digest: of every decision so far, and of the stage's state after each step.
    """

    def __init__(self, model: Model, head: Head, acceptance: str) -> None:
        self.model, self.head, self.acceptance = model, head, acceptance
        self.running: list[LlmRequest] = []
        self.done: list[LlmRequest] = []
        self.steps = 0
        self.target = model.logits
        self.before_commit: Callable[[list[LlmRequest], Tensor, Tensor], None] = lambda rows, tokens, counts: None
        self._draft_probs: dict[int, Tensor] = {}
        self._hash = hashlib.sha256()
        self._worker = SimpleNamespace(force_num_accepted_tokens=0)
        if RUNTIME.stage is not None:
            self._record_decisions()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def join(self, request: LlmRequest) -> None:
        """Give the request the lowest free slot; its next step is its context."""
        taken = {r.py_seq_slot for r in self.running}
        request.py_seq_slot = next(s for s in range(MAX_ROWS) if s not in taken)
        request.context_chunk_size = request.prompt_len
        self.running.append(request)

    def step(self, dummies: int = 0) -> None:
        """One step of all running requests, followed by so many rows that are nobody's."""
        contexts = [r for r in self.running if r.is_context_init_state]
        generation = [r for r in self.running if not r.is_context_init_state]
        rows = [*contexts, *generation, *(_dummy() for _ in range(dummies))]
        metadata = self._metadata(len(contexts), len(rows))
        with nothing_sent() if RUNTIME.rank_check is None else contextlib.nullcontext():
            hooks.bind(metadata, rows)
        if rows:
            tokens, counts, commit = self._accept(rows, len(contexts), metadata)
            self.before_commit(rows, tokens, counts)
            with nothing_sent():
                commit()
            for i, request in enumerate(rows[: len(self.running)]):
                self._take(request, tokens[i, : counts[i]].tolist())
        self._note_state()
        self.done += [r for r in self.running if r.is_finished]
        self.running = [r for r in self.running if not r.is_finished]
        self._draft()
        self.steps += 1

    def _accept(self, rows, num_contexts: int, metadata):
        """Acceptance as an engine does it, contexts first; returns what a commit hook is given, and that hook."""
        generation = rows[num_contexts:]
        asked = [tuple(r.tokens) for r in rows[:num_contexts]]
        asked += [(*r.tokens, *r.py_draft_tokens[:j]) for r in generation for j in range(WIDTH)]
        logits = self.target(asked)
        tokens = torch.full((len(rows), WIDTH), -1, dtype=torch.int32, device=logits.device)
        counts = torch.ones(len(rows), dtype=torch.int32, device=logits.device)
        tokens[:num_contexts, 0] = self._sample(logits[:num_contexts]).int()
        drafts = torch.tensor([r.py_draft_tokens for r in generation], dtype=torch.int32, device=logits.device)
        target_probs = None
        if generation and self.acceptance == "rejection":
            target_probs = logits[num_contexts:].softmax(-1).view(len(generation), WIDTH, -1)
            draft_probs = torch.stack([self._probs_of(r) for r in generation])
            window = rejection_reference(draft_probs, drafts, target_probs, seed=11, offset=self.steps * 64)
            tokens[num_contexts:], counts[num_contexts:] = window.output_tokens, window.emitted + 1
        elif generation:
            sampled = self._sample(logits[num_contexts:]).view(len(generation), WIDTH)
            window = strict_reference(drafts, sampled)
            tokens[num_contexts:], counts[num_contexts:] = window

        def commit() -> None:
            given = (self._worker, tokens, counts, logits, num_contexts, len(rows), metadata)
            if self.acceptance == "rejection":
                hooks.commit_rejection(*given, target_probs)
            else:
                hooks.commit_strict(*given)

        return tokens, counts, commit

    def _sample(self, logits: Tensor) -> Tensor:
        """[N] int64: the target's own choice, from random words that depend on the step alone."""
        if self.acceptance == "greedy":
            return logits.argmax(-1)
        generator = torch.Generator().manual_seed(1_000 + self.steps)
        words = torch.randint(1 << 32, (len(logits), 2), generator=generator).to(logits.device)
        filled = torch.full((len(logits),), 1.0, device=logits.device)
        probs = logits.softmax(-1)
        if self.acceptance == "strict":
            probs = filtered_probs(logits, filled * TEMPERATURE, (filled * TOP_K).int(), filled * TOP_P)
        return draw(legal_weights(probs, torch.ones_like(probs, dtype=torch.bool)), words)

    def _metadata(self, num_contexts: int, num_rows: int) -> SimpleNamespace:
        count = num_contexts + (num_rows - num_contexts) * WIDTH
        filled = torch.full((count,), 1.0, device=self.model.device)
        sampling = {"temperatures": filled, "top_ks": None, "top_ps": None}
        if self.acceptance == "strict":
            sampling = {
                "temperatures": filled * TEMPERATURE,
                "top_ks": (filled * TOP_K).int(),
                "top_ps": filled * TOP_P,
            }
        one_engine = SimpleNamespace(use_one_engine=lambda: True)
        return SimpleNamespace(spec_dec_mode=one_engine, is_all_greedy_sample=self.acceptance == "greedy", **sampling)

    def _draft(self) -> None:
        """K drafts for each running row, one call of the head each, also where there are no rows."""
        contexts = [tuple(r.tokens) for r in self.running]
        chosen, probs = [], []
        for _ in range(DRAFTS):
            logits = self.head(self.model.hidden(contexts))
            probs.append(logits.softmax(-1))
            chosen.append(self._sample(logits) if self.acceptance == "rejection" else logits.argmax(-1))
            contexts = [(*c, t) for c, t in zip(contexts, chosen[-1].tolist(), strict=True)]
        for i, request in enumerate(self.running):
            request.py_draft_tokens = [int(c[i]) for c in chosen]
            self._draft_probs[request.py_request_id] = torch.stack([p[i] for p in probs])

    def _probs_of(self, request: LlmRequest) -> Tensor:
        missing = torch.full((DRAFTS, self.model.checkpoint.vocab_size), 1.0, device=self.model.device)
        return self._draft_probs.get(request.py_request_id, missing.softmax(-1))

    def _take(self, request: LlmRequest, tokens: list[int]) -> None:
        for token in tokens:
            request.add_new_token(token, 0)
            if token == request.py_end_id or len(request.output) >= request.py_max_new_tokens:
                request.finish_by("end", 0)
                return
        request.state = LlmRequestState.GENERATION_IN_PROGRESS

    def _record_decisions(self) -> None:
        commit_ = RUNTIME.stage.commit_

        def recorded(tokens: Tensor, lengths: Tensor, slots: Tensor, **given) -> Tensor:
            events = commit_(tokens, lengths, slots, **given)
            for tensor in (tokens, lengths, events):
                self._hash.update(tensor.cpu().numpy().tobytes())
            return events

        RUNTIME.stage.commit_ = recorded

    def _note_state(self) -> None:
        stage = RUNTIME.stage
        if stage is not None:
            for tensor in (stage.state[:MAX_ROWS], stage.steps[:MAX_ROWS], stage.repairs[:MAX_ROWS], stage.counters):
                self._hash.update(tensor.cpu().numpy().tobytes())


def new_request(checkpoint: Checkpoint, number: int) -> LlmRequest:
    """The request of this number; the first tokens and the lengths of requests differ."""
    prompts = checkpoint.prompts(7)
    length = MAX_NEW_TOKENS - number % 5
    return LlmRequest(1_000 + number, prompts[number % len(prompts)], length, py_end_id=checkpoint.end_id)


def mapping(**more) -> SimpleNamespace:
    """A rank's place, as the executor's factory knows it."""
    return SimpleNamespace(**{"rank": 0, "tp_size": 1, "enable_attention_dp": False, **more})


def build(checkpoint: Checkpoint, policy: str, place: SimpleNamespace, gather: Callable | None = None, **more) -> None:
    """What the patched factory calls; `gather` is what the engine's `dist` would do over its tensor-parallel group."""
    spec_config = SimpleNamespace(structured_commit=checkpoint.section(policy, **more))
    engine = SimpleNamespace(dist=SimpleNamespace(tp_allgather=gather))
    hooks.build(None, str(checkpoint.folder), None, engine, None, spec_config, place)


def _exact(values: Tensor) -> Tensor:
    return (values * _SIXTY_FOURTH).round() / _SIXTY_FOURTH


def _dummy() -> LlmRequest:
    request = LlmRequest(-1, [0], 1 << 20, is_dummy=True)
    request.state = LlmRequestState.GENERATION_IN_PROGRESS
    request.py_draft_tokens = [0] * DRAFTS
    return request
