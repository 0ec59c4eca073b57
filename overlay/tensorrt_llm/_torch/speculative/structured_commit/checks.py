"""What the stage refuses. Shapes, dtypes and devices are checked on every call, without touching the device;
values only on request, since that waits for it. All checks come before any write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import StageError

if TYPE_CHECKING:
    from .repair import Distribution
    from .stage import CommitStage

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SUM_TOLERANCE = 1e-3


def check_shapes(
    stage: CommitStage,
    tokens: Tensor,
    lengths: Tensor,
    slots: Tensor,
    given: Distribution,
    redraw: bool,
) -> None:
    """Refuse arguments of `commit` with a wrong shape, dtype or device, or a combination that cannot work."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise StageError(f"tokens must be a [B, W] int32 tensor, not {_describe(tokens)}")
    batch, width = tokens.shape
    if not 1 <= width <= stage.max_window:
        raise StageError(f"tokens has windows of {width} columns; this stage was built for 1 to {stage.max_window}")
    vocab = stage.table.vocab_size
    source = (batch, width, vocab)
    if given.source_rows is not None:
        flat = given.probs if given.probs is not None else given.logits
        source = (flat.shape[0] if isinstance(flat, Tensor) and flat.dim() else 0, vocab)
    expected = (
        ("tokens", tokens, (batch, width), (torch.int32,)),
        ("lengths", lengths, (batch,), (torch.int32,)),
        ("slots", slots, (batch,), (torch.int64,)),
        ("probs", given.probs, source, _FLOATS),
        ("logits", given.logits, source, _FLOATS),
        ("temperature", given.temperature, (batch,), _FLOATS),
        ("top_k", given.top_k, (batch,), (torch.int32, torch.int64)),
        ("top_p", given.top_p, (batch,), _FLOATS),
        ("source_rows", given.source_rows, (batch, width), (torch.int64,)),
        ("words", given.words, (batch, 2), (torch.int64,)),
    )
    for name, tensor, shape, dtypes in expected:
        if tensor is None and name not in ("lengths", "slots"):
            continue
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise StageError(f"{name} must be a {list(shape)} {kinds} tensor, not {_describe(tensor)}")
        if tensor.device != stage.state.device:
            raise StageError(f"{name} is on {tensor.device}, the stage on {stage.state.device}; move one of them")
    if given.probs is not None and given.logits is not None:
        raise StageError("pass probs or logits, not both: they could disagree")
    filters = (given.temperature, given.top_k, given.top_p)
    if given.probs is not None and any(f is not None for f in filters):
        raise StageError("temperature, top_k and top_p belong to logits; probs are already filtered")
    if given.temperature is None and any(f is not None for f in filters):
        raise StageError("top_k and top_p need a temperature: without one every row is greedy")
    if redraw and stage.config.policy.repairs and given.probs is None and given.logits is None:
        raise StageError(
            f"policy {stage.config.policy.value!r} redraws illegal tokens and needs probs or logits; use 'trim' or "
            "'observe', or redraw=False, where there are none"
        )


def check_in_place(tokens: Tensor, lengths: Tensor) -> None:
    """Refuse tensors that cannot be written to because their rows share memory."""
    for name, tensor in (("tokens", tokens), ("lengths", lengths)):
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise StageError(f"{name} is expanded: its rows share memory and cannot be written in place; clone it")


def check_values(stage: CommitStage, tokens: Tensor, lengths: Tensor, slots: Tensor, probs: Tensor | None) -> None:
    """Refuse wrong values, naming the first row that has one. Waits for the device."""
    width, vocab = tokens.shape[1], stage.table.vocab_size
    column = torch.arange(width, device=tokens.device)
    bad_token = ((tokens < 0) | (tokens >= vocab)) & (column < lengths[:, None])
    _refuse(
        (lengths < 1) | (lengths > width),
        lengths,
        f"lengths: {{value}} in row {{row}} is outside [1, {width}]",
    )
    _refuse(
        (slots < 0) | (slots > stage.num_slots),
        slots,
        f"slots: {{value}} in row {{row}} is outside [0, {stage.num_slots}] ({stage.num_slots} = no slot)",
    )
    owned = [s for s in slots.tolist() if s < stage.num_slots]
    if len(set(owned)) != len(owned):
        raise StageError(f"slots: {max(owned, key=owned.count)} stands in two rows of one batch")
    _refuse(bad_token.any(dim=1), tokens, f"tokens: row {{row}} holds an id outside [0, {vocab}): {{value}}")
    if probs is not None and probs.dim() == 3:
        sums = probs.double().sum(dim=2)
        wrong = ((sums - 1).abs() > _SUM_TOLERANCE) & (column < lengths[:, None])
        _refuse(wrong.any(dim=1), sums, "probs: a column of row {row} does not sum to one: {value}")


def check_bindings(
    num_slots: int,
    slots: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    owners: Sequence | None,
    in_context: Sequence[bool] | None,
    tracked: Sequence[bool] | None,
    prompt_lengths: Sequence[int] | None,
) -> None:
    """Refuse arguments of `bind` that do not belong together."""
    for name, values in (
        ("token_ids", token_ids),
        ("owners", owners),
        ("in_context", in_context),
        ("tracked", tracked),
        ("prompt_lengths", prompt_lengths),
    ):
        if values is not None and len(values) != len(slots):
            raise StageError(f"bind: {len(slots)} slots but {len(values)} {name}")
    for slot in slots:
        if not 0 <= slot < num_slots:
            raise StageError(f"bind: slot {slot} is outside [0, {num_slots})")
    if len(set(slots)) != len(slots):
        raise StageError(f"bind: slot {max(slots, key=list(slots).count)} is named twice")


def _refuse(bad: Tensor, values: Tensor, message: str) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise StageError(message.format(row=row, value=values[row].tolist()))


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
