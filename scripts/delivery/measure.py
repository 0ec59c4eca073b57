"""Counting: how many streams a client reads otherwise than the parser's own unstreamed answer, without and with the
splitter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .chunkings import SHAPES, chunkings, report_41967, shapes
from .disagreements import DRAINED, named
from .parsers import FAMILIES, Family, Reading, deliver, deltas_of, token_by_token
from .turns import OPEN, Turn, turns


@dataclass(slots=True)
class Count:
    """Of one parser.

    Attributes:
        turns, calls: turns written, calls in them as read at once.
        disagreeing: turns that the parser streams otherwise even token by token, by named case.
        streams: deliveries compared, of `turns` in all chunkings and shapes.
        before, after: streams whose calls or text differ from the right answer, without and with the splitter. Right is
            the unstreamed answer; for disagreeing turns, what comes token by token.
        calls_before, calls_after: those among them whose calls differ.
        shapes_before: streams of each shape that differ without the splitter.
        wrong: the first stream that differs with the splitter, for a report.
    """

    parser: str
    turns: int = 0
    calls: int = 0
    disagreeing: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    before: int = 0
    after: int = 0
    calls_before: int = 0
    calls_after: int = 0
    shapes_before: Counter[str] = field(default_factory=Counter)
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a turn should read as: at once, or token by token where that is a named disagreement of the parser.

    Attributes:
        once: the unstreamed answer.
        singles: what comes token by token, where that differs and the difference has a name; by tokens of the whole
            text, and by those of the deltas, which a parser may read differently.
        unnamed: what comes token by token of the whole text, if it differs without a name.
        cases: the names.
    """

    parser: str
    once: Reading
    singles: tuple[Reading, ...]
    unnamed: Reading | None
    cases: tuple[str, ...]

    @property
    def right(self) -> Reading:
        return self.singles[0] if self.singles else self.once

    def accepts(self, got: Reading) -> bool:
        """Whether a delivery is as good as can be."""
        if got in (self.once, *self.singles):
            return True
        drained = self.parser in DRAINED and got.calls == self.right.calls
        return drained and got.text.rstrip() == self.right.text.rstrip()


def verdict(parser: str, turn: Turn, deltas: Sequence[str] = ()) -> Verdict:
    """Judge a turn; a disagreement without a name is not covered, so the unstreamed answer stays the right one."""
    family = FAMILIES[parser]
    once, singles, cases, unnamed = family.at_once(turn.text), [], [], None
    for texts in ([turn.text], list(deltas)):
        single = token_by_token(family, texts) if texts else once
        if single != once:
            names = named(parser, turn, once, single)
            if names:
                singles.append(single)
                cases += [name for name in names if name not in cases]
            elif texts == [turn.text]:
                unnamed = single
    return Verdict(parser, once, tuple(singles), unnamed, tuple(cases))


def measure(
    parser: str,
    how_many: int,
    randoms: int = 8,
    pairs: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Count:
    """Deliver `how_many` turns of a parser in all their chunkings; `pairs` bounds the pairs of boundaries per turn."""
    family, count = FAMILIES[parser], Count(parser)
    written = turns(parser, how_many)
    if parser == "gemma4":
        written.append(report_41967()[0])
    for seed, turn in enumerate(written):
        judged = verdict(parser, turn)
        count.turns += 1
        count.calls += len(judged.once.calls)
        count.disagreeing.update(judged.cases)
        tokens = family.tokens(turn.text)
        for cuts in chunkings(turn, tokens, seed, randoms, pairs):
            _compare(count, family, judged, deltas_of(tokens, cuts))
        for name, (made, deltas) in _shapes(turn).items():
            before = count.before
            _compare(count, family, verdict(parser, made, deltas), deltas)
            count.shapes_before[name] += count.before - before
        progress()
    return count


def _shapes(turn: Turn) -> dict[str, tuple[Turn, list[str]]]:
    if turn.name == "vllm 41967":
        return {"end fused with start": report_41967()}
    return shapes(turn) if sum(kind == OPEN for kind, _ in turn.parts) > 1 else {}


def _compare(count: Count, family: Family, judged: Verdict, deltas: list[str]) -> None:
    without, aligned = deliver(family, deltas, aligned=False), deliver(family, deltas, aligned=True)
    count.streams += 1
    if not judged.accepts(without):
        count.before += 1
        count.calls_before += without.calls not in (judged.once.calls, judged.right.calls)
    if not judged.accepts(aligned):
        count.after += 1
        count.calls_after += aligned.calls not in (judged.once.calls, judged.right.calls)
        count.wrong = count.wrong or f"{deltas}: {aligned}, not {judged.right}"


__all__ = ["SHAPES", "Count", "Verdict", "measure", "verdict"]
