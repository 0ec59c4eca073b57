"""Where a turn stopped, against a second reading of every short token string."""

from __future__ import annotations

import itertools

import pytest

from structured_commit import StructureTable, Vocabulary, compile_format
from structured_commit.format import Format
from structured_commit.serving.finish import Finish, examine

TEXTS = {0: b"a", 1: b"{", 2: b"}", 3: b"n"}
OPEN, CLOSE, END = 4, 5, 6
FORM = Format(
    name="small",
    turn="(?:a|(?<header>«<open>»n)(?<block>[{]a*[}]«<close>»))*",
    terminals=("<end>",),
)


@pytest.fixture(scope="module")
def table() -> StructureTable:
    return compile_format(FORM, Vocabulary(7, TEXTS, {"<open>": OPEN, "<close>": CLOSE, "<end>": END}))


def second_reading(tokens: tuple[int, ...]) -> tuple[bool, str | None, int | None, int | None]:
    """(complete, open, began, illegal_at) from the grammar as a person reads it."""
    kind, began = "text", None  # then: opened, named, inside, closing
    for i, token in enumerate(tokens):
        if kind == "text" and token == 0:
            continue
        if kind == "text" and token == END:
            return True, None, None, None
        follow = {("text", OPEN): "opened", ("opened", 3): "named", ("named", 1): "inside", ("inside", 0): "inside"}
        follow |= {("inside", 2): "closing", ("closing", CLOSE): "text"}
        if (kind, token) not in follow:
            return False, _open(kind), began, i
        was, kind = kind, follow[kind, token]
        if kind == "text":
            began = None
        elif was == "text":
            began = i  # a header that opens a block is where the block began
    return kind == "text", _open(kind), began, None


def _open(kind: str) -> str | None:
    return {"text": None, "opened": "header"}.get(kind, "block")


def test_every_string_of_up_to_six_tokens_is_judged_as_the_grammar_reads_it(table):
    for length in range(7):
        for tokens in itertools.product(range(7), repeat=length):
            finish = examine(table.host, tokens)
            assert (finish.complete, finish.open, finish.began, finish.illegal_at) == second_reading(tokens), tokens


def test_a_trimmed_terminal_changes_no_verdict(table):
    for tokens in itertools.product(range(6), repeat=4):
        assert examine(table.host, tokens).complete == examine(table.host, (*tokens, END)).complete


def test_an_untracked_request_is_never_called_incomplete(table):
    assert examine(table.host, [OPEN, OPEN, END], 0) == Finish(True, "untracked")


def test_what_was_open_from_the_start_began_at_the_first_token(table):
    inside = table.host.walk([OPEN, 3, 1]).state
    assert examine(table.host, [0, 0], inside).began == 0
    assert examine(table.host, [0, 2, CLOSE, 0], inside).complete


def test_lost_text_begins_at_the_open_block_or_at_what_broke_the_format(table):
    assert examine(table.host, [0, OPEN, 3, 1, 0]).lost_from == 1
    assert examine(table.host, [0, OPEN, END]).lost_from == 1
    assert examine(table.host, [0, 3, 0]).lost_from == 1
    assert examine(table.host, [0, 0]).lost_from is None
