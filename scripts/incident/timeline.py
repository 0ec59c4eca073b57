"""A trace in the terminal: one line of tokens for each window, the automaton's states under them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from structured_commit.recording.trace import Choice, Mark, Trace, Window

from .spelling import Speller
from .words import ILLEGAL_MARK, LOOKS, event_names, facts, is_incident, state_name


def show(console: Console, trace: Trace, spell: Speller) -> None:
    """Print a trace."""
    for name, value in facts(trace, spell.source):
        console.print(Text.assemble((f"{name}: ", "dim"), value), highlight=False)
    console.print()
    for window in trace.windows:
        _show_window(console, trace, window, spell)
    legend = Text("tokens: ", style="dim")
    for role, look in LOOKS.items():
        legend.append(look.mark + role, style=look.style).append("  ")
    legend.append(f"{ILLEGAL_MARK} illegal where it stood; the state after each token stands under it")
    console.print(legend)


def _show_window(console: Console, trace: Trace, window: Window, spell: Speller) -> None:
    events = ", ".join(event_names(window))
    style = "bold red" if is_incident(window) else "dim"
    console.print(Text.assemble((f"window {window.number}", style), "  ", (events, style)), highlight=False)
    cells = [(_token(mark, spell), _state(trace, mark)) for mark in window.marks()]
    before = (Text("│", style="dim"), Text(state_name(trace, window.states[0]), style="dim"))
    for above, below in _lines([before, *cells], console.width - 2):
        console.print(Text("  ") + above, no_wrap=True, crop=True)
        console.print(Text("  ") + below, no_wrap=True, crop=True)
    if window.choice is not None:
        caption = "column {}: the target's likeliest tokens and the one that stood there; all legal ones have {:.6g}"
        console.print(caption.format(window.choice.column, window.choice.legal_mass), style="dim", highlight=False)
        console.print(_choice(window.choice, spell))


def _token(mark: Mark, spell: Speller) -> Text:
    look = LOOKS[mark.role]
    wrong = ILLEGAL_MARK if mark.legal is False else ""
    return Text(f"{look.mark}{wrong}{spell(mark.token)}", style=look.style)


def _state(trace: Trace, mark: Mark) -> Text:
    return Text(state_name(trace, mark.state), style="dim")


def _lines(cells: list[tuple[Text, Text]], width: int) -> list[tuple[Text, Text]]:
    """Pairs of lines of at most `width` cells, every token above its state."""
    lines, above, below = [], Text(), Text()
    for token, state in cells:
        wide = max(token.cell_len, state.cell_len)
        if above.cell_len and above.cell_len + wide > width:
            lines.append((above, below))
            above, below = Text(), Text()
        above += token + Text(" " * (wide - token.cell_len + 1))
        below += state + Text(" " * (wide - state.cell_len + 1))
    return [*lines, (above, below)]


def _choice(choice: Choice, spell: Speller) -> Table:
    table = Table(box=None, padding=(0, 1), expand=False)
    for heading in ("token", "id", "probability", ""):
        table.add_column(heading, justify="right" if heading in ("id", "probability") else "left")
    for token, prob, legal in zip(choice.tokens, choice.probs, choice.legal, strict=True):
        verdict = Text("legal", style="green") if legal else Text("illegal", style="red")
        table.add_row(Text(spell(token)), str(token), f"{prob:.3g}", verdict)
    return table
