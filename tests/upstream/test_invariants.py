"""The checker that hangs in every double notices each memory that took something else than what was committed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .common.engine import requests_for
from .paths import PATHS, cases, name
from .test_doubles import BY_NAME, DRAFTER, PROMPTS, TARGET, VOCAB, decode
from .test_patched_repair import Decoded


def uncut(counts):
    return torch.full_like(counts, 4)


def around(owner, method, change):
    """Replace a method of one object; `change(call, *args, **kwargs)` gets the old one."""
    call = getattr(owner, method)
    setattr(owner, method, lambda *args, **kwargs: change(call, *args, **kwargs))


def cuts_after_the_drafter(engine):
    def change(call, logits, tokens, counts, drafts):
        return call(logits, tokens, counts.clamp(max=1), drafts)

    around(engine.worker, "output", change)


def replaces_after_the_drafter(engine):
    def change(call, logits, tokens, counts, drafts):
        last = torch.arange(len(tokens)), counts.long() - 1
        return call(logits, tokens.index_put(last, (tokens[last] + 1) % VOCAB), counts, drafts)

    around(engine.worker, "output", change)


def never_updates_the_recurrent_state(engine):
    around(engine.worker, "update_recurrent", lambda call, *args: None)


def updates_the_recurrent_state_uncut(engine):
    around(engine.worker, "update_recurrent", lambda call, metadata, counts, *rest: call(metadata, uncut(counts), None))


def leaves_the_accepted_nodes_where_they_were(engine):
    around(engine.worker, "_relocate_kv_eagerly", lambda call, *args: None)


def grows_the_context_too_far(engine):
    def change(call, input_ids, tokens, counts, metadata, *rest):
        drafts = call(input_ids, tokens, counts, metadata, *rest)
        engine.worker._ctx_len[metadata.lines] += 1
        return drafts

    around(engine.worker, "draft_block", change)


def gives_the_automaton_all_columns(engine):
    def change(call, *, num_accepted_tokens, **rest):
        return call(num_accepted_tokens=uncut(num_accepted_tokens), **rest)

    around(engine.worker.sa_enhancer, "extend_and_prepare", change)


def extends_the_automaton_twice(engine):
    def change(call, **given):
        call(**given)
        call(**given)

    around(engine.worker.sa_enhancer, "extend_and_prepare", change)


def gives_the_history_all_columns(engine):
    manager = engine.executor.model_engine.spec_metadata.sa_manager
    around(
        manager,
        "extend_ngram",
        lambda call, ids, tokens, counts, width, **more: call(ids, tokens, uncut(counts), width, **more),
    )


def fills_the_pools_with_other_tokens(engine):
    def change(call, *args):
        drafts = call(*args)
        engine.executor.model_engine.hidden_states_manager.past_tokens.add_(1)
        return drafts

    around(engine.worker, "draft_from_pools", change)


def drafts_from_one_place_too_far(engine):
    def change(call, ids, tokens, counts, metadata, *rest):
        metadata.kv_lens_cuda += 1
        return call(ids, tokens, counts, metadata, *rest)

    around(engine.worker, "draft_chain", change)


def forgets_the_kv_rewind(engine):
    around(engine.worker, "rewind_now", lambda call, metadata: None)


def rewinds_too_little(engine):
    def change(call, state, manager=None):
        call(state, manager)
        for request in state.requests:
            request.py_rewind_len -= 1

    around(engine.executor.sampler, "update_requests", change)


def tells_the_host_one_token_less(engine):
    def change(call, batch, outputs, prefix=None):
        state = call(batch, outputs, prefix)
        state.host.new_tokens_lens.clamp_(max=1)
        return state

    around(engine.executor.sampler, "sample_async", change)


def passes_other_tokens_to_the_next_step(engine):
    around(engine.worker, "_prepare_next_new_tokens", lambda call, *args: call(*args).flip(1))


FAULTS = [
    ("eagle3-strict", cuts_after_the_drafter, "drafted from"),
    ("eagle3-strict", replaces_after_the_drafter, "drafted from"),
    ("eagle3-strict", gives_the_automaton_all_columns, "the automaton took"),
    ("mtp-strict", extends_the_automaton_twice, "once a step"),
    ("eagle3-strict", drafts_from_one_place_too_far, r"the drafter \(chain\) keeps"),
    ("mtp-strict", fills_the_pools_with_other_tokens, r"the drafter \(pools\) keeps"),
    ("mtp-eagle-hybrid", never_updates_the_recurrent_state, "recurrent state"),
    ("mtp-eagle-hybrid", updates_the_recurrent_state_uncut, "recurrent state"),
    ("dflash-hybrid", updates_the_recurrent_state_uncut, "recurrent state"),
    ("ngram-hybrid", updates_the_recurrent_state_uncut, "recurrent state"),
    ("mtp-tree-hybrid", updates_the_recurrent_state_uncut, "recurrent state"),
    ("eagle3-tree", leaves_the_accepted_nodes_where_they_were, "target's cache"),
    ("mtp-tree", leaves_the_accepted_nodes_where_they_were, "target's cache"),
    ("dflash-strict", grows_the_context_too_far, r"the drafter \(context\) keeps"),
    ("dspark-strict", grows_the_context_too_far, r"the drafter \(frames\) keeps"),
    ("pard-strict", forgets_the_kv_rewind, "KV length"),
    ("dflash-strict", forgets_the_kv_rewind, "KV length"),
    ("pard-strict", cuts_after_the_drafter, "drafted from"),
    ("sa-strict", gives_the_history_all_columns, r"the drafter \(history\) keeps"),
    ("eagle3-strict", rewinds_too_little, "rewind"),
    ("eagle3-strict", tells_the_host_one_token_less, "the host took"),
    ("sa-strict", passes_other_tokens_to_the_next_step, "next inputs"),
]


@pytest.mark.parametrize(("path", "fault", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_memory_that_took_something_else_is_noticed(unpatched, path, fault, message):
    path = BY_NAME[path]
    engine = path.engine(unpatched[path.windows[-1]], TARGET, DRAFTER, VOCAB)
    fault(engine)
    with pytest.raises(AssertionError, match=message):
        engine.run(requests_for(PROMPTS, max_new_tokens=9, end_id=0))


@pytest.mark.parametrize("window", ["w13b", "w14"])
def test_penalties_counted_twice_are_noticed(unpatched, window):
    penalized = replace(BY_NAME["eagle3-strict"], weights={"enable_penalty": True})
    engine = penalized.engine(unpatched[window], TARGET, DRAFTER, VOCAB)
    around(engine.worker, "_commit_occurrence_counts", lambda call, accepted, *rest: call(call(accepted, *rest), *rest))
    with pytest.raises(AssertionError, match="penalties count"):
        engine.run(requests_for(PROMPTS, max_new_tokens=9, end_id=0))


@pytest.mark.parametrize("kind", ["mtp-relaxed", "eagle3-relaxed"])
def test_a_delta_ahead_of_the_commit_is_noticed(patched, checkpoint, kind, monkeypatch):
    tree = patched("w14")
    hooks = tree.load("_torch.speculative.structured_commit.hooks")
    monkeypatch.setattr(hooks, "_restore_deltas", lambda *args: None)
    with pytest.raises(AssertionError, match="its delta is"):
        Decoded(tree, BY_NAME[kind], checkpoint)


def test_every_worker_and_window_goes_through_the_checker(unpatched):
    for window, path in cases(two_model=False, settings=False):
        if path.windows[0] == window:
            _, run, engine = decode(unpatched[window], path, prompts=PROMPTS[:1])
            checker = engine.executor.model_engine.checker
            assert checker.steps >= len(run.steps), name(path)
            said, told = run.tokens[100], [token for _, tokens in checker.windows for token in tokens]
            assert told[: len(said)] == said
    assert {path.speculative["decoding_type"] for path in PATHS} >= {"MTP", "PARD", "DFlash", "DSpark", "SA", "NGram"}
