"""What the stage needs of a checkpoint folder: which format the model speaks, and its vocabulary.

Reads files only (`config.json`, the tokenizer's, the chat template); runs no code of the checkpoint.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from .errors import FormatError, VocabularyError
from .format import Format, builtin_format, format_names
from .vocabulary import Vocabulary

_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tiktoken.model")


def read_model_type(folder: Path) -> tuple[str, int | None]:
    """`model_type` and vocabulary size from `config.json`; of the text part where the model has several."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"cannot read {path}: {error}; set structured_commit.format by name") from error
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    size = config.get("vocab_size", text.get("vocab_size"))
    return str(config.get("model_type", "")), size if isinstance(size, int) else None


def read_vocabulary(folder: Path, size: int | None = None) -> Vocabulary:
    """The vocabulary of the tokenizer in `folder`; `size` is that of the model's logits, if larger.

    Raises:
        VocabularyError: there is no tokenizer file that can be read.
    """
    read = {"tokenizer.json": _hugging_face, "tekken.json": _tekken, "tiktoken.model": _tiktoken}
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            try:
                vocabulary = read[name](path)
            except VocabularyError:
                raise
            except Exception as error:  # each reader has its own kinds; all mean "not such a file"
                raise VocabularyError(f"cannot read tokenizer {path}: {error}") from error
            return Vocabulary.of(vocabulary, size=max(size or 0, vocabulary.size))
    raise VocabularyError(
        f"no tokenizer in {folder}: looked for {', '.join(_TOKENIZER_FILES)}; set structured_commit.checkpoint to the "
        "folder that holds it"
    )


def resolve_auto(folder: Path, vocabulary: Vocabulary) -> Format:
    """The format that a checkpoint speaks: by model type, then by control tokens, then by its chat template.

    Raises:
        FormatError: no built-in format fits, or more than one does.
    """
    model_type, _ = read_model_type(folder)
    formats = [builtin_format(name) for name in format_names()]
    by_type = [f for f in formats if model_type in f.model_types]
    if not by_type:
        raise FormatError(
            f"no built-in format is known for model type {model_type!r} (of {folder}); set structured_commit.format to "
            f"one of: {', '.join(format_names())}, or to a format file"
        )
    fitting = [f for f in by_type if f.required_controls <= set(vocabulary.controls)]
    if len(fitting) > 1:
        template = _chat_template(folder)
        marked = [f for f in fitting if any(mark in template for mark in f.template_marks)]
        fitting = marked or [f for f in fitting if not f.template_marks]
    if len(fitting) != 1:
        names = ", ".join(f.name for f in fitting or by_type)
        problem = "several formats fit" if fitting else "the tokenizer lacks the control tokens of"
        raise FormatError(f"model type {model_type!r} of {folder}: {problem} ({names}); set structured_commit.format")
    return fitting[0]


def _chat_template(folder: Path) -> str:
    """All of the checkpoint's chat templates as one text, '' if it has none."""
    texts = []
    for path in sorted(folder.glob("*.jinja")):
        texts.append(path.read_text(encoding="utf-8"))
    config = folder / "tokenizer_config.json"
    if config.is_file():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""
        texts.append(template if isinstance(template, str) else json.dumps(template, ensure_ascii=False))
    return "\n".join(texts)


def _hugging_face(path: Path) -> Vocabulary:
    from tokenizers import Tokenizer  # TRT-LLM installs it

    added = _added_tokens(path.parent)
    return Vocabulary.of(Tokenizer.from_file(str(path)), controls=added)


def _tiktoken(path: Path) -> Vocabulary:
    texts = {}
    for line in path.read_bytes().splitlines():
        if line.strip():
            text, rank = line.split()
            texts[int(rank)] = base64.b64decode(text)
    return Vocabulary.of(texts, controls=_added_tokens(path.parent))


def _tekken(path: Path) -> Vocabulary:
    data = json.loads(path.read_text(encoding="utf-8"))
    config = data["config"]
    special = int(config["default_num_special_tokens"])
    size = int(config["default_vocab_size"])
    named = {t["token_str"]: int(t["rank"]) for t in data.get("special_tokens") or ()}
    texts = {special + int(t["rank"]): base64.b64decode(t["token_bytes"]) for t in data["vocab"]}
    return Vocabulary.of({i: b for i, b in texts.items() if i < size}, controls=named, size=size)


def _added_tokens(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    decoder = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder") or {}
    return {entry["content"]: int(token) for token, entry in decoder.items()}
