"""The redraw: integer weights, an inverse-CDF draw that is exact to its ends, and the sampler's own filters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structured_commit import CommitConfig, CommitStage, Event
from structured_commit.repair import PROBABILITY_BITS, best_legal, draw, filtered_probs, legal_weights, random_words
from tests.support.calls import BODY, END, IN_TEXT, IN_THE_HEADER, NAME, OPEN, TEXT, VOCAB, calls_table, int32

ALL = torch.ones(1, 4, dtype=torch.bool)


def word(number: int) -> torch.Tensor:
    return torch.tensor([[number >> 32, number & 0xFFFFFFFF]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**PROBABILITY_BITS), min_size=1, max_size=6).filter(any), st.integers(0, 2**64 - 1))
def test_the_draw_is_the_inverse_cdf_in_whole_numbers(weights, number):
    target = number * sum(weights) >> 64
    expected = next(x for x in range(len(weights)) if sum(weights[: x + 1]) > target)
    assert int(draw(torch.tensor([weights]), word(number))) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2**PROBABILITY_BITS), min_size=2, max_size=6))
def test_each_token_owns_its_share_of_the_64_bit_numbers_from_the_first_to_the_last(weights):
    total, before = sum(weights), 0
    for token, weight in enumerate(weights):
        first, past = (-(-(edge << 64) // total) for edge in (before, before + weight))
        for number in (first, past - 1):
            assert int(draw(torch.tensor([weights]), word(number))) == token
        before += weight


def test_nothing_is_drawn_where_there_is_no_weight():
    assert draw(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)).tolist() == [5, 5]


def test_weights_are_the_legal_probabilities_in_52_bits():
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    legal = torch.tensor([[True, False, True, True]])
    assert legal_weights(probs, legal).tolist() == [[1 << 51, 0, 1 << 50, 0]]


def test_values_that_are_no_probabilities_weigh_nothing_or_one():
    probs = torch.tensor([[float("nan"), -1.0, float("inf"), 2.0]])
    assert legal_weights(probs, ALL).tolist() == [[0, 0, 1 << 52, 1 << 52]]


def test_the_stages_stream_depends_on_seed_slot_and_step_alone():
    slots, steps = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    words = random_words(7, slots, steps)
    assert len({tuple(row) for row in words.tolist()}) == 3
    assert torch.equal(words[[2, 0]], random_words(7, slots[[2, 0]], steps[[2, 0]]))
    assert not torch.equal(words, random_words(8, slots, steps))
    assert bool(((words >= 0) & (words < 2**32)).all())


def test_the_best_legal_token_is_the_lowest_id_among_equals():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    assert best_legal(scores, torch.tensor([[True, False, True, True]])).tolist() == [2]
    assert best_legal(scores, torch.zeros(1, 4, dtype=torch.bool)).tolist() == [4]


LOGITS = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, None, None, [0.6, 0.2, 0.1, 0.1]),
        (0.5, None, None, [0.36 / 0.42, 0.04 / 0.42, 0.01 / 0.42, 0.01 / 0.42]),
        (0.0, None, None, [1, 0, 0, 0]),
        (0.009, 3, 0.5, [1, 0, 0, 0]),
        (1.0, 2, None, [0.75, 0.25, 0, 0]),
        (1.0, 0, None, [0.6, 0.2, 0.1, 0.1]),
        (1.0, 3, None, [0.6, 0.2, 0.1, 0.1]),
        (1.0, 99, None, [0.6, 0.2, 0.1, 0.1]),
        (1.0, None, 0.5, [1, 0, 0, 0]),
        (1.0, None, 0.7, [0.75, 0.25, 0, 0]),
        (1.0, None, 1.0, [0.6, 0.2, 0.1, 0.1]),
        (1.0, 2, 0.7, [1, 0, 0, 0]),
    ],
)
def test_the_filters_are_the_samplers(temperature, top_k, top_p, expected):
    """`top_k` 3 keeps four tokens: the fourth ties with the third."""
    found = filtered_probs(
        LOGITS,
        torch.tensor([temperature]),
        None if top_k is None else int32([top_k]),
        None if top_p is None else torch.tensor([top_p]),
    )
    assert torch.allclose(found, torch.tensor([expected], dtype=torch.float32), atol=1e-6)


def redraws(state: int, token: int, logits: list[float], numbers=(0,), **filters):
    """What takes the place of `token`, once for each 64-bit number: (tokens, events)."""
    rows = len(numbers)
    stage = CommitStage(calls_table(), CommitConfig(repair_rows=rows), num_slots=rows, max_window=1)
    stage.state[:rows] = state
    out = stage.commit(
        int32([[token]] * rows),
        int32([1] * rows),
        torch.arange(rows),
        logits=torch.tensor(logits).expand(rows, 1, VOCAB),
        words=torch.cat([word(number) for number in numbers]),
        **{name: torch.tensor([value] * rows) for name, value in filters.items()},
    )
    events = [Event(e) for e in out.events.tolist()]
    assert all(Event.REPAIRED in e for e in events)
    return out.tokens[:, 0].tolist(), events


PREFERENCE = [1.0, 2.0, 9.0, 3.0, 0.0, 4.0]  # NAME first, which no text holds; then END, OPEN, TEXT


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"temperature": 0.01, "top_p": 0.3}])
def test_a_greedy_row_takes_the_best_legal_token(filters):
    assert redraws(IN_TEXT, NAME, PREFERENCE, **filters)[0] == [END]


def test_a_sampled_row_draws_from_the_filtered_legal_part():
    """Top-k 4 keeps NAME, END, BODY, OPEN: the legal ones are END and OPEN, with odds e² to 1."""
    numbers = [number << 56 for number in range(256)]
    drawn, _ = redraws(IN_TEXT, NAME, PREFERENCE, numbers, temperature=1.0, top_k=4)
    assert set(drawn) == {OPEN, END}
    assert drawn.count(END) == pytest.approx(256 / (1 + torch.e**-2), abs=1.5)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.2}])
def test_filters_that_kept_only_illegal_tokens_give_way_to_the_best_legal_one(filters):
    drawn, events = redraws(IN_TEXT, NAME, PREFERENCE, temperature=1.0, **filters)
    assert drawn == [END]
    assert Event.ESCAPED not in events[0]


def test_scores_without_any_legal_value_still_give_a_legal_token():
    nothing = float("-inf")
    drawn, _ = redraws(IN_THE_HEADER, TEXT, [1.0, 1.0, nothing, nothing, 1.0, 1.0], temperature=1.0)
    assert drawn[0] in (NAME, BODY)


def test_equal_calls_draw_equal_tokens_and_the_samplers_generator_is_left_alone():
    def one_run() -> list[int]:
        stage = CommitStage(calls_table(), CommitConfig(seed=5, max_repairs=99), num_slots=2, max_window=1)
        stage.state[:2] = IN_THE_HEADER
        probs = torch.full((2, 1, VOCAB), 1 / VOCAB)
        rows = int32([[TEXT], [TEXT]]), int32([1, 1]), torch.tensor([0, 1])
        drawn = []
        for _ in range(20):
            drawn += stage.commit(*rows, probs=probs).tokens[:, 0].tolist()
            stage.state[:2] = IN_THE_HEADER
        return drawn

    before = torch.get_rng_state()
    first, second = one_run(), one_run()
    assert first == second
    assert len(set(first)) == 2
    assert torch.equal(before, torch.get_rng_state())
