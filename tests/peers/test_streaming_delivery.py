"""Aligned delivery before SGLang's ten tool parsers: no chunking changes what a client reads.

The judge is each parser's own unstreamed answer; where it streams otherwise even token by token the case is named in
`scripts/delivery/disagreements.py`, and then what comes token by token is the judge. Bounded here; `make delivery` runs
hundreds of turns in every chunking.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from scripts.delivery.chunkings import SHAPES, report_41967, shapes
from scripts.delivery.disagreements import CASES
from scripts.delivery.measure import Count, measure, verdict
from scripts.delivery.parsers import FAMILIES, deliver, deltas_of
from scripts.delivery.turns import BODY, CLOSE, JOIN, OPEN, TEXT, Turn, turns

TURNS, RANDOMS, PAIRS = 6, 2, 4
NAMED_IN = 40
# These take any number of events in one increment: nothing to mend, nothing to break.
UNAFFECTED = {"gemma4", "kimik2", "qwen3_coder"}


@cache
def counted(parser: str) -> Count:
    return measure(parser, TURNS, RANDOMS, PAIRS)


@pytest.mark.parametrize("parser", FAMILIES)
def test_with_the_splitter_no_stream_differs(parser):
    count = counted(parser)
    assert count.after == 0, count.wrong
    assert count.streams > 20 * TURNS
    assert count.calls > TURNS // 2


@pytest.mark.parametrize("parser", FAMILIES)
def test_without_it_all_but_three_parsers_lose_something(parser):
    assert (counted(parser).before == 0) == (parser in UNAFFECTED)


def spoken(parser: str) -> list[Turn]:
    """Turns as they are, and those with two calls with text behind them too."""
    written = turns(parser, NAMED_IN)
    longer = [shapes(t).get("end and text") for t in written if sum(kind == OPEN for kind, _ in t.parts) > 1]
    return [*written, *(made[0] for made in longer if made)]


@pytest.mark.parametrize("parser", FAMILIES)
def test_every_disagreement_of_a_parser_with_itself_is_named_and_every_name_occurs(parser):
    found = Counter()
    for turn in spoken(parser):
        judged = verdict(parser, turn)
        assert judged.unnamed is None, (turn.text, judged)
        found.update(judged.cases)
    assert set(found) == {case.name for case in CASES[parser]}
    assert all(case.fault for case in CASES[parser])


@pytest.mark.parametrize("parser", FAMILIES)
def test_every_shape_of_the_reports_is_read_whole(parser):
    """All seven, but for those that a format has no words for: no reasoning there, or nothing behind a terminal."""
    made = set()
    for turn in turns(parser, NAMED_IN):
        if sum(kind == OPEN for kind, _ in turn.parts) > 1:
            for name, (made_of, deltas) in shapes(turn).items():
                if name not in made:
                    made.add(name)
                    judged = verdict(parser, made_of, deltas)
                    got = deliver(FAMILIES[parser], deltas, aligned=True)
                    assert judged.accepts(got), (name, deltas, got, judged.right)
    missing = {"llama32": {SHAPES[0]}, "gpt_oss": {"end and newline", "end and text"}}
    assert set(SHAPES) - made == missing.get(parser, set())


def test_the_delta_of_report_41967_keeps_the_arguments_of_both_calls():
    turn, deltas = report_41967()
    family = FAMILIES["gemma4"]
    tokens = family.tokens(turn.text)
    for stream in (deltas, deltas_of(tokens, range(12, len(tokens), 12)), [turn.text]):
        got = deliver(family, stream, aligned=True)
        assert got == family.at_once(turn.text)
        assert [name for name, _ in got.calls] == ["getStationInfo"] * 2
        assert [city in str(arguments) for (_, arguments), city in zip(got.calls, ("Milano", "Piacenza"), strict=True)]


MINIMAX = Turn(
    (
        (TEXT, "Both."),
        (OPEN, '<minimax:tool_call>\n<invoke name="f">\n'),
        (BODY, '<parameter name="x">1</parameter>\n'),
        (JOIN, "</invoke>\n"),
        (OPEN, '<invoke name="g">\n'),
        (BODY, '<parameter name="s">a < b</parameter>\n'),
        (CLOSE, "</invoke>\n</minimax:tool_call>"),
    )
)
LLAMA = Turn(
    (
        (OPEN, '<|python_tag|>{"name": "f", "parameters": '),
        (BODY, '{"s": "a; {b"}}'),
        (JOIN, ";"),
        (OPEN, '{"name": "g", "parameters": '),
        (BODY, '{"o": {"k": [1]}}}'),
    )
)
TOO_DEEP = Turn(
    (
        (OPEN, '{"name": "f", "parameters": '),
        (BODY, '{"o": ' + '{"k": ' * 9 + "1" + "}" * 9 + "}}"),
        (JOIN, ";"),
        (OPEN, '{"name": "g", "parameters": '),
        (BODY, '{"x": 1}}'),
    )
)


@pytest.mark.parametrize(
    ("parser", "turn"),
    [("minimax", MINIMAX), ("llama32", LLAMA), ("llama32", TOO_DEEP)],
    ids=["two calls in one MiniMax block", "Llama calls joined by ;", "arguments deeper than the format follows"],
)
def test_calls_between_which_no_control_token_stands_are_told_apart(parser, turn):
    family = FAMILIES[parser]
    once = family.at_once(turn.text)
    assert [name for name, _ in once.calls] == ["f", "g"]
    assert deliver(family, [turn.text], aligned=False) != once
    tokens = family.tokens(turn.text)
    for size in range(1, len(tokens) + 1):
        assert deliver(family, deltas_of(tokens, range(size, len(tokens), size)), aligned=True) == once
