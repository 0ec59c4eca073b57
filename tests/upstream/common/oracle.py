"""Every outcome of a double's decoding, with its probability: the oracle decides wherever a double would draw.

A run follows a path of choices and takes the first outcome where the path ends; what else could have come there becomes
paths of later runs. One batch follows many paths, one request for each. What nobody reads is not enumerated: columns
behind a rejection, drafts of a request that has ended. Exact up to float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from structured_commit import Event
from structured_commit.repair import legal_weights, sampled_weights
from tests.law.rules import every_draw

from . import ops
from .requests import LlmRequest

Path = tuple[int, ...]
Outcome = tuple[list[int], float]
Law = dict[int, float]


def exact(probs: Tensor) -> Tensor:
    """float64, normalised: the law that float32 probabilities stand for."""
    return probs.double() / probs.double().sum(-1, keepdim=True)


def laws_of(probs: Tensor) -> list[Law]:
    """Token → probability of each row of [n, V], for the tokens that are possible."""
    columns = (probs > 0).any(dim=0).nonzero()[:, 0]
    tokens = columns.tolist()
    rows = exact(probs)[:, columns].tolist()
    return [{t: p for t, p in zip(tokens, row, strict=True) if p > 0} for row in rows]


class Oracle:
    """Choices of one engine's requests. `path_of` is set before a run; `taken` holds (choice, probabilities)."""

    def __init__(self, engine: Any, stage: Any = None) -> None:
        self.engine, self.checker = engine, engine.checker
        self.path_of: dict[int, Path] = {}
        self.taken: dict[int, list[tuple[int, list[float]]]] = {}
        self.request_in: dict[int, LlmRequest] = {}
        if stage is not None:
            commit_ = stage.commit_
            stage.commit_ = lambda tokens, lengths, slots, **given: self._redraw(
                stage, commit_, tokens, lengths, slots, given
            )

    def choose(self, request: LlmRequest, probabilities: list[float]) -> int:
        """The outcome on this request's path."""
        if request.is_dummy:
            return 0
        path, taken = self.path_of[request.py_request_id], self.taken.setdefault(request.py_request_id, [])
        choice = path[len(taken)] if len(taken) < len(path) else 0
        taken.append((choice, probabilities))
        return choice

    def _ended(self, request: LlmRequest, more: list[int]) -> bool:
        """Whether nobody reads what this request would say behind `more`."""
        said = [*self.checker.since_context.get(request.py_request_id, []), *more]
        return request.is_dummy or len(said) >= request.py_max_new_tokens or request.py_end_id in said

    def _one_of(self, request: LlmRequest, law: Law) -> int:
        return list(law)[self.choose(request, list(law.values()))]

    def sample(self, probs: Tensor) -> Tensor:
        """The target's choices: one for each context, then K + 1 for each generation row, or the contexts' alone."""
        requests, contexts = self.checker.requests, self.checker.num_contexts
        self.request_in = {request.py_seq_slot: request for request in requests}
        p = laws_of(probs)
        chosen = [[self._one_of(request, p[i])] for i, request in enumerate(requests[:contexts])]
        generation = requests[contexts:] if len(p) > contexts else []
        width = (len(p) - contexts) // max(1, len(generation))
        for i, request in enumerate(generation):
            rows = p[contexts + i * width : contexts + (i + 1) * width]
            drafts = self.checker.fed[contexts + i][1:width]
            outcomes = [] if request.is_dummy else list(strict_outcomes(rows, drafts))
            if outcomes and not self._ended(request, []):
                tokens, _ = outcomes[self.choose(request, [weight for _, weight in outcomes])]
            else:
                tokens = [next(iter(rows[0]))]
            # Behind a mismatch stand the drafts: whoever reads on is led astray.
            chosen.append([*tokens, *drafts[len(tokens) :], *[0] * width][:width])
        return torch.tensor([token for row in chosen for token in row], dtype=torch.int32)

    def draft(self, probs: Tensor) -> Tensor:
        """Drafts: one for each row, or a block for each generation row."""
        requests, contexts = self.checker.requests, self.checker.num_contexts
        seen, counts = self.engine.worker.seen_by_drafter
        each = len(probs) // max(1, len(requests) - contexts) if len(probs) != len(requests) else 0
        drafted = []
        for i, law in enumerate(laws_of(probs)):
            at = contexts + i // each if each else i
            new = seen[at, : int(counts[at])].tolist()
            ended = self._ended(requests[at], new)
            drafted.append(next(iter(law)) if ended else self._one_of(requests[at], law))
        return torch.tensor(drafted, dtype=torch.int32)

    def verify(self, draft_probs: Tensor, drafts: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rejection sampling: [n, K+1] int32 tokens, −1 behind the last, and [n] int32 lengths."""
        contexts = self.checker.num_contexts
        width = target_probs.shape[1]
        q, p = laws_of(draft_probs.flatten(0, 1)), laws_of(target_probs.flatten(0, 1))
        requests = self.checker.requests[contexts:]
        self.request_in = {request.py_seq_slot: request for request in self.checker.requests}
        tokens = torch.full((len(drafts), width), -1, dtype=torch.int32)
        lengths = torch.ones(len(drafts), dtype=torch.int32)
        for i, request in enumerate(requests):
            found = [next(iter(p[i * width]))]
            if not self._ended(request, []):
                before = slice(i * (width - 1), (i + 1) * (width - 1))
                at = slice(i * width, (i + 1) * width)
                outcomes = list(rejection_outcomes(p[at], q[before], drafts[i].tolist()))
                found, _ = outcomes[self.choose(request, [weight for _, weight in outcomes])]
            tokens[i, : len(found)] = torch.tensor(found, dtype=torch.int32)
            lengths[i] = len(found)
        return tokens, lengths

    def _redraw(self, stage, commit_: Callable, tokens: Tensor, lengths: Tensor, slots: Tensor, given: dict) -> Tensor:
        """The stage's own draws: a first call says which rows it redraws, the real one gets words for each choice."""
        states = [state.clone() for state in (stage.state, stage.steps, stage.repairs, stage.counters)]
        words = torch.zeros(len(tokens), 2, dtype=torch.int64)
        seen = stage.commit(tokens, lengths, slots, **{**given, "words": words})
        for state, before in zip((stage.state, stage.steps, stage.repairs, stage.counters), states, strict=True):
            state.copy_(before)
        expected = {}
        for row in ((seen.events & Event.REPAIRED) != 0).nonzero()[:, 0].tolist():
            at = int(seen.lengths[row]) - 1
            state = int(stage.state[slots[row]])
            for token in tokens[row, :at].tolist():
                state = stage.table.host.step(state, token)
            weights = _weights_of(given, row, at, stage.legal_tokens(state)[None])
            _, options, some, shares = every_draw(weights)
            choice = self.choose(self.request_in[int(slots[row])], shares.tolist())
            words[row], expected[row, at] = some[choice], int(options[choice])
        events = commit_(tokens, lengths, slots, **{**given, "words": words})
        for (row, at), token in expected.items():
            assert int(tokens[row, at]) == token, "the stage drew another token than its words say"
        return events


def _weights_of(given: dict, row: int, at: int, legal: Tensor) -> Tensor:
    """[1, V] int64: what the stage redraws from."""
    if given.get("probs") is not None:
        return legal_weights(given["probs"][row, at][None], legal)
    limits = (None if given[name] is None else given[name][row, None] for name in ("top_k", "top_p"))
    return sampled_weights(given["logits"][row, at][None], given["temperature"][row, None], *limits, legal=legal)


def strict_outcomes(laws: list[Law], drafts: list[int]) -> Iterator[Outcome]:
    """Tokens up to the first that is not the draft at its place; K + 1 laws, K drafts."""
    weight = 1.0
    for column, law in enumerate(laws):
        draft = drafts[column] if column < len(drafts) else None
        for token, p in law.items():
            if token != draft:
                yield [*drafts[:column], token], weight * p
        weight *= law.get(draft, 0.0)
        if not weight:
            return


def rejection_outcomes(targets: list[Law], proposals: list[Law], drafts: list[int]) -> Iterator[Outcome]:
    """Accepted drafts and the token behind them; K + 1 target laws, K laws that the drafts came from."""
    weight = 1.0
    for column, (p, q, draft) in enumerate(zip(targets, proposals, drafts, strict=False)):
        passes = min(1.0, p.get(draft, 0.0) / q[draft])
        residual = {token: share - q.get(token, 0.0) for token, share in p.items() if share > q.get(token, 0.0)}
        total = sum(residual.values())
        if passes < 1:
            for token, share in residual.items():
                yield [*drafts[:column], token], weight * (1 - passes) * share / total
        weight *= passes
        if not weight:
            return
    for token, share in targets[-1].items():
        yield [*drafts, token], weight * share


@contextmanager
def deciding(oracle: Oracle) -> Iterator[None]:
    ops.ORACLE = oracle
    try:
        yield
    finally:
        ops.ORACLE = None


def law_of_streams(engine: Any, oracle: Oracle, make_request: Callable[[int], LlmRequest]) -> dict[Path, float]:
    """Probability of each stream. `make_request(id)` makes the same request again under another id."""
    frontier: list[Path] = [()]
    law: dict[Path, float] = defaultdict(float)
    number = 0
    while frontier:
        width = engine.llm_args.max_batch_size
        paths, frontier = frontier[:width], frontier[width:]
        requests = [make_request(1000 + number + i) for i in range(len(paths))]
        number += len(paths)
        oracle.path_of = {r.py_request_id: path for r, path in zip(requests, paths, strict=True)}
        oracle.taken = {}
        with deciding(oracle):
            run = engine.run(requests)
        for request_id, path in oracle.path_of.items():
            taken, weight = oracle.taken[request_id], 1.0
            for i, (choice, probabilities) in enumerate(taken):
                weight *= probabilities[choice]
                if i >= len(path):
                    before = tuple(c for c, _ in taken[:i])
                    frontier += [(*before, other) for other in range(1, len(probabilities))]
            law[tuple(run.tokens[request_id])] += weight
    return dict(law)
