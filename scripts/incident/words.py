"""What both views say about a trace, in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from structured_commit import Event
from structured_commit.recording.ring import STRUCTURAL
from structured_commit.recording.trace import (
    ACCEPTED,
    BONUS,
    CUT,
    RECOVERED,
    REJECTED,
    REPAIRED,
    SAMPLED,
    Trace,
    Window,
)


@dataclass(frozen=True, slots=True)
class Look:
    """How a role is shown: a mark that needs no colour, the terminal's style, and what it means."""

    mark: str
    style: str
    meaning: str


LOOKS = {
    ACCEPTED: Look("", "green", "a draft that the target accepted"),
    RECOVERED: Look("↺", "yellow", "drawn by the target in place of a rejected draft"),
    BONUS: Look("+", "cyan", "drawn by the target after all drafts were accepted"),
    SAMPLED: Look("", "cyan", "drawn by the target, nothing was drafted"),
    REPAIRED: Look("✎", "bold white on magenta", "illegal token redrawn from the target's legal part"),
    CUT: Look("✂", "red strike", "accepted, but not committed"),
    REJECTED: Look("✗", "dim strike", "a draft that the target rejected"),
}
ILLEGAL_MARK = "!"


def is_incident(window: Window) -> bool:
    """Whether something structural happened in a window."""
    return bool(window.events & STRUCTURAL)


def event_names(window: Window) -> list[str]:
    """Names of what happened, in small letters."""
    return [event.name.lower() for event in Event if event & window.events]


def state_name(trace: Trace, state: int | None) -> str:
    """A state's name, a dash where there is none."""
    return "–" if state is None else trace.states.get(state, str(state))


def facts(trace: Trace, source: str) -> list[tuple[str, str]]:
    """What a trace is about: (name, value)."""
    request, table = trace.request, trace.table
    said = [
        ("request", f"{request['id']} (slot {request['slot']}, rank {request['rank']})"),
        ("written because", ", ".join(trace.reasons)),
        ("written at", trace.written),
        ("policy", trace.policy),
        ("format", f"{table['format']} {table['format_digest']}"),
        ("vocabulary", f"{table['vocabulary']} tokens, {table['vocabulary_digest'] or 'unknown'}; {source}"),
        ("prompt", f"{request['prompt_tokens']} tokens, SHA-256 {request['prompt_sha256'][:16]}…"),
        ("windows", f"the last {len(trace.windows)}"),
    ]
    if not trace.consistent:
        said.append(("warning", "the host reads these windows otherwise than the device did; please report this trace"))
    return said
