"""Aligned delivery (I5): a text delta is cut at the automaton's boundaries before a streaming parser sees it.

A parser that takes one structural event per increment loses what a second event in the same increment says, and a
speculative step makes such increments. So each delta is cut into pieces, none of which crosses a boundary, and the
parser is called once a piece and then with nothing until nothing more comes. Pieces concatenate to the deltas,
character for character.

The walk is over text, since text is what post-processors hold: token deltas cover other tokens (stop words are trimmed,
half a character is held back by the detokeniser), and control tokens arrive as their spelling. A boundary is each end
of a control token's spelling, each place where a block or header opens or closes (behind white space that follows), and
each end of a format's `cuts`. Where the text fits no turn, the walk is lost: spellings and `cuts` remain, and it starts
again at the next opener.

Pure Python at run time; knows nothing of TensorRT-LLM but the methods of a tool parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

from ..log import log
from ..table import IN_BLOCK, IN_HEADER, UNTRACKED, StructureTable
from .merge import Delivered, merge_results, results_in_order

MAX_ASKS = 64  # a parser that always has more to say is broken; none says more than two things for one call


class Stream:
    """Where one request's stream stands. Made by `Splitter.stream`, changed by whoever is given it.

    Attributes:
        state: of the automaton behind the text that was cut, 0 while the walk is lost.
        held: text held back: the beginning of what may become a control token's spelling.
        reported: whether the log has told of an error of this stream's parser.
    """

    __slots__ = ("behind", "held", "reported", "state")

    def __init__(self, state: int) -> None:
        self.state = state
        self.held = ""
        self.behind = ""  # the end of the text that was cut, in which one of `cuts` may have begun
        self.reported = False


class Splitter:
    """Cuts deltas of a format's text. Immutable, shared by all streams.

    Args:
        table: the compiled format, with its byte automaton.
        cuts: text at both ends of which a delta is cut too, wherever it stands (`Format.cuts`): markers that the
            automaton cannot tell from data.

    Raises:
        ValueError: the table has no byte automaton, or a cut is empty.
    """

    def __init__(self, table: StructureTable, cuts: Sequence[str] = ()) -> None:
        if table.byte_class is None:
            raise ValueError(f"the table of format {table.info.format} has no byte automaton; compile the format again")
        if not all(cuts):
            raise ValueError("an empty text among the cuts; leave it out")
        self._byte_class: list[int] = table.byte_class.tolist()
        self._byte_next: list[list[int]] = table.byte_next.tolist()
        self._region = [flags & (IN_BLOCK | IN_HEADER) for flags in table.state_flags.tolist()]
        self._region[UNTRACKED] = 0
        controls = {name: int(table.token_class[token]) for name, token in table.info.controls.items()}
        steps = table.transitions[: table.num_states].tolist()
        # A state behind the end of a turn is followed no further: nothing belongs there.
        self._after = {
            name: [UNTRACKED if row[column] == table.ended else row[column] for row in steps]
            for name, column in controls.items()
        }
        self._start = table.info.start
        self._spelling = _any_of(controls)
        self._beginnings = frozenset(name[:n] for name in controls for n in range(1, len(name)))
        self._longest = max(map(len, controls), default=1) - 1
        self._cut = _any_of(cuts)
        self._reach = max(map(len, cuts), default=1) - 1

    def stream(self, state: int | None = None) -> Stream:
        """A new stream, at the start of a turn if `state` is None."""
        return Stream(self._start if state is None else state)

    def split(self, text: str, stream: Stream) -> list[str]:
        """Cut a delta: what was held back before and `text`, less what is held back now, in pieces without empty ones.

        Linear in the text.
        """
        text = stream.held + text
        spellings = list(self._spelling.finditer(text)) if self._spelling else []
        keep = self._complete(text, spellings)
        stream.held, text = text[keep:], text[:keep]
        return self._pieces(text, [m for m in spellings if m.end() <= keep], stream)

    def flush(self, stream: Stream) -> list[str]:
        """The text still held back, when the stream ends."""
        text, stream.held = stream.held, ""
        return self._pieces(text, list(self._spelling.finditer(text)) if self._spelling else [], stream)

    def _complete(self, text: str, spellings: list[re.Match]) -> int:
        """How much of `text` cannot become a longer spelling, whatever follows."""
        begin = 0
        if spellings:
            last = spellings[-1]
            if last.end() == len(text) and last.group() in self._beginnings:
                return last.start()
            begin = last.end()
        for at in range(max(begin, len(text) - self._longest), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)

    def _pieces(self, text: str, spellings: list[re.Match], stream: Stream) -> list[str]:
        if not text:
            return []
        ends: list[int] = []
        state, at = stream.state, 0
        for match in spellings:
            state = self._walk(text, at, match.start(), state, ends)
            state = self._control(match, state)
            ends += match.span()
            at = match.end()
        stream.state = self._walk(text, at, len(text), state, ends)
        if self._cut:
            ends = self._with_cuts(text, ends, stream)
        cuts = sorted({0, len(text), *(end for end in ends if 0 < end < len(text))})
        return [text[a:b] for a, b in pairwise(cuts)]

    def _with_cuts(self, text: str, ends: list[int], stream: Stream) -> list[int]:
        """`ends` and those of the format's cuts; no cut's text is cut inside."""
        seen, before = stream.behind + text, len(stream.behind)
        spans = [(m.start() - before, m.end() - before) for m in self._cut.finditer(seen)]
        stream.behind = seen[-self._reach :] if self._reach else ""
        kept = [end for end in ends if not any(a < end < b for a, b in spans)] if spans else ends
        return [*kept, *(end for span in spans for end in span)]

    def _control(self, match: re.Match, state: int) -> int:
        """The state behind a spelling: as the control token if a turn can hold it there, as text if it can hold that;
        lost, it starts again behind the token."""
        after = self._after[match.group()]
        following = after[state] if state != UNTRACKED else -1
        if following < 0:
            following = self._walk(match.string, match.start(), match.end(), state, [])
        if following == UNTRACKED:
            following = max(after[self._start], UNTRACKED)
        return following

    def _walk(self, text: str, begin: int, end: int, state: int, ends: list[int]) -> int:
        """The state behind `text[begin:end]`; boundaries are added to `ends`."""
        rows, classes, region = self._byte_next, self._byte_class, self._region
        for at in range(begin, end):
            if state == UNTRACKED:
                break
            before, char = state, text[at]
            if char < "\x80":
                state = rows[state][classes[ord(char)]]
            else:
                for byte in char.encode("utf-8", "surrogatepass"):
                    state = rows[state][classes[byte]]
                    if state < 0:
                        break
            if state < 0:
                return UNTRACKED
            if region[state] != region[before]:
                ends.append(_behind_blanks(text, at + 1, end))
        return state


class AlignedDelivery:
    """Puts a splitter before every tool parser of a process. One object for all requests; streams are told apart by
    their parser, of which a server makes one for each request and choice.

    Args:
        splitter: of the format that the model speaks.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._streams: WeakKeyDictionary[object, Stream] = WeakKeyDictionary()

    def parse(self, parser, text: str, tools, finished: bool = False) -> Delivered:
        """In the place of `parser.parse_streaming_increment(text, tools)`.

        Args:
            parser: the request's own parser, as it comes from the factory.
            text: the delta; may be empty.
            tools: handed through.
            finished: whether this is the stream's last delta: what is held back goes too.
        """
        return merge_results(self._results(parser, text, tools, finished))

    def parse_in_order(self, parser, text: str, tools, finished: bool = False) -> list[Delivered]:
        """As `parse`, for a caller that can send several chunks: text stays on its side of the calls."""
        return results_in_order(self._results(parser, text, tools, finished))

    def _results(self, parser, text: str, tools, finished: bool) -> list:
        stream = self._streams.get(parser)
        if stream is None:
            stream = self._streams[parser] = self._splitter.stream()
        return aligned_results(parser, text, tools, self._splitter, stream, finished)


def aligned_results(parser, text: str, tools, splitter: Splitter, stream: Stream, finished: bool = False) -> list:
    """What a parser says to a delta, piece by piece, in order. The parser is called at least once.

    A piece at which the parser raises is delivered as content and the parser is put back to where it was before it, so
    the pieces before and behind it are not lost. The first such error of a stream is logged.

    Args:
        parser: has `parse_streaming_increment(text, tools)`.
        text, tools, finished: as for `AlignedDelivery.parse`.
        splitter, stream: of the model's format and of this request.
    """
    pieces = splitter.split(text, stream)
    if finished:
        pieces += splitter.flush(stream)
    results: list = []
    for piece in pieces:
        result = _ask(parser, piece, tools, stream)
        results.append(result)
        if _came(result):
            _drain(parser, tools, stream, results)
    if finished or not pieces:
        _drain(parser, tools, stream, results)
    return results


def _drain(parser, tools, stream: Stream, results: list) -> None:
    for _ in range(MAX_ASKS):
        result = _ask(parser, "", tools, stream)
        if not _came(result):
            return
        results.append(result)
    _report(parser, stream, f"it had more to say {MAX_ASKS} times in a row; not asked again")


def _ask(parser, piece: str, tools, stream: Stream):
    attributes = getattr(parser, "__dict__", None)
    before = dict(attributes) if attributes is not None else None  # parsers replace their buffers, so this is enough
    try:
        return parser.parse_streaming_increment(piece, tools)
    except Exception as error:  # whatever a parser raises, the request goes on
        if before is not None:
            attributes.clear()
            attributes.update(before)
        _report(parser, stream, f"{type(error).__name__} at a piece of {len(piece)} characters, delivered as content")
        return Delivered(piece)


def _came(result) -> bool:
    return bool(result.normal_text) or any(call.name or call.parameters for call in result.calls or ())


def _report(parser, stream: Stream, what: str) -> None:
    if not stream.reported:
        stream.reported = True
        log.warning(f"structured_commit: tool parser {type(parser).__name__}: {what}; said once a stream")


def _behind_blanks(text: str, at: int, end: int) -> int:
    """White space stays with what it follows: a JSON parser takes it there, and alone it would become content."""
    while at < end and text[at] in " \t\r\n":
        at += 1
    return at


def _any_of(texts) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
