"""A streaming tool parser behind the splitter: what the factory hands out in place of the parser itself.

One place below every route: chat, responses and whatever else asks the factory for a parser. All else of the parser,
its `finish` included, is reached through it.
"""

from __future__ import annotations

from .merge import Delivered, merge_results
from .process import SERVING


class AlignedParser:
    """A tool parser that is given its text piece by piece.

    Attributes:
        inner: the parser that was made.
    """

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def parse_streaming_increment(self, new_text: str, tools):
        """As the parser's own, but no piece it sees crosses a structural boundary."""
        raw = self.inner.parse_streaming_increment
        result = SERVING.guarded(_parse, None, self.inner, new_text, tools, False)
        return raw(new_text, tools) if result is None else result

    def finish(self, tools) -> Delivered:
        """What was held back, what the parser still has to say, and what its own `finish` adds, if it has one."""
        rest = SERVING.guarded(_parse, None, self.inner, "", tools, True) or Delivered()
        own = getattr(self.inner, "finish", None)
        return rest if own is None else merge_results([rest, own(tools)])

    def __getattr__(self, name: str):
        if name == "inner":  # asked for before it is set, as when unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def aligned_parser(parser):
    """A new tool parser as it should be handed out: behind the splitter, or itself where deltas are not aligned."""
    return AlignedParser(parser) if SERVING.ready() and SERVING.aligned is not None else parser


def inner_parser(parser):
    """The parser that was made, whichever was handed out."""
    return parser.inner if isinstance(parser, AlignedParser) else parser


def _parse(parser, text: str, tools, finished: bool) -> Delivered:
    return SERVING.aligned.parse(parser, text, tools, finished)
