"""The finish guard's judgement (I4): is a turn complete, and if not, where did it stop?

Pure: token ids in, values out. What a client is told of it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..host import HostTwin


@dataclass(frozen=True, slots=True)
class Finish:
    """Where a turn stopped.

    Attributes:
        complete: no token was illegal, and a turn may end here. A terminal may have been trimmed off.
        state: name of the last state that the format knows, as `HostTwin.describe` gives it.
        open: `header` or `block` if one was open in it, else None.
        began: index of the token that opened it; 0 if it was open from the start. None if nothing was open.
        illegal_at: index of the first illegal token, or None. Nothing behind it was looked at.
    """

    complete: bool
    state: str
    open: str | None = None
    began: int | None = None
    illegal_at: int | None = None

    @property
    def lost_from(self) -> int | None:
        """Index of the first token of what no parser can read: the open block, else what broke the format."""
        return self.began if self.began is not None else self.illegal_at


def examine(host: HostTwin, token_ids: Sequence[int], state: int | None = None) -> Finish:
    """Judge a finished turn.

    Args:
        token_ids: all of the output. Terminals and stop words may have been trimmed off its end.
        state: where the output began, the start of a turn if None; 0 (untracked) is always complete.
    """
    at = host.start if state is None else state
    if not host.tracks(at):
        return Finish(True, host.describe(at))
    began = 0 if _open(host, at) else None
    illegal_at = None
    for i, token in enumerate(token_ids):
        following = host.step(at, token)
        if following < 0:
            illegal_at = i
            break
        was, now = _open(host, at), _open(host, following)
        # A header inside a block (a call's name) begins no block of its own.
        if now and not was:
            began = i
        elif not now:
            began = None
        at = following
        if at == host.ended:
            break
    complete = illegal_at is None and host.may_end(at)
    return Finish(complete, host.describe(at), _open(host, at), began, illegal_at)


def _open(host: HostTwin, state: int) -> str | None:
    if host.header_open(state):
        return "header"
    return "block" if host.block_open(state) else None
