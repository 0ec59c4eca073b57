"""One batch of requests on one double, as it is, patched but off, or patched with the stage on, and what must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .common.engine import Engine, plain_greedy, requests_for
from .common.executor import Run
from .common.loading import Tree
from .common.requests import LlmRequest
from .common.tables import Table
from .paths import DecodingPath
from .toy import Checkpoint

RUNTIME = "_torch.speculative.structured_commit.runtime"


@dataclass
class Schedule:
    """What is the same in all three runs.

    Attributes:
        prepare: called with the engine and the requests before they run.
        settings: of `TorchLlmArgs`. weights: of `Weights`. wrap_drafter: makes the drafter of a table.
    """

    path: DecodingPath
    prompts: int | list[list[int]] = 3
    max_new_tokens: int = 11
    prepare: Callable[[Engine, list[LlmRequest]], None] | None = None
    settings: dict[str, Any] | None = None
    weights: dict[str, Any] | None = None
    wrap_target: Callable[[Table], Table] = lambda table: table
    wrap_drafter: Callable[[Table], Any] = lambda table: table
    pause_at: dict[int, int] | None = None
    seed: int = 4


@dataclass
class Outcome:
    engine: Engine
    requests: list[LlmRequest]
    run: Run
    target: Table
    checkpoint: Checkpoint
    counters: dict[str, int]
    aside: dict[str, int]
    log: list[str]

    @property
    def tokens(self) -> dict[int, list[int]]:
        return self.run.tokens

    @property
    def alone(self) -> dict[int, list[int]]:
        """What the target says of itself."""
        return {r.py_request_id: plain_greedy(self.target, r) for r in self.requests}

    @property
    def constrained(self) -> dict[int, list[int]]:
        """What it says where only legal tokens compete."""
        return {r.py_request_id: self.checkpoint.constrained(self.target, r) for r in self.requests}

    @property
    def illegal(self) -> dict[int, int]:
        """Index of the first illegal token of each request that has one."""
        found = {r.py_request_id: self.checkpoint.first_illegal(r, r.output) for r in self.requests}
        return {request: at for request, at in found.items() if at is not None}


def decode(tree: Tree, checkpoint: Checkpoint, schedule: Schedule, policy: str | None) -> Outcome:
    """`policy` None: no section at all, for a tree that is not patched."""
    path = schedule.path.with_thinking_tokens(checkpoint.ids["a"], checkpoint.ids["}"])
    path = DecodingPath(
        path.name, path.windows, path.speculative, {**path.weights, **(schedule.weights or {})}, path.law
    )
    target = schedule.wrap_target(checkpoint.target(schedule.seed))
    engine = path.engine(
        tree,
        target,
        schedule.wrap_drafter(checkpoint.drafter(target)),
        checkpoint.vocab_size,
        stage=checkpoint.section(policy) if policy else None,
        checkpoint=str(checkpoint.folder),
        **(schedule.settings or {}),
    )
    prompts = checkpoint.prompts(schedule.prompts) if isinstance(schedule.prompts, int) else schedule.prompts
    requests = requests_for(
        prompts, max_new_tokens=schedule.max_new_tokens, end_id=checkpoint.end_id, temperature=path.temperature
    )
    log: list[str] = []
    runtime = tree.load(RUNTIME) if policy else None
    if runtime:
        runtime.log = _Recorder(log)
    if schedule.prepare:
        schedule.prepare(engine, requests)
    run = engine.run(requests, schedule.pause_at)
    stage = runtime.RUNTIME.stage if runtime else None
    counters = stage.read_counters() if stage else {}
    return Outcome(
        engine, requests, run, target, checkpoint, counters, dict(runtime.RUNTIME.aside) if runtime else {}, log
    )


def leaning_to(token: int, amount: float) -> Callable[[Table], Table]:
    """For `wrap_target`: `amount` on top of one token's logit everywhere."""

    def wrap(table: Table) -> Table:
        rows = {}

        def logits(context):
            key = context[-3:]
            if key not in rows:
                rows[key] = table(context).clone()
                rows[key][token] += amount
            return rows[key]

        return logits

    return wrap


class _Recorder:
    """A logger that keeps what it is told."""

    def __init__(self, lines: list[str]) -> None:
        self.info = self.warning = lines.append


def off_is_upstream(unpatched, patched, checkpoint, window: str, schedule: Schedule) -> Outcome:
    """Patched and off, every step is as in the tree that is not patched; where nothing is drawn, the stream is the
    target's own. Returns the run that is not patched."""
    before = decode(unpatched[window], checkpoint, schedule, None)
    after = decode(patched(window), checkpoint, schedule, "off")
    assert after.run == before.run
    if schedule.path.law == "argmax":
        assert before.tokens == before.alone
    return before


def repaired(patched, checkpoint, window: str, schedule: Schedule) -> Outcome:
    """With `repair`, what is committed is legal, nothing follows a terminal, and where nothing is drawn the stream is
    the constrained target's."""
    on = decode(patched(window), checkpoint, schedule, "repair")
    assert not on.illegal
    assert all(checkpoint.end_id not in tokens[:-1] for tokens in on.tokens.values())
    if schedule.path.law == "argmax":
        assert on.tokens == on.constrained
    assert not on.aside
    assert on.counters["repaired"] > 0
    assert on.counters["escaped"] == on.counters["untracked"] == 0
    return on


def both(unpatched, patched, checkpoint, window: str, schedule: Schedule) -> tuple[Outcome, Outcome]:
    """The two above."""
    return off_is_upstream(unpatched, patched, checkpoint, window, schedule), repaired(
        patched, checkpoint, window, schedule
    )
