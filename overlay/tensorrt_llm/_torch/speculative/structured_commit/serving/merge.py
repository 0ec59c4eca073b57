"""Several results of one streaming tool parser, made into one again: pure functions over what parsers return.

A *result* has `normal_text` and `calls`; an *item* of `calls` has `tool_index`, `name` and `parameters`, as in
TensorRT-LLM and SGLang. Whoever turns items into a reply mints a new id for every item with a name, so a name must
appear once. Nothing here knows formats, automata or parsers' insides; nothing is renumbered, and no item is changed in
place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a chunk may carry: text, and behind it calls. Has the attributes of a parser's own result.

    Attributes:
        normal_text: content.
        calls: items of the parser's own class.
    """

    normal_text: str = ""
    calls: list = field(default_factory=list)


def merge_calls(items: Iterable) -> list:
    """Join the items of each call: its name once, its arguments concatenated, calls in the order they began.

    A named item begins a call, also where its index was used before; an item without a name continues the last call of
    its index. Items with neither name nor arguments are dropped.

    Args:
        items: items in the order in which the parser returned them.

    Returns:
        Copies; the given items stay as they are.
    """
    merged: list = []
    begun: dict[int, object] = {}
    for item in items:
        if not (item.name or item.parameters):
            continue
        call = begun.get(item.tool_index)
        if call is None or item.name:
            begun[item.tool_index] = call = copy.copy(item)
            merged.append(call)
        else:
            call.parameters = (call.parameters or "") + item.parameters
    return merged


def merge_results(results: Iterable) -> Delivered:
    """All results as one: texts concatenated, calls joined. Text that stood between calls moves before them."""
    results = list(results)
    return Delivered(
        "".join(r.normal_text or "" for r in results),
        merge_calls(item for r in results for item in r.calls or ()),
    )


def results_in_order(results: Iterable) -> list[Delivered]:
    """As few results as keep text and calls in their order: a new one begins where text follows a call.

    The first has all of them if nothing but calls follows the first call; the list is empty if nothing came.
    """
    groups: list[list] = []
    calls_came = True
    for result in results:
        if (result.normal_text and calls_came) or not groups:
            groups.append([])
            calls_came = False
        groups[-1].append(result)
        calls_came = calls_came or bool(result.calls)
    merged = [merge_results(group) for group in groups]
    return [m for m in merged if m.normal_text or m.calls]


def once_per_delta(
    chunks: int, *, logprobs: object = None, finish_reason: object = None, stop_reason: object = None
) -> list[dict[str, object]]:
    """The fields that one delta has once, for each of the chunks it becomes: [chunks] mappings.

    Log probabilities go with the first chunk, the finish and stop reasons with the last; usage has a chunk of its own,
    behind all of them, as ever.

    Raises:
        ValueError: `chunks` is not positive: the fields would be lost.
    """
    if chunks < 1:
        raise ValueError(f"{chunks} chunks cannot carry a delta's fields; make one chunk at least")
    fields = [{"logprobs": None, "finish_reason": None, "stop_reason": None} for _ in range(chunks)]
    fields[0]["logprobs"] = logprobs
    fields[-1].update(finish_reason=finish_reason, stop_reason=stop_reason)
    return fields
