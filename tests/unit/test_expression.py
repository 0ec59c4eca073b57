"""The expression language means what its documentation says, and says what is wrong where."""

import re

import pytest

from structured_commit import FormatError
from structured_commit.automaton import BYTES, build_automaton
from structured_commit.expression import translate


def accepts(expression, *symbols, rules=None):
    """Whether the expression matches the symbols: strings are text, («name»,) tuples are control tokens."""
    automaton = build_automaton(translate(expression, rules or {}), "test")
    state = 0
    for symbol in symbols:
        codes = symbol.encode() if isinstance(symbol, str) else [BYTES + automaton.controls.index(symbol[0])]
        for code in codes:
            state = automaton.step(state, code)
            if state < 0:
                return False
    return automaton.may_end[state]


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        ("a|ab", ["a", "ab"], ["b", "abb", ""]),  # a lower alternative is not dropped once a higher one matched
        ("(a|b)*c", ["c", "abac"], ["ab", "ca"]),
        ("a{2,3}", ["aa", "aaa"], ["a", "aaaa"]),
        ("[^<]*", ["", "x\n\x00é日🙂"], ["a<"]),
        (".", ["a", "\n", "<"], ["", "ab", "é"]),  # one byte, not one character
        (r"\d+\s\w", ["12 a", "1\t_"], ["a a", "1  a"]),
        (r"\S\D\W", ["ab-", "!x "], [" b-", "a1-"]),
        (r"[\d,]+[^\s]", ["1,2x"], [",1 "]),
        (r"\.\(\[\{\x41\n", [".([{A\n"], ["x([{A\n"]),
        ("é?日", ["日", "é日"], ["é", "\u65e6"]),
        ("[a-c-]+", ["a-c"], ["d"]),
        ("[]x]+", ["]x]"], ["[x"]),
        ("a*?", ["", "aaa"], ["b"]),
    ],
)
def test_text_matches_like_a_regular_expression_over_bytes(expression, yes, no):
    assert [accepts(expression, text) for text in yes] == [True] * len(yes)
    assert [accepts(expression, text) for text in no] == [False] * len(no)


def test_a_control_token_is_one_symbol_and_its_spelling_is_text():
    assert accepts("«<|end|>».*", ("<|end|>",), "<|end|>")
    assert not accepts("«<|end|>»", "<|end|>")
    assert not accepts(".*«<|end|>»?x", ("<|end|>",), ("<|end|>",), "x")


def test_any_byte_and_negated_classes_never_match_a_control_token():
    assert not accepts("(?:«<a>»x|.*)", ("<a>",))
    assert not accepts("(?:«<a>»x|[^y]*)", ("<a>",))


def test_rules_are_spliced_as_groups():
    assert accepts("‹pair›+x", "ababx", rules={"pair": "a‹b›", "b": "b|c"})


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("‹nope›", "rule ‹nope› is not defined"),
        ("‹loop›", "leads back to itself"),
        ("«x", "not closed by '»'"),
        ("x»", "without its opening mark"),
        ("«»", "empty control token"),
        ("(a", "1 group(s) not closed"),
        ("a)", "unbalanced ')' at offset 1"),
        ("[a", "not closed by ']'"),
        ("[é]", "a class holds ASCII only"),
        ("[z-a]", "empty range"),
        ("^a", "anchor '^'"),
        ("(?<body>a)", "unknown region 'body'"),
        ("(?=a)", "not supported"),
        (r"\q", r"escape \q"),
        (r"\xg1", "two hexadecimal digits"),
    ],
)
def test_a_bad_expression_is_refused_with_the_place(expression, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        translate(expression, {"loop": "a‹loop›"})


def test_an_expression_the_library_refuses_is_a_named_error():
    with pytest.raises(FormatError, match="format test: the expression does not compile"):
        accepts("a**{2", "a")


@pytest.mark.parametrize("expression", [r"[^\x00-\xff]", r"a|b[^\x00-\xff]", r"a[^\x00-\xff]*b|c[^\x00-\xff]+"])
def test_an_expression_with_a_dead_part_is_refused(expression):
    with pytest.raises(FormatError, match="format test: .*(no turn matches|dead state)"):
        build_automaton(translate(expression, {}), "test")
