"""Merging the results of several calls of one parser: names once, arguments joined, order kept, nothing renumbered."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from structured_commit.serving.merge import (
    Delivered,
    merge_calls,
    merge_results,
    once_per_delta,
    results_in_order,
)


@dataclass
class Item:
    """An item as parsers make them."""

    tool_index: int
    name: str | None = None
    parameters: str = ""


CASES = {
    "a name and its arguments": (
        [Item(0, "f"), Item(0, None, '{"x"'), Item(0, None, ": 1}")],
        [Item(0, "f", '{"x": 1}')],
    ),
    "two calls": (
        [Item(0, "f"), Item(0, None, "{}"), Item(1, "g"), Item(1, None, "{}")],
        [Item(0, "f", "{}"), Item(1, "g", "{}")],
    ),
    "arguments of a call whose name went out earlier": (
        [Item(0, None, "1}"), Item(1, "g"), Item(1, None, "{")],
        [Item(0, None, "1}"), Item(1, "g", "{")],
    ),
    "arguments that come in turns": (
        [Item(0, "f"), Item(1, "g"), Item(0, None, "{"), Item(1, None, "["), Item(0, None, "}")],
        [Item(0, "f", "{}"), Item(1, "g", "[")],
    ),
    "two calls of one index": (
        [Item(2, "f"), Item(2, None, "{1}"), Item(2, "f"), Item(2, None, "{2}")],
        [Item(2, "f", "{1}"), Item(2, "f", "{2}")],
    ),
    "a name with arguments": ([Item(0, "f", "{"), Item(0, None, "}")], [Item(0, "f", "{}")]),
    "nothing": ([Item(0), Item(1, "", "")], []),
    "indices of tools, not of calls": (
        [Item(-1, "f", "{}"), Item(5, "g", "{}")],
        [Item(-1, "f", "{}"), Item(5, "g", "{}")],
    ),
}


@pytest.mark.parametrize(("items", "merged"), CASES.values(), ids=CASES)
def test_items_of_a_call_are_joined(items, merged):
    given = [Item(i.tool_index, i.name, i.parameters) for i in items]
    assert merge_calls(items) == merged
    assert items == given


@pytest.mark.parametrize(("items", "merged"), CASES.values(), ids=CASES)
def test_merging_in_two_steps_is_merging_at_once(items, merged):
    for cut in range(len(items) + 1):
        assert merge_calls([*merge_calls(items[:cut]), *items[cut:]]) == merged


def test_one_result_has_all_text_before_all_calls():
    results = [Delivered("a"), Delivered("b", [Item(0, "f")]), Delivered("", [Item(0, None, "{}")]), Delivered("c")]
    assert merge_results(results) == Delivered("abc", [Item(0, "f", "{}")])
    assert merge_results([]) == Delivered()


def test_several_results_keep_text_on_its_side_of_the_calls():
    results = [
        *(Delivered("a"), Delivered("b", [Item(0, "f")]), Delivered("", [Item(0, None, "{}")])),
        *(Delivered("c"), Delivered("d"), Delivered(), Delivered("", [Item(1, "g")]), Delivered("e")),
    ]
    assert results_in_order(results) == [
        Delivered("ab", [Item(0, "f", "{}")]),
        Delivered("cd", [Item(1, "g")]),
        Delivered("e"),
    ]
    assert results_in_order([Delivered(), Delivered()]) == []


def test_what_a_delta_has_once_goes_once():
    assert once_per_delta(1, logprobs="l", finish_reason="stop", stop_reason=7) == [
        {"logprobs": "l", "finish_reason": "stop", "stop_reason": 7}
    ]
    first, middle, last = once_per_delta(3, logprobs="l", finish_reason="stop", stop_reason=7)
    assert first == {"logprobs": "l", "finish_reason": None, "stop_reason": None}
    assert set(middle.values()) == {None}
    assert last == {"logprobs": None, "finish_reason": "stop", "stop_reason": 7}
    with pytest.raises(ValueError, match="0 chunks"):
        once_per_delta(0)
