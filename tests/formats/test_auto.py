"""`format: auto` on real tokenizers: the model type decides, then the control tokens, then the chat template."""

from __future__ import annotations

import json

import pytest

from scripts.tokenizers import real_tokenizer
from structured_commit import Vocabulary
from structured_commit.checkpoint import resolve_auto


def without(vocabulary: Vocabulary, *named: str) -> Vocabulary:
    return Vocabulary(
        vocabulary.size, vocabulary.texts, {n: i for n, i in vocabulary.controls.items() if n not in named}
    )


QWEN2_5_LACKS = ("<think>", "</think>", "<tool_response>", "</tool_response>")


@pytest.mark.parametrize(
    ("model_type", "tokenizer", "lacks", "template", "expected"),
    [
        ("qwen2", "qwen3", QWEN2_5_LACKS, "<tool_call>\n{'name'", "hermes"),
        ("qwen3", "qwen3", (), "<tool_call>\n{'name'", "hermes"),
        ("qwen3_moe", "qwen3", (), "<tool_call>\n{'name'", "hermes"),
        ("qwen3_moe", "qwen3", (), "<tool_call>\n<function=", "qwen3_coder"),
        ("qwen3_next", "qwen3", (), "<tool_call>\n<function=", "qwen3_coder"),
        ("qwen3_5_moe", "qwen3", (), "", "qwen3_coder"),
        ("deepseek_v3", "deepseek_v3", (), "", "deepseek_v3_1"),
        ("deepseek_v32", "deepseek_v3", (), "", "deepseek_v3_1"),
        ("kimi_k2", "kimi_k2", ("<think>", "</think>"), "", "kimi_k2"),
        ("deepseek_v3", "kimi_k2", (), "", "kimi_k2"),
        ("glm4_moe", "glm4", (), "", "glm_4_7"),
    ],
)
def test_a_checkpoint_is_read_as_its_family(tmp_path, model_type, tokenizer, lacks, template, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert resolve_auto(tmp_path, without(real_tokenizer(tokenizer).vocabulary, *lacks)).name == expected
