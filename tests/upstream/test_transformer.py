"""A seeded transformer in the tables' place: the cache is one of keys and values, read by KV length alone."""

from __future__ import annotations

import pytest
import torch

from .common.engine import plain_greedy, requests_for
from .common.transformer import Transformer
from .paths import PATHS, SETTINGS
from .test_patched_repair import RUNTIME
from .toy import _CONTROLS, _WEIGHTS

BY_NAME = {path.name: path for path in PATHS}
WORKERS = (("w13a", "eagle3-strict"), ("w13b", "eagle3-strict"), ("w14", "eagle3-strict"), ("w14", "mtp-eagle-strict"))


def models(checkpoint):
    texts = (*_CONTROLS, *"ab{}")
    used = [checkpoint.ids[text] for text in texts]
    target = Transformer(checkpoint.vocab_size, used, torch.tensor([_WEIGHTS.get(text, 0.0) for text in texts]), seed=3)
    return target, target.blurred(0.3, seed=5)


def decode(tree, path, checkpoint, policy, way):
    target, drafter = models(checkpoint)
    stage = checkpoint.section(policy) if policy else None
    settings = {**SETTINGS[way], "checkpoint": str(checkpoint.folder)}
    engine = path.engine(tree, target, drafter, checkpoint.vocab_size, stage=stage, **settings)
    requests = requests_for(checkpoint.prompts(5), max_new_tokens=14, end_id=checkpoint.end_id)
    return target, requests, engine.run(requests)


@pytest.mark.parametrize("way", ["padded", "overlap"])
@pytest.mark.parametrize(("window", "worker"), WORKERS)
def test_a_transformer_decodes_as_alone_and_under_repair_as_the_constrained_one(
    patched, checkpoint, window, worker, way
):
    tree, path = patched(window), BY_NAME[worker]
    target, requests, run = decode(tree, path, checkpoint, None, way)
    assert run.tokens == {r.py_request_id: plain_greedy(target, r) for r in requests}
    assert any(len(tokens) > 2 for step in run.steps for tokens in step.committed.values())
    target, requests, run = decode(tree, path, checkpoint, "repair", way)
    runtime = tree.load(RUNTIME).RUNTIME
    assert run.tokens == {r.py_request_id: checkpoint.constrained(target, r) for r in requests}
    assert runtime.stage.read_counters()["repaired"] > 0
    assert not runtime.aside
