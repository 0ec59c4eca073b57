"""Regions: a state is inside one only if every reading of the text so far is."""

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from structured_commit.automaton import build_automaton
from structured_commit.expression import REGIONS, translate

BLOCK, HEADER = (1 << REGIONS.index(name) for name in ("block", "header"))


def regions_after(expression, text):
    automaton = build_automaton(translate(expression, {}), "test")
    state, seen = 0, [automaton.regions[0]]
    for code in text.encode():
        state = automaton.step(state, code)
        seen.append(automaton.regions[state])
    return seen


def test_a_region_begins_before_its_first_symbol_and_ends_after_its_last():
    assert regions_after("a(?<block>bc)d", "abcd") == [0, BLOCK, BLOCK, 0, 0]


def test_regions_nest():
    assert regions_after("(?<block>a(?<header>b)c)", "abc") == [BLOCK, BLOCK | HEADER, BLOCK, 0]


def test_where_readings_differ_the_state_is_outside():
    assert regions_after("a(?:(?<block>b*c)|b*d)", "abbc") == [0, 0, 0, 0, 0]
    assert regions_after("a(?:(?<block>xb*c)|b*d)", "axbc") == [0, 0, BLOCK, BLOCK, 0]


def test_a_repeated_region_closes_between_its_turns():
    assert regions_after("(?:(?<block>ab)-)*", "ab-ab-") == [0, BLOCK, 0, 0, BLOCK, 0, 0]


def test_the_automaton_is_minimal_for_a_known_language():
    automaton = build_automaton(translate("(?:a|b)*abb", {}), "test")
    assert len(automaton.next_state) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", "b", "ab", "[ab]", "a?"]),
        lambda inner: st.one_of(
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
            st.builds("(?:{})*".format, inner),
        ),
        max_leaves=6,
    )
)
def test_the_automaton_accepts_what_python_re_accepts(expression):
    automaton = build_automaton(translate(expression, {}), "test")
    for length in range(5):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            state = 0
            for code in text.encode():
                state = automaton.step(state, code) if state >= 0 else state
            assert (state >= 0 and automaton.may_end[state]) == bool(re.fullmatch(expression, text))
