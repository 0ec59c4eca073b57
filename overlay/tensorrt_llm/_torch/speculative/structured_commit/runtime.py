"""The one commit stage of a process, and which request each row of the coming step belongs to.

Metadata objects are copied for every captured graph, so nothing is kept on them: the stage, its row table and the
reasons for which it stood aside live here. Knows a little of TensorRT-LLM's requests, by attribute; imports none of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .counters import CounterReader
from .errors import RankMismatchError
from .loading import load_structure
from .log import log
from .rank_check import Gather, RankCheck
from .recording.recorder import WIDTH, Recorder
from .settings import VARIABLE, parse_settings
from .stage import CommitStage

NUM_SLOTS = 16_384  # far above any sequence-slot pool; a slot costs 16 bytes
MAX_WINDOW = 1_024
STATISTICS_EVERY = 100  # steps between two copies of the counters for iteration statistics
FORCED = "forced acceptance"


class Runtime:
    """Process-wide state. `stage` is None while the stage is not configured: that is all a hook looks at then.

    Attributes:
        stage: the stage, or None.
        rows: [NUM_SLOTS] int64 on the stage's device, the stage slot of each batch row; its address never moves.
        aside: how often the stage stood aside, by reason.
        rank_check: compares what ranks committed; None unless asked for.
        recorder: keeps the last windows of each request; None unless asked for.
        labels: policy and format of the stage. counts: its counters, at most two times `STATISTICS_EVERY` steps old.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the stage: nothing is configured."""
        self.stage: CommitStage | None = None
        self.rows: Tensor | None = None
        self.aside: Counter[str] = Counter()
        self.rank_check: RankCheck | None = None
        self.recorder: Recorder | None = None
        self.labels: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._statistics: CounterReader | None = None
        self._report_every = self._steps = 0

    def build(
        self,
        value: object,
        folder: str | os.PathLike | None,
        rank: int,
        serves: bool,
        gather: Gather | None = None,
        *,
        records: bool = True,
        width: int | None = None,
    ) -> None:
        """Build the stage of this process from its configured value, replacing an earlier one.

        Args:
            value: what the configuration holds; None = look at the variable `TRTLLM_STRUCTURED_COMMIT`.
            folder: the checkpoint folder.
            rank: for the log.
            serves: False on ranks that never accept tokens (all but the last pipeline stage).
            gather: a collective over the ranks that own the same requests as this one; None if there are none.
            records: False on ranks whose requests another rank records.
            width: the widest window, where it is known.

        Raises:
            StructuredCommitError: the configuration cannot be honoured; the process then has no stage.
        """
        self.reset()
        settings = parse_settings(value if value is not None else os.environ.get(VARIABLE))
        if settings is None or not serves:
            return
        table, form, vocabulary = load_structure(settings, folder)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        stage = CommitStage(table, settings.commit_config, num_slots=NUM_SLOTS, max_window=MAX_WINDOW, device=device)
        self.rows = torch.full((NUM_SLOTS,), NUM_SLOTS, dtype=torch.int64, device=device)
        self.stage = stage
        self.labels = {"policy": settings.policy, "format": form.name}
        self._statistics = CounterReader(stage.counters)
        self._report_every = settings.report_every
        if settings.rank_check_every and gather is not None:
            self.rank_check = RankCheck(settings.rank_check_every, gather, NUM_SLOTS, device)
        elif settings.rank_check_every:
            log.warning("structured_commit: rank_check_every does nothing here: no other rank owns the same requests")
        if settings.record is not None and records:
            self.recorder = Recorder(stage, settings.record, rank=rank, width=width or WIDTH, texts=vocabulary.spell)
            log.info(f"structured_commit records to {settings.record.folder}: {self.recorder.describe()}")
        log.info(
            f"structured_commit active: format={form.name} states={table.num_states} classes={table.num_classes} "
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
        except RankMismatchError:  # the one error that somebody asked for
            raise
        except Exception as error:
            self.stand_aside(f"{decide.__name__.lstrip('_')}: {type(error).__name__}: {error}")
            return fallback

    def bind(self, requests: list, prefilled: Iterable = ()) -> None:
        """Write the slots whose owner changed or whose request is in its context phase, and the row table.

        Args:
            prefilled: those of the requests that were contexts in the step in question, where their state has moved on.

        Raises:
            RankMismatchError: only if `rank_check_every` is set.
        """
        stage = self.stage
        if self.rank_check is not None:
            self.rank_check.next_step()
        if self.recorder is not None:
            self.recorder.next_step()
        rows, slots, tokens, owners, tracked, prompts = [], [], [], [], [], []
        owned, fresh = [], []  # for the record
        contexts = {id(request) for request in prefilled}
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
            is_fresh = is_new(request, slot) or not stage.owned_by(slot, owner)
            if is_fresh or in_context or id(request) in contexts:
                owned.append(request)
                fresh.append(is_fresh)
                slots.append(slot)
                owners.append(owner)
                tokens.append(request.get_tokens(0))
                tracked.append(not ignores_end(request))
                prompts.append(prompt_length(request))
        self._report()
        stage.bind(
            slots, tokens, owners=owners, in_context=[True] * len(slots), tracked=tracked, prompt_lengths=prompts
        )
        if self.recorder is not None:
            self.recorder.bind(slots, owned, tokens, prompts, fresh)
        self.write_rows(rows)
        if self.rank_check is not None:
            self.rank_check.name_rows(rows)

    def _report(self) -> None:
        """Read counters whose copy was started earlier: for statistics, and every `report_every` steps for the log."""
        self._steps += 1
        if self._steps % STATISTICS_EVERY == 1:
            self.counts = self._statistics.read() or self.counts
            self._statistics.start()
        if not self._report_every or self._steps % self._report_every:
            return
        values = self.stage.counter_reader.read()
        if values is not None:
            values.update({} if self.recorder is None else self.recorder.counts)
            shown = " ".join(f"{name}={value}" for name, value in values.items())
            log.info(f"structured_commit counters: {shown} aside={sum(self.aside.values())}")
        self.stage.counter_reader.start()

    def write_rows(self, rows: list[int]) -> None:
        """Set the slots of the first rows; all others get none."""
        values = torch.tensor(rows, dtype=torch.int64, pin_memory=self.rows.is_cuda)
        self.rows[: len(rows)].copy_(values, non_blocking=True)
        self.rows[len(rows) :].fill_(NUM_SLOTS)


def is_new(request, slot: int) -> bool:
    """Whether this very request was never bound to `slot`; marks it. An executor that sizes caches numbers its requests
    as the one after it will, so that ids alone do not tell them apart."""
    known = getattr(request, "structured_commit_slot", None) == slot  # no `py_` name: those are copied to children
    request.structured_commit_slot = slot
    return not known


def prompt_length(request) -> int | None:
    """How many of the request's tokens are its prompt; output before a pause is not."""
    return getattr(request, "py_orig_prompt_len", None)


def ignores_end(request) -> bool:
    """Whether end tokens do not end this request."""
    end = getattr(request, "py_end_id", None)
    return end is not None and end < 0


RUNTIME = Runtime()
