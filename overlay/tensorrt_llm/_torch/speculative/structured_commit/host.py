"""The host twin: a `StructureTable` walked over Python lists, for code that runs on the CPU side.

It reads the table's own transitions, so device and host cannot drift. Pure: it keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .table import IN_BLOCK, IN_HEADER, MAY_END, UNTRACKED

if TYPE_CHECKING:
    from .table import StructureTable


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a list of tokens leads.

    Attributes:
        state: the state after the last token that was taken.
        taken: how many tokens were taken; fewer than given if one was illegal or followed a terminal.
        illegal_at: index of the first illegal token, or None.
    """

    state: int
    taken: int
    illegal_at: int | None


class HostTwin:
    """Queries on a table by state and token id. Made by `StructureTable.host`."""

    def __init__(self, table: StructureTable) -> None:
        self._class: list[int] = table.token_class.tolist()
        self._next: list[list[int]] = table.transitions.tolist()
        self._flags: list[int] = table.state_flags.tolist()
        self._entries = table.info.entries
        self.start, self.ended, self.stray = table.info.start, table.ended, table.stray

    def step(self, state: int, token: int) -> int:
        """The state after `token`, or −1 if it is illegal or outside the vocabulary."""
        if not 0 <= token < len(self._class):
            return -1 if 0 < state < self.ended else state
        return self._next[state][self._class[token]]

    def let_through(self, token: int) -> int:
        """The state after `token` was committed although it is illegal: stray, or ended by a terminal."""
        following = self.step(self.stray, token)
        return following if following >= 0 else self.stray

    def walk(self, tokens: Sequence[int], state: int | None = None) -> Walk:
        """Take `tokens` from `state` (the start of a turn if None) up to the first one that does not fit."""
        at = self.start if state is None else state
        for i, token in enumerate(tokens):
            if at == self.ended:
                return Walk(at, i, None)
            following = self.step(at, token)
            if following < 0:
                return Walk(at, i, i)
            at = following
        return Walk(at, len(tokens), None)

    def first_illegal(self, tokens: Sequence[int], state: int | None = None) -> int | None:
        """Index of the first illegal token, or None. Tokens after a terminal are not looked at."""
        return self.walk(tokens, state).illegal_at

    def block_open(self, state: int) -> bool:
        """Whether a block is open in `state`."""
        return bool(self._flag(state) & IN_BLOCK)

    def header_open(self, state: int) -> bool:
        """Whether a header is open in `state`."""
        return bool(self._flag(state) & IN_HEADER)

    def may_end(self, state: int) -> bool:
        """Whether a turn may end in `state`; true where nothing is tracked or the turn has ended."""
        return not self.tracks(state) or bool(self._flag(state) & MAY_END)

    def tracks(self, state: int) -> bool:
        """Whether `state` is one of the format's: not untracked, stray or ended."""
        return UNTRACKED < state < self.ended

    def describe(self, state: int) -> str:
        """A short name of `state` for logs: `untracked`, `header`, `block`, `text`, `ended` or `stray`, numbered."""
        if state == UNTRACKED:
            return "untracked"
        if state >= self.ended:
            return "ended" if state == self.ended else "stray"
        kind = "header" if self.header_open(state) else "block" if self.block_open(state) else "text"
        return f"{kind}:{state}"

    def locate(self, token_ids: Sequence[int], prompt_length: int | None = None) -> int:
        """The state behind a prompt (plus what was generated so far), or 0 if it is in no turn.

        Looks for the last turn opener of each kind, in the format's order, and walks what follows it. The first
        kind whose rest can be walked to the end decides. Tokens from `prompt_length` on were committed as output: they
        are walked one by one, and an illegal one is let through as the stage would have.
        """
        prompt = token_ids if prompt_length is None else token_ids[:prompt_length]
        state = self._locate_prompt(prompt)
        for token in token_ids[len(prompt) :]:
            following = self.step(state, token)
            state = self.let_through(token) if following < 0 else following
        return state

    def _locate_prompt(self, token_ids: Sequence[int]) -> int:
        for control, entry in self._entries:
            for i in range(len(token_ids) - 1, -1, -1):
                if token_ids[i] == control:
                    found = self.walk(token_ids[i + 1 :], entry)
                    if found.taken == len(token_ids) - i - 1 and found.state != self.ended:
                        return found.state
                    break
        return UNTRACKED

    def _flag(self, state: int) -> int:
        return self._flags[state] if self.tracks(state) else 0
