"""The hermes format (Qwen2.5, Qwen3): optional reasoning, text, JSON calls between two markers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled, compiled_on
from structured_commit import builtin_format
from tests.support.older_tokenizers import is_turn_lacking
from tests.support.streams import SPELLINGS, is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

ASKED = "<|im_start|>system⏎Be brief.<|im_end|>⏎<|im_start|>user⏎Why?<|im_end|>⏎<|im_start|>assistant⏎"
CALLED = ASKED + '<tool_call>⏎{"name": "f", "arguments": {}}⏎</tool_call><|im_end|>⏎'
ANSWERED = "<|im_start|>user⏎<tool_response>⏎{}⏎</tool_response>⏎<tool_response>⏎1⏎</tool_response><|im_end|>⏎"

IN_TEXT = {
    "Qwen2.5, Qwen3 with thinking": ASKED,
    "thinking off": ASKED + "<think>⏎⏎</think>⏎⏎",
    "after tool results": CALLED + ANSWERED + "<|im_start|>assistant⏎",
    "after tool results, thinking off": CALLED + ANSWERED + "<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎",
    "second turn": ASKED + "<think>⏎a⏎</think>⏎⏎b<|im_end|>⏎" + ASKED,
}
IN_REASONING = {
    "thinking always": ASKED + "<think>⏎",
    "thinking always, after tool results": CALLED + ANSWERED + "<|im_start|>assistant⏎<think>⏎",
}

WELL_FORMED = [
    "It is blue.<|im_end|>",
    "<think>⏎Sky question.⏎</think>⏎⏎Blue.<|im_end|>",
    '<think>⏎⏎</think>⏎⏎<tool_call>⏎{"name": "f", "arguments": {"x": 1}}⏎</tool_call><|im_end|>',
    'Both.⏎<tool_call>⏎{"name": "f", "arguments": {"x": 1}}⏎</tool_call>⏎<tool_call>⏎{"name": "g", "arguments": {}}⏎'
    "</tool_call><|im_end|>",
    '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call><|im_end|>',
]

MALFORMED = {
    "nested opener": '<tool_call>⏎<tool_call>⏎{"name": "f", "arguments": {}}⏎</tool_call>',
    "empty call": "<tool_call>⏎⏎</tool_call>",
    "closer without opener": '{"name": "f", "arguments": {"x": 1}}⏎</tool_call>',
    "body is not a JSON object": "<tool_call>⏎f(x=1)⏎</tool_call>",
}

NOT_SKELETON = {
    "JSON not closed: the body begins with { and ends with }, braces are not counted": "<tool_call>⏎"
    '{"name": "f", "arguments": {"x": 1}⏎</tool_call>',
}

F = '<tool_call>⏎{"name": "f", "arguments": {"x": 1}}⏎</tool_call>'
G = '<tool_call>⏎{"name": "g", "arguments": {}}⏎</tool_call>'
F_READ, G_READ = ("f", {"x": 1}), ("g", {})

ANSWERS = {
    "empty turn": "",
    "white space only": " ⏎⏎\t",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "braces and quotes": '{"name": "f", "arguments": {"x": "}',
    "markers spelled in other words": "< tool_call> </tool _call> <|im_end |> <tools>",
    "a second closer of reasoning": "Sky.</think>Blue.</think>Yes.",
    "an opener of reasoning in text": "Blue.<think>Or not?",
    "reasoning cut short by the end": "<think>⏎Sky ques",
    "reasoning only": "<think>⏎Sky.⏎</think>",
    "empty reasoning": "<think></think>Blue.",
    "blank before reasoning": "⏎ <think>⏎Sky.⏎</think>⏎⏎Blue.",
    "reasoning twice": "<think>a</think>b<think>c</think>d",
    "an opener in open reasoning": "<think>a<think>b</think>c",
    "a tool result quoted in reasoning": "<think>It said <tool_response>1</tool_response>.</think>Blue.",
    "a closer in open reasoning": "<think>Not </tool_call> yet</think>Blue.",
    "a call marker quoted in reasoning": "<think>I must write <tool_call> and then </tool_call>.</think>Blue.",
    "a call marker quoted in reasoning, never closed": "<think>I must write <tool_call> first.</think>Blue.",
    "two openers quoted in reasoning": "<think><tool_call><tool_call> are two.</think>Blue.",
    "a broken call in reasoning": '<think><tool_call>⏎{"name": </tool_call> no.</think>Blue.',
}

CALLS = {
    "one call": (F, [F_READ]),
    "two calls": (F + "⏎" + G, [F_READ, G_READ]),
    "three calls without white space": (F + G + F, [F_READ, G_READ, F_READ]),
    "text before": ("Looking.⏎" + F, [F_READ]),
    "text between": (F + "⏎And g.⏎" + G, [F_READ, G_READ]),
    "text after": (F + "⏎Asked.", [F_READ]),
    "reasoning before": ("<think>⏎Need f.⏎</think>⏎⏎" + F, [F_READ]),
    "reasoning between": (F + "<think>And g.</think>" + G, [F_READ, G_READ]),
    "from open reasoning": ("<think>⏎Need f.⏎" + F, [F_READ]),
    "two from open reasoning": ("<think>⏎Need both.⏎" + F + "⏎" + G, [F_READ, G_READ]),
    "compact": ('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', [F_READ]),
    "pretty-printed": ('<tool_call>⏎{⏎\t"name": "f",⏎\t"arguments": {⏎\t\t"x": 1⏎\t}⏎}⏎</tool_call>', [F_READ]),
    "arguments first": ('<tool_call>⏎{"arguments": {"x": 1}, "name": "f"}⏎</tool_call>', [F_READ]),
    "parameters for arguments": ('<tool_call>⏎{"name": "f", "parameters": {"x": 1}}⏎</tool_call>', [F_READ]),
    "no arguments": ('<tool_call>⏎{"name": "g"}⏎</tool_call>', [G_READ]),
    "another key last": ('<tool_call>⏎{"name": "g", "arguments": {}, "id": 1}⏎</tool_call>', [G_READ]),
    "a list of calls": (
        '<tool_call>⏎[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]⏎</tool_call>',
        [F_READ, G_READ],
    ),
    "braces, quotes and escapes in a string": (
        r'<tool_call>⏎{"name": "f", "arguments": {"s": "}\"{\\ \n\u00e9 ⏎"}}⏎</tool_call>'.replace(" ⏎", ""),
        [("f", {"s": '}"{\\ \né'})],
    ),
    "unicode in a string": (
        '<tool_call>⏎{"name": "f", "arguments": {"s": "空 🌤️"}}⏎</tool_call>',
        [("f", {"s": "空 🌤️"})],
    ),
    "an opener in a string": (
        '<tool_call>⏎{"name": "f", "arguments": {"s": "a <tool_call> b"}}⏎</tool_call>',
        [("f", {"s": "a <tool_call> b"})],
    ),
    "a closer in a string": (
        '<tool_call>⏎{"name": "f", "arguments": {"s": "{}</tool_call> b"}}⏎</tool_call>',
        [("f", {"s": "{}</tool_call> b"})],
    ),
    "reasoning markers in a string": (
        '<tool_call>⏎{"name": "f", "arguments": {"s": "<think></think>"}}⏎</tool_call>',
        [("f", {"s": "<think></think>"})],
    ),
    "result markers in a string": (
        '<tool_call>⏎{"name": "f", "arguments": {"s": "\\n<tool_response></tool_response>"}}⏎</tool_call>',
        [("f", {"s": "\n<tool_response></tool_response>"})],
    ),
}

LENIENT = {
    "a line feed in a string": '<tool_call>⏎{"name": "f", "arguments": {"s": "a⏎b"}}⏎</tool_call>',
    "a quote not escaped": '<tool_call>⏎{"name": "f", "arguments": {"s": "it"s"}}⏎</tool_call>',
    "a call in reasoning that a later closer makes part of it": "<think>I could " + F + " but no.</think>Blue.",
    "text after calls from open reasoning": "<think>⏎Need f.⏎" + F + "⏎Done.",
}

OPEN = '<tool_call>⏎{"name": "f", "arguments": {"x": 1'

REFUSED = {
    "terminal in an open call": (OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal in an open string": (OPEN + ', "s": "a<|im_end|>', "<|im_end|>"),
    "terminal right after the opener": ("<tool_call><|im_end|>", "<|im_end|>"),
    "terminal before the closer": (OPEN + "}}⏎<|im_end|>", "<|im_end|>"),
    "end of text in an open call": (OPEN + "<|endoftext|>", "<|endoftext|>"),
    "terminal in the second call": (F + OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal in a call from open reasoning": ("<think>Need f." + OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal after a broken call in open reasoning": ("<think><tool_call>f()</tool_call><|im_end|>", "<|im_end|>"),
    "opener after an opener": ("<tool_call><tool_call>" + F, "<tool_call>"),
    "opener in open arguments": (OPEN + "<tool_call>", "<tool_call>"),
    "opener for the missing closer": (OPEN + "}}⏎<tool_call>", "<tool_call>"),
    "opener after an opener, second call": (F + "⏎<tool_call>" + G, "<tool_call>"),
    "closer in an open object": (OPEN + ",⏎</tool_call>", "</tool_call>"),
    "closer twice": (F + "</tool_call>", "</tool_call>"),
    "closer after text": ("Blue.</tool_call>", "</tool_call>"),
    "reasoning in a call": ("<tool_call><think>", "<think>"),
    "reasoning closed in open arguments": (OPEN + "</think>", "</think>"),
    "a bare name": ("<tool_call>⏎f⏎</tool_call>", "f"),
    "text after the object": ('<tool_call>⏎{"name": "g"}⏎ok⏎</tool_call>', "</tool_call>"),
    "another turn": ("Blue.<|im_start|>user", "<|im_start|>"),
    "another turn in reasoning": ("<think>Blue.<|im_start|>user", "<|im_start|>"),
    "another turn in a string": (OPEN + ', "s": "<|im_start|>', "<|im_start|>"),
    "a tool result written by the model": (F + "⏎<tool_response>⏎1", "<tool_response>"),
}

FLAGS = {
    "": "end",
    "Blue": "end",
    "<think>": "end",
    "<think>Sky": "end",
    "<think>Sky</think>": "end",
    "<tool_call>": "block",
    "<tool_call>⏎": "block",
    OPEN: "block",
    OPEN + "}}": "block",
    OPEN + "}}⏎": "block",
    F: "end",
    F + "⏎": "end",
    F + "⏎<tool_call>": "block",
    OPEN + ', "s": "</tool_call>': "block",
    "<think><tool_call>": "block",
    "<think>" + OPEN: "block",
    "<think>" + F: "end",
    "<think><tool_call> is a marker": "block",
    "<think><tool_call></tool_call> are markers": "",
    "<think><tool_call></tool_call> are markers</think>": "end",
}

CORPUS = {
    **{f"answer: {name}": text for name, text in ANSWERS.items()},
    **{f"call: {name}": text for name, (text, _) in CALLS.items()},
    **{f"lenient: {name}": text for name, text in LENIENT.items()},
    **{f"not of the skeleton: {name}": text for name, text in NOT_SKELETON.items()},
}
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("hermes", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("hermes", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("hermes", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("hermes", text)
    assert refused_at("hermes", text) == token


def test_a_call_that_never_ends_is_a_prefix_and_no_turn():
    for text in ("<tool_call>", "<tool_call>⏎{", OPEN, OPEN + "}}⏎", OPEN + ', "s": "' + "a" * 300):
        assert is_unfinished("hermes", text)


@pytest.mark.parametrize("prompt", IN_TEXT.values(), ids=IN_TEXT)
def test_every_prompt_that_ends_in_text_starts_a_turn(prompt):
    assert flags("hermes", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("hermes", text, prompt)
    for text in MALFORMED.values():
        assert refuses("hermes", text, prompt)


@pytest.mark.parametrize("prompt", IN_REASONING.values(), ids=IN_REASONING)
def test_a_prompt_that_opened_reasoning_starts_inside_it(prompt):
    assert flags("hermes", "", prompt) == "end"
    for text in ("Sky.⏎</think>⏎⏎Blue.<|im_end|>", "⏎</think>⏎⏎" + F, "Need f.⏎" + F + "⏎" + G, "Sky ques", ""):
        assert accepts("hermes", text, prompt)
    for quoted in (text for name, text in ANSWERS.items() if "quoted in reasoning" in name):
        assert accepts("hermes", quoted.removeprefix("<think>"), prompt)
    assert refuses("hermes", OPEN + "<|im_end|>", prompt)
    assert refuses("hermes", "Sky.⏎</think>⏎⏎" + MALFORMED["nested opener"], prompt)


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_turn_resumed_anywhere_goes_on(cut):
    table, chat = compiled("hermes")
    ids = spell(chat, WELL_FORMED[3])
    state = table.host.locate(spell(chat, ASKED) + ids[:cut])
    assert is_turn(table, ids[cut:], state)


@pytest.mark.parametrize(
    "prompt",
    ["Why?", "<|im_start|>user⏎Why?", ASKED + WELL_FORMED[0], ASKED + MALFORMED["empty call"], ASKED + "<|im_end|>⏎"],
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("hermes")
    assert table.host.locate(spell(chat, prompt)) == 0


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("hermes", text) == expected


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("hermes")
    for name in (*builtin_format("hermes").terminals, *MARKERS, "<|im_start|>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a") + plain + chat.encode("b<|im_end|>"))
            assert is_turn(table, spell(chat, OPEN + ', "s": "') + plain + spell(chat, '"}}⏎</tool_call>'))
            if name == "</tool_call>":
                assert not is_turn(table, spell(chat, OPEN + "}}⏎") + plain)


def ends_inside(table, ids):
    """Whether the turn may end behind each token but the first, `a`, and the last, which closes the call."""
    state = table.host.walk(ids[:1]).state
    for token in ids[1:-1]:
        state = table.host.step(state, token)
        yield table.host.may_end(state)


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.integers() | st.lists(st.text(max_size=4) | st.sampled_from(MARKERS)).map("".join),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_json_arguments_in_any_spelling_are_a_call(arguments, ascii_only, indent, seed):
    table, chat = compiled("hermes")
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    for how in SPELLINGS:
        ids = spell(chat, f"a<tool_call>⏎{body}⏎</tool_call>", how, seed)
        assert is_turn(table, ids)
        assert not any(ends_inside(table, ids))


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("hermes")
    for text in (*CORPUS.values(), *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        expected = is_turn(table, spell(chat, text))
        for seed in range(6):
            assert is_turn(table, spell(chat, text, "random", seed)) == expected


def test_the_real_tokenizer_of_qwen3_gives_the_same_verdicts():
    table, tokenizer = compiled_on("hermes", "qwen3")
    assert table.info.controls["<tool_call>"] == 151657
    for text in (*WELL_FORMED, *CORPUS.values()):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *((text, True) for text in (WELL_FORMED[0], *WELL_FORMED[2:], "<think>a</think>" + F, "<tool_response>a")),
        *((text, False) for text in (*MALFORMED.values(), "<think><tool_call> is one</think>", "<think>" + OPEN)),
    ],
)
def test_a_tokenizer_without_reasoning_tokens_reads_them_as_text(text, accepted):
    assert is_turn_lacking("hermes", text, "<think>", "</think>", "<tool_response>", "</tool_response>") == accepted
