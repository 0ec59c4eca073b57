"""Strict and relaxed acceptance, and what every reference rule refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from structured_commit import reference
from structured_commit.errors import StageError
from structured_commit.reference import rejection_reference, relaxed_reference, strict_reference
from tests.unit.test_reference import drafts, one_hot, windows

# --- strict ---


@pytest.mark.parametrize(
    ("draft", "target", "length"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 9, 7, 8], 2),
        ([5, 6, 7], [9, 6, 7, 8], 1),
        ([5, 6, 7], [5, 6, 9, 8], 3),
        ([], [4], 1),
    ],
)
def test_strict_keeps_the_matching_prefix_and_returns_the_targets_choices(draft, target, length):
    result = strict_reference(torch.tensor([draft], dtype=torch.int32), torch.tensor([target]))
    assert result.tokens.tolist() == [target]
    assert result.lengths.tolist() == [length]
    assert (result.tokens.dtype, result.lengths.dtype) == (torch.int32, torch.int32)


@given(st.data())
def test_rejection_between_certain_choices_is_strict_acceptance(data):
    num_drafts, vocab = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
    tokens = st.integers(0, vocab - 1)
    row = st.lists(tokens, min_size=2 * num_drafts + 1, max_size=2 * num_drafts + 1)
    both = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    draft, target = both[:, :num_drafts], both[:, num_drafts:]
    strict = strict_reference(draft, target)
    # Between certain choices a draft passes or fails whatever the number, unless it is 1.0: not drawn here.
    result = rejection_reference(one_hot(draft, vocab), draft, one_hot(target, vocab), 5, 0)
    assert torch.equal(result.emitted + 1, strict.lengths)
    inside = torch.arange(num_drafts + 1) < strict.lengths.unsqueeze(1)
    assert torch.equal(result.output_tokens[inside], strict.tokens[inside])


# --- relaxed ---

SCORES = torch.tensor([[0.5, 0.3125, 0.125, 0.0625]])  # exact in every float type


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("draft", "top_k", "delta", "tokens"),
    [
        pytest.param([0, 0], 1, 0.0, [0, 0, 0], id="the best token is always kept"),
        pytest.param([0, 1], 4, 0.0, [0, 0, 1], id="without delta only the best token"),
        pytest.param([0, 1], 4, 0.1875, [0, 1, 0], id="the threshold itself is close enough"),
        pytest.param([0, 1], 4, 0.18, [0, 0, 1], id="below the threshold"),
        pytest.param([1, 2], 2, 1.0, [1, 0, 1], id="close enough but not among the top k"),
        pytest.param([1, 2], 3, 1.0, [1, 2, 0], id="among the top k"),
        pytest.param([3, 0], 2, 1.0, [0, 1, 1], id="the row ends at the first draft not kept"),
    ],
)
def test_relaxed_keeps_close_candidates_then_the_best_token_then_filler(draft, top_k, delta, tokens, dtype):
    result = relaxed_reference(drafts(draft), SCORES.expand(1, 3, 4).to(dtype), top_k, delta)
    assert result.tokens.tolist() == [tokens]
    expected = 1 + next((i for i, token in enumerate(draft) if tokens[i] != token), len(draft))
    assert result.lengths.tolist() == [expected]
    assert (result.tokens.dtype, result.lengths.dtype) == (torch.int32, torch.int32)


def test_relaxed_delta_may_differ_by_row():
    scores = SCORES.expand(2, 2, 4)
    result = relaxed_reference(drafts([1], [1]), scores, 2, torch.tensor([0.0, 0.5]))
    assert result.tokens.tolist() == [[0, 1], [1, 0]]
    assert result.lengths.tolist() == [1, 2]


def test_relaxed_without_delta_keeps_what_ties_with_the_best():
    scores = torch.tensor([[[0.25, 0.375, 0.375], [1.0, 0.0, 0.0]]])
    for draft in (1, 2):
        assert relaxed_reference(drafts([draft]), scores, 2, 0.0).tokens.tolist() == [[draft, 0]]


def test_relaxed_compares_the_scores_it_is_given():
    # One and the same delta: a quarter apart as probabilities, more than that as log-probabilities.
    probs = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    assert relaxed_reference(drafts([1]), probs, 3, 0.25).lengths.tolist() == [2]
    assert relaxed_reference(drafts([1]), probs.log(), 3, 0.25).lengths.tolist() == [1]


@given(windows(), st.integers(1, 9), st.sampled_from([0.0, 0.125, 0.5, 2.0]))
def test_relaxed_equals_a_walk_of_the_rule_row_by_row(window, top_k, delta):
    _, ids, scores, _ = window
    n, num_drafts = ids.shape
    top_k = min(top_k, scores.shape[-1])
    # Distinct scores: the order of equal ones is not part of the rule.
    scores = scores + 1e-3 * torch.arange(scores.shape[-1])
    result = relaxed_reference(ids, scores, top_k, delta)
    for row in range(n):
        expected = []
        for position in range(num_drafts + 1):
            ranked = sorted(enumerate(scores[row, position].tolist()), key=lambda pair: -pair[1])[:top_k]
            best = ranked[0][1]
            assume(all(score == best or abs(best - delta - score) > 1e-6 for _, score in ranked))
            close = {token for token, score in ranked if score >= best - delta}
            if position < num_drafts and int(ids[row, position]) in close:
                expected.append(int(ids[row, position]))
                continue
            expected.append(ranked[0][0])
            break
        assert result.lengths[row] == len(expected)
        filler = [reference.RELAXED_FILLER] * (num_drafts + 1 - len(expected))
        assert result.tokens[row].tolist() == expected + filler


# --- arguments that do not fit ---

IDS, TOO_LARGE, NEGATIVE = drafts([0, 1]), drafts([0, 3]), drafts([-1, 0])
DRAFT, TARGET = torch.full((1, 2, 3), 1 / 3), torch.full((1, 3, 3), 1 / 3)
SEEDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rejection_reference(DRAFT.double(), IDS, TARGET, 0, 0), "draft_probs must be torch.float32"),
        (lambda: rejection_reference(DRAFT, IDS.float(), TARGET, 0, 0), "draft_tokens must be torch.int32"),
        (lambda: rejection_reference(DRAFT, IDS, TARGET.half(), 0, 0), "target_probs must be torch.float32"),
        (lambda: rejection_reference(DRAFT, IDS, TARGET[:, :2], 0, 0), r"target_probs must be \[1, 3, any\]"),
        (lambda: rejection_reference(DRAFT[:, :1], IDS, TARGET, 0, 0), r"draft_probs must be \[1, 2, 3\]"),
        (lambda: rejection_reference(DRAFT[..., :2], IDS, TARGET, 0, 0), r"draft_probs must be \[1, 2, 3\]"),
        (lambda: rejection_reference(DRAFT, IDS[0], TARGET, 0, 0), r"draft_tokens must be \[any, any\]"),
        (lambda: rejection_reference(DRAFT[..., :0], IDS, TARGET[..., :0], 0, 0), "empty vocabulary"),
        (lambda: rejection_reference(DRAFT.to("meta"), IDS, TARGET, 0, 0), "draft_probs is on meta"),
        (lambda: rejection_reference(DRAFT, TOO_LARGE, TARGET, 0, 0), r"draft_tokens\[0, 1\] is 3"),
        (lambda: rejection_reference(DRAFT, NEGATIVE, TARGET, 0, 0), r"draft_tokens\[0, 0\] is -1"),
        (lambda: rejection_reference(DRAFT, IDS, TARGET, SEEDS, 0), "seed must have one element or 1"),
        (lambda: rejection_reference(DRAFT, IDS, TARGET, 0, SEEDS[:1].int()), "offset must be torch.int64"),
        (lambda: rejection_reference(DRAFT, IDS, TARGET, 0, 0, flashinfer="0.1"), "choose one of 0.6.4"),
        (lambda: strict_reference(IDS, IDS), r"target_tokens must be \[1, 3\]"),
        (lambda: strict_reference(IDS, TARGET[..., 0]), "target_tokens must be torch.int32"),
        (lambda: relaxed_reference(IDS, TARGET.double(), 1, 0.0), "target_scores must be torch.float32"),
        (lambda: relaxed_reference(IDS, TARGET, 0, 0.0), "top_k must be in 1 ... 3"),
        (lambda: relaxed_reference(IDS, TARGET, 4, 0.0), "top_k must be in 1 ... 3"),
        (lambda: relaxed_reference(IDS, TARGET, 1, torch.zeros(2)), r"delta must be \[1\]"),
        (lambda: relaxed_reference(TOO_LARGE, TARGET, 1, 0.0), "outside the vocabulary"),
    ],
)
def test_arguments_that_do_not_fit_raise_a_stage_error_that_names_them(call, message):
    with pytest.raises(StageError, match=message):
        call()
