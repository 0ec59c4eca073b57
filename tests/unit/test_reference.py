"""The acceptance rules: windows by hand, the exact law of rejection sampling, the kernel's own outputs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from structured_commit import reference
from structured_commit.philox import curand_philox_words, curand_uniform
from structured_commit.reference import rejection_reference

TWO32 = 1 << 32
RELEASES = ("0.6.4", "0.7.2", "0.7.4")
CERTAIN = TWO32 // 2  # a word whose uniform, one half, is on the safe side of 0 and 1


@pytest.fixture
def with_words(monkeypatch):
    """Run rejection sampling with the given words, [n, K+2], in place of the generator's."""

    def run(words, *args, **kwargs):
        table = torch.as_tensor(words, dtype=torch.int64)
        monkeypatch.setattr(reference, "curand_philox_words", lambda seed, rows, offset, n: table)
        return rejection_reference(*args, seed=0, offset=0, **kwargs)

    return run


def one_hot(tokens, vocab: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.as_tensor(tokens), vocab).float()


def drafts(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# --- rejection: single windows, by hand ---


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("draft", "target", "output", "accepted", "emitted"),
    [
        pytest.param([0, 1], [0, 1, 2], [0, 1, 2], 2, 2, id="all kept, then the bonus token"),
        pytest.param([0, 1], [0, 2, 3], [0, 2, -1], 1, 1, id="second rejected, recovered token"),
        pytest.param([0, 1], [3, 1, 2], [3, -1, -1], 1, 0, id="first rejected, second counts as accepted"),
        pytest.param([0, 1, 2], [3, 1, 0, 0], [3, -1, -1, -1], 1, 0, id="counts only what passes"),
        pytest.param([0, 1, 2], [0, 3, 2, 0], [0, 3, -1, -1], 2, 1, id="counts go on past a rejection"),
        pytest.param([], [2], [2], 0, 0, id="no drafts, only the bonus token"),
    ],
)
def test_certain_windows(with_words, release, draft, target, output, accepted, emitted):
    num_drafts = len(draft)
    result = with_words(
        [[CERTAIN] * (num_drafts + 2)],
        one_hot(torch.tensor(draft, dtype=torch.int64), 4).view(1, num_drafts, 4),
        torch.tensor(draft, dtype=torch.int32).view(1, num_drafts),
        one_hot(target, 4).unsqueeze(0),
        flashinfer=release,
    )
    assert result.output_tokens.tolist() == [output]
    assert result.accepted.tolist() == [accepted]
    assert result.emitted.tolist() == [emitted]
    assert {tensor.dtype for tensor in result} == {torch.int32}


@pytest.mark.parametrize(("release", "accepted"), [("0.6.4", 1), ("0.7.2", 1), ("0.7.4", 0)])
def test_the_rejected_draft_is_tested_again_until_0_7_4(with_words, release, accepted):
    # Token 0 has draft mass 1 and target mass 1/2: it fails at 3/4 and passes the second test at 1/4.
    window = one_hot([[0]], 2), drafts([0]), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    result = with_words([[TWO32 // 4 * 3, TWO32 // 4, CERTAIN]], *window, flashinfer=release)
    assert result.emitted.tolist() == [0]
    assert result.accepted.tolist() == [accepted]
    assert result.output_tokens.tolist() == [[1, -1]]


def test_numbers_are_read_in_the_kernels_order(with_words):
    # Two drafts of mass 1 against 1/2. Words: test 0, test 1, after a rejection one more; then the draw.
    # Each draw splits its vocabulary at one half, so a word of 3/4 or 1/4 shows in the token.
    low, high = TWO32 // 4, TWO32 // 4 * 3
    target = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]])
    window = one_hot([[0, 0]], 3), drafts([0, 0]), target
    for last in (low, high):
        kept = with_words([[low, low, last, high - last + low]], *window)
        assert kept.output_tokens.tolist() == [[0, 0, 0 if last == low else 1]]
        second = with_words([[low, high, high - last + low, last]], *window)
        assert second.output_tokens.tolist() == [[0, 1 if last == low else 2, -1]]
        first = with_words([[high, high, high, last]], *window)
        assert first.output_tokens.tolist() == [[1 if last == low else 2, -1, -1]]


def test_a_draft_without_target_mass_is_rejected_even_if_the_drafter_gave_it_none(with_words):
    result = with_words([[CERTAIN] * 3], one_hot([[1]], 3), drafts([0]), one_hot([[2, 1]], 3))
    assert result.output_tokens.tolist() == [[2, -1]]


def test_a_draft_the_drafter_gave_no_mass_is_kept_if_the_target_gives_some(with_words):
    target = torch.tensor([[[0.25, 0.75], [0.0, 1.0]]])
    result = with_words([[CERTAIN] * 3], one_hot([[1]], 2), drafts([0]), target)
    assert result.output_tokens.tolist() == [[0, 1]]


def test_subnormal_mass_counts_as_none(with_words):
    target = torch.tensor([[[1e-40, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    result = with_words([[CERTAIN] * 3], one_hot([[2]], 3), drafts([0]), target)
    assert result.output_tokens.tolist() == [[1, -1]]


def test_the_largest_number_takes_the_last_token_that_has_mass(with_words):
    target = torch.tensor([[[0.25, 0.5, 0.25, 0.0]]])
    window = torch.empty(1, 0, 4), torch.empty(1, 0, dtype=torch.int32), target
    assert with_words([[TWO32 - 1, 0]], *window).output_tokens.tolist() == [[2]]


@pytest.mark.parametrize("release", RELEASES)
def test_a_row_without_mass_to_draw_from_ends_in_padding(with_words, release):
    same = torch.tensor([[[0.5, 0.5]]])
    target = torch.cat((same, same), dim=1)
    result = with_words([[TWO32 - 1] * 3], same, drafts([0]), target, flashinfer=release)
    assert result.output_tokens.tolist() == [[-1, -1]]
    assert result.emitted.tolist() == [0]


# --- rejection: the law, exactly ---

# Cells of the unit interval. Masses are in twelfths, chosen so that every threshold (target / draft, and the
# steps of max(target - draft, 0) over its sum) lies between two cells: a cell then behaves as its midpoint.
CELLS = 12
MIDPOINTS = [(2 * cell + 1) * TWO32 // (2 * CELLS) for cell in range(CELLS)]

LAWS = {
    "one draft": ([(3, 3, 6)], [(6, 4, 2), (4, 4, 4)]),
    "second draft never kept": ([(3, 3, 6), (12, 0, 0)], [(6, 4, 2), (0, 6, 6), (1, 2, 9)]),
    "two drafts": ([(4, 4, 2, 2), (6, 2, 2, 2)], [(4, 2, 3, 3), (3, 3, 3, 3), (0, 0, 12, 0)]),
    "drafter equals target": ([(5, 7), (1, 11)], [(5, 7), (1, 11), (6, 6)]),
    "disjoint supports": ([(12, 0, 0)], [(0, 4, 8), (3, 9, 0)]),
    "no drafts": ([], [(2, 0, 7, 3)]),
}


def exact_law(run, draft_mass, target_mass, release) -> Counter:
    """The probability of each output row, with drafts from the drafter, over all cells of all numbers."""
    num_drafts, vocab = len(draft_mass), len(target_mass[0])
    # The last two words are the draw with and without a rejection; only one of them is used for a token.
    numbers = torch.tensor(list(product(MIDPOINTS, repeat=num_drafts + 1)))
    words = torch.cat((numbers, numbers[:, -1:]), dim=1)
    n = len(words)
    draft_probs = (torch.tensor(draft_mass).view(num_drafts, vocab) / CELLS).expand(n, num_drafts, vocab)
    target_probs = (torch.tensor(target_mass) / CELLS).expand(n, num_drafts + 1, vocab)
    law = Counter()
    for tokens in product(range(vocab), repeat=num_drafts):
        weight = Fraction(1, n)
        for position, token in enumerate(tokens):
            weight *= Fraction(draft_mass[position][token], CELLS)
        if not weight:
            continue
        ids = torch.tensor(tokens, dtype=torch.int32).expand(n, num_drafts)
        output = run(words, draft_probs, ids, target_probs, flashinfer=release).output_tokens
        for row, count in Counter(map(tuple, output.tolist())).items():
            law[row] += weight * count
    return law


@pytest.mark.parametrize("release", ["0.6.4", "0.7.4"])
@pytest.mark.parametrize("name", LAWS)
def test_each_token_has_exactly_the_targets_law_given_the_tokens_before_it(with_words, name, release):
    draft_mass, target_mass = LAWS[name]
    law = exact_law(with_words, draft_mass, target_mass, release)
    assert sum(law.values()) == 1
    for position, mass in enumerate(target_mass):
        by_prefix: dict[tuple, Counter] = {}
        for row, probability in law.items():
            if row[position] != reference.PADDING:
                by_prefix.setdefault(row[:position], Counter())[row[position]] += probability
        for prefix, tokens in by_prefix.items():
            reached = sum(tokens.values())
            expected = {token: Fraction(m, CELLS) for token, m in enumerate(mass) if m}
            assert {token: p / reached for token, p in tokens.items()} == expected, (position, prefix)


# --- rejection: the kernel's own outputs ---


def stream(seed: int, *shape: int) -> torch.Tensor:
    words = curand_philox_words(seed, torch.zeros(1, dtype=torch.int64), 0, torch.Size(shape).numel())
    return words.view(shape)


def masses(seed: int, *shape: int) -> torch.Tensor:
    """Weights that are the same bits everywhere (the kernel does not ask for a sum of one)."""
    return curand_uniform(stream(seed, *shape)) * 2.0**-12


# Outputs of flashinfer's own kernel: sampling.cuh of the release, compiled to PTX with flashinfer's flags
# (nvcc 13.0, compute_90a) and interpreted lane by lane.
# (V, n, K, data seed), seed, offset, releases; output tokens, accepted, emitted.
WINDOWS = [
    pytest.param(
        (7, 4, 3, 100), 42, 0, RELEASES,
        [[4, -1, -1, -1], [5, 1, 5, 5], [3, 5, 0, 3], [3, 3, -1, -1]], [1, 3, 3, 2], [0, 3, 3, 1],
        id="one float a load",
    ),
    pytest.param(
        (4098, 3, 4, 200), (1 << 63) + 5, 6, RELEASES,
        [[663, -1, -1, -1, -1], [716, 2061, 2795, 1270, 2242], [2855, 3561, 2768, 3978, 2079]],
        [1, 4, 4], [0, 4, 4],
        id="two floats a load, two tiles",
    ),
    pytest.param(
        (8200, 2, 2, 300), 7, (1 << 34) - 2, ("0.6.4", "0.7.2"),
        [[846, 1197, -1], [4872, 4627, -1]], [2, 2], [1, 1],
        id="three tiles, counter carry, second test counts",
    ),
    pytest.param(
        (8200, 2, 2, 300), 7, (1 << 34) - 2, ("0.7.4",),
        [[846, 1197, -1], [4872, 4627, -1]], [1, 1], [1, 1],
        id="three tiles, counter carry, no second test",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "seed", "offset", "releases", "output", "accepted", "emitted"), WINDOWS)
def test_windows_equal_the_kernels(data, seed, offset, releases, output, accepted, emitted):
    vocab, n, num_drafts, source = data
    window = (
        masses(source + 1, n, num_drafts, vocab),
        stream(source + 2, n, num_drafts) % vocab,
        masses(source, n, num_drafts + 1, vocab),
    )
    for release in releases:
        result = rejection_reference(*window, seed, offset, flashinfer=release)
        assert result.output_tokens.tolist() == output
        assert result.accepted.tolist() == accepted
        assert result.emitted.tolist() == emitted


# As above, for seeds whose draw lies within rounding of a step: summing a thread's floats, the block's warps,
# the tiles or the scan in another order gives the neighbouring token. V, seed, token.
KERNEL_DRAWS = {
    "0.6.4": [
        (4096, 4458, 3129), (4096, 16780, 3298), (4096, 17639, 2867), (4095, 4035, 2144), (4094, 14584, 3436),
        (4094, 15388, 3075), (4094, 17322, 2775), (40001, 220, 16217), (65536, 591, 49210),
        (65536, 12293, 30787), (65536, 13048, 28322),
    ],
    "0.7.4": [
        (4096, 4458, 3129), (4096, 17639, 2868), (40001, 241, 29744), (65536, 69, 16317), (65536, 591, 49209),
        (65536, 5159, 8051),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("release", "vocab", "seed", "token"), [(r, *draw) for r, draws in KERNEL_DRAWS.items() for draw in draws]
)
def test_draws_equal_the_kernels_where_the_order_of_sums_decides(release, vocab, seed, token):
    window = torch.empty(1, 0, vocab), torch.empty(1, 0, dtype=torch.int32), masses(vocab, 1, 1, vocab)
    result = rejection_reference(*window, seed, 0, flashinfer=release)
    assert result.output_tokens.tolist() == [[token]]


# --- rejection: properties ---


@st.composite
def windows(draw):
    """Small windows of normalised masses with holes in their supports, and a seed."""
    n, num_drafts, vocab = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, TWO32)))

    def probs(width):
        raw = torch.rand(n, width, vocab, generator=generator).pow(3)
        raw = raw * (torch.rand(n, width, vocab, generator=generator) < 0.7)
        raw[..., -1] += 0.05
        return raw / raw.sum(-1, keepdim=True)

    ids = torch.randint(0, vocab, (n, num_drafts), generator=generator, dtype=torch.int32)
    return probs(num_drafts), ids, probs(num_drafts + 1), draw(st.integers(0, (1 << 64) - 1))


@given(windows(), st.sampled_from(RELEASES))
def test_windows_equal_a_walk_of_the_rule_row_by_row(window, release):
    draft_probs, ids, target_probs, seed = window
    n, num_drafts = ids.shape
    result = rejection_reference(*window[:3], seed, 3, flashinfer=release)
    rows = torch.arange(n)
    numbers = curand_uniform(curand_philox_words(seed, rows, 3, num_drafts + 2)).double().tolist()
    for row in rows.tolist():
        p, q = draft_probs[row].double(), target_probs[row].double()
        number = iter(numbers[row])

        def passes(position, row=row, p=p, q=q, number=number):
            token = ids[row, position]
            gap = float(next(number) * p[position, token] - q[position, token])
            assume(gap == 0 or abs(gap) > 1e-6)
            return gap < 0

        emitted = 0
        while emitted < num_drafts and passes(emitted):
            emitted += 1
        accepted = emitted
        for position in range(emitted, num_drafts):
            accepted += passes(position) and (release != "0.7.4" or position > emitted)
        residual = q[emitted].clone()
        if emitted < num_drafts:
            residual = (residual - p[emitted]).clamp(min=0)
        steps = residual.cumsum(0)
        place = next(number) * steps[-1]
        assume((steps - place).abs().min() > 1e-6)
        token = int((steps > place).nonzero()[0])

        padding = [reference.PADDING] * (num_drafts - emitted)
        assert result.output_tokens[row].tolist() == [*ids[row, :emitted].tolist(), token, *padding]
        assert result.accepted[row] == accepted
        assert result.emitted[row] == emitted


@given(windows(), st.sampled_from(RELEASES))
def test_a_row_does_not_depend_on_the_other_rows(window, release):
    draft_probs, ids, target_probs, seed = window
    whole = rejection_reference(draft_probs, ids, target_probs, seed, 0, flashinfer=release)
    row = len(ids) - 1
    others = torch.arange(len(ids)) != row
    changed = [tensor.clone() for tensor in (draft_probs, ids, target_probs)]
    for tensor in changed:
        tensor[others] = tensor[row].clone()
    again = rejection_reference(*changed, seed, 0, flashinfer=release)
    for first, second in zip(whole, again, strict=True):
        assert torch.equal(first[row], second[row])


@given(windows())
def test_arguments_are_left_as_they_were(window):
    *tensors, seed = window
    copies = [tensor.clone() for tensor in tensors]
    rejection_reference(*tensors, seed, 0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_seed_tensors_serve_all_rows_or_each_its_own_by_release():
    window = masses(1, 3, 2, 50), stream(2, 3, 2) % 50, masses(3, 3, 3, 50)
    seeds, offsets = torch.tensor([11, 12, 13]), torch.tensor([0, 4, 9])

    def rows(seed, offset, release):
        return rejection_reference(*window, seed, offset, flashinfer=release).output_tokens

    assert torch.equal(rows(seeds, offsets, "0.6.4"), rows(11, 0, "0.6.4"))
    each = torch.stack([rows(11, 0, "0.7.2")[0], rows(12, 4, "0.7.2")[1], rows(13, 9, "0.7.2")[2]])
    assert torch.equal(rows(seeds, offsets, "0.7.2"), each)
    assert torch.equal(rows(seeds[:1], offsets[:1], "0.7.2"), rows(11, 0, "0.7.2"))


def test_no_rows_give_no_rows():
    seed = torch.tensor([1])
    window = torch.empty(0, 2, 5), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 3, 5)
    for release in RELEASES:
        result = rejection_reference(*window, seed, 0, flashinfer=release)
        assert [tuple(tensor.shape) for tensor in result] == [(0, 3), (0,), (0,)]
