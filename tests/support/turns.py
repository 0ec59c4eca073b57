"""Statements about whole turns that every family's tests make in the same words."""

from __future__ import annotations

from structured_commit import HostTwin, builtin_format

from .streams import SPELLINGS, compiled, is_prefix, is_turn, spell, turn_verdicts


def without_terminal(name: str, text: str) -> str:
    """`text` less its last terminal, as servers hand it to a parser."""
    for terminal in builtin_format(name).terminals:
        if text.endswith(terminal):
            return text[: -len(terminal)]
    return text


def accepts(name: str, text: str, prompt: str | None = None) -> bool:
    """Whether every spelling of `text` is a turn, with each terminal of the format and with none."""
    bare = without_terminal(name, text)
    endings = [text, bare, *(bare + terminal for terminal in builtin_format(name).terminals)]
    return all(turn_verdicts(name, whole, prompt) == {True} for whole in dict.fromkeys(endings))


def refuses(name: str, text: str, prompt: str | None = None) -> bool:
    """Whether no spelling of `text` is a turn, neither as it stands nor without its last terminal."""
    wholes = dict.fromkeys((text, without_terminal(name, text)))
    return all(turn_verdicts(name, whole, prompt) == {False} for whole in wholes)


def is_unfinished(name: str, text: str, prompt: str | None = None) -> bool:
    """Whether every spelling of `text` could become a turn but is none yet."""
    table, chat = compiled(name)
    state = start_state(name, prompt)
    spelled = [spell(chat, text, how) for how in SPELLINGS]
    return all(is_prefix(table, ids, state) and not is_turn(table, ids, state) for ids in spelled)


def refused_at(name: str, text: str, prompt: str | None = None) -> str | None:
    """The spelling of the first token of `text` that no turn can hold there, or None."""
    table, chat = compiled(name)
    ids = spell(chat, text)
    at = table.host.first_illegal(ids, start_state(name, prompt))
    return None if at is None else chat.spell(ids[at])


def start_state(name: str, prompt: str | None) -> int | None:
    """The state behind a generation prompt, which must lie in a turn."""
    if prompt is None:
        return None
    table, chat = compiled(name)
    state = table.host.locate(spell(chat, prompt))
    if not table.host.tracks(state):
        raise AssertionError(f"the prompt {prompt!r} is in no turn of {name}")
    return state


def flags(name: str, text: str, prompt: str | None = None) -> str:
    """What is true behind `text`: `block`, `header`, `end`, joined by blanks; all spellings must agree."""
    table, chat = compiled(name)
    host: HostTwin = table.host
    found = set()
    for how in SPELLINGS:
        ids = spell(chat, text, how)
        walk = host.walk(ids, start_state(name, prompt))
        if walk.taken != len(ids):
            raise AssertionError(f"{text!r} is refused at {chat.spell(ids[walk.taken])!r}")
        named = (("block", host.block_open), ("header", host.header_open), ("end", host.may_end))
        found.add(" ".join(word for word, holds in named if holds(walk.state)))
    if len(found) != 1:
        raise AssertionError(f"{text!r}: spellings disagree: {sorted(found)}")
    return found.pop()
