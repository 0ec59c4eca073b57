"""The mistral format: calls behind [TOOL_CALLS], one by one or as a JSON list, and thoughts between two marks."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled
from scripts.tokenizers import RealTokenizer, real_tokenizer, with_named
from structured_commit import StructureTable, compile_format
from tests.support.streams import is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses, without_terminal

ASKED = (
    "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS][][/AVAILABLE_TOOLS][INST]Why is the sky blue?[/INST]"
)

PROMPTS = {
    "first turn": ASKED,
    "second turn": ASKED + "[THINK]Hm.[/THINK]Blue.</s>[INST]Sure?[/INST]",
    "after a tool result": ASKED
    + '[TOOL_CALLS]f[ARGS]{"x": 1}</s>[TOOL_RESULTS]aB3dE5gH7[TOOL_CONTENT]2[/TOOL_RESULTS]',
    "after two tool results": ASKED + "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}</s>"
    "[TOOL_RESULTS]2[/TOOL_RESULTS][TOOL_RESULTS]3[/TOOL_RESULTS]",
    "second turn, tools used in the first": ASKED + "[TOOL_CALLS]f[ARGS]{}</s>[TOOL_RESULTS]2[/TOOL_RESULTS]Two.</s>"
    "[INST]Sure?[/INST]",
}

WELL_FORMED = [
    "It is blue.</s>",
    "[THINK]Sky question.[/THINK]Blue.</s>",
    '[TOOL_CALLS]f[ARGS]{"x": 1}</s>',
    '[THINK]Both.[/THINK]Looking.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}</s>',
    '[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{"x": 1}</s>',
]

MALFORMED = {
    "empty name": '[TOOL_CALLS][ARGS]{"x": 1}</s>',
    "arguments not an object": "[TOOL_CALLS]f[ARGS][1]</s>",
    "JSON not closed": '[TOOL_CALLS]f[ARGS]{"x": 1</s>',
    "marker missing": 'f[ARGS]{"x": 1}</s>',
    "reasoning not closed": "[THINK]Sky</s>",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

# In tables before v11 [ARGS] and [THINK] are no tokens, and these two are plain answers that spell them.
TEXT_BEFORE_V11 = {"marker missing", "reasoning not closed"}

CALL = '[TOOL_CALLS]f[ARGS]{"x": 1}'

CORPUS = {
    "empty turn": "",
    "blank turn": " ⏎⏎",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "brackets of all kinds": "[ { ( ) } ] \" ' \\ [TOOL CALLS] [ARG]",
    "a JSON answer": '{"name": "f", "arguments": {',
    "plain-text reasoning": "<think>⏎Sky.⏎</think>⏎Blue.",
    "an empty thought": "[THINK][/THINK]Blue.",
    "only a thought": "[THINK]Sky.[/THINK]",
    "text before a thought": "Wait.[THINK]Sky.[/THINK]Blue.",
    "three thoughts": "[THINK]a[/THINK]b[THINK]c[/THINK]d[THINK]e[/THINK]f",
    "a thought closed twice": "[THINK]a[/THINK][/THINK]b",
    "one call": CALL,
    "text before a call": "Looking.⏎" + CALL,
    "text after a call": CALL + " Asked.",
    "text between calls": CALL + " and " + CALL,
    "three calls": CALL * 3,
    "a thought between calls": CALL + "[THINK]And g.[/THINK]" + CALL,
    "a call that ends a thought": "[THINK]Need f." + CALL,
    "a call in a thought that goes on": "[THINK]I could " + CALL + " but no.[/THINK]Blue.",
    "no arguments": "[TOOL_CALLS]f[ARGS]{}",
    "without the arguments mark": '[TOOL_CALLS]f{"x": 1}',
    "white space everywhere": '[TOOL_CALLS]⏎ f ⏎[ARGS] ⏎{⏎ "x" : 1⏎ }⏎ ',
    "call id": '[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{"x": 1}',
    "call id of another shape": '[TOOL_CALLS]f[CALL_ID]call_0-1[ARGS]{"x": 1}',
    "call ids in two calls": "[TOOL_CALLS]f[CALL_ID]aB3dE5gH7[ARGS]{}[TOOL_CALLS]g[CALL_ID]aB3dE5gH8[ARGS]{}",
    "dotted, dashed, unicode name": "[TOOL_CALLS]mcp.für-2:get/x_1[ARGS]{}",
    "braces and quotes in strings": r'[TOOL_CALLS]f[ARGS]{"s": "}\"{ \\", "t": "{"}',
    "nested": '[TOOL_CALLS]f[ARGS]{"a": {"b": [{"c": {}}, "}"]}, "d": {}}',
    "eight levels": "[TOOL_CALLS]f[ARGS]" + '{"a": ' * 8 + "1" + "}" * 8,
    "eight levels, then another call": "[TOOL_CALLS]f[ARGS]" + '{"a": ' * 8 + "1" + "}" * 8 + CALL,
    "eight levels in a thought": "[THINK]Hm.[TOOL_CALLS]f[ARGS]" + '{"a": ' * 8 + "1" + "}" * 8,
    "markers in a string": '[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]g[ARGS]{[THINK][/THINK][CALL_ID]"}',
    "unicode in a string": '[TOOL_CALLS]f[ARGS]{"s": "空 🌤️ é"}',
    "a list of one call": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
    "a list, compact": '[TOOL_CALLS][{"name":"f","arguments":{"x":1}}]',
    "a list with ids": '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "aB3dE5gH7"}]',
    "a list of three calls": "[TOOL_CALLS] [" + ", ".join(['{"name": "f", "arguments": {"s": "]}"}}'] * 3) + "]",
    "a list, pretty-printed": '[TOOL_CALLS]⏎[⏎  {⏎    "name": "f"⏎  } ,⏎  {}⏎]⏎',
    "text around a list": 'Looking. [TOOL_CALLS] [{"name": "f", "arguments": {}}] Asked.',
    "a list that ends a thought": '[THINK]Need f.[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    "a list, eight levels": '[TOOL_CALLS] [{"name": "f"}, ' + '{"a": ' * 8 + "1" + "}" * 8 + "]",
}

REFUSED = {
    "end in an open thought": ("[THINK]Sky</s>", "</s>"),
    "end right after the opener": ("[TOOL_CALLS]</s>", "</s>"),
    "end in a name": ("[TOOL_CALLS]f</s>", "</s>"),
    "end before the arguments": ("[TOOL_CALLS]f[ARGS]</s>", "</s>"),
    "end after a call id": ("[TOOL_CALLS]f[CALL_ID]aB3dE5gH7</s>", "</s>"),
    "end in open arguments": ('[TOOL_CALLS]f[ARGS]{"x": 1</s>', "</s>"),
    "end before the last brace": ('[TOOL_CALLS]f[ARGS]{"x": {"y": 1}</s>', "</s>"),
    "end in an open string": ('[TOOL_CALLS]f[ARGS]{"x": "1}</s>', "</s>"),
    "end in an open list": ('[TOOL_CALLS] [{"name": "f", "arguments": {}}</s>', "</s>"),
    "end in a second call": (CALL + '[TOOL_CALLS]g[ARGS]{"x": {</s>', "</s>"),
    "call in open arguments": ('[TOOL_CALLS]f[ARGS]{"x": [TOOL_CALLS]g[ARGS]{}', "[TOOL_CALLS]"),
    "opener twice": ("[TOOL_CALLS]" + CALL, "[TOOL_CALLS]"),
    "call in a name": ("[TOOL_CALLS]f" + CALL, "[TOOL_CALLS]"),
    "arguments mark twice": ("[TOOL_CALLS]f[ARGS][ARGS]{}", "[ARGS]"),
    "call id before the name": ("[TOOL_CALLS][CALL_ID]aB3dE5gH7[ARGS]{}", "[CALL_ID]"),
    "call id after the arguments mark": ("[TOOL_CALLS]f[ARGS][CALL_ID]aB3dE5gH7{}", "[CALL_ID]"),
    "empty call id": ("[TOOL_CALLS]f[CALL_ID][ARGS]{}", "[ARGS]"),
    "arguments mark in text": ('f[ARGS]{"x": 1}', "[ARGS]"),
    "arguments mark after a call": (CALL + "[ARGS]{}", "[ARGS]"),
    "arguments in words": ("[TOOL_CALLS]f[ARGS]x=1", "x"),
    "a list of no calls": ("[TOOL_CALLS] []", " []"),
    "a list of words": ('[TOOL_CALLS] ["f"]', ' ["'),
    "thought in a thought": ("[THINK]a[THINK]b[/THINK]", "[THINK]"),
    "thought in a call": ("[TOOL_CALLS]f[THINK]a[/THINK][ARGS]{}", "[THINK]"),
    "a user turn": ("Blue.[INST]Sure?[/INST]", "[INST]"),
    "a user turn in a string": ('[TOOL_CALLS]f[ARGS]{"x": "[INST]', "[INST]"),
    "a tool result": (CALL + "[TOOL_RESULTS]2[/TOOL_RESULTS]", "[TOOL_RESULTS]"),
    "tool content": ("[TOOL_CONTENT]2", "[TOOL_CONTENT]"),
    "start of text": ("<s>Blue.", "<s>"),
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("mistral", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("mistral", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("mistral", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("mistral", text)
    assert refused_at("mistral", text) == token


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_starts_any_turn(prompt):
    assert flags("mistral", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("mistral", text, prompt)
    for text in MALFORMED.values():
        assert refuses("mistral", text, prompt)


def test_a_turn_resumed_anywhere_goes_on():
    assert is_unfinished("mistral", "", ASKED + "[THINK]Sky.")
    assert accepts("mistral", "[/THINK]Blue.</s>", ASKED + "[THINK]Sky.")
    assert accepts("mistral", ": 1}</s>", ASKED + '[TOOL_CALLS]f[ARGS]{"x"')
    assert accepts("mistral", "f[ARGS]{}</s>", ASKED + CALL + "[TOOL_CALLS]")


@pytest.mark.parametrize("prompt", ["Why?", "<s>[INST]hi", ASKED + "Blue.</s>", ASKED + CALL + "</s>[TOOL_RESULTS]2"])
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("mistral")
    assert table.host.locate(spell(chat, prompt)) == 0


FLAGS = {
    "": "end",
    "Blue.": "end",
    "[THINK]": "",
    "[THINK]Sky.": "",
    "[THINK]Sky.[/THINK]": "end",
    "[TOOL_CALLS]": "block header",
    "[TOOL_CALLS]f": "block header",
    "[TOOL_CALLS]f[CALL_ID]aB3": "block header",
    "[TOOL_CALLS]f[ARGS]": "block header",
    "[TOOL_CALLS]f[ARGS]{": "block",
    '[TOOL_CALLS]f[ARGS]{"x": {}': "block",
    CALL: "end",
    CALL + " Asked.": "end",
    CALL + "[TOOL_CALLS]": "block header",
    "[THINK]Need f.[TOOL_CALLS]f[ARGS]{": "block",
    "[THINK]Need f." + CALL: "end",
    "[TOOL_CALLS] [": "block header",
    "[TOOL_CALLS] [{": "block",
    '[TOOL_CALLS] [{"name": "f"}': "block",
    '[TOOL_CALLS] [{"name": "f"}]': "end",
}


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("mistral", text) == expected


# -- a second reading of how a call ends, against random arguments ------------------------------------------------

FRAGMENTS = ("{", "{", "}", "}", '"', '"', "\\", " ", "\n", "a", '"k": 1', "[", "]", ",", "空", "[ARGS]", '"a\\"b"')
_MARK = re.compile(r"\[ARGS\]")


def closes(arguments: str) -> bool | None:
    """Whether an object that was opened closes within `arguments`; None if a mark stands in it, outside strings."""
    depth, quoted, i = 1, False, 0
    while i < len(arguments):
        mark = _MARK.match(arguments, i)
        if mark and not quoted:
            return None
        if quoted and arguments[i] == "\\" and not _MARK.match(arguments, i + 1):
            i += 2
            continue
        if arguments[i] == '"':
            quoted = not quoted
        elif not quoted:
            depth += (arguments[i] == "{") - (arguments[i] == "}")
        if depth > 6 or not depth:
            return True
        i = mark.end() if mark else i + 1
    return False


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))
def test_a_call_is_open_exactly_where_its_braces_and_strings_are(arguments):
    table, chat = compiled("mistral")
    host = table.host
    walk = host.walk(chat.encode("[TOOL_CALLS]f[ARGS]{"))
    expected = closes(arguments)
    if expected:
        arguments = arguments.replace("[ARGS]", "")  # a mark behind the end of the call is refused on its own account
        expected = closes(arguments)
    walk = host.walk(chat.encode(arguments), walk.state)
    assert (walk.illegal_at is not None) == (expected is None)
    if expected is not None:
        assert host.may_end(walk.state) == expected
        assert host.block_open(walk.state) == (not expected)


# -- real tokenizers ---------------------------------------------------------------------------------------------

V13_REASONING = {
    **{"[SYSTEM_PROMPT]": 17, "[/SYSTEM_PROMPT]": 18, "[TOOL_CONTENT]": 19},
    **{"[ARGS]": 32, "[CALL_ID]": 33, "[THINK]": 34, "[/THINK]": 35},
}
BARE_PROMPT = "<s>[INST]Why is the sky blue?[/INST]"


KINDS = ("tekken v13 with reasoning", "tekken v3", "sentencepiece v3")


@cache
def real(kind: str) -> tuple[RealTokenizer, StructureTable]:
    tokenizer = real_tokenizer("mistral_v2" if kind.startswith("sentencepiece") else "mistral_v3")
    if "v13" in kind:
        tokenizer = with_named(tokenizer, V13_REASONING)
    return tokenizer, compile_format("mistral", tokenizer.vocabulary)


@pytest.mark.parametrize("kind", KINDS)
def test_real_tokenizers_accept_well_formed_turns(kind):
    tokenizer, table = real(kind)
    for text in [*WELL_FORMED, *CORPUS.values()]:
        bare = without_terminal("mistral", text)
        for whole in (bare, bare + "</s>"):
            if _is_spelled(tokenizer, whole):
                assert verdicts_on(tokenizer, table, whole, BARE_PROMPT) == {True}


@pytest.mark.parametrize("kind", KINDS)
def test_real_tokenizers_refuse_malformed_turns(kind):
    tokenizer, table = real(kind)
    for name, text in MALFORMED.items():
        expected = name in TEXT_BEFORE_V11 and "[THINK]" not in tokenizer.vocabulary.controls
        if name == "marker missing":
            expected = "[ARGS]" not in tokenizer.vocabulary.controls
        assert verdicts_on(tokenizer, table, text, BARE_PROMPT) == {expected}


def _is_spelled(tokenizer: RealTokenizer, text: str) -> bool:
    """Whether the table has the marks that the calls of `text` need as tokens."""
    return all(mark in tokenizer.vocabulary.controls for mark in ("[ARGS]", "[CALL_ID]") if mark in text)


def test_tables_without_the_arguments_mark_know_the_list_form_and_a_name_before_an_object():
    tokenizer, table = real("tekken v3")
    assert verdicts_on(tokenizer, table, '[TOOL_CALLS] [{"name": "f", "arguments": {}}]</s>', BARE_PROMPT) == {True}
    assert verdicts_on(tokenizer, table, '[TOOL_CALLS] [{"name": "f", "arguments": {}</s>', BARE_PROMPT) == {False}
    assert verdicts_on(tokenizer, table, '[TOOL_CALLS]f{"x": 1}</s>', BARE_PROMPT) == {True}
    assert verdicts_on(tokenizer, table, CALL + "</s>", BARE_PROMPT) == {False}


def test_markers_spelled_as_ordinary_text_are_text():
    table, chat = compiled("mistral")
    for marker in ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>", "[INST]"):
        for how in ("bytes", "longest", "random"):
            plain = [token for part in marker for token in spell(chat, part, how)]
            assert is_turn(table, plain + chat.encode("x</s>"))
            assert is_turn(table, chat.encode('[TOOL_CALLS]f[ARGS]{"s": "') + plain + chat.encode('"}</s>'))
