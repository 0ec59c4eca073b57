"""What the patches call. Every function costs one attribute read while the stage is not configured.

Rows come contexts first: C context rows with one column each, then G generation rows with K + 1 columns. Hooks in
the forward work in place on the tensors that acceptance made, without host synchronisation. None of them raises,
but `build`, `check_config` and, where ranks are compared, `bind`: where a hook does not understand what it is given, it
lets the step pass, sets the rows untracked, counts the reason and says so once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .policy import Event
from .rank_check import tensor_parallel_gather
from .repair import Distribution
from .runtime import FORCED, RUNTIME
from .serving.iteration_stats import add_finishes, add_statistics, collect_finish, log_statistics
from .serving.process import publish
from .serving.replies import feed_harmony, finish_chat, finish_harmony, finish_harmony_stream
from .serving.report import declare_report
from .serving.tool_parsers import aligned_parser
from .settings import validated_field
from .two_model import accept_on_device, host_recovered, host_rejection, host_stop

_Sampling = tuple[Distribution, Distribution]  # of context rows, of generation rows
_CHANGED = int(Event.REPAIRED | Event.TRIMMED | Event.CUT | Event.GATED | Event.ALIGNED | Event.ROLLED_BACK)

__all__ = [
    "accept_on_device",
    "add_finishes",
    "add_statistics",
    "aligned_parser",
    "before_relaxed",
    "bind",
    "build",
    "check_config",
    "collect_finish",
    "commit_rejection",
    "commit_relaxed",
    "commit_single",
    "commit_strict",
    "commit_thop",
    "commit_tree",
    "declare_report",
    "feed_harmony",
    "finish_chat",
    "finish_harmony",
    "finish_harmony_stream",
    "guard_draft_loop",
    "host_recovered",
    "host_rejection",
    "host_stop",
    "log_statistics",
    "publish",
    "veto_fused",
]


def check_config(value: object) -> dict | None:
    """Validate the `structured_commit` section of a speculative configuration; raises a `ValueError` if it is bad."""
    checked = validated_field(value)
    return {"policy": checked} if isinstance(checked, str) else checked


def build(llm_args, checkpoint_dir, tokenizer, model_engine, sampler, spec_config, mapping) -> None:
    """Build this process's stage. A second call replaces the first, as when a throw-away executor came before.

    Raises:
        StructuredCommitError: the configuration cannot be honoured.
    """
    value = getattr(spec_config, "structured_commit", None)
    is_last = getattr(mapping, "is_last_pp_rank", None)
    serves = spec_config is not None and (is_last() if callable(is_last) else True)
    gather = tensor_parallel_gather(model_engine, mapping)
    longest = getattr(spec_config, "max_draft_len", None)
    # Ranks that own the same requests would record the same.
    records = gather is None or getattr(mapping, "tp_rank", 0) == 0
    width = longest + 1 if isinstance(longest, int) and longest > 0 else None
    RUNTIME.build(value, checkpoint_dir, getattr(mapping, "rank", 0), serves, gather, records=records, width=width)


def bind(metadata, requests: list) -> None:
    """Tell the stage which request each row of the coming step belongs to. Host side, before the forward."""
    if RUNTIME.stage is None or not metadata.spec_dec_mode.use_one_engine():
        return

    def bind_rows() -> bool:
        RUNTIME.bind(requests)
        return True

    if not RUNTIME.guarded(bind_rows, False):
        RUNTIME.write_rows([])


def commit_strict(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, spec_metadata):
    """After strict acceptance. Returns the same (accepted_tokens [B, K+1] int32, num_accepted_tokens [B] int32)."""
    if RUNTIME.stage is not None:

        def sampling() -> _Sampling:
            return _sampling(spec_metadata, num_contexts, batch_size, accepted_tokens.shape[1])

        drafts = _drafts(spec_metadata)
        _commit(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, sampling, drafts)
    return accepted_tokens, num_accepted_tokens


def commit_rejection(
    worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, spec_metadata, target_probs
):
    """After rejection sampling; `target_probs` [G, K+1, V] float32, None without generation rows."""
    if RUNTIME.stage is not None:

        def sampling() -> _Sampling:
            contexts, _ = _sampling(spec_metadata, num_contexts, num_contexts, accepted_tokens.shape[1])
            return contexts, Distribution(probs=_fitted(target_probs))

        drafts = _drafts(spec_metadata)
        _commit(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, sampling, drafts)
    return accepted_tokens, num_accepted_tokens


def commit_thop(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, spec_metadata):
    """After MTP's fused strict op, whose law is argmax."""
    if RUNTIME.stage is not None:
        drafts = _drafts(spec_metadata)
        _commit(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, _greedy, drafts)
    return accepted_tokens, num_accepted_tokens


def commit_single(worker, target_tokens, logits, num_contexts, batch_size, spec_metadata):
    """At draft length 0: `target_tokens` [B] int, `logits` [B, V]. Returns tokens of the same shape and dtype."""
    if RUNTIME.stage is None:
        return target_tokens
    tokens = target_tokens[:batch_size].to(torch.int32).view(-1, 1)
    counts = torch.ones_like(tokens[:, 0])

    def sampling() -> _Sampling:
        return _sampling(spec_metadata, batch_size, batch_size, 1)

    _commit(worker, tokens, counts, logits, batch_size, batch_size, sampling)
    target_tokens[:batch_size].copy_(tokens[:, 0])
    return target_tokens


def before_relaxed(worker, pool: Tensor) -> Tensor | None:
    """A copy of the thinking deltas before relaxed acceptance moves them."""
    return None if RUNTIME.stage is None else pool.clone()


def commit_relaxed(
    worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, spec_metadata, pool, deltas
):
    """After relaxed acceptance, whose last token is an argmax. Where the stage changed a row, its delta in `pool` is
    recomputed in place from what was committed, starting at `deltas`."""
    if RUNTIME.stage is None or deltas is None:
        return accepted_tokens, num_accepted_tokens
    drafts = _drafts(spec_metadata)
    events = _commit(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, _greedy, drafts)
    if events is not None:
        _restore_deltas(
            worker, accepted_tokens, num_accepted_tokens, spec_metadata.slot_ids[:batch_size], pool, deltas, events
        )
    return accepted_tokens, num_accepted_tokens


def commit_tree(
    worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, spec_metadata, greedy=False
) -> None:
    """After tree verification, in place on the persistent buffers. `logits` [C + G·N, V] in tree order; path column j
    has the request's root row for j = 0, else row index[j − 1] + 1 of its N rows."""
    if RUNTIME.stage is None:
        return
    generation = batch_size - num_contexts

    def sampling() -> _Sampling:
        nodes = worker.tokens_per_gen_step
        index = worker._accepted_draft_indices_tensor[num_contexts:batch_size].long()
        root = torch.arange(generation, device=index.device)[:, None] * nodes
        path = torch.cat([torch.zeros_like(root), index.clamp(min=-1) + 1], dim=1)[:, : accepted_tokens.shape[1]]
        contexts, rest = _greedy() if greedy else _sampling(spec_metadata, num_contexts, batch_size, nodes)
        return contexts, rest._replace(source_rows=path + root)

    def copy_to_drafter() -> None:
        drafted_from = getattr(worker, "_accept_token", None)
        if drafted_from is not None and generation:
            width = min(drafted_from.shape[1], accepted_tokens.shape[1])
            drafted_from[:generation, :width].copy_(accepted_tokens[num_contexts:batch_size, :width])

    _commit(worker, accepted_tokens, num_accepted_tokens, logits, num_contexts, batch_size, sampling)
    RUNTIME.guarded(copy_to_drafter, None)


def veto_fused(worker) -> bool:
    """Whether to keep off the fused acceptance step: it uses the uncut count everywhere."""
    return RUNTIME.stage is not None


def guard_draft_loop(spec_metadata, num_accepted_draft_tokens: Tensor, attn_metadata) -> Tensor:
    """What the two-model drafting loop may advance by: never below 0, never past the row's own tokens."""
    if RUNTIME.stage is None:
        return num_accepted_draft_tokens
    return RUNTIME.guarded(_within_rows, num_accepted_draft_tokens, num_accepted_draft_tokens, attn_metadata)


def _within_rows(num_accepted: Tensor, attn_metadata) -> Tensor:
    lengths = attn_metadata._seq_lens_cuda[: num_accepted.shape[0]]
    return torch.minimum(num_accepted, lengths.to(num_accepted.dtype) - 1).clamp(min=0)


def _commit(
    worker,
    tokens: Tensor,
    counts: Tensor,
    logits: Tensor | None,
    num_contexts: int,
    batch_size: int,
    sampling: Callable[[], _Sampling],
    drafts: Tensor | None = None,
) -> Tensor | None:
    """Commit context and generation rows in place; `sampling` gives what to redraw from, for each of the two; `drafts`,
    what was proposed to the generation rows, is for the record only.

    Returns events [B] int32, or None if the stage stood aside.
    """
    events = None
    if getattr(worker, "force_num_accepted_tokens", 0):
        RUNTIME.stand_aside(FORCED)
    else:
        given = (tokens, counts, logits, num_contexts, batch_size, sampling, drafts)
        events = RUNTIME.guarded(_commit_rows, None, *given)
    if events is None:
        RUNTIME.stage.untrack_(RUNTIME.rows[:batch_size])
    return events


def _commit_rows(
    tokens: Tensor,
    counts: Tensor,
    logits: Tensor | None,
    num_contexts: int,
    batch_size: int,
    sampling: Callable[[], _Sampling],
    drafts: Tensor | None,
) -> Tensor:
    stage, recorder = RUNTIME.stage, RUNTIME.recorder
    # Rows without a token (early rejection sampling leaves contexts at 0) are not the stage's business.
    empty = counts[:batch_size] < 1
    slots = torch.where(empty, stage.num_slots, RUNTIME.rows[:batch_size])
    events = torch.zeros_like(counts[:batch_size])
    contexts, generation = sampling()
    parts = (
        (slice(0, num_contexts), 1, contexts),
        (slice(num_contexts, batch_size), tokens.shape[1], generation),
    )
    for part, width, given in parts:
        if part.stop > part.start:
            ready = _with_logits(given, logits, part, width)
            window = (tokens[part, :width], counts[part])
            before = None if recorder is None else recorder.before(*window, slots[part])
            events[part] = stage.commit_(*window, slots[part], **ready._asdict())
            if recorder is not None:
                recorder.after(before, *window, events[part], ready, _by_row(drafts, part, width))
    counts[:batch_size].masked_fill_(empty, 0)
    if RUNTIME.rank_check is not None:
        RUNTIME.rank_check.record(stage, tokens[:batch_size], counts[:batch_size], slots)
    return events


def _drafts(metadata) -> Tensor | None:
    """What was proposed in this step, [G · K]; looked up only where it is recorded."""
    return None if RUNTIME.recorder is None else getattr(metadata, "draft_tokens", None)


def _by_row(drafts: Tensor | None, part: slice, width: int) -> Tensor | None:
    """Drafts as [G, K], or None where they are laid out otherwise or belong to other rows."""
    rows = part.stop - part.start
    if drafts is None or width < 2 or drafts.numel() != rows * (width - 1):
        return None
    return drafts.reshape(rows, width - 1)


def _with_logits(given: Distribution, logits: Tensor | None, part: slice, width: int) -> Distribution:
    """Logits of a part of the batch: they follow `part.start` rows of one column each."""
    if given.probs is not None or logits is None:
        return given
    own = _fitted(logits)[part.start :]
    if given.source_rows is not None:
        return given._replace(logits=own)
    rows = part.stop - part.start
    return given._replace(logits=own[: rows * width].view(rows, width, -1))


def _fitted(scores: Tensor | None) -> Tensor | None:
    """Scores over the table's vocabulary; a padded tail is cut off, its tokens are illegal anyway."""
    vocab = RUNTIME.stage.table.vocab_size
    return scores if scores is None or scores.shape[-1] <= vocab else scores[..., :vocab]


def _greedy() -> _Sampling:
    return Distribution(), Distribution()


def _sampling(metadata, num_contexts: int, batch_size: int, width: int) -> _Sampling:
    """The sampler's settings for context rows and generation rows; parameters lie one for each logits row."""
    greedy = getattr(metadata, "is_all_greedy_sample", None)
    if greedy is None:  # trees before it had a switch of their own
        greedy = not getattr(metadata, "allow_advanced_sampling", False)
    if greedy or getattr(metadata, "temperatures", None) is None:
        return _greedy()
    end = num_contexts + (batch_size - num_contexts) * width
    columns = (metadata.temperatures, metadata.top_ks, metadata.top_ps)
    contexts = (None if c is None else c[:num_contexts] for c in columns)
    generation = (None if c is None else c[num_contexts:end:width] for c in columns)
    return Distribution(None, None, *contexts), Distribution(None, None, *generation)


def _restore_deltas(worker, tokens, counts, slot_ids, pool, deltas, events) -> None:
    config = worker.spec_config
    names = ("begin_thinking_phase_token", "end_thinking_phase_token")
    begin, end = (getattr(config, n, getattr(config, n.upper(), None)) for n in names)
    slot_ids = slot_ids.long()
    delta = deltas[slot_ids]
    for column in range(tokens.shape[1]):
        token = tokens[: len(slot_ids), column]
        inside = column < counts[: len(slot_ids)]
        delta = torch.where(inside & (token == begin), torch.full_like(delta, config.relaxed_delta), delta)
        delta = torch.where(inside & (token == end), torch.zeros_like(delta), delta)
    changed = (events & _CHANGED) != 0
    pool[slot_ids] = torch.where(changed, delta, pool[slot_ids])
