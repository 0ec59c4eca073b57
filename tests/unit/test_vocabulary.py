"""A vocabulary is read to the byte, whatever kind of tokenizer it comes from."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from scripts.vocabularies import o200k
from structured_commit import Vocabulary, VocabularyError, compile_format


def byte_level_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"ĠhÃ©": 256, "æĹ": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    return tokenizer


def sentencepiece_like_tokenizer():
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁hi": 256, "é": 257, "<unk>": 258}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def test_byte_level_tokens_keep_blanks_and_half_characters():
    vocabulary = Vocabulary.of(byte_level_tokenizer())
    assert sorted(vocabulary.texts[i] for i in range(256)) == [bytes([b]) for b in range(256)]
    assert vocabulary.texts[256] == " hé".encode()
    assert vocabulary.texts[257] == "日".encode()[:2]
    assert vocabulary.controls == {"<|end|>": 258, "<think>": 259}
    assert vocabulary.size == 260


def test_byte_fallback_tokens_are_bytes_and_the_blank_mark_is_a_blank():
    vocabulary = Vocabulary.of(sentencepiece_like_tokenizer())
    assert vocabulary.texts[0x41] == b"A"
    assert vocabulary.texts[0xE6] == b"\xe6"
    assert vocabulary.texts[256] == b" hi"
    assert vocabulary.texts[257] == "é".encode()
    assert vocabulary.controls["</s>"] == 259


def test_a_wrapped_tokenizer_is_read_through_its_backend():
    class Fast:
        backend_tokenizer = byte_level_tokenizer()
        added_tokens_decoder = {300: tokenizers.AddedToken("<late>")}  # noqa: RUF012

    vocabulary = Vocabulary.of(Fast())
    assert vocabulary.controls["<late>"] == 300
    assert vocabulary.size == 301


def test_a_transformers_tokenizer_is_read():
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>")
    assert Vocabulary.of(fast).digest == Vocabulary.of(byte_level_tokenizer()).digest


def test_a_tiktoken_like_object_is_read_by_token():
    vocabulary = Vocabulary.of(o200k(), controls={"<|return|>": 200002})
    assert vocabulary.texts[o200k().encode_ordinary(" assistant")[0]] == b" assistant"
    assert vocabulary.size == 200_019
    assert vocabulary.controls["<|return|>"] == 200002


def test_a_mapping_needs_named_controls_and_may_be_padded():
    vocabulary = Vocabulary.of({0: b"a", 1: b"b", 2: b"ignored"}, controls={"<e>": 2}, size=8)
    assert (vocabulary.size, dict(vocabulary.texts)) == (8, {0: b"a", 1: b"b"})
    table = compile_format("[ab]*", vocabulary, terminals=("<e>",))
    assert table.vocab_size == 8
    assert table.host.first_illegal([0, 1, 5]) == 2  # a hole in the vocabulary is never legal


def test_the_digest_follows_every_meaning():
    base = Vocabulary(3, {0: b"a", 1: b"b"}, {"<e>": 2})
    others = [
        Vocabulary(4, {0: b"a", 1: b"b"}, {"<e>": 2}),
        Vocabulary(3, {0: b"a", 1: b"c"}, {"<e>": 2}),
        Vocabulary(3, {0: b"a", 1: b"b"}, {"<f>": 2}),
    ]
    assert base.digest == Vocabulary(3, {1: b"b", 0: b"a"}, {"<e>": 2}).digest
    assert len({base.digest, *(v.digest for v in others)}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vocabulary.of({0: b"a", 9: b"b"}, size=5), "smaller than the largest token id"),
        (lambda: Vocabulary(2, {0: b"a", 2: b"b"}, {}), "outside a vocabulary of size 2"),
        (lambda: Vocabulary(2, {-1: b"a"}, {}), "token ids run from -1"),
        (lambda: Vocabulary(2, {0: b"a"}, {"<e>": 0}), "both ordinary text and the control token"),
        (lambda: Vocabulary.of(object()), "cannot read a vocabulary from object"),
        (lambda: Vocabulary.of(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), "not understood"),
    ],
)
def test_what_cannot_be_read_is_refused(make, message):
    with pytest.raises(VocabularyError, match=message):
        make()
