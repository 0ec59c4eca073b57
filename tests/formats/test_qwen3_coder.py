"""The qwen3_coder format (Qwen3-Coder, Qwen3.5 and later): calls of tags that are ordinary text, in two markers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled, compiled_on
from structured_commit import builtin_format
from tests.support.older_tokenizers import is_turn_lacking
from tests.support.streams import SPELLINGS, is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

ASKED = "<|im_start|>system⏎Be brief.<|im_end|>⏎<|im_start|>user⏎Why?<|im_end|>⏎<|im_start|>assistant⏎"
CALLED = ASKED + "<tool_call>⏎<function=g>⏎</function>⏎</tool_call><|im_end|>⏎"
ANSWERED = "<|im_start|>user⏎<tool_response>⏎{}⏎</tool_response>⏎<|im_end|>⏎"

IN_TEXT = {
    "Qwen3-Coder": ASKED,
    "Qwen3.5, thinking off": ASKED + "<think>⏎⏎</think>⏎⏎",
    "after a tool result": CALLED + ANSWERED + "<|im_start|>assistant⏎",
    "after a tool result, thinking off": CALLED + ANSWERED + "<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎",
}
IN_REASONING = {
    "Qwen3.5": ASKED + "<think>⏎",
    "Qwen3.5, after a tool result": CALLED + ANSWERED + "<|im_start|>assistant⏎<think>⏎",
}

F = "<tool_call>⏎<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call>"
G = "<tool_call>⏎<function=g>⏎</function>⏎</tool_call>"
F_READ, G_READ = ("f", {"x": 1}), ("g", {})

WELL_FORMED = [
    "It is blue.<|im_end|>",
    "Sky question.⏎</think>⏎⏎Blue.<|im_end|>",
    "Need f.⏎</think>⏎⏎" + F + "<|im_end|>",
    "Both.⏎⏎<tool_call>⏎<function=f>⏎<parameter=s>⏎a < b⏎c⏎</parameter>⏎</function>⏎</tool_call>⏎" + G + "<|im_end|>",
    "<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call><|im_end|>",
]

MALFORMED = {
    "hermes body": '<tool_call>⏎{"name": "f", "arguments": {"x": 1}}⏎</tool_call>',
    "empty wrapper": "<tool_call>⏎</tool_call>",
    "parameter outside a function": "<tool_call>⏎<parameter=x>⏎1⏎</parameter>⏎</tool_call>",
    "function tag not closed": "<tool_call>⏎<function=f⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call>",
    "opener between the tags of an open function": "<tool_call>⏎<function=f>⏎<tool_call>⏎<function=g>⏎</function>⏎"
    "</tool_call>",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

ANSWERS = {
    "empty turn": "",
    "white space only": " ⏎⏎\t",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "tags in text": "Write <function=f> and <parameter=x>, then </function>.",
    "a function tag that never ends": "<function=f>⏎<parameter=x>⏎1",
    "markers spelled in other words": "< tool_call> </tool _call> <|im_end |>",
    "a stray closer of calls": "Done.⏎</tool_call>⏎",
    "a second closer of reasoning": "Sky.</think>Blue.</think>Yes.",
    "empty reasoning, opened by the prompt": "⏎</think>⏎⏎Blue.",
    "reasoning cut short by the end": "<think>⏎Sky ques",
    "reasoning twice": "<think>a</think>b<think>c</think>d",
    "a call marker quoted in reasoning": "<think>I must write <tool_call> and then </tool_call>.</think>Blue.",
    "a broken call in reasoning": "<think><tool_call>⏎<function=f</tool_call> no.</think>Blue.",
    "a result quoted in reasoning": "<think><tool_response>1</tool_response></think>Blue.",
}

CALLS = {
    "one call": (F, [F_READ]),
    "two calls": (F + "⏎" + G, [F_READ, G_READ]),
    "three calls without white space": (F + G + F, [F_READ, G_READ, F_READ]),
    "text before, between, after": ("A⏎⏎" + F + "⏎b⏎" + G + "⏎c", [F_READ, G_READ]),
    "reasoning before": ("<think>⏎Need f.⏎</think>⏎⏎" + F, [F_READ]),
    "from open reasoning": ("<think>⏎Need both.⏎" + F + "⏎" + G, [F_READ, G_READ]),
    "compact": ("<tool_call><function=f><parameter=x>1</parameter></function></tool_call>", [F_READ]),
    "no parameters, compact": ("<tool_call><function=g></function></tool_call>", [G_READ]),
    "two functions in one wrapper": (
        F.replace("⏎</tool_call>", "⏎<function=g>⏎</function>⏎</tool_call>"),
        [F_READ, G_READ],
    ),
    "no parameters first, then another function": (
        "<tool_call>⏎<function=g>⏎</function>⏎<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call>",
        [G_READ, F_READ],
    ),
    "parameter not closed": ("<tool_call>⏎<function=f>⏎<parameter=x>⏎1⏎</function>⏎</tool_call>", [F_READ]),
    "first parameter not closed": (
        "<tool_call>⏎<function=f>⏎<parameter=x>⏎1⏎<parameter=s>⏎a⏎</parameter>⏎</function>⏎</tool_call>",
        [("f", {"x": 1, "s": "a"})],
    ),
    "function not closed": ("<tool_call>⏎<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</tool_call>", [F_READ]),
    "neither closed": ("<tool_call>⏎<function=f>⏎<parameter=x>⏎1⏎</tool_call>", [F_READ]),
    "no parameters, not closed": ("<tool_call>⏎<function=g>⏎</tool_call>", [G_READ]),
    "a value of many lines": (
        '<tool_call>⏎<function=f>⏎<parameter=s>⏎if a < b:⏎\tprint("{}")⏎⏎</parameter>⏎</function>⏎</tool_call>',
        [("f", {"s": 'if a < b:\n\tprint("{}")\n'})],
    ),
    "an empty value": (
        "<tool_call>⏎<function=f>⏎<parameter=s>⏎⏎</parameter>⏎</function>⏎</tool_call>",
        [("f", {"s": ""})],
    ),
    "unicode and tags in a value": (
        "<tool_call>⏎<function=f>⏎<parameter=s>⏎<b>空 🌤️</b> </p⏎</parameter>⏎</function>⏎</tool_call>",
        [("f", {"s": "<b>空 🌤️</b> </p"})],
    ),
    "an opener in a value": (
        "<tool_call>⏎<function=f>⏎<parameter=s>⏎a <tool_call> <b><tool_call>⏎</parameter>⏎</function>⏎</tool_call>",
        [("f", {"s": "a <tool_call> <b><tool_call>"})],
    ),
    "a value that begins with an opener": (
        "<tool_call>⏎<function=f>⏎<parameter=s>⏎<tool_call>⏎{}⏎</parameter>⏎</function>⏎</tool_call>",
        [("f", {"s": "<tool_call>\n{}"})],
    ),
    "other markers in a value": (
        "<tool_call>⏎<function=f>⏎<parameter=s>⏎<think></think><tool_response></tool_response>⏎</parameter>⏎</function>⏎"
        "</tool_call>",
        [("f", {"s": "<think></think><tool_response></tool_response>"})],
    ),
}

LENIENT = {
    "opener missing": "Need f.⏎<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call>",
    "opener missing, then a call": "<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>⏎</tool_call>⏎" + G,
    "no wrapper": "<function=f>⏎<parameter=x>⏎1⏎</parameter>⏎</function>",
    "closer in a value": F.replace("⏎1⏎", "⏎a</tool_call>b⏎"),
    "end tags in a value": F.replace("⏎1⏎", "⏎a</function> b</parameter> c⏎"),
    "end tags and a closer in a value": F.replace("⏎1⏎", "⏎a⏎</function>⏎</tool_call>⏎b⏎") + "⏎" + G,
    "blank in the name": "<tool_call>⏎<function=my f>⏎</function>⏎</tool_call>",
    "unicode names": "<tool_call>⏎<function=wetter_für>⏎<parameter=größe>⏎1⏎</parameter>⏎</function>⏎</tool_call>",
    "a call in reasoning that a later closer makes part of it": "<think>I could " + F + " but no.</think>Blue.",
}

OPEN = "<tool_call>⏎<function=f>⏎<parameter=x>⏎1"

REFUSED = {
    "terminal in an open value": (OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal behind a parameter": (OPEN + "⏎</parameter>⏎<|im_end|>", "<|im_end|>"),
    "terminal behind a function": (OPEN + "⏎</parameter>⏎</function>⏎<|im_end|>", "<|im_end|>"),
    "terminal right after the opener": ("<tool_call><|im_end|>", "<|im_end|>"),
    "terminal in a name": ("<tool_call>⏎<function=f<|im_end|>", "<|im_end|>"),
    "end of text in an open function": ("<tool_call>⏎<function=f>⏎<|endoftext|>", "<|endoftext|>"),
    "terminal in the second call": (F + OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal in a call from open reasoning": ("<think>Need f." + OPEN + "<|im_end|>", "<|im_end|>"),
    "opener after an opener": ("<tool_call><tool_call>", "<tool_call>"),
    "opener in a name": ("<tool_call>⏎<function=f<tool_call>", "<tool_call>"),
    "opener behind a parameter": (OPEN + "⏎</parameter>⏎<tool_call>", "<tool_call>"),
    "opener for the missing closer": (OPEN + "⏎</parameter>⏎</function>⏎<tool_call>", "<tool_call>"),
    "opener for the missing closer, no parameters": ("<tool_call>⏎<function=g>⏎</function>⏎<tool_call>", "<tool_call>"),
    "opener for the missing closer, missing end tag": (OPEN + "⏎</function><tool_call>", "<tool_call>"),
    "closer in a name": ("<tool_call>⏎<function=f</tool_call>", "</tool_call>"),
    "reasoning before the first parameter": ("<tool_call>⏎<function=f>⏎<think>", "<think>"),
    "text before the function": ("<tool_call>⏎Calling f.", "Calling"),
    "JSON for the parameters": ('<tool_call>⏎<function=f>⏎{"x": 1}', '{"'),
    "text behind a function without parameters": ("<tool_call>⏎<function=g>⏎</function>⏎ok", "ok"),
    "empty name": ("<tool_call>⏎<function=>", "=>"),
    "another turn": ("Blue.<|im_start|>user", "<|im_start|>"),
    "another turn in a value": (OPEN + "<|im_start|>", "<|im_start|>"),
    "a tool result written by the model": (F + "⏎<tool_response>⏎1", "<tool_response>"),
}

FLAGS = {
    "": "end",
    "<think>Sky": "end",
    "<tool_call>": "block header",
    "<tool_call>⏎<function=": "block header",
    "<tool_call>⏎<function=f": "block header",
    "<tool_call>⏎<function=f>": "block",
    "<tool_call>⏎<function=f>⏎": "block",
    "<tool_call>⏎<function=g>⏎</function>⏎<function=f": "block header",
    OPEN: "block",
    OPEN + "⏎</parameter>⏎": "block",
    OPEN + "⏎</parameter>⏎</function>⏎": "block",
    F: "end",
    F + "⏎<tool_call>": "block header",
    "<function=f>⏎<parameter=x>⏎1": "end",
    "<think>" + OPEN: "block",
    "<think><tool_call> is a marker": "block",
    "<think><tool_call></tool_call> are markers": "",
    "<think>" + F: "end",
}

CORPUS = {
    **{f"answer: {name}": text for name, text in ANSWERS.items()},
    **{f"call: {name}": text for name, (text, _) in CALLS.items()},
    **{f"lenient: {name}": text for name, text in LENIENT.items()},
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("qwen3_coder", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("qwen3_coder", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("qwen3_coder", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("qwen3_coder", text)
    assert refused_at("qwen3_coder", text) == token


def test_a_call_that_never_ends_is_a_prefix_and_no_turn():
    for text in ("<tool_call>", "<tool_call>⏎<function=" + "f" * 300, OPEN, OPEN + "⏎</parameter>⏎</function>"):
        assert is_unfinished("qwen3_coder", text)


@pytest.mark.parametrize("prompt", IN_TEXT.values(), ids=IN_TEXT)
def test_every_prompt_that_ends_in_text_starts_a_turn(prompt):
    assert flags("qwen3_coder", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("qwen3_coder", text, prompt)
    for text in MALFORMED.values():
        assert refuses("qwen3_coder", text, prompt)


@pytest.mark.parametrize("prompt", IN_REASONING.values(), ids=IN_REASONING)
def test_a_prompt_that_opened_reasoning_starts_inside_it(prompt):
    assert flags("qwen3_coder", "", prompt) == "end"
    for text in (*WELL_FORMED, "⏎</think>⏎⏎" + F, "Need both.⏎" + F + "⏎" + G, "Sky ques", ""):
        assert accepts("qwen3_coder", text, prompt)
    assert accepts("qwen3_coder", "I must write <tool_call> first.</think>Blue.", prompt)
    assert refuses("qwen3_coder", OPEN + "<|im_end|>", prompt)
    assert refuses("qwen3_coder", "Sky.⏎</think>⏎⏎" + MALFORMED["empty wrapper"], prompt)


@pytest.mark.parametrize("cut", range(1, 40, 4))
def test_a_turn_resumed_anywhere_goes_on(cut):
    table, chat = compiled("qwen3_coder")
    ids = spell(chat, WELL_FORMED[3])
    assert is_turn(table, ids[cut:], table.host.locate(spell(chat, ASKED) + ids[:cut]))


@pytest.mark.parametrize("prompt", ["Why?", "<|im_start|>user⏎Why?", ASKED + WELL_FORMED[0], ASKED + "<tool_call>a"])
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("qwen3_coder")
    assert table.host.locate(spell(chat, prompt)) == 0


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("qwen3_coder", text) == expected


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("qwen3_coder")
    for name in (*builtin_format("qwen3_coder").terminals, "<tool_call>", "</tool_call>", "<|im_start|>", "<think>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a") + plain + chat.encode("b<|im_end|>"))
            whole = spell(chat, OPEN) + plain + spell(chat, "⏎</parameter>⏎</function>⏎</tool_call>")
            assert is_turn(table, whole)
            assert not is_turn(table, spell(chat, "<tool_call>") + plain)


@given(
    values=st.lists(
        st.lists(
            st.text(max_size=4)
            | st.sampled_from(
                ["<tool_call>", "<think>", "</think>", "<tool_response>", "</function", "<parameter=x>", ">"]
            )
        ).map("".join),
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_values_in_any_spelling_are_a_call(values, seed):
    table, chat = compiled("qwen3_coder")
    values = [v.replace("</function>", "") for v in values]
    parameters = "".join(f"<parameter=k>⏎{value}⏎</parameter>⏎" for value in values)
    for how in SPELLINGS:
        ids = spell(chat, f"a<tool_call>⏎<function=f>⏎{parameters}</function>⏎</tool_call>", how, seed)
        assert is_turn(table, ids)
        state = table.host.walk(ids[:1]).state
        for token in ids[1:-1]:
            state = table.host.step(state, token)
            assert table.host.block_open(state)
            assert not table.host.may_end(state)


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("qwen3_coder")
    for text in (*CORPUS.values(), *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        expected = is_turn(table, spell(chat, text))
        for seed in range(6):
            assert is_turn(table, spell(chat, text, "random", seed)) == expected


def test_the_real_tokenizer_of_qwen3_gives_the_same_verdicts():
    table, tokenizer = compiled_on("qwen3_coder", "qwen3")
    for text in (*WELL_FORMED, *CORPUS.values()):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    unnamed = "<tool_call>⏎<function=f<|vision_start|>>⏎</function>⏎</tool_call>"
    for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values()), unnamed):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}
    assert verdicts_on(tokenizer, table, F.replace("1", "<|vision_start|>")) == {True}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *((text, True) for text in (*WELL_FORMED, "<think>a</think>" + F, "<tool_response>a")),
        *((text, False) for text in (*MALFORMED.values(), "<think><tool_call> is one</think>", "<think>" + OPEN)),
    ],
)
def test_a_tokenizer_without_reasoning_tokens_reads_them_as_text(text, accepted):
    lacked = ("<think>", "</think>", "<tool_response>", "</tool_response>")
    assert is_turn_lacking("qwen3_coder", text, *lacked) == accepted
