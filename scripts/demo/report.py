"""What the demo prints and writes: one table, one stream before and after, JSON for machines.

Nothing is computed here that is not in `Row` or `Example`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.vocabularies import ChatVocabulary

from .decoding import NUM_DRAFTS, POLICIES, Run, Step
from .delivery import Delivery
from .model import World

STYLES = {
    "accepted": "green",
    "recovered": "yellow",
    "bonus": "cyan",
    "repaired": "bold white on magenta",
    "cut": "red strike",
}
COLUMNS = (
    "calls\nintended",
    "calls\ndelivered",
    "silently\nlost",
    "wrong\ncontent",
    "parse\nerror",
    "too\nlong",
    "tokens\n/step",
    "re-\npaired",
)
NOTES = (
    "intended: calls that the stream began; it is the sum of the next five columns.",
    'silently lost: finish reason "stop", no error, no usable call.',
    "wrong content: the call arrives, but its JSON or its function name is wrong. No structure check sees that; "
    "a grammar would.",
    "parse error: calls of replies where openai-harmony raised. Unstreamed the client gets raw text, streamed nothing.",
    "too long: cut by the length limit. (n): illegal tokens that observe saw, up to the first in each stream.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One acceptance rule under one policy.

    Attributes:
        calls: what became of the calls.
        tokens_per_step: mean number of tokens that a step committed, the ones after a terminal not counted.
        illegal: illegal tokens that the stage saw. A request is not followed beyond one that is let through.
        repaired: tokens redrawn.
        counters: of the stage, all of them.
    """

    acceptance: str
    policy: str
    calls: Delivery
    tokens_per_step: float
    illegal: int
    repaired: int
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One request that loses a call without the stage, token by token: without it, then with it."""

    request: int
    acceptance: str
    before: list[Step]
    after: list[Step]
    reply_before: str
    reply_after: str


def make_row(acceptance: str, policy: str, run: Run, deliveries: list[Delivery]) -> Row:
    """Add up a run."""
    tokens = sum(len(s.tokens) for s in run.streams)
    return Row(
        acceptance=acceptance,
        policy=policy,
        calls=sum(deliveries, Delivery()),
        tokens_per_step=tokens / sum(s.steps for s in run.streams),
        illegal=run.counters["illegal"],
        repaired=run.counters["repaired"],
        counters=run.counters,
    )


def render_table(rows: list[Row], requests: int) -> Table:
    """The table: one row for each acceptance rule and policy."""
    title = f"Tool calls of {requests} requests, {NUM_DRAFTS} drafts a step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("accept-\nance")
    table.add_column("policy")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        calls = row.calls
        lost = Text(str(calls.silently_lost), style="bold red" if calls.silently_lost else "bold green")
        numbers = (calls.wrong, calls.in_error, calls.unfinished, f"{row.tokens_per_step:.2f}")
        table.add_row(
            row.acceptance,
            row.policy,
            str(calls.intended),
            str(calls.delivered),
            lost,
            *map(str, numbers),
            f"({row.illegal})" if row.policy == "observe" else str(row.repaired),
            end_section=row.policy == POLICIES[-1],
        )
    return table


def render_example(example: Example, world: World, chat: ChatVocabulary) -> Group:
    """The stream before and after, coloured by what each token is. Blanks inside tokens are shown as dots."""
    legend = Text("tokens: ")
    for name, style in STYLES.items():
        legend.append(_marked(name, name), style=style).append("  ")
    legend.append("│ ends a step")
    title = f"request {example.request}, {example.acceptance} acceptance"
    panels = [
        Panel(
            Text.assemble(_render_steps(steps, world, chat), "\n\nthe client gets: ", (reply, "bold")),
            title=f"{title}, {policy}",
            title_align="left",
        )
        for policy, steps, reply in (
            ("off", example.before, example.reply_before),
            ("repair", example.after, example.reply_after),
        )
    ]
    return Group(*panels, legend)


def as_json(rows: list[Row], example: Example | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, for machines. Tokens of the example are local ids; its replies are text."""
    return {
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "example": None if example is None else asdict(example),
    }


def show(console: Console, rows: list[Row], example: Group | None, requests: int) -> None:
    """Print the report."""
    console.print(render_table(rows, requests))
    for note in NOTES:
        console.print(note, style="dim", highlight=False)
    if example is not None:
        console.print()
        console.print(example)


def _render_steps(steps: list[Step], world: World, chat: ChatVocabulary) -> Text:
    text = Text()
    for i, step in enumerate(steps):
        if i:
            text.append("│ ", style="dim")
        for role, token in _roles(step):
            spelled = chat.spell(world.to_real([token])[0]).replace(" ", "·")
            text.append(_marked(role, spelled), style=STYLES[role]).append(" ")
    return text


def _roles(step: Step) -> list[tuple[str, int]]:
    """Each token of a step and what it is; what was cut comes last."""
    last = len(step.window) - 1
    roles = []
    for i, token in enumerate(step.committed):
        if step.repaired and i == len(step.committed) - 1:
            roles.append(("repaired", token))
        elif i < last:
            roles.append(("accepted", token))
        else:
            roles.append(("bonus" if last == NUM_DRAFTS else "recovered", token))
    kept = len(step.committed) - step.repaired
    return roles + [("cut", token) for token in step.window[kept:]]


def _marked(role: str, spelled: str) -> str:
    """Readable without colours where it matters."""
    return {"repaired": f"[{spelled}]", "cut": f"✂{spelled}"}.get(role, spelled)
