"""The random stream: Philox against published vectors and against curand, curand's uniforms bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from structured_commit.errors import StageError
from structured_commit.philox import curand_philox_words, curand_uniform, philox4x32

TWO32 = 1 << 32
TWO64 = 1 << 64

# Random123 1.14 (D. E. Shaw Research), tests/kat_vectors, lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = {
    "zero": (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}

# Printed by curand_kernel.h (nvidia-curand 10.4.5, CUDA 13), compiled for the host: the words of curand() and
# the bits of curand_uniform() after curand_init(seed, subsequence, offset). The last row crosses block 2**32.
CURAND = {
    (5, 0, 0): (
        (3289868317, 299389332, 4225117243, 4147765880, 1491303360, 670720010, 2467182222, 513040669),
        (1061427048, 1032766093, 1065080364, 1064778210, 1051838200, 1042278784, 1058213431, 1039442697),
    ),
    (81985529216486895, 3, 5): (
        (3061390551, 882688573, 514718783, 2606638874, 2062599732, 2561374748),
        (1060534557, 1045590793, 1039495138, 1058758183, 1056301452, 1058581370),
    ),
    (42, 7, 17179869182): (
        (595232490, 3407274827, 4289532615, 2817611449, 4157248900, 2637147353, 106282909, 3950353042),
        (1041099292, 1061885667, 1065331987, 1059582295, 1064815254, 1058877357, 1019918324, 1064007067),
    ),
}

words64 = st.one_of(st.integers(0, TWO64 - 1), st.sampled_from([0, 1, TWO32 - 1, TWO32, TWO64 - 1]))


def signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    return value - TWO64 if value >= TWO64 // 2 else value


def subsequences(*values: int) -> torch.Tensor:
    return torch.tensor([signed(value) for value in values], dtype=torch.int64)


def scalar_philox(counter: int, key: int) -> list[int]:
    """The paper's ten rounds on Python integers: a 128-bit counter and a 64-bit key."""
    c = [counter >> 32 * i & (TWO32 - 1) for i in range(4)]
    k = [key & (TWO32 - 1), key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second % TWO32, first >> 32 ^ c[3] ^ k[1], first % TWO32]
        k = [(k[0] + 0x9E3779B9) % TWO32, (k[1] + 0xBB67AE85) % TWO32]
    return c


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_block_equals_the_published_known_answer(name):
    counter, key, expected = KNOWN_ANSWERS[name]
    assert tuple(philox4x32(torch.tensor(counter), torch.tensor(key)).tolist()) == expected


def test_one_call_computes_many_blocks_and_broadcasts_the_key():
    counters = torch.tensor([vector[0] for vector in KNOWN_ANSWERS.values()])
    keys = torch.tensor([vector[1] for vector in KNOWN_ANSWERS.values()])
    blocks = philox4x32(counters.unsqueeze(1), keys)
    assert blocks.shape == (3, 3, 4)
    for i, (_, _, expected) in enumerate(KNOWN_ANSWERS.values()):
        assert tuple(blocks[i, i].tolist()) == expected
        assert torch.equal(blocks[i, 0], philox4x32(counters[i], keys[0]))


def test_words_outside_32_bits_are_taken_modulo_two_to_the_32():
    block = philox4x32(torch.tensor([-1] * 4), torch.tensor([TWO32 - 1, -1]))
    assert tuple(block.tolist()) == KNOWN_ANSWERS["ones"][2]


@pytest.mark.parametrize(("seed", "subsequence", "offset"), CURAND)
def test_stream_equals_curand_word_for_word_and_uniform_for_uniform(seed, subsequence, offset):
    expected_words, expected_bits = CURAND[seed, subsequence, offset]
    words = curand_philox_words(seed, subsequences(subsequence), offset, len(expected_words))
    assert tuple(words[0].tolist()) == expected_words
    assert tuple(curand_uniform(words)[0].view(torch.int32).tolist()) == expected_bits


@given(seed=words64, subsequence=words64, offset=words64, n=st.integers(0, 9))
def test_stream_is_the_blocks_of_the_128_bit_counter(seed, subsequence, offset, n):
    words = curand_philox_words(seed, subsequences(subsequence), offset, n)
    expected = []
    for position in range(offset, offset + n):
        expected.append(scalar_philox((subsequence << 64) + position // 4, seed)[position % 4])
    assert words.shape == (1, n)
    assert words[0].tolist() == expected


def test_counter_carries_from_its_first_word_into_its_second():
    words = curand_philox_words(9, subsequences(6), 4 * TWO32 - 2, 6)[0]
    before, after = philox4x32(torch.tensor([[TWO32 - 1, 0, 6, 0], [0, 1, 6, 0]]), torch.tensor([9, 0]))
    assert words.tolist() == before[2:].tolist() + after.tolist()


def test_subsequences_fill_the_upper_counter_words_and_do_not_meet():
    rows = subsequences(0, 1, 2, TWO32 - 1, TWO32, TWO32 + 1)
    words = curand_philox_words(3, rows, 0, 64)
    assert words[4, :4].tolist() == philox4x32(torch.tensor([0, 0, 0, 1]), torch.tensor([3, 0])).tolist()
    assert words.unique().numel() == words.numel()


@pytest.mark.parametrize("offset", range(8))
def test_an_offset_skips_that_many_words(offset):
    rows = subsequences(0, 5)
    words = curand_philox_words(1, rows, 0, 18)
    assert torch.equal(curand_philox_words(1, rows, offset, 10), words[:, offset : offset + 10])


def test_seed_and_offset_tensors_equal_ints_row_by_row():
    rows = subsequences(4, 4, 9)
    seeds, offsets = [1, TWO64 - 2, 7], [0, 3, TWO64 - 1]
    together = curand_philox_words(subsequences(*seeds), rows, subsequences(*offsets), 5)
    for i in range(3):
        alone = curand_philox_words(seeds[i], rows[i : i + 1], offsets[i], 5)
        assert torch.equal(together[i : i + 1], alone)
    shared = curand_philox_words(subsequences(7), rows, torch.tensor(2), 5)
    assert torch.equal(shared, curand_philox_words(7, rows, 2, 5))


def test_an_int_is_taken_modulo_two_to_the_64():
    rows, largest = subsequences(0), TWO64 - 1
    assert torch.equal(curand_philox_words(-1, rows, -1, 3), curand_philox_words(largest, rows, largest, 3))


def test_no_value_is_read_by_the_host(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    rows = subsequences(0, 1)
    for read in ("item", "tolist", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, read, refuse)
    with pytest.raises(AssertionError):
        int(rows[0])
    assert curand_uniform(curand_philox_words(rows, rows, rows, 7)).shape == (2, 7)
    assert curand_uniform(curand_philox_words(3, rows, 5, 7)).shape == (2, 7)


def test_uniforms_lie_in_the_half_open_interval_that_holds_one():
    smallest, largest = curand_uniform(torch.tensor([0, TWO32 - 1])).tolist()
    assert (smallest, largest) == (2.0**-33, 1.0)
    assert curand_uniform(torch.tensor([TWO32 - 129, TWO32 - 128])).tolist() == [1 - 2.0**-24, 1.0]


@given(st.lists(st.integers(0, TWO32 - 1), min_size=1, max_size=64))
def test_uniforms_do_not_depend_on_whether_the_multiply_and_add_are_fused(words):
    words = torch.tensor(words)
    # Exact in float64, then rounded once: what a fused multiply-add gives.
    fused = (words.to(torch.float32).double() * 2.0**-32 + 2.0**-33).to(torch.float32)
    assert torch.equal(curand_uniform(words), fused)


ONE = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: philox4x32(ONE.expand(4).float(), ONE.expand(2)), id="counter dtype"),
        pytest.param(lambda: philox4x32(ONE.expand(4), ONE.expand(2).int()), id="key dtype"),
        pytest.param(lambda: philox4x32(ONE.expand(3), ONE.expand(2)), id="counter shape"),
        pytest.param(lambda: philox4x32(ONE.expand(4), ONE.expand(4)), id="key shape"),
        pytest.param(lambda: curand_philox_words(0, ONE.int(), 0, 1), id="subsequence dtype"),
        pytest.param(lambda: curand_philox_words(0, ONE.expand(2, 2), 0, 1), id="subsequence shape"),
        pytest.param(lambda: curand_philox_words(ONE.expand(2), ONE.expand(3), 0, 1), id="seed shape"),
        pytest.param(lambda: curand_philox_words(0, ONE, ONE.to("meta"), 1), id="offset device"),
        pytest.param(lambda: curand_philox_words(ONE.float(), ONE, 0, 1), id="seed dtype"),
        pytest.param(lambda: curand_philox_words(0, ONE, 0, -1), id="negative count"),
        pytest.param(lambda: curand_uniform(ONE.float()), id="words dtype"),
    ],
)
def test_arguments_that_do_not_fit_raise_a_stage_error(call):
    with pytest.raises(StageError):
        call()
