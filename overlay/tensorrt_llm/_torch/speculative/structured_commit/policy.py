"""What the stage may do to a window (policies), what it says it did (events), and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag

from .errors import StageError


class Policy(str, Enum):
    """What happens to an accepted window. Each is a stopping time or a conditioning of the target, but `ROLLBACK`.

    OFF: nothing is looked at. OBSERVE: events and counters only. TRIM: cut after the first terminal token.
    REPAIR: trim, and redraw the first illegal token from the target's legal part. GATE: repair, and one token a
    step inside headers. ROLLBACK: repair, and drop a header or block that the window opened but did not close;
    not exact: which openers survive depends on discarded tokens.
    """

    OFF = "off"
    OBSERVE = "observe"
    TRIM = "trim"
    REPAIR = "repair"
    GATE = "gate"
    ROLLBACK = "rollback"

    @property
    def repairs(self) -> bool:
        """Whether illegal tokens are redrawn."""
        return self in (Policy.REPAIR, Policy.GATE, Policy.ROLLBACK)


class Event(IntFlag):
    """What happened to a row in one step."""

    ENDED = 1  # a terminal was committed (under observe: seen) in this window
    AFTER_END = 2  # the turn had ended before this window
    TRIMMED = 4  # tokens after a terminal were cut (under observe: seen)
    ILLEGAL = 8  # the window held an illegal token where a format was tracked
    REPAIRED = 16  # the illegal token was redrawn
    GATED = 32  # tokens were put off by `gate`
    ROLLED_BACK = 64  # an opener and what followed it were dropped by `rollback`
    CUT = 128  # more rows needed a repair than `repair_rows`: cut before the illegal token
    ESCAPED = 256  # no legal mass, or no repair row left for a first column: a fixed legal token was committed
    UNTRACKED = 512  # an illegal token was let through; the row is not tracked any more
    OUT_OF_RANGE = 1024  # a length outside [1, W], a slot or a token id out of range
    ALIGNED = 2048  # tokens behind a structural boundary were put off by `align`


COUNTERS = (
    "windows",
    "tokens_in",
    "tokens_committed",
    "trimmed",
    "illegal",
    "repaired",
    "gated",
    "rolled_back",
    "cut",
    "escaped",
    "untracked",
    "ended",
    "out_of_range",
    "aligned",
)


BACKENDS = ("auto", "host", "torch", "triton")


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """Settings of a `CommitStage`.

    Attributes:
        policy: one of `Policy`, by value.
        max_repairs: repairs per request; after that its illegal tokens are let through and it is `UNTRACKED`.
        repair_rows: how many rows may be repaired in one step; bounds the [repair_rows, V] traffic. Rows that
            need a repair in their first column come first; any other row beyond the bound is cut before its
            illegal token, which is exact. With `repair_rows` ≥ batch size no row is ever `ESCAPED` for lack of one.
        seed: of the stage's own random stream, the same on every rank.
        check: verify values (lengths, slots, ids, sums) on the host before each commit. Synchronises; for
            debugging, not inside CUDA graphs.
        backend: what `commit` runs on, with the same result to the bit: `torch`; the fused kernels of `triton`; or
            `host`, on a CPU only, which looks first whether there is anything to do. `auto` = the kernels on a GPU
            where Triton is at hand, `host` on a CPU, else torch.
        align: with `repair`, end a window behind the first token that opens or closes a header or a block, so that no
            window crosses two boundaries. A stopping time, so exact; it costs accepted tokens.
    """

    policy: str = "repair"
    max_repairs: int = 64
    repair_rows: int = 8
    seed: int = 0
    check: bool = False
    backend: str = "auto"
    align: bool = False

    def __post_init__(self) -> None:
        allowed = [p.value for p in Policy]
        if self.policy not in allowed:
            raise StageError(f"unknown policy {self.policy!r}; choose one of: {', '.join(allowed)}")
        object.__setattr__(self, "policy", Policy(self.policy))
        if self.max_repairs < 0:
            raise StageError(f"max_repairs is {self.max_repairs}; it must be 0 or more")
        if self.repair_rows < 1:
            raise StageError(f"repair_rows is {self.repair_rows}; it must be 1 or more")
        if not 0 <= self.seed < 2**64:
            raise StageError(f"seed {self.seed} does not fit 64 bits")
        if self.backend not in BACKENDS:
            raise StageError(f"unknown backend {self.backend!r}; choose one of: {', '.join(BACKENDS)}")
        if self.align and self.policy is not Policy.REPAIR:
            raise StageError(f"align goes with policy 'repair', not with {self.policy.value!r}")

    @classmethod
    def of_rule(cls, rule: str, **settings: object) -> CommitConfig:
        """The settings whose `rule` this is."""
        align = rule == "align"
        return cls(policy=Policy.REPAIR.value if align else rule, align=align, **settings)

    @property
    def rule(self) -> str:
        """What decides over a window: the policy, or `align` for `repair` that also ends windows at boundaries."""
        return "align" if self.align else self.policy.value
