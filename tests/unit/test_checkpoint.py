"""`format: auto` and the tokenizer are read from a checkpoint folder's files, and nothing else."""

import base64
import json

import pytest

from scripts.vocabularies import HARMONY_CONTROLS, o200k_texts
from structured_commit import FormatError, Vocabulary, VocabularyError
from structured_commit.checkpoint import read_model_type, read_vocabulary, resolve_auto
from tests.unit.test_vocabulary import byte_level_tokenizer


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))


def write_tiktoken(folder, controls):
    texts = sorted(o200k_texts().items())[:500]
    (folder / "tiktoken.model").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in texts))
    decoder = {str(i): {"content": name, "special": True} for name, i in controls.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))


def test_the_model_type_and_size_are_read_also_from_a_text_part(tmp_path):
    write_config(tmp_path, model_type="gpt_oss", vocab_size=201088)
    assert read_model_type(tmp_path) == ("gpt_oss", 201088)
    write_config(tmp_path, model_type="gemma4", text_config={"model_type": "gemma4_text", "vocab_size": 9})
    assert read_model_type(tmp_path) == ("gemma4", 9)


def test_a_hugging_face_tokenizer_is_read_and_padded(tmp_path):
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(tmp_path, size=300)
    assert (vocabulary.size, vocabulary.controls["<|end|>"]) == (300, 258)


def test_a_tiktoken_file_is_read_with_its_added_tokens(tmp_path):
    write_tiktoken(tmp_path, {"[EOS]": 600})
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.texts[499] == o200k_texts()[499]
    assert (vocabulary.size, vocabulary.controls) == (601, {"[EOS]": 600})


def test_a_tekken_file_is_read(tmp_path):
    tekken = {
        "config": {"default_num_special_tokens": 3, "default_vocab_size": 5},
        "special_tokens": [{"rank": i, "token_str": s} for i, s in enumerate(["<unk>", "<s>", "</s>"])],
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(b).decode()} for i, b in enumerate([b"a", b"b", b"c"])],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    vocabulary = read_vocabulary(tmp_path)
    assert (dict(vocabulary.texts), vocabulary.size) == ({3: b"a", 4: b"b"}, 5)
    assert vocabulary.controls["</s>"] == 2


def test_auto_follows_the_model_type(tmp_path):
    write_config(tmp_path, model_type="gpt_oss")
    assert resolve_auto(tmp_path, Vocabulary(201088, {}, HARMONY_CONTROLS)).name == "harmony"


def test_auto_refuses_what_it_cannot_tell(tmp_path):
    write_config(tmp_path, model_type="gpt_oss")
    with pytest.raises(FormatError, match=r"lacks the control tokens of \(harmony\)"):
        resolve_auto(tmp_path, Vocabulary(10, {}, {"<e>": 1}))
    write_config(tmp_path, model_type="bert")
    with pytest.raises(FormatError, match="no built-in format is known for model type 'bert'"):
        resolve_auto(tmp_path, Vocabulary(10, {}, {"<e>": 1}))
    (tmp_path / "config.json").unlink()
    with pytest.raises(FormatError, match=r"cannot read .*config.json"):
        resolve_auto(tmp_path, Vocabulary(10, {}, {"<e>": 1}))


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path):
    with pytest.raises(VocabularyError, match="no tokenizer in"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match="cannot read tokenizer"):
        read_vocabulary(tmp_path)


QWEN = Vocabulary(100, {}, {name: i for i, name in enumerate(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])})


@pytest.mark.parametrize(
    ("template", "expected"),
    [("use <tool_call>\n{json}", "hermes"), ("use <tool_call>\n<function=f>", "qwen3_coder"), ("", "hermes")],
)
def test_auto_tells_formats_of_one_model_type_apart_by_the_chat_template(tmp_path, template, expected):
    write_config(tmp_path, model_type="qwen3_moe")
    (tmp_path / "chat_template.jinja").write_text(template)
    controls = {**QWEN.controls, "<tool_call>": 50, "</tool_call>": 51}
    assert resolve_auto(tmp_path, Vocabulary(100, {}, controls)).name == expected
