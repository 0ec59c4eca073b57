"""A parser of tokens that refuses one: its errors cost a piece and the rest of that message, never the batch.

For the Harmony path, whose parser takes tokens one by one, so that no delta needs cutting, but raises at a header that
it cannot read and takes the whole batch of deltas with it. What it reads afterwards, in a state nobody vouches for, is
not used: a new parser begins at the next message. Pure Python; knows control tokens' ids, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .log import log


class Containment:
    """One request's stream of tokens.

    Args:
        controls: ids of the format's control tokens.
        opener: the one that begins a message.

    Attributes:
        broken: whether the parser has refused a token and no message has begun since.
        lost: tokens so far that no parser has read.
    """

    def __init__(self, controls: frozenset[int], opener: int) -> None:
        self._controls, self._opener = controls, opener
        self.broken = False
        self.lost = 0
        self._reported = False

    def feed(self, tokens: Sequence[int], process: Callable[[list[int]], list], restart: Callable[[], None]) -> list:
        """What `process` makes of a batch, with an error contained.

        Args:
            tokens: the batch; may be empty.
            process: takes a list of tokens, returns a list of deltas, may raise.
            restart: puts a new parser, one that expects an opener, in the place of the broken one.

        Returns:
            The deltas of all pieces that were read, in order.
        """
        deltas: list = []
        for piece in split_tokens(tokens, self._controls):
            if self.broken and piece[0] == self._opener:
                restart()
                self.broken = False
            if not self.broken:
                try:
                    deltas += process(piece)
                    continue
                except Exception as error:  # whatever a parser raises, the request goes on
                    self.broken = True
                    self._report(error)
            self.lost += len(piece)
        return deltas

    def _report(self, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            log.warning(
                f"structured_commit: {type(error).__name__} in a message; its rest is lost, the next one begins anew; "
                "said once a stream"
            )


def split_tokens(tokens: Sequence[int], controls: frozenset[int]) -> list[list[int]]:
    """Each control token is a piece, and so is what stands between two."""
    pieces: list[list[int]] = []
    for token in tokens:
        if token in controls or not pieces or pieces[-1][-1] in controls:
            pieces.append([])
        pieces[-1].append(token)
    return pieces
