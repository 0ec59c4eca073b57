"""A trace as one page: no script, no font, nothing from anywhere else. Every text goes through `escape`."""

from __future__ import annotations

from html import escape

from structured_commit.recording.trace import CUT, REJECTED, Choice, Mark, Trace, Window

from .spelling import Speller
from .words import ILLEGAL_MARK, LOOKS, event_names, facts, is_incident, state_name

# Nothing may be loaded and no script may run, whatever a token is spelled like.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1c1e; --soft: #6b6b70; --line: #d9d9de;
  --accepted: #1a7f37; --recovered: #9a6700; --bonus: #0969da; --sampled: #0969da; --repaired: #8250df;
  --cut: #cf222e; --rejected: #8c8c92; --alarm: #cf222e; --header: #8a5a00; --block: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d;
  --accepted: #3fb950; --recovered: #d29922; --bonus: #58a6ff; --sampled: #58a6ff; --repaired: #bc8cff;
  --cut: #ff7b72; --rejected: #7d8590; --alarm: #ff7b72; --header: #d29922; --block: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
nav { margin: 0 0 1rem; } nav a { color: var(--alarm); margin-right: .75rem; }
.legend { display: flex; flex-wrap: wrap; gap: .35rem 1rem; margin: 0 0 1.25rem; padding: 0; list-style: none;
  color: var(--soft); font-size: .85rem; }
.window { border-left: 3px solid var(--line); margin: 0 0 .6rem; padding: .1rem 0 .1rem .75rem; }
.window.incident { border-left-color: var(--alarm); }
.window h2 { font-size: .8rem; font-weight: 400; color: var(--soft); margin: 0 0 .15rem; }
.incident h2 b { color: var(--alarm); }
.tokens { display: flex; flex-wrap: wrap; gap: .25rem; align-items: flex-start; }
.token { display: inline-flex; flex-direction: column; min-width: 2.2rem; max-width: 100%; }
.token code { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; padding: 0 .3rem;
  border: 1px solid var(--role); border-radius: 3px; color: var(--role); }
.token small { font-size: .68rem; line-height: 1.25; color: var(--soft); padding: 0 .3rem; }
.accepted { --role: var(--accepted); } .recovered { --role: var(--recovered); } .bonus { --role: var(--bonus); }
.sampled { --role: var(--sampled); } .repaired { --role: var(--repaired); } .cut { --role: var(--cut); }
.rejected { --role: var(--rejected); }
.repaired code { background: var(--role); color: var(--ground); font-weight: 600; }
.cut code, .rejected code { border-style: dashed; } s { text-decoration-thickness: 1px; }
.rejected { opacity: .75; } .control code { font-weight: 700; }
.illegal code { outline: 2px solid var(--alarm); outline-offset: 1px; }
.state.header { color: var(--header); } .state.block { color: var(--block); }
table { border-collapse: collapse; margin: .4rem 0 .3rem; font-size: .82rem;
  min-width: min(100%, 36rem); }
td code { overflow-wrap: anywhere; }
caption { text-align: left; color: var(--soft); padding-bottom: .2rem; }
td, th { padding: .1rem .6rem .1rem 0; text-align: left; font-weight: 400; } th { color: var(--soft); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: block; height: .55rem; min-width: 1px; background: var(--accepted); }
.no .bar { background: var(--alarm); } .bars { width: 35%; min-width: 3rem; }
"""


def render(trace: Trace, spell: Speller) -> str:
    """The whole page."""
    title = f"request {trace.request['id']}: {', '.join(trace.reasons)}"
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(trace, spell.source))
    incidents = [w for w in trace.windows if is_incident(w)]
    links = "".join(f'<a href="#w{w.number}">window {w.number}: {_events(w)}</a>' for w in incidents)
    windows = "\n".join(_window(trace, window, spell) for window in trace.windows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<dl>{said}</dl>
<nav>{links}</nav>
<ul class="legend">{_legend()}</ul>
<main>
{windows}
</main>
</body>
</html>
"""


def _legend() -> str:
    items = []
    for role, look in LOOKS.items():
        shown = f'<span class="token {role}"><code>{_struck(role, look.mark, role)}</code></span>'
        items.append(f"<li>{shown} {escape(look.meaning)}</li>")
    items.append(f'<li><span class="token illegal"><code>{ILLEGAL_MARK}</code></span> illegal where it stood</li>')
    items.append("<li>under each token: the automaton's state after it</li>")
    return "".join(items)


def _window(trace: Trace, window: Window, spell: Speller) -> str:
    kind = "window incident" if is_incident(window) else "window"
    start = state_name(trace, window.states[0])
    head = f"window {window.number}, from <span>{escape(start)}</span> <b>{_events(window)}</b>"
    tokens = "".join(_token(trace, mark, spell) for mark in window.marks())
    choice = "" if window.choice is None else _choice(window.choice, spell)
    return (
        f'<section class="{kind}" id="w{window.number}"><h2>{head}</h2>'
        f'<div class="tokens">{tokens}</div>{choice}</section>'
    )


def _token(trace: Trace, mark: Mark, spell: Speller) -> str:
    look = LOOKS[mark.role]
    classes = ["token", mark.role, *(["control"] if spell.is_control(mark.token) else [])]
    classes += ["illegal"] if mark.legal is False else []
    wrong = ILLEGAL_MARK if mark.legal is False else ""
    state = state_name(trace, mark.state)
    about = escape(f"{mark.role}, id {mark.token}: {look.meaning}", quote=True)
    return (
        f'<span class="{" ".join(classes)}" data-id="{mark.token}" title="{about}">'
        f"<code>{_struck(mark.role, look.mark + wrong, escape(spell(mark.token)))}</code>"
        f'<small class="state {escape(state.split(":")[0], quote=True)}">{escape(state)}</small></span>'
    )


def _struck(role: str, mark: str, text: str) -> str:
    """A mark, then text in HTML, struck out where the token was not committed."""
    return f"{mark}<s>{text}</s>" if role in (CUT, REJECTED) else f"{mark}{text}"


def _choice(choice: Choice, spell: Speller) -> str:
    rows = "".join(
        f'<tr class="{"yes" if legal else "no"}"><td><code>{escape(spell(token))}</code></td>'
        f'<td class="number">{token}</td><td class="number">{prob:.3g}</td>'
        f'<td class="bars"><span class="bar" style="width:{100 * prob:.1f}%"></span></td>'
        f"<td>{'legal' if legal else 'illegal'}</td></tr>"
        for token, prob, legal in zip(choice.tokens, choice.probs, choice.legal, strict=True)
    )
    caption = (
        f"column {choice.column}: the target's likeliest tokens and the one that stood there; all legal ones together "
        f"have probability {choice.legal_mass:.6g}"
    )
    heads = "".join(f"<th>{name}</th>" for name in ("token", "id", "probability", "", ""))
    return f"<table><caption>{caption}</caption><tr>{heads}</tr>{rows}</table>"


def _events(window: Window) -> str:
    return escape(", ".join(event_names(window)))
