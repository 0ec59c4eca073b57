"""The redraw: integer weights, an inverse-CDF draw that is exact to its ends, and the sampler's own filters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structured_commit import CommitConfig, CommitStage, Event
from structured_commit.repair import (
    PROBABILITY_BITS,
    WEIGHT_BITS,
    best_legal,
    draw,
    exponential,
    filtered_probs,
    legal_weights,
    mass_limit,
    random_words,
    sampled_weights,
)
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
    # All distances are below 4, so weights are right to 4 · 2^-23 + 2^-26 of themselves and 2^-40 of the largest.
    assert torch.allclose(found, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=2**-20)


def test_the_exponential_is_as_close_as_it_says():
    """Every float32 distance of a coarse grid, and every one of its neighbours."""
    distances = torch.arange(0, 33, 2**-10, dtype=torch.float32)
    distances = torch.cat([distances, distances.nextafter(torch.tensor(0.0)), distances.nextafter(torch.tensor(99.0))])
    exact = (-distances.double()).exp() * 2.0**WEIGHT_BITS
    found = exponential(distances).double()
    assert bool(((found - exact).abs() <= exact * 2.0**-26 + 1).all())
    assert found.max() == exponential(torch.zeros(1)) < 2**WEIGHT_BITS
    assert exponential(torch.tensor([32.0, 1e38, torch.inf, torch.nan, -1.0])).tolist() == [0] * 5


def softmax(logits: torch.Tensor, temperature: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    scaled = torch.where(left, logits.double() / temperature.double()[:, None], -torch.inf)
    return scaled.softmax(dim=1)


@pytest.mark.parametrize("depth", [0.0, 60.0])
def test_the_weights_of_the_legal_part_are_its_softmax_within_the_stated_bound(depth):
    """Also where the legal part as a whole is as unlikely as e^-60: it is drawn from by its own odds.

    With weights a_i·(1 + r_i) − c_i, |r_i| ≤ r = d·2^-23 + 2^-26 and 0 ≤ c_i ≤ c = 2^-40, the largest a_i being 1, a
    share differs from a_i / Σa by at most r of itself and c, plus as much again for the sum: (r + V·c) of itself.
    """
    generator = torch.Generator().manual_seed(2)
    rows, vocab = 50, 200
    logits = torch.randn(rows, vocab, generator=generator) * 3
    legal = torch.rand(rows, vocab, generator=generator) < 0.5
    temperature = torch.rand(rows, generator=generator) + 0.5
    weights = sampled_weights(logits - legal * depth * temperature[:, None], temperature, None, None, legal=legal)
    exact = softmax(logits - legal * depth * temperature[:, None], temperature, legal)
    found = weights.double() / weights.sum(dim=1, keepdim=True)
    distance = (exact.amax(dim=1, keepdim=True) / exact).log()
    relative, cut = distance.where(legal, 0.0).amax() * 2.0**-23 + 2.0**-26, 2.0**-40
    assert bool(((found - exact).abs() <= exact * (2 * relative + vocab * cut) + cut).all())


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.25, 250),
        (0.5, 500),
        (1e-9, 1),
        (0.0, 1),
        (-1.0, 1),
        (float("nan"), 1),
        (1.0, 1000),
        (7.0, 1000),
        (0.9995, 1000),
    ],
)
def test_the_limit_of_mass_is_exact(top_p, expected):
    assert mass_limit(torch.tensor([top_p]), torch.tensor([1000])).tolist() == [expected]


def test_the_limit_of_mass_is_exact_in_63_bits():
    total = 2**62 + 12345
    assert mass_limit(torch.tensor([0.75]), torch.tensor([total])).tolist() == [-(-3 * total // 4)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [(2, None, [1, 2, 3]), (1, None, [1]), (4, None, [0, 1, 2, 3, 4]), (3, None, [1, 2, 3]), (None, 0.5, [1, 2])],
)
def test_top_k_keeps_what_ties_and_top_p_the_lower_ids_of_what_ties(top_k, top_p, left):
    """Masses 1 : 8 : 4 : 4 : 1 : 0, so half of it is reached by the first 4."""
    logits = torch.tensor([[1.0, 8.0, 4.0, 4.0, 1.0, 0.0]]).log()
    limits = (None if top_k is None else int32([top_k]), None if top_p is None else torch.tensor([top_p]))
    assert sampled_weights(logits, torch.ones(1), *limits)[0].nonzero()[:, 0].tolist() == left


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_weighs_nothing(odd):
    rows = torch.tensor([[0.0, odd, 1.0], [-torch.inf] * 3, [1.0, -torch.inf, -torch.inf]])
    weights = sampled_weights(rows, torch.ones(3), None, None)
    assert weights.count_nonzero(dim=1).tolist() == [0, 0, 1]
    assert sampled_weights(rows, torch.full((3,), torch.nan), None, None).count_nonzero() == 0


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
