"""The llama_3 format: text and calls that look alike, JSON calls followed to their end, an optional tag."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled
from scripts.tokenizers import RealTokenizer, real_tokenizer
from structured_commit import Vocabulary, VocabularyError, compile_format
from tests.support.streams import is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses, without_terminal

HEADER = "<|start_header_id|>assistant<|end_header_id|>⏎⏎"
PROMPT = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>⏎⏎Why is the sky blue?<|eot_id|>" + HEADER

PROMPTS = {
    "first turn": PROMPT,
    "second turn": PROMPT + "Blue.<|eot_id|><|start_header_id|>user<|end_header_id|>⏎⏎Sure?<|eot_id|>" + HEADER,
    "after a tool result": PROMPT
    + '<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|><|start_header_id|>ipython<|end_header_id|>⏎⏎2<|eot_id|>'
    + HEADER,
    "after an open call": PROMPT + '{"name": "f", "parameters": {<|eot_id|>' + HEADER,
}

WELL_FORMED = [
    "It is blue.<|eot_id|>",
    '{"name": "f", "parameters": {"x": 1}}<|eot_id|>',
    '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}<|eom_id|>',
    '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}<|eot_id|>',
    "[f(x=1), g()]<|eot_id|>",
    '<|python_tag|>brave_search.call(query="sky")<|eom_id|>',
]

MALFORMED = {
    "header repeated by the model": "<|start_header_id|>assistant<|end_header_id|>⏎⏎Hi<|eot_id|>",
    "text after the terminal": 'Hi<|eot_id|>{"name": "f", "parameters": {}}',
    "two terminals": "Hi<|eom_id|><|eot_id|>",
    "start-of-text token generated": "<|begin_of_text|>Hi<|eot_id|>",
    "result written by the model": "<|python_tag|>print(1)<|eom_id|><|start_header_id|>ipython<|end_header_id|>⏎⏎1"
    "<|eot_id|>",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton
# "Hi<|eom_id|>" is a turn, so only what follows the first terminal makes the second and third line malformed.
ENDS_AT_THE_FIRST_TERMINAL = ("two terminals",)

CALL = '{"name": "f", "parameters": {"x": 1}}'

CORPUS = {
    "empty turn": "",
    "blank turn": " ⏎⏎",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "brackets of all kinds": "{ [ ( } ] ) < > \" ' \\ ;",
    "tag spelled in other words": "<| python_tag |>",
    "bare call": CALL,
    "call behind the tag": "<|python_tag|>" + CALL,
    "white space before a call": "⏎ " + CALL,
    "white space behind the tag": "<|python_tag|>⏎ " + CALL,
    "arguments for parameters": '{"name": "f", "arguments": {"x": 1}}',
    "type first": '{"type": "function", "name": "f", "parameters": {"x": 1}}',
    "type last": '{"name": "f", "parameters": {"x": 1}, "type": "function"}',
    "compact": '{"name":"f","parameters":{"x":1}}',
    "pretty-printed": '{⏎  "name" : "f" ,⏎  "parameters" :⏎  {⏎    "x": 1⏎  }⏎}⏎',
    "no parameters": '{"name": "f", "parameters": {}}',
    "parameters that are no object": '{"name": "f", "parameters": null}',
    "parameters in a string": '{"name": "f", "parameters": "{\\"x\\": 1}"}',
    "other order": '{"parameters": {"x": 1}, "name": "f"}',
    "no name": '{"parameters": {"x": 1}}',
    "single quotes": "{'name': 'f', 'parameters': {'s': '}'}}",
    "dotted and unicode name": '{"name": "mcp.für-2", "parameters": {}}',
    "braces and quotes in strings": '{"name": "f", "parameters": {"s": "}\\"{ \\\\", "t": "{"}}',
    "nested": '{"name": "f", "parameters": {"a": {"b": [{"c": {}}, "}"]}, "d": {}}}',
    "the tag in a string": '{"name": "f", "parameters": {"s": "a<|python_tag|>b"}}',
    "eight levels": '{"name": "f", "parameters": ' + '{"a": ' * 8 + "1" + "}" * 8 + "}",
    "separated by a semicolon": CALL + ";" + CALL,
    "separated by a line feed": CALL + "⏎" + CALL,
    "separated by nothing": CALL + CALL,
    "separated by a second tag": "<|python_tag|>" + CALL + "<|python_tag|>" + CALL,
    "three calls": "; ".join([CALL] * 3),
    "a semicolon at the end": CALL + ";⏎",
    "text before a call": "Looking. " + CALL,
    "text before a tagged call": "Looking.<|python_tag|>" + CALL,
    "text after a call": CALL + " Asked.",
    "a JSON answer": '{"name": "Ada", "born": 1815}',
    "a JSON answer with a type": '{"type": "function", "of": "x"}',
    "a JSON answer that stops anywhere": '{"name": "Ada", "born": {"year": 18',
    "a list of calls in JSON": "[" + CALL + ", " + CALL + "]",
    "list form": "[get_weather(city='San Francisco', metric='}')]",
    "function tag": '<function=f>{"x": 1}</function>',
    "code": "<|python_tag|>d = {'a': 1}⏎print(d['a'])⏎",
    "code that is a dictionary": '<|python_tag|>{"a": 1}["a"]',
    "code that is not finished": "<|python_tag|>print({",
    "built-in tool": '<|python_tag|>wolfram_alpha.call(query="x^2 = {4")',
    "only the tag": "<|python_tag|>",
    "the tag twice": "<|python_tag|><|python_tag|>print(1)",
}

REFUSED = {
    "turn end in open arguments": ('{"name": "f", "parameters": {"x": 1<|eot_id|>', "<|eot_id|>"),
    "turn end before the last brace": ('{"name": "f", "parameters": {"x": 1}<|eot_id|>', "<|eot_id|>"),
    "message end in an open string": ('<|python_tag|>{"name": "f", "parameters": {"x": "1}}<|eom_id|>', "<|eom_id|>"),
    "end of text in arguments": ('{"name": "f", "arguments": {<|end_of_text|>', "<|end_of_text|>"),
    "message end in a second call": (CALL + '; {"name": "f", "parameters": {<|eom_id|>', "<|eom_id|>"),
    "message end in a second tagged call": (
        "a<|python_tag|>" + CALL + '<|python_tag|>{"type": "function", "name": "f", "parameters": {<|eom_id|>',
        "<|eom_id|>",
    ),
    "the tag in open arguments": ('{"name": "f", "parameters": {"x": <|python_tag|>', "<|python_tag|>"),
    "another header": ("Hi<|start_header_id|>user", "<|start_header_id|>"),
    "end of a header": ("assistant<|end_header_id|>⏎⏎Hi", "<|end_header_id|>"),
    "a role opener in a string": ('{"name": "f", "parameters": {"x": "<|start_header_id|>', "<|start_header_id|>"),
    "start of text": ("Hi<|begin_of_text|>", "<|begin_of_text|>"),
    "padding": ("Hi<|finetune_right_pad_id|>", "<|finetune_right_pad_id|>"),
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("llama_3", text)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_turns_are_refused(name):
    text = MALFORMED[name]
    table, chat = compiled("llama_3")
    assert not is_turn(table, spell(chat, text))
    if name not in ENDS_AT_THE_FIRST_TERMINAL:
        assert refuses("llama_3", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("llama_3", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("llama_3", text)
    assert refused_at("llama_3", text) == token


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_starts_any_turn(prompt):
    assert flags("llama_3", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("llama_3", text, prompt)
    for name, text in MALFORMED.items():
        assert name in ENDS_AT_THE_FIRST_TERMINAL or refuses("llama_3", text, prompt)


def test_a_turn_resumed_inside_a_call_goes_on():
    resumed = PROMPT + '<|python_tag|>{"name": "f", "parameters": {"x": "a'
    assert flags("llama_3", "", resumed) == "block"
    assert is_unfinished("llama_3", "}}", resumed)
    assert accepts("llama_3", 'b"}}<|eom_id|>', resumed)


@pytest.mark.parametrize("prompt", ["Why?", "<|start_header_id|>user<|end_header_id|>⏎⏎hi", PROMPT + "Blue.<|eot_id|>"])
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("llama_3")
    assert table.host.locate(spell(chat, prompt)) == 0


FLAGS = {
    "": "end",
    '{"name": "f", "parameters": ': "end",
    '{"name": "f", "parameters": {': "block",
    '{"name": "f", "arguments":⏎{"x": {}': "block",
    '{"name": "f", "parameters": {"x": 1}': "block",
    CALL: "end",
    CALL + ";": "end",
    CALL + '; {"name": "g", "parameters": {': "block",
    "<|python_tag|>": "end",
    "<|python_tag|>print(": "end",
    '<|python_tag|>{"type": "function", "name": "f", "parameters": {': "block",
    "Looking. " + '{"name": "f", "parameters": {': "end",
    '{"name": "f", "parameters": ' + '{"a": ' * 5: "block",
    '{"name": "f", "parameters": ' + '{"a": ' * 6: "end",
}


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("llama_3", text) == expected


# -- a second reading of the same rules, against random text -----------------------------------------------------

_HEAD = re.compile(
    r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:\s*"[^"\\]+"\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)
_TAG = "<|python_tag|>"
FRAGMENTS = (
    *('{"name": "f", "parameters": ', '{"type": "function", "name": "g", "arguments": ', '{"name": "f", "x": '),
    *("{", "{", "}", "}", "}}", '"', '"', "\\", ";", " ", "\n", "a", '"k": 1', "name", "空", _TAG, "{}}", '"a\\"b"'),
)


def open_call(text: str) -> bool | None:
    """Whether a JSON call is open at the end of `text`; None if it holds the tag inside one, outside strings."""
    at = 0
    while at < len(text):
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n;"))
        head = _HEAD.match(text, at)
        if not head:
            tag = text.find(_TAG, at)
            if tag < 0:
                return False
            at = tag + len(_TAG)
            continue
        depth, quoted, i = 1, False, head.end()
        while i < len(text):
            tagged = text.startswith(_TAG, i)
            if tagged and not quoted:
                return None
            if quoted and text[i] == "\\" and not text.startswith(_TAG, i + 1):
                i += 2
                continue
            if text[i] == '"':
                quoted = not quoted
            elif not quoted:
                depth += (text[i] == "{") - (text[i] == "}")
            if depth > 6:
                return False
            i += len(_TAG) if tagged else 1
            if not depth:
                break
        if depth:
            return True
        at = i
    return False


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join))
def test_a_call_is_open_exactly_where_its_braces_and_strings_are(text):
    table, chat = compiled("llama_3")
    ids = chat.encode(text)
    walk = table.host.walk(ids)
    expected = open_call(text)
    assert (walk.illegal_at is not None) == (expected is None)
    if expected is not None:
        assert table.host.may_end(walk.state) == (not expected)


# -- the real tokenizer ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    tokenizer = real_tokenizer("llama3")
    return tokenizer, compile_format("llama_3", tokenizer.vocabulary)


def test_the_real_tokenizer_gives_the_same_verdicts(llama):
    tokenizer, table = llama
    for text in [*WELL_FORMED, *CORPUS.values()]:
        bare = without_terminal("llama_3", text)
        for whole in (text, bare, bare + "<|eot_id|>", bare + "<|eom_id|>"):
            assert verdicts_on(tokenizer, table, whole, PROMPT) == {True}
    for text in [*MALFORMED.values(), *(text for text, _ in REFUSED.values())]:
        assert verdicts_on(tokenizer, table, text, PROMPT) == {False}


def test_a_tokenizer_of_llama_3_0_reads_the_spelling_of_the_tag_as_text():
    tokenizer = real_tokenizer("llama3")
    vocabulary = tokenizer.vocabulary
    named = {n: i for n, i in vocabulary.controls.items() if n not in ("<|python_tag|>", "<|eom_id|>")}
    old = RealTokenizer(Vocabulary(vocabulary.size, vocabulary.texts, named), tokenizer.ordinary)
    table = compile_format("llama_3", old.vocabulary)
    assert verdicts_on(old, table, "<|python_tag|>print(1)<|eot_id|>", PROMPT) == {True}
    assert verdicts_on(old, table, CALL + "<|eot_id|>", PROMPT) == {True}
    assert verdicts_on(old, table, CALL[:-1] + "<|eot_id|>", PROMPT) == {False}


def test_a_tokenizer_of_another_family_is_refused_by_name():
    with pytest.raises(VocabularyError, match="eot_id"):
        compile_format("llama_3", real_tokenizer("mistral_v3").vocabulary)
