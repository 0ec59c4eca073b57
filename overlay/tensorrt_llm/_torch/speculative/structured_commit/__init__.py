"""structured-commit: a structure-checked commit stage for speculative decoding.

    table = compile_format("harmony", vocabulary)
    stage = CommitStage(table, CommitConfig(policy="repair"), num_slots=64, max_window=9)
    stage.bind(slots=[3], token_ids=[prompt_and_generated])
    out = stage.commit(tokens, lengths, slots, probs=target_probs)

Importing it needs torch and the standard library; compiling a format needs outlines-core, table files safetensors.
"""

from .compile import compile_format
from .errors import FormatError, StageError, StructuredCommitError, TableError, VocabularyError
from .format import Format, builtin_format, format_names, read_format
from .host import HostTwin, Walk
from .policy import COUNTERS, CommitConfig, Event, Policy
from .reference import rejection_reference, relaxed_reference, strict_reference
from .serving.delivery import AlignedDelivery, Splitter
from .serving.merge import Delivered, merge_results, once_per_delta, results_in_order
from .stage import CommitOutput, CommitStage
from .table import StructureTable, TableInfo
from .vocabulary import Vocabulary

__all__ = [
    "COUNTERS",
    "AlignedDelivery",
    "CommitConfig",
    "CommitOutput",
    "CommitStage",
    "Delivered",
    "Event",
    "Format",
    "FormatError",
    "HostTwin",
    "Policy",
    "Splitter",
    "StageError",
    "StructureTable",
    "StructuredCommitError",
    "TableError",
    "TableInfo",
    "Vocabulary",
    "VocabularyError",
    "Walk",
    "builtin_format",
    "compile_format",
    "format_names",
    "merge_results",
    "once_per_delta",
    "read_format",
    "rejection_reference",
    "relaxed_reference",
    "results_in_order",
    "strict_reference",
]
