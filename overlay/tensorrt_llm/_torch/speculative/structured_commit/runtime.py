"""The one commit stage of a process, and which request each row of the coming step belongs to.

Metadata objects are copied for every captured graph, so nothing is kept on them: the stage, its row table and the
reasons for which it stood aside live here. Knows a little of TensorRT-LLM's requests, by attribute; imports none of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .cache import cached_table
from .checkpoint import read_model_type, read_vocabulary, resolve_auto
from .errors import FormatError, StructuredCommitError, VocabularyError
from .format import resolve_format
from .log import log
from .settings import AUTO, VARIABLE, Settings, parse_settings
from .stage import CommitStage

NUM_SLOTS = 16_384  # far above any sequence-slot pool; a slot costs 16 bytes
MAX_WINDOW = 1_024
FORCED = "forced acceptance"


class Runtime:
    """Process-wide state. `stage` is None while the stage is not configured: that is all a hook looks at then.

    Attributes:
        stage: the stage, or None.
        rows: [NUM_SLOTS] int64 on the stage's device, the stage slot of each batch row; its address never moves.
        aside: how often the stage stood aside, by reason.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the stage: nothing is configured."""
        self.stage: CommitStage | None = None
        self.rows: Tensor | None = None
        self.aside: Counter[str] = Counter()
        self._report_every = self._steps = 0

    def build(self, value: object, folder: str | os.PathLike | None, rank: int, serves: bool) -> None:
        """Build the stage of this process from its configured value, replacing an earlier one.

        Args:
            value: what the configuration holds; None = look at the variable `TRTLLM_STRUCTURED_COMMIT`.
            folder: the checkpoint folder.
            rank: for the log.
            serves: False on ranks that never accept tokens (all but the last pipeline stage).

        Raises:
            StructuredCommitError: the configuration cannot be honoured; the process then has no stage.
        """
        self.reset()
        settings = parse_settings(value if value is not None else os.environ.get(VARIABLE))
        if settings is None or not serves:
            return
        table, name = _load_table(settings, folder)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        stage = CommitStage(table, settings.commit_config, num_slots=NUM_SLOTS, max_window=MAX_WINDOW, device=device)
        self.rows = torch.full((NUM_SLOTS,), NUM_SLOTS, dtype=torch.int64, device=device)
        self.stage = stage
        self._report_every = settings.report_every
        log.info(
            f"structured_commit active: format={name} states={table.num_states} classes={table.num_classes} "
            f"policy={settings.policy} vocabulary={table.vocab_size} device={device} rank={rank}"
        )

    def stand_aside(self, reason: str) -> None:
        """Count a step in which the stage did nothing, and say so once for each reason."""
        self.aside[reason] += 1
        if self.aside[reason] == 1:
            log.warning(f"structured_commit stands aside: {reason}; said once, counted from here on")

    def guarded(self, decide: Callable, fallback, *args):
        """`decide(*args)`, or `fallback` where it raises: an exception in a hook would fail every active request."""
        try:
            return decide(*args)
        except Exception as error:
            self.stand_aside(f"{decide.__name__.lstrip('_')}: {type(error).__name__}: {error}")
            return fallback

    def bind(self, requests: list) -> None:
        """Write the slots whose owner changed or whose request is in its context phase, and the row table."""
        stage = self.stage
        rows, slots, tokens, owners, tracked, prompts = [], [], [], [], [], []
        for request in requests:
            slot = getattr(request, "py_seq_slot", None)
            if slot is None or getattr(request, "is_dummy", False):
                rows.append(NUM_SLOTS)
                continue
            if not 0 <= slot < NUM_SLOTS:
                self.stand_aside(f"sequence slot {slot} is beyond {NUM_SLOTS}")
                rows.append(NUM_SLOTS)
                continue
            in_context = bool(getattr(request, "is_context_init_state", False))
            if in_context and not getattr(request, "is_last_context_chunk", True):
                rows.append(NUM_SLOTS)  # its sampled token is thrown away
                continue
            rows.append(slot)
            owner = request.py_request_id
            if in_context or not stage.owned_by(slot, owner):
                slots.append(slot)
                owners.append(owner)
                tokens.append(request.get_tokens(0))
                tracked.append(not ignores_end(request))
                prompts.append(prompt_length(request))
        self._report()
        stage.bind(
            slots, tokens, owners=owners, in_context=[True] * len(slots), tracked=tracked, prompt_lengths=prompts
        )
        self.write_rows(rows)

    def _report(self) -> None:
        """Every `report_every` steps, log the counters whose copy was started at the last report."""
        self._steps += 1
        if not self._report_every or self._steps % self._report_every:
            return
        values = self.stage.counter_reader.read()
        if values is not None:
            shown = " ".join(f"{name}={value}" for name, value in values.items())
            log.info(f"structured_commit counters: {shown} aside={sum(self.aside.values())}")
        self.stage.counter_reader.start()

    def write_rows(self, rows: list[int]) -> None:
        """Set the slots of the first rows; all others get none."""
        values = torch.tensor(rows, dtype=torch.int64, pin_memory=self.rows.is_cuda)
        self.rows[: len(rows)].copy_(values, non_blocking=True)
        self.rows[len(rows) :].fill_(NUM_SLOTS)


def prompt_length(request) -> int | None:
    """How many of the request's tokens are its prompt; output before a pause is not."""
    return getattr(request, "py_orig_prompt_len", None)


def ignores_end(request) -> bool:
    """Whether end tokens do not end this request."""
    end = getattr(request, "py_end_id", None)
    return end is not None and end < 0


def _load_table(settings: Settings, folder: str | os.PathLike | None):
    where = settings.checkpoint or folder
    if where is None or not Path(where).is_dir():
        raise StructuredCommitError(
            f"structured_commit: the checkpoint {where!r} is not a local folder; set structured_commit.checkpoint to "
            "the folder that holds config.json and the tokenizer"
        )
    path = Path(where)
    try:
        _, size = read_model_type(path)
    except FormatError:
        if settings.format == AUTO:
            raise
        size = None
    try:
        vocabulary = read_vocabulary(path, size)
    except VocabularyError as error:
        raise VocabularyError(f"structured_commit: {error}") from error
    form = resolve_auto(path, vocabulary) if settings.format == AUTO else resolve_format(settings.format)
    return cached_table(form, vocabulary, settings.cache_dir), form.name


RUNTIME = Runtime()
