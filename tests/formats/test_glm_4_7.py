"""The glm_4_7 format (GLM-4.5 to 5.x): calls of a name and pairs, terminals that open the next turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled, compiled_on
from structured_commit import builtin_format
from tests.support.streams import SPELLINGS, is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

F = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
F_LINES = "<tool_call>f⏎<arg_key>x</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>"
G, G_LINES = "<tool_call>g</tool_call>", "<tool_call>g⏎</tool_call>"
F_READ, G_READ = ("f", {"x": 1}), ("g", {})

ASKED = "[gMASK]<sop><|system|>⏎Be brief.<|user|>⏎Why?<|assistant|>"
CALLED = ASKED + "</think>" + F + "<|observation|>"
ANSWERED = "<tool_response>{}</tool_response><tool_response>1</tool_response><|assistant|>"

IN_TEXT = {
    "GLM-4.5, 4.6": ASKED,
    "GLM-4.5, 4.6, thinking off": ASKED + "⏎<think></think>",
    "GLM-4.7, thinking off": ASKED + "</think>",
    "after tool results": CALLED + ANSWERED,
    "after tool results, thinking off": CALLED + ANSWERED + "</think>",
    "second turn": ASKED + "</think>Blue.<|user|>⏎Sure?<|assistant|>",
}
IN_REASONING = {
    "GLM-4.7": ASKED + "<think>",
    "GLM-4.7, after tool results": CALLED + ANSWERED + "<think>",
}

WELL_FORMED = [
    "It is blue.<|user|>",
    "⏎<think>Sky question.</think>⏎Blue.<|user|>",
    "Need f.</think>" + F + "<|observation|>",
    "Both.</think>Looking." + F + G + "<|observation|>",
    "⏎<think></think>⏎<tool_call>f⏎<arg_key>s</arg_key>⏎<arg_value>a⏎b</arg_value>⏎</tool_call><|observation|>",
]

MALFORMED = {
    "value without key": "<tool_call>f<arg_value>1</arg_value></tool_call>",
    "JSON body becomes the name": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    "nested opener": "<tool_call>f<tool_call>g</tool_call>",
    "empty name": "<tool_call></tool_call>",
    "key without value": "<tool_call>f<arg_key>x</arg_key></tool_call>",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

ANSWERS = {
    "empty turn": "",
    "white space only": " ⏎⏎\t",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "braces and quotes": '{"name": "f", "arguments": {"x": "}',
    "markers spelled in other words": "< tool_call> </arg _key> <|user |>",
    "a second closer of reasoning": "Sky.</think>Blue.</think>Yes.",
    "reasoning opened again": "<think>a</think>b<think>c</think>d",
    "reasoning cut short by the end": "<think>Sky ques",
    "reasoning opened again, cut short": "<think>a</think>b<think>c",
    "empty reasoning": "⏎<think></think>⏎Blue.",
    "a call marker quoted in reasoning": "<think>I must write <tool_call> and then </tool_call>.</think>Blue.",
    "an opener quoted in reasoning": "<think>I must write <tool_call> first.</think>Blue.",
    "other markers in open reasoning": "<think><arg_key>x</arg_key><arg_value></arg_value></tool_call><tool_response>",
    "a broken call in reasoning": "<think><tool_call>f<arg_value></tool_call> no.</think>Blue.",
}

CALLS = {
    "one call": (F, [F_READ]),
    "one call without arguments": (G, [G_READ]),
    "two calls": (F + G, [F_READ, G_READ]),
    "three calls": (G + F + G, [G_READ, F_READ, G_READ]),
    "text before, between, after": ("A." + F + "b" + G + "c", [F_READ, G_READ]),
    "reasoning before": ("<think>Need f.</think>" + F, [F_READ]),
    "from open reasoning": ("<think>Need both." + F + G, [F_READ, G_READ]),
    "two arguments": (
        F.replace("</tool_call>", "<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>"),
        [("f", {"x": 1, "s": "a"})],
    ),
    "white space between key and value": (F.replace("</arg_key>", "</arg_key> ⏎"), [F_READ]),
    "an empty value": ("<tool_call>f<arg_key>s</arg_key><arg_value></arg_value></tool_call>", [("f", {"s": ""})]),
    "a value of many lines": (
        '<tool_call>f<arg_key>s</arg_key><arg_value>if a < b:⏎\t"{}"⏎</arg_value></tool_call>',
        [("f", {"s": 'if a < b:\n\t"{}"\n'})],
    ),
    "unicode in a value": (
        "<tool_call>f<arg_key>s</arg_key><arg_value>空 🌤️</arg_value></tool_call>",
        [("f", {"s": "空 🌤️"})],
    ),
    "markers in a value": (
        "<tool_call>f<arg_key>s</arg_key><arg_value><tool_call><arg_key></arg_key><arg_value><think></think></arg_value>"
        "</tool_call>",
        [("f", {"s": "<tool_call><arg_key></arg_key><arg_value><think></think>"})],
    ),
}

CALLS_ON_LINES = {
    "one call": (F_LINES, [F_READ]),
    "one call without arguments": (G_LINES, [G_READ]),
    "two calls": (F_LINES + "⏎" + G_LINES, [F_READ, G_READ]),
    "text before and after": ("A.⏎" + F_LINES + "⏎b", [F_READ]),
    "reasoning before": ("⏎<think>Need f.</think>⏎" + F_LINES, [F_READ]),
    "from open reasoning": ("⏎<think>Need f.⏎" + F_LINES, [F_READ]),
}

LENIENT = {
    "the closer in a value": F.replace("1", "a</tool_call>b"),
    "white space round the name": F.replace("f", " f ", 1).replace(">f<", "> f <"),
    "unicode, dotted, dashed name": F.replace(">f<", ">mcp.wetter-für_1/x<"),
    "a blank in a key": F.replace(">x<", ">two words<"),
    "a call in reasoning that a later closer makes part of it": "<think>I could " + F + " but no.</think>Blue.",
}

OPEN = "<tool_call>f<arg_key>x</arg_key><arg_value>1"

REFUSED = {
    "observation in an open value": (OPEN + "<|observation|>", "<|observation|>"),
    "user in an open value": (OPEN + "<|user|>", "<|user|>"),
    "observation before the closer": (OPEN + "</arg_value><|observation|>", "<|observation|>"),
    "observation right after the opener": ("<tool_call><|observation|>", "<|observation|>"),
    "observation in a name": ("<tool_call>f<|observation|>", "<|observation|>"),
    "observation in a key": ("<tool_call>f<arg_key>x<|observation|>", "<|observation|>"),
    "observation between key and value": ("<tool_call>f<arg_key>x</arg_key><|observation|>", "<|observation|>"),
    "end of text in an open call": (OPEN + "<|endoftext|>", "<|endoftext|>"),
    "observation in the second call": (F + OPEN + "<|observation|>", "<|observation|>"),
    "observation in a call from open reasoning": ("<think>Need f." + OPEN + "<|observation|>", "<|observation|>"),
    "opener after an opener": ("<tool_call><tool_call>", "<tool_call>"),
    "opener for the missing closer": (OPEN + "</arg_value><tool_call>", "<tool_call>"),
    "opener in a key": ("<tool_call>f<arg_key><tool_call>", "<tool_call>"),
    "closer twice": (F + "</tool_call>", "</tool_call>"),
    "closer in a key": ("<tool_call>f<arg_key>x</tool_call>", "</tool_call>"),
    "key in a key": ("<tool_call>f<arg_key>x<arg_key>", "<arg_key>"),
    "empty key": ("<tool_call>f<arg_key></arg_key>", "</arg_key>"),
    "value twice": (OPEN + "</arg_value><arg_value>", "<arg_value>"),
    "value closed twice": (OPEN + "</arg_value></arg_value>", "</arg_value>"),
    "a stray value closer after the name": ("<tool_call>g</arg_value></tool_call>", "</arg_value>"),
    "text between pairs": (OPEN + "</arg_value>and", "and"),
    "arguments outside a call": ("f<arg_key>x</arg_key>", "<arg_key>"),
    "a sentence for the name": ("<tool_call>f is it<arg_key>", " is"),
    "reasoning in a name": ("<tool_call>f<think>", "<think>"),
    "another turn": ("Blue.<|assistant|>", "<|assistant|>"),
    "a system message": ("Blue.<|system|>", "<|system|>"),
    "another turn in a value": (OPEN + "<|assistant|>", "<|assistant|>"),
    "a tool result written by the model": (F + "<tool_response>1", "<tool_response>"),
    "start of text": ("[gMASK]<sop>", "[gMASK]"),
}

FLAGS = {
    "": "end",
    "<think>Sky": "end",
    "<tool_call>": "block header",
    "<tool_call>f": "block header",
    "<tool_call>f⏎": "block header",
    "<tool_call>f<arg_key>": "block",
    "<tool_call>f<arg_key>x</arg_key>": "block",
    OPEN: "block",
    OPEN + "</tool_call>": "block",
    OPEN + "</arg_value>": "block",
    OPEN + "</arg_value><arg_key>": "block",
    F: "end",
    G: "end",
    F + "<tool_call>g": "block header",
    "<think>" + OPEN: "block",
    "<think>" + F: "end",
    "<think><tool_call> is a marker": "block",
    "<think><tool_call></tool_call> are markers": "",
}

CORPUS = {
    **{f"answer: {name}": text for name, text in ANSWERS.items()},
    **{f"call: {name}": text for name, (text, _) in CALLS.items()},
    **{f"call on lines: {name}": text for name, (text, _) in CALLS_ON_LINES.items()},
    **{f"lenient: {name}": text for name, text in LENIENT.items()},
}
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"]


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("glm_4_7", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("glm_4_7", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("glm_4_7", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("glm_4_7", text)
    assert refused_at("glm_4_7", text) == token


def test_a_name_or_a_call_that_never_ends_is_a_prefix_and_no_turn():
    for text in ("<tool_call>", "<tool_call>" + "f" * 300, "<tool_call>f<arg_key>" + "x" * 300, OPEN + "1" * 300):
        assert is_unfinished("glm_4_7", text)


@pytest.mark.parametrize("prompt", IN_TEXT.values(), ids=IN_TEXT)
def test_every_prompt_that_ends_in_text_starts_a_turn(prompt):
    assert flags("glm_4_7", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("glm_4_7", text, prompt)
    for text in MALFORMED.values():
        assert refuses("glm_4_7", text, prompt)


@pytest.mark.parametrize("prompt", IN_REASONING.values(), ids=IN_REASONING)
def test_a_prompt_that_opened_reasoning_starts_inside_it(prompt):
    assert flags("glm_4_7", "", prompt) == "end"
    for text in (*WELL_FORMED, "</think>" + F, "Need both." + F + G, "Sky ques", ""):
        assert accepts("glm_4_7", text, prompt)
    assert accepts("glm_4_7", ANSWERS["an opener quoted in reasoning"].removeprefix("<think>"), prompt)
    assert refuses("glm_4_7", OPEN + "<|observation|>", prompt)
    assert refuses("glm_4_7", "Sky.</think>" + MALFORMED["nested opener"], prompt)


@pytest.mark.parametrize("cut", range(1, 18, 2))
def test_a_turn_resumed_anywhere_goes_on(cut):
    table, chat = compiled("glm_4_7")
    ids = spell(chat, WELL_FORMED[3])
    assert is_turn(table, ids[cut:], table.host.locate(spell(chat, ASKED) + ids[:cut]))


@pytest.mark.parametrize(
    "prompt", ["Why?", "<|user|>⏎Why?", ASKED + WELL_FORMED[0], CALLED, ASKED + "<tool_call></tool_call>"]
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("glm_4_7")
    assert table.host.locate(spell(chat, prompt)) == 0


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("glm_4_7", text) == expected


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("glm_4_7")
    for name in (*builtin_format("glm_4_7").terminals, *MARKERS, "</arg_value>", "<|assistant|>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a") + plain + chat.encode("b<|user|>"))
            assert is_turn(table, spell(chat, OPEN) + plain + spell(chat, "</arg_value></tool_call>"))
            assert not is_turn(table, spell(chat, OPEN) + plain)


@given(
    pairs=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=5),
            st.lists(st.text(max_size=4) | st.sampled_from(MARKERS)).map("".join),
        ),
        max_size=3,
    ),
    between=st.sampled_from(["", "⏎"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_pairs_in_any_spelling_are_a_call(pairs, between, seed):
    table, chat = compiled("glm_4_7")
    body = "".join(f"<arg_key>{k}</arg_key>{between}<arg_value>{v}</arg_value>{between}" for k, v in pairs)
    for how in SPELLINGS:
        ids = spell(chat, f"a<tool_call>f{between}{body}</tool_call>", how, seed)
        assert is_turn(table, ids)
        state = table.host.walk(ids[:1]).state
        for token in ids[1:-1]:
            state = table.host.step(state, token)
            assert table.host.block_open(state)
            assert not table.host.may_end(state)


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("glm_4_7")
    for text in (*CORPUS.values(), *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        expected = is_turn(table, spell(chat, text))
        for seed in range(6):
            assert is_turn(table, spell(chat, text, "random", seed)) == expected


def test_the_real_tokenizer_of_glm_4_5_gives_the_same_verdicts():
    table, tokenizer = compiled_on("glm_4_7", "glm4")
    assert table.info.controls["<arg_key>"] == 151356
    for text in (*WELL_FORMED, *CORPUS.values(), "<|begin_of_box|>1<|end_of_box|>", "Blue. /nothink"):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    for text in (
        *MALFORMED.values(),
        *(text for text, _ in REFUSED.values()),
        "<tool_call>f<|begin_of_box|></tool_call>",
    ):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}
