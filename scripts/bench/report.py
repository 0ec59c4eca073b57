"""The figures of a run: as tables, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from .accepted import Accepted
from .compiling import Compiled
from .timing import Cost

FIXED_BATCH, FIXED_DRAFT_LENGTH = 64, 8


@dataclass(frozen=True)
class Cell:
    """One cost: whose, for how many rows, how many drafts, what share of illegal windows."""

    name: str
    batch: int
    draft_length: int
    illegal: float
    cost: Cost


@dataclass
class Results:
    """Everything that one run measured."""

    device: str
    rounds: int
    threads: int
    torch: str
    axes: list[Cell] = field(default_factory=list)
    grid: list[Cell] = field(default_factory=list)
    acceptance: list[Cell] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        found = asdict(self)
        for row, one in zip(found["accepted"], self.accepted, strict=True):
            row["per_step"] = one.per_step
        return found

    @property
    def best_stage(self) -> str:
        """The stage's fastest implementation here."""
        names = {c.name for c in self.axes if c.name.startswith("stage")}
        return min(names, key=lambda n: self._at(n, FIXED_BATCH, FIXED_DRAFT_LENGTH).cost.median)

    def _at(self, name: str, batch: int, draft_length: int) -> Cell:
        return next(c for c in self.axes if (c.name, c.batch, c.draft_length) == (name, batch, draft_length))

    def along(self, axis: str) -> dict[str, list[Cell]]:
        """Cells by name along `batch` or `draft_length`, the other one fixed."""
        fixed = {"batch": ("draft_length", FIXED_DRAFT_LENGTH), "draft_length": ("batch", FIXED_BATCH)}[axis]
        found: dict[str, list[Cell]] = {}
        for cell in self.axes:
            if getattr(cell, fixed[0]) == fixed[1]:
                found.setdefault(cell.name, []).append(cell)
        return {name: sorted(cells, key=lambda c: getattr(c, axis)) for name, cells in found.items()}


def show(results: Results, console: Console) -> None:
    """Print every table."""
    console.print(
        f"device {results.device}, {results.threads} threads, torch {results.torch}; medians of {results.rounds} rounds"
    )
    console.print(_along(results, "batch", f"µs a step, draft length {FIXED_DRAFT_LENGTH}, against batch size"))
    console.print(_along(results, "draft_length", f"µs a step, batch {FIXED_BATCH}, against draft length"))
    console.print(_ratios(results))
    console.print(_grid(results))
    console.print(_acceptance(results))
    console.print(_accepted(results))
    console.print(_compiled(results))


def _along(results: Results, axis: str, title: str) -> Table:
    lines = results.along(axis)
    values = sorted({getattr(c, axis) for cells in lines.values() for c in cells})
    table = Table(Column("", no_wrap=True), *map(str, values), title=title)
    for name, cells in lines.items():
        by_value = {getattr(c, axis): c.cost for c in cells}
        table.add_row(name, *(_micro(by_value[v]) if v in by_value else "–" for v in values))
    return table


def _ratios(results: Results) -> Table:
    stage = results.best_stage
    table = Table(
        "times the cost of " + stage, "ratio", title=f"batch {FIXED_BATCH}, draft length {FIXED_DRAFT_LENGTH}"
    )
    own = results._at(stage, FIXED_BATCH, FIXED_DRAFT_LENGTH).cost.median
    for name in results.along("batch"):
        if name != stage:
            cost = results._at(name, FIXED_BATCH, FIXED_DRAFT_LENGTH).cost.median
            table.add_row(name, f"{cost / own:.1f}")
    return table


def _grid(results: Results) -> Table:
    stage = results.best_stage
    cells = [c for c in results.grid if c.name == stage]
    shares = sorted({c.illegal for c in cells})
    batches, lengths = (sorted({getattr(c, n) for c in cells}) for n in ("batch", "draft_length"))
    table = Table(
        "batch", *(f"K {k}" for k in lengths), title=f"{stage}, µs a step at {_shares(shares)} illegal windows"
    )
    by = {(c.batch, c.draft_length, c.illegal): c.cost.median * 1e6 for c in cells}
    for batch in batches:
        table.add_row(str(batch), *(" / ".join(f"{by[batch, k, s]:.0f}" for s in shares) for k in lengths))
    return table


def _acceptance(results: Results) -> Table:
    title = f"acceptance itself, batch {FIXED_BATCH}, draft length {FIXED_DRAFT_LENGTH}"
    table = Table("", "ms", "stage's share", title=title)
    stage = next(c for c in results.acceptance if c.name == "stage").cost.median
    for cell in results.acceptance:
        share = "" if cell.name == "stage" else f"{stage / cell.cost.median:.3%}"
        table.add_row(cell.name, f"{cell.cost.median * 1e3:.2f}", share)
    return table


def _accepted(results: Results) -> Table:
    policies = list(dict.fromkeys(a.policy for a in results.accepted))
    table = Table("illegal windows under off", *policies, title="mean tokens committed in a step")
    for share in dict.fromkeys(a.illegal for a in results.accepted):
        row = [a for a in results.accepted if a.illegal == share]
        base = row[0].per_step
        table.add_row(f"{share:.2%}", *(f"{a.per_step:.3f} ({a.per_step / base - 1:+.1%})" for a in row))
    return table


def _compiled(results: Results) -> Table:
    table = Table(
        *("format", "table s", "KB", "load ms", "xgrammar s", "KB", "llguidance s", "KB"),
        title="making a family's structure ready",
        caption="llguidance gives no figure for its memory: what the process grew by",
    )
    for c in results.compiled:
        table.add_row(
            c.format,
            *(f"{c.seconds:.2f}", f"{c.bytes / 1e3:.0f}", f"{c.load_seconds * 1e3:.1f}"),
            *(_number(c.xgrammar_seconds, 2), _number(c.xgrammar_bytes, 0, 1e3)),
            *(_number(c.llguidance_seconds, 3), _number(c.llguidance_bytes, 0, 1e3)),
        )
    return table


def draw(results: Results, path: Path) -> None:
    """Cost of a row against batch size, and of a step against draft length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(13, 4.5))
    left, right = figure.subplots(1, 2)
    panels = (
        (left, "batch", "batch size", "µs a row", lambda c: c.batch),
        (right, "draft_length", "draft length", "µs a step", lambda c: 1),
    )
    for axis, along, x, y, share in panels:
        for name, cells in results.along(along).items():
            values = [getattr(c, along) for c in cells]
            scale = [1e6 / share(c) for c in cells]
            middle = [c.cost.median * s for c, s in zip(cells, scale, strict=True)]
            bounds = [[(q * s) for q, s in zip(qs, scale, strict=True)] for qs in _quartiles(cells)]
            (line,) = axis.plot(
                values, middle, marker="o", markersize=3, label=name, linewidth=2.4 if name.startswith("stage") else 1.2
            )
            axis.fill_between(values, *bounds, alpha=0.2, color=line.get_color())
        axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        axis.grid(True, which="both", alpha=0.2)
        axis.set_xticks(sorted({getattr(c, along) for cells in results.along(along).values() for c in cells}))
        axis.get_xaxis().set_major_formatter(ScalarFormatter())
        axis.minorticks_off()
    left.set_title(f"draft length {FIXED_DRAFT_LENGTH}")
    right.set_title(f"batch {FIXED_BATCH}")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(f"Checking one step's windows, Harmony over gpt-oss's vocabulary ({results.device})", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _quartiles(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    return [c.cost.low for c in cells], [c.cost.high for c in cells]


def _micro(cost: Cost) -> str:
    return f"{cost.median * 1e6:,.0f} ±{cost.spread:.0%}"


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def _shares(shares: Sequence[float]) -> str:
    return " / ".join(f"{s:.0%}" for s in shares)
