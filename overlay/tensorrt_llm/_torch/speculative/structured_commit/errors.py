"""The errors this package raises on purpose. All are `ValueError`s, so a caller that knows nothing of the
package still reads them as "bad input"; each message names the thing, the place and the next step."""


class StructuredCommitError(ValueError):
    """Base of every error raised on purpose by structured_commit."""


class FormatError(StructuredCommitError):
    """A chat format is unknown, or its expression cannot be read or has a dead state."""


class VocabularyError(StructuredCommitError):
    """A vocabulary cannot be read, or lacks a control token that the format needs."""


class TableError(StructuredCommitError):
    """A structure table's tensors or its file are not valid, or belong to another vocabulary."""


class StageError(StructuredCommitError):
    """The stage was configured or called with arguments it cannot honour."""


class RankMismatchError(StructuredCommitError):
    """Ranks that were given the same requests committed different tokens."""


class TraceError(StructuredCommitError):
    """A flight recorder's trace cannot be read, or belongs to another vocabulary."""
