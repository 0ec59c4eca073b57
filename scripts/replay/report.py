"""What the replay prints and writes. Nothing is computed here that is not in `Figures` or `Sentence`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .model import DRAFTS, NAMES, spell
from .verdict import CASES, POLICIES, Ending, Figures, Sentence

NOTES = (
    "term. inside: STOP committed in an open call. malformed: a header no parser reads. rej. inside: windows that "
    "ended in a rejection and left a call open. behind term.: tokens committed behind STOP, which the host drops. "
    "mean window: tokens output a window.",
    "From the report: MSG = 6, TOK = 7, END = 8, golden token CH, drafts MSG TOK END, the rule, a fixed seed. The id "
    "of CH, the other tokens and all probabilities are this replay's.",
    "That upstream commits without looking is read from its source, not run here: a worker's accepted tokens and their "
    "count become new_tokens and new_tokens_lens, and the host's loop over them checks end id, length and stop words.",
)


def show(console: Console, figures: Figures, sentences: list[Sentence]) -> None:
    """Print the tables and the verdict."""
    console.print(_one_window(figures))
    console.print(_endings("The same streams to their natural end", list(figures.sound.values())))
    leaking = [figures.plain, *figures.leaking.values()]
    console.print(_endings("A target with a little mass where no turn has any", leaking))
    console.print(_verdict(sentences))
    for note in NOTES:
        console.print(note, style="dim", highlight=False)
    unsupported = [s for s in sentences if not s.holds]
    for sentence in unsupported:
        console.print(f"Not supported by the figures: {sentence.text}", style="bold red", highlight=False)
    if not unsupported:
        console.print("Every sentence of the verdict is supported by the figures.", highlight=False)


def as_json(figures: Figures, sentences: list[Sentence], settings: dict[str, Any]) -> dict[str, Any]:
    """All figures and the verdict."""
    return {
        "report": "NVIDIA/TensorRT-LLM #17437",
        "settings": settings,
        "one_window": [
            {
                "case": case,
                "policy": policy,
                "accepted": [NAMES[t] for t in window.accepted],
                "committed": [NAMES[t] for t in window.committed],
                "rejected": window.rejected,
                "call": window.call.outcome,
            }
            for (case, policy), window in figures.one_window.items()
        ],
        "interior_rejection_probability": figures.interior_rejection,
        "law": {"streams": figures.law_streams, "largest_difference": figures.law_difference},
        "to_the_end": [_ending_json(e) for e in (*figures.sound.values(), figures.plain, *figures.leaking.values())],
        "length_limit": [_ending_json(e) for e in figures.short],
        "exact_lost_shares": figures.exact_lost,
        "greedy": [{**asdict(g), "tokens": [NAMES[t] for t in g.tokens]} for g in figures.greedy],
        "verdict": [asdict(s) for s in sentences],
        "supported": all(s.holds for s in sentences),
    }


def _ending_json(ending: Ending) -> dict[str, Any]:
    means = {"tokens_per_window": ending.tokens_per_window, "opened_per_stream": ending.opened_per_stream}
    return {**asdict(ending), **{name: round(mean, 4) for name, mean in means.items()}}


def _one_window(figures: Figures) -> Table:
    table = Table(title=f"One window, as the report has it: CH, then drafts {spell(DRAFTS)}", **_STYLE)
    table.add_column("policy")
    for case in CASES:
        share = figures.interior_rejection[case]
        table.add_column(f"target {case}\n(rejects with probability {share:.3f})")
        table.add_column("the call")
    for policy in POLICIES:
        cells = [policy]
        for case in CASES:
            window = figures.one_window[case, policy]
            cells += [f"CH {spell(window.committed)}", window.call.outcome]
        table.add_row(*cells)
    return table


def _endings(title: str, endings: list[Ending]) -> Table:
    table = Table(title=f"{title} ({endings[0].streams} streams)", **_STYLE)
    columns = ("policy", "calls\nopened", "deliv-\nered", "term.\ninside", "mal-\nformed", "rej.\ninside")
    for column in (*columns, "behind\nterm.", "re-\npaired", "mean\nwindow"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for e in endings:
        counts = (e.opened, e.delivered, e.terminal_inside, e.malformed, e.rejected_inside)
        cells = (*counts, e.behind_terminal, e.repaired)
        name = e.policy if e.num_drafts else "no drafts"
        table.add_row(name, *(str(c) for c in cells), f"{e.tokens_per_window:.2f}")
    return table


def _verdict(sentences: list[Sentence]) -> Table:
    table = Table(title="The verdict", show_lines=True, **_STYLE)
    for column in ("claim", "sentence", "figures", "holds"):
        table.add_column(column)
    for s in sentences:
        table.add_row(s.claim, s.text, s.evidence, "yes" if s.holds else "NO")
    return table


_STYLE: dict[str, Any] = {"box": box.SIMPLE, "collapse_padding": True, "title_justify": "left", "title_style": "bold"}
