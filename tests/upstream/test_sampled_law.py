"""The law of sampled streams, enumerated through the doubles: every outcome of drafting, acceptance and redraw.

Patched but off, a stream has the law of plain sampling from the target; under repair it has the law of plain sampling
in which at each place only the legal tokens compete. Two drafts, short streams, a handful of tokens that matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from structured_commit.repair import sampled_weights

from .common.engine import requests_for
from .common.ops import compute_probs_from_logits
from .common.oracle import Oracle, exact, law_of_streams
from .common.tables import Context
from .paths import PATHS, name

TOLERANCE = 1e-12
# A redraw from logits has shares of its own, in integers. At temperature 1 both they and the sampler's float32 softmax
# start from the same float32 distances; then an exponential is off by 2^-26 of itself here, by 2^-23 there and 2^-24
# more by the quotient: r < 2^-22. A share s = a / Σa moves by at most 2r · s(1 − s) ≤ r / 2.
SHARE_TOLERANCE = 2**-23
LENGTH = 3
BATCH = 128
SEED = 5  # a world in which both rejection and the format leave several streams
IMPOSSIBLE = -200.0  # probability 0 in float32
RUNTIME = "_torch.speculative.structured_commit.runtime"


def sparse_table(checkpoint, seed: int, support: tuple[int, ...], sure: Context = ()) -> Callable[[Context], Tensor]:
    """Logits [V]: `support` (one of these numbers) tokens are possible behind each context, one of them legal there;
    only that one behind `sure`."""
    used = [checkpoint.ids[text] for text in ("a", "<|im_end|>", "<tool_call>", "{", "<|im_start|>")]
    rows: dict[Context, Tensor] = {}

    def logits(context: Context) -> Tensor:
        key = context[-2:]
        if key not in rows:
            choose = random.Random(f"{seed}:{key}")
            opens = key[-1] == checkpoint.ids["<tool_call>"]
            needed = checkpoint.ids["{" if opens else "a"]
            others = 0 if key == sure else choose.choice(support) - 1
            possible = {needed, *choose.sample([t for t in used if t != needed], others)}
            row = torch.full((checkpoint.vocab_size,), IMPOSSIBLE)
            for token in sorted(possible):
                row[token] = choose.gauss(0, 0.8)
            rows[key] = row
        return rows[key]

    return logits


def plain_law(checkpoint, table, request, *, constrained: bool, from_logits: bool) -> dict[tuple[int, ...], float]:
    """The law of the target on its own, up to an end or the length; `from_logits` is what illegal tokens are redrawn
    from."""
    host, found = checkpoint.table.host, {}
    ones = torch.ones(1), torch.tensor([1 << 30], dtype=torch.int32), torch.ones(1)

    def walk(tokens: tuple[int, ...], state: int, weight: float) -> None:
        if len(tokens) == request.py_max_new_tokens or tokens[-1:] == (request.py_end_id,):
            found[tokens] = weight
            return
        logits = table((*request.prompt, *tokens))[None]
        p = exact(compute_probs_from_logits(logits, *ones))[0]
        if constrained:
            legal = checkpoint.table.transitions[state][checkpoint.table.token_class.long()] >= 0
            conditional = torch.where(legal, p, 0.0) / p[legal].sum()
            if from_logits:
                shares = exact(sampled_weights(logits, *ones, legal=legal[None]))[0]
                assert float((shares - conditional).abs().max()) < SHARE_TOLERANCE
                conditional = torch.where(legal, p, 0.0) + p[~legal].sum() * shares
            p = conditional
        for token in p.nonzero()[:, 0].tolist():
            after = host.step(state, token) if constrained else state
            walk((*tokens, token), after, weight * float(p[token]))

    walk((), host.locate(list(request.prompt)), 1.0)
    return found


def small(path):
    """The path with two drafts."""
    return replace(path, speculative={**path.speculative, "max_draft_len": 2})


def cases() -> list[tuple]:
    """Every one-model worker and window under repair. Off is bit-identical to unpatched everywhere (test_doubles.py),
    so three workers show its law; MTP's rejection is Eagle3's, so one window shows that."""
    found = []
    for path in PATHS:
        if path.law != "sampled" or path.two_model or "tree" in path.name or path.name == "mtp-single-sampled":
            continue
        windows = path.windows[-1:] if path.name == "mtp-rejection" else path.windows
        found += [(window, path, "repair") for window in windows]
        if path.name in ("eagle3-sampled", "mtp-sampled", "eagle3-rejection"):
            found.append((windows[-1], path, None))
    return found


@pytest.mark.parametrize(("window", "path", "policy"), cases(), ids=name)
def test_the_law_of_streams_is_the_targets_own(patched, checkpoint, window, path, policy):
    tree, path = patched(window), small(path)
    rejects = path.speculative.get("use_rejection_sampling", False)
    # Where drafts are drawn too, the first token is a sure one: strict paths enumerate it, and worlds multiply.
    sure = tuple(checkpoint.prompts(1)[0][-2:]) if rejects else ()
    draws_drafts = rejects and path.speculative["decoding_type"] in ("Eagle3", "MTP")
    target = sparse_table(checkpoint, SEED, (2,) if draws_drafts else (3,), sure)
    drafter = sparse_table(checkpoint, 2, (1, 2) if draws_drafts else (2,))
    stage = checkpoint.section(policy, repair_rows=BATCH) if policy else None
    engine = path.engine(
        tree,
        target,
        drafter,
        checkpoint.vocab_size,
        stage=stage,
        checkpoint=str(checkpoint.folder),
        max_batch_size=BATCH,
    )
    runtime = tree.load(RUNTIME).RUNTIME
    oracle = Oracle(engine.executor.model_engine, runtime.stage)

    def make_request(request_id: int):
        (request,) = requests_for(
            checkpoint.prompts(1), max_new_tokens=LENGTH, end_id=checkpoint.end_id, temperature=1.0, first_id=request_id
        )
        return request

    found = law_of_streams(engine, oracle, make_request)
    assert not runtime.aside
    expected = plain_law(checkpoint, target, make_request(1), constrained=policy is not None, from_logits=not rejects)
    assert found.keys() == expected.keys()
    assert max(abs(found[stream] - expected[stream]) for stream in expected) < TOLERANCE
    assert len(expected) > 2
