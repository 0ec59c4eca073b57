"""Token ids of a trace in words: from the trace itself, a checkpoint's vocabulary, or the demo's."""

from __future__ import annotations

from pathlib import Path

from scripts.vocabularies import harmony_vocabulary
from structured_commit import Vocabulary, VocabularyError
from structured_commit.checkpoint import read_vocabulary
from structured_commit.recording.trace import Trace

_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


class Speller:
    """What each token of one trace is called.

    Args:
        trace: whose ids.
        checkpoint: folder with the tokenizer that the server used; None = the trace's own texts, or the demo's
            vocabulary where it is the same.

    Attributes:
        source: where texts come from, for the reader.

    Raises:
        TraceError: the checkpoint's vocabulary is another one than the trace's.
        VocabularyError: there is no vocabulary in the checkpoint.
    """

    def __init__(self, trace: Trace, checkpoint: Path | None = None) -> None:
        self._names = {token: name for name, token in trace.controls.items()}
        self._texts = trace.texts
        self._vocabulary: Vocabulary | None = None
        self.source = "texts of the trace" if trace.texts else "ids only: name the checkpoint to see texts"
        if checkpoint is not None:
            if not checkpoint.is_dir():
                raise VocabularyError(f"{checkpoint} is no folder; name the one that holds the tokenizer")
            self._vocabulary = read_vocabulary(checkpoint, trace.table["vocabulary"])
            trace.check_vocabulary(self._vocabulary.digest, f"checkpoint {checkpoint}")
            self.source = f"vocabulary of {checkpoint}"
        elif not trace.texts and trace.table["format"] == "harmony":
            embedded = harmony_vocabulary().vocabulary
            if embedded.digest == trace.table["vocabulary_digest"]:
                self._vocabulary, self.source = embedded, "the o200k vocabulary of the demo"

    def __call__(self, token: int) -> str:
        """A control token's name, a token's text with its blanks made visible, or its number in brackets."""
        if token in self._names:
            return self._names[token]
        text = self._texts.get(token, "") if self._vocabulary is None else self._vocabulary.spell(token)
        return "".join(map(_shown, text)) or f"⟨{token}⟩"

    def is_control(self, token: int) -> bool:
        """Whether the format knows the token by name."""
        return token in self._names


def _shown(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else f"\\u{ord(character):04x}"
