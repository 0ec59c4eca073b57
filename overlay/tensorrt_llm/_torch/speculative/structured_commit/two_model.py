"""Hooks of two-model speculation, where the host decides what is accepted and, under overlap, the device decides the
same a step earlier. Without a distribution at hand (greedy, tree) a window can be cut but not redrawn: an illegal
first token is let through and counted. Nothing here raises into the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import repair
from .policy import Policy
from .runtime import RUNTIME, ignores_end, prompt_length
from .table import UNTRACKED

_HOST_STREAM = 1 << 31  # host draws must not share counters with device slots


def host_stop(request, token: int) -> bool:
    """Whether `token` must not be appended: greedy and tree verification ask before every token but the first."""
    if RUNTIME.stage is None or getattr(request, "py_is_draft", False):
        return False
    return bool(RUNTIME.guarded(_stops, False, request, int(token)))


def host_rejection(request, num_accepted: int, sample_last: bool, target_probs: Tensor, new_tokens_list):
    """How many accepted drafts to append and whether a last token follows.

    Args:
        target_probs: [K+1, V] float.

    Returns:
        (num_accepted, sample_last, last): `last` is the token to append after the drafts, None = upstream's choice.
    """
    given = (num_accepted, sample_last, None)
    if RUNTIME.stage is None or getattr(request, "py_is_draft", False):
        return given
    return RUNTIME.guarded(_cut_drafts, given, request, num_accepted, sample_last, target_probs, new_tokens_list)


def host_recovered(request, token: int, probs: Tensor) -> int:
    """The token to append where upstream drew `token`; `probs` [V] is the target's distribution there."""
    if RUNTIME.stage is None or getattr(request, "py_is_draft", False):
        return token
    return RUNTIME.guarded(_legal_token, token, request, token, probs)


def accept_on_device(executor, num_accepted_tokens: Tensor, target_tokens: Tensor, scheduled_batch):
    """Under overlap, decide on the device what `host_stop` will decide a step later.

    Args:
        num_accepted_tokens: [S] int32 accepted drafts by slot, without the bonus. target_tokens: [K+1, S] int.

    Returns:
        (num_accepted_tokens, target_tokens): a new count tensor where the stage is on, the same tokens.
    """
    if RUNTIME.stage is None:
        return num_accepted_tokens, target_tokens
    cut = RUNTIME.guarded(_cut_on_device, num_accepted_tokens, num_accepted_tokens, target_tokens, scheduled_batch)
    return cut, target_tokens


def _state(request) -> int:
    """The request's state after its tokens so far; walks only those that are new since the last call."""
    host = RUNTIME.stage.table.host
    tokens = request.get_tokens(0)
    state, seen = getattr(request, "py_structured_commit", (None, 0))
    if state is None or seen > len(tokens):
        state = UNTRACKED if ignores_end(request) else host.locate(tokens, prompt_length(request))
    else:
        for token in tokens[seen:]:
            following = host.step(state, token)
            state = host.let_through(token) if following < 0 else following
    request.py_structured_commit = (state, len(tokens))
    return state


def _stops(request, token: int) -> bool:
    stage = RUNTIME.stage
    policy, host = stage.config.policy, stage.table.host
    if policy is Policy.OBSERVE:
        return False
    state = _state(request)
    return state == host.ended or (policy.repairs and host.step(state, token) < 0)


def _cut_drafts(request, num_accepted: int, sample_last: bool, target_probs: Tensor, new_tokens_list):
    stage = RUNTIME.stage
    if not stage.config.policy.repairs:
        return num_accepted, sample_last, None
    host, state = stage.table.host, _state(request)
    for i in range(num_accepted + (not sample_last)):
        if state == host.ended:
            break  # the sampler stops at the terminal by itself
        # Where every draft was accepted, the bonus comes from the target's own samples.
        is_draft = i < num_accepted
        token = request.py_draft_tokens[i] if is_draft else new_tokens_list[i][request.py_seq_slot][0]
        after = host.step(state, int(token))
        if after < 0:
            return i, True, _draw(request, state, target_probs[i])
        state = after
    return num_accepted, sample_last, None


def _legal_token(request, token: int, probs: Tensor) -> int:
    stage = RUNTIME.stage
    state = _state(request)
    if not stage.config.policy.repairs or stage.table.host.step(state, int(token)) >= 0:
        return token
    return _draw(request, state, probs)


def _draw(request, state: int, probs: Tensor) -> int:
    stage = RUNTIME.stage
    table = stage.table
    legal = stage.legal_tokens(state)
    request_id = torch.tensor([_HOST_STREAM | (request.py_request_id & (_HOST_STREAM - 1))], device=table.device)
    step = torch.tensor([len(request.get_tokens(0))], device=table.device)
    words = repair.random_words(stage.config.seed, request_id, step)
    probs = probs[: table.vocab_size].to(table.device)
    drawn = int(repair.draw(repair.legal_weights(probs[None], legal[None]), words)[0])
    return drawn if drawn < table.vocab_size else int(table.escape_token[state])


def _cut_on_device(num_accepted: Tensor, target_tokens: Tensor, scheduled_batch) -> Tensor:
    stage = RUNTIME.stage
    requests = [r for r in scheduled_batch.all_requests() if not getattr(r, "py_is_draft", False)]
    # Contexts of that step are in generation by now; one that was paused meanwhile still owns its slot.
    RUNTIME.bind(requests, prefilled=getattr(scheduled_batch, "context_requests", ()))
    bound = [r.py_seq_slot for r in requests if getattr(r, "py_seq_slot", None) is not None]
    slots = torch.full((num_accepted.shape[0],), stage.num_slots, dtype=torch.int64)
    slots[bound] = torch.tensor(bound, dtype=torch.int64)
    slots = slots.to(num_accepted.device)
    tokens = target_tokens.T.to(torch.int32).contiguous()
    lengths = (num_accepted + 1).to(torch.int32)
    recorder = RUNTIME.recorder
    before = None if recorder is None else recorder.before(tokens, lengths, slots)
    out = stage.commit(tokens, lengths, slots, redraw=False)
    if recorder is not None:
        recorder.after(before, *out, repair.Distribution())
    return torch.where(slots < stage.num_slots, out.lengths - 1, num_accepted).to(num_accepted.dtype)
