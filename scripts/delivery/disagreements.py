"""Where a parser's streamed answer differs from its own unstreamed one even token by token: each case and whose fault.

No delivery can mend these: without speculation and without the splitter they are the same. For such a turn aligned
delivery must give what token by token gives; for every other turn, what the parser reads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .parsers import Reading
from .turns import BODY, JOIN, OPEN, TEXT, Turn


@dataclass(frozen=True, slots=True)
class Case:
    """A named disagreement of one parser. `holds(turn, at_once, streamed)` says whether a turn is one."""

    name: str
    fault: str
    holds: Callable[[Turn, Reading, Reading], bool]


def _spoken_behind(turn: Turn) -> bool:
    kinds = [kind for kind, _ in turn.parts]
    return OPEN in kinds and any(kind in (TEXT, JOIN) for kind in kinds[kinds.index(OPEN) :])


def _bodies(turn: Turn) -> list[str]:
    """The text between each call's head and the next part that is no body; '' where a call has none."""
    found = []
    for i, (kind, _) in enumerate(turn.parts):
        if kind == OPEN:
            following = turn.parts[i + 1 : i + 2]
            found.append(following[0][1] if following and following[0][0] == BODY else "")
    return found


def _strips(turn: Turn, once: Reading, streamed: Reading) -> bool:
    return once.calls == streamed.calls and once.text == streamed.text.strip() != streamed.text


def _strips_behind(turn: Turn, once: Reading, streamed: Reading) -> bool:
    return (
        once.calls == streamed.calls
        and _spoken_behind(turn)
        and "".join(once.text.split()) == "".join(streamed.text.split())
    )


def _drops_text_behind(turn: Turn, once: Reading, streamed: Reading) -> bool:
    return (
        once.calls == streamed.calls
        and _spoken_behind(turn)
        and streamed.text.strip().startswith(once.text.strip())
        and len(streamed.text) > len(once.text)
    )


STRIPS = Case(
    "white space round text", "at once it strips the text, streamed it cannot know that none follows", _strips
)
DROPS_BEHIND = Case(
    "text behind the first call",
    "at once it keeps only what stands before the first call; streamed it passes the rest on",
    _drops_text_behind,
)

STRIPS_BEHIND = Case(
    "white space before text behind the calls", "at once it strips that text, streamed it passes it on", _strips_behind
)

CASES: dict[str, tuple[Case, ...]] = {
    "gemma4": (DROPS_BEHIND,),
    "qwen25": (STRIPS, DROPS_BEHIND),
    "qwen3_coder": (DROPS_BEHIND,),
    "deepseekv31": (DROPS_BEHIND,),
    "kimik2": (DROPS_BEHIND,),
    "glm47": (STRIPS,),
    "llama32": (STRIPS_BEHIND,),
    "mistral": (
        STRIPS_BEHIND,
        Case(
            "brackets in text",
            "streamed it deletes every ] from text, since ] ends a list of calls",
            lambda turn, once, streamed: once.calls == streamed.calls and once.text.replace("]", "") == streamed.text,
        ),
        Case(
            "a list of several calls",
            "streamed it looks for the marker before every call, and a list has one: later calls become text",
            lambda turn, once, streamed: (
                "[TOOL_CALLS] [" in turn.text and len(once.calls) > 1 and streamed.calls == once.calls[:1]
            ),
        ),
    ),
    "minimax": (
        Case(
            "braces in a value",
            "streamed it closes the object only if its text has more { than }, strings included",
            lambda turn, once, streamed: (
                any("{" in body or "}" in body for body in _bodies(turn))
                and [name for name, _ in once.calls] == [name for name, _ in streamed.calls]
                and once.calls != streamed.calls
            ),
        ),
        Case(
            "a call without parameters",
            "streamed its arguments stay empty, at once they are {}",
            lambda turn, once, streamed: (
                "" in _bodies(turn) and any(arguments == "" for _, arguments in streamed.calls)
            ),
        ),
        Case(
            "text behind a block",
            "streamed it takes all behind the first block for the inside of a block, and drops it",
            lambda turn, once, streamed: (
                once.calls == streamed.calls and _spoken_behind(turn) and once.text.startswith(streamed.text)
            ),
        ),
    ),
    "gpt_oss": (
        Case(
            "a turn whose first message is the call, or that has none",
            "at once it looks for <|start|>assistant<|channel|>commentary, whose first part stands in the prompt",
            lambda turn, once, streamed: (
                "<|start|>assistant<|channel|>commentary" not in turn.text and once == Reading((), turn.text)
            ),
        ),
    ),
}


DRAINED = {"mistral": "white space behind the last call stays in its buffer, unless it is asked until nothing comes"}


def named(parser: str, turn: Turn, once: Reading, streamed: Reading) -> list[str]:
    """The names of the cases that a disagreement is."""
    return [case.name for case in CASES[parser] if case.holds(turn, once, streamed)]
