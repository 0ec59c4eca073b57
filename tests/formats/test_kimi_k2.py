"""The kimi_k2 format (Kimi K2 and its successors up to K2.7): sections of calls with numbered ids."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.tables import compiled, compiled_on
from structured_commit import builtin_format
from tests.support.older_tokenizers import is_turn_lacking
from tests.support.streams import SPELLINGS, is_turn, spell, verdicts_on
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, DONE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = [BEGIN, CALL, ARGUMENTS, DONE, END, "<think>", "</think>"]
EVERY_MARKER = "".join(MARKERS)

F = f'{CALL}functions.f:0{ARGUMENTS}{{"x": 1}}{DONE}'
G = f"{CALL}functions.g:1{ARGUMENTS}{{}}{DONE}"
F_READ, G_READ = ("f", {"x": 1}), ("g", {})

OPENER = "<|im_assistant|>assistant<|im_middle|>"
ASKED = "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Why?<|im_end|>" + OPENER
CALLED = ASKED + BEGIN + F + END + "<|im_end|>"
ANSWERED = "<|im_system|>f<|im_middle|>## Return of functions.f:0⏎{}<|im_end|>"

IN_TEXT = {
    "K2-Instruct, K2-Thinking": ASKED,
    "K2.5, thinking off": ASKED + "<think></think>",
    "after a tool result": CALLED + ANSWERED + OPENER,
    "after two tool results, thinking off": CALLED + ANSWERED * 2 + OPENER + "<think></think>",
}
IN_REASONING = {
    "K2.5": ASKED + "<think>",
    "K2.5, after a tool result": CALLED + ANSWERED + OPENER + "<think>",
}

WELL_FORMED = [
    "It is blue.<|im_end|>",
    "<think>Sky question.</think>Blue.<|im_end|>",
    "<think>Need f.</think>" + BEGIN + F + END + "<|im_end|>",
    "Both." + BEGIN + F.replace(":0", ":3") + G.replace(":1", ":4") + END + "<|im_end|>",
    f'{BEGIN}⏎{CALL} f:0 {ARGUMENTS} {{"x": 1}} {DONE}⏎{END}<|im_end|>',
]

MALFORMED = {
    "no section": F,
    "id without number": f'{BEGIN}{CALL}functions.f{ARGUMENTS}{{"x": 1}}{DONE}{END}',
    "argument marker missing": f'{BEGIN}{CALL}functions.f:0{{"x": 1}}{DONE}{END}',
    "empty section": BEGIN + END,
    "body is not a call": BEGIN + '{"name": "f"}' + END,
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

ANSWERS = {
    "empty turn": "",
    "white space only": " ⏎⏎\t",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "braces and quotes": '{"name": "f", "arguments": {"x": "}',
    "the section marker in the singular is text": "<|tool_call_section_begin|>",
    "markers spelled in other words": "< |im_end|> <|tool_call_begin |>",
    "a second closer of reasoning": "Sky.</think>Blue.</think>Yes.",
    "an opener of reasoning in text": "Blue.<think>Or not?",
    "reasoning cut short by the end": "<think>Sky ques",
    "empty reasoning": "<think></think>Blue.",
    "reasoning twice": "<think>a</think>b<think>c</think>d",
    "markers quoted in reasoning": f"<think>First {BEGIN}, then {CALL} and {ARGUMENTS}, {DONE}, {END}.</think>Blue.",
    "a call without section in reasoning": "<think>Like " + F + "?</think>Blue.",
    "an opener quoted in reasoning": f"<think>First {BEGIN} I think.</think>Blue.",
    "a closer in open reasoning": f"<think>Not {END} yet.",
}

CALLS = {
    "one call": (BEGIN + F + END, [F_READ]),
    "two calls": (BEGIN + F + G + END, [F_READ, G_READ]),
    "line feeds round the markers": (f"{BEGIN}⏎{F}⏎{G}⏎{END}", [F_READ, G_READ]),
    "blanks round the id and the arguments": (f'{BEGIN}{CALL} f:0 {ARGUMENTS} {{"x": 1}} {DONE}{END}', [F_READ]),
    "an id without functions.": (f"{BEGIN}{CALL}g:12{ARGUMENTS}{{}}{DONE}{END}", [G_READ]),
    "a section that is not closed": (BEGIN + F + G, [F_READ, G_READ]),
    "two sections": (BEGIN + F + END + BEGIN + G + END, [F_READ, G_READ]),
    "text before, between, after": ("A." + BEGIN + F + END + "b" + BEGIN + G + END + "c", [F_READ, G_READ]),
    "text after a section that is not closed": (BEGIN + F + "⏎Asked.", [F_READ]),
    "reasoning before": ("<think>Need f.</think>" + BEGIN + F + END, [F_READ]),
    "from open reasoning": ("<think>Need both." + BEGIN + F + G + END, [F_READ, G_READ]),
    "pretty-printed arguments": (f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{⏎  "x": 1⏎}}{DONE}{END}', [F_READ]),
    "braces, quotes and escapes in a string": (
        BEGIN + CALL + "functions.f:0" + ARGUMENTS + r'{"s": "}\"{\\ \n"}' + DONE + END,
        [("f", {"s": '}"{\\ \n'})],
    ),
    "unicode in a string": (
        f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"s": "空 🌤️"}}{DONE}{END}',
        [("f", {"s": "空 🌤️"})],
    ),
    "markers in a string": (
        f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"s": "{EVERY_MARKER}"}}{DONE}{END}',
        [("f", {"s": EVERY_MARKER})],
    ),
}

LENIENT = {
    "a bare number for an id": f'{BEGIN}{CALL}3{ARGUMENTS}{{"x": 1}}{DONE}{END}',
    "dotted, dashed, unicode name": f"{BEGIN}{CALL}functions.mcp.a-b_ü:7{ARGUMENTS}{{}}{DONE}{END}",
    "a quote not escaped": f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"s": "it"s"}}{DONE}{END}',
    "JSON not closed inside": f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"x": {{"y": 1}}{DONE}{END}',
    "a section in reasoning that a later closer makes part of it": "<think>" + BEGIN + F + END + " no.</think>Blue.",
    "text after a section from open reasoning": "<think>Need f." + BEGIN + F + END + "Done.",
}

OPEN = f'{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"x": 1'

REFUSED = {
    "terminal in open arguments": (OPEN + "<|im_end|>", "<|im_end|>"),
    "terminal in an open string": (OPEN + ', "s": "a<|im_end|>', "<|im_end|>"),
    "terminal right after the section's opener": (BEGIN + "<|im_end|>", "<|im_end|>"),
    "terminal in an id": (f"{BEGIN}{CALL}functions.f:<|im_end|>", "<|im_end|>"),
    "terminal before the arguments": (f"{BEGIN}{CALL}functions.f:0{ARGUMENTS}<|im_end|>", "<|im_end|>"),
    "terminal before the call's closer": (OPEN + "}<|im_end|>", "<|im_end|>"),
    "end of sequence in open arguments": (OPEN + "[EOS]", "[EOS]"),
    "terminal in the second call": (f"{BEGIN}{F}{CALL}functions.g:1<|im_end|>", "<|im_end|>"),
    "terminal in a second call from open reasoning": (
        f"<think>{BEGIN}{F}{CALL}g:1{ARGUMENTS}{{<|im_end|>",
        "<|im_end|>",
    ),
    "section in a section": (BEGIN + BEGIN, BEGIN),
    "call in a call": (f"{BEGIN}{CALL}{CALL}", CALL),
    "call in open arguments": (OPEN + CALL, CALL),
    "call for the missing closer": (OPEN + "}" + CALL, CALL),
    "section closed in a call": (OPEN + "}" + END, END),
    "section closed twice": (BEGIN + F + END + END, END),
    "call closed twice": (BEGIN + F + DONE, DONE),
    "call after the section": (BEGIN + F + END + G, CALL),
    "text between calls": (BEGIN + F + "and" + G, CALL),
    "text before the first call": (BEGIN + "Calling", "Calling"),
    "two argument markers": (f"{BEGIN}{CALL}f:0{ARGUMENTS}{ARGUMENTS}", ARGUMENTS),
    "argument marker outside a call": (ARGUMENTS + "{}", ARGUMENTS),
    "empty arguments": (f"{BEGIN}{CALL}f:0{ARGUMENTS}{DONE}", DONE),
    "arguments that are no object": (f"{BEGIN}{CALL}f:0{ARGUMENTS}[1]{DONE}", "["),
    "closer in an open object": (OPEN + "," + DONE, DONE),
    "empty id": (f"{BEGIN}{CALL}{ARGUMENTS}", ARGUMENTS),
    "another turn": ("Blue.<|im_user|>", "<|im_user|>"),
    "another turn of its own": ("Blue.<|im_assistant|>assistant", "<|im_assistant|>"),
    "a system message": ("Blue.<|im_system|>f", "<|im_system|>"),
    "a middle marker": ("assistant<|im_middle|>", "<|im_middle|>"),
    "another turn in a string": (OPEN + ', "s": "<|im_user|>', "<|im_user|>"),
}

FLAGS = {
    "": "end",
    "<think>Sky": "end",
    BEGIN: "block",
    BEGIN + "⏎": "block",
    BEGIN + CALL: "block header",
    BEGIN + CALL + "functions.f:0": "block header",
    BEGIN + CALL + "functions.f:0" + ARGUMENTS: "block",
    OPEN: "block",
    OPEN + "}": "block",
    BEGIN + F: "end",
    BEGIN + F + "⏎": "end",
    BEGIN + F + CALL: "block header",
    BEGIN + F + G: "end",
    BEGIN + F + END: "end",
    "<think>" + BEGIN: "block",
    "<think>" + OPEN: "block",
    "<think>" + BEGIN + F: "end",
    "<think>" + BEGIN + " is a marker": "block",
    "<think>" + BEGIN + END + " are markers": "",
}

CORPUS = {
    **{f"answer: {name}": text for name, text in ANSWERS.items()},
    **{f"call: {name}": text for name, (text, _) in CALLS.items()},
    **{f"lenient: {name}": text for name, text in LENIENT.items()},
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("kimi_k2", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("kimi_k2", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("kimi_k2", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("kimi_k2", text)
    assert refused_at("kimi_k2", text) == token


def test_an_id_or_a_call_that_never_ends_is_a_prefix_and_no_turn():
    for text in (BEGIN, BEGIN + CALL + "functions." + "f" * 300, BEGIN + CALL + "f:" + "1" * 50, OPEN, OPEN + "}"):
        assert is_unfinished("kimi_k2", text)


@pytest.mark.parametrize("prompt", IN_TEXT.values(), ids=IN_TEXT)
def test_every_prompt_that_ends_in_text_starts_a_turn(prompt):
    assert flags("kimi_k2", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("kimi_k2", text, prompt)
    for text in MALFORMED.values():
        assert refuses("kimi_k2", text, prompt)


@pytest.mark.parametrize("prompt", IN_REASONING.values(), ids=IN_REASONING)
def test_a_prompt_that_opened_reasoning_starts_inside_it(prompt):
    assert flags("kimi_k2", "", prompt) == "end"
    for text in ("Sky.</think>Blue.", "</think>" + BEGIN + F + END, "Need both." + BEGIN + F + G + END, "Sky ques", ""):
        assert accepts("kimi_k2", text, prompt)
    assert accepts("kimi_k2", ANSWERS["markers quoted in reasoning"].removeprefix("<think>"), prompt)
    assert refuses("kimi_k2", OPEN + "<|im_end|>", prompt)
    assert refuses("kimi_k2", "Sky.</think>" + MALFORMED["empty section"], prompt)


@pytest.mark.parametrize("cut", range(1, 30, 3))
def test_a_turn_resumed_anywhere_goes_on(cut):
    table, chat = compiled("kimi_k2")
    ids = spell(chat, WELL_FORMED[3])
    assert is_turn(table, ids[cut:], table.host.locate(spell(chat, ASKED) + ids[:cut]))


@pytest.mark.parametrize("prompt", ["Why?", "<|im_user|>user<|im_middle|>Why?", ASKED + WELL_FORMED[0], ASKED + F])
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("kimi_k2")
    assert table.host.locate(spell(chat, prompt)) == 0


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("kimi_k2", text) == expected


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("kimi_k2")
    for name in (*builtin_format("kimi_k2").terminals, *MARKERS, "<|im_user|>", "<|im_middle|>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a") + plain + chat.encode("b<|im_end|>"))
            assert is_turn(table, spell(chat, OPEN + ', "s": "') + plain + spell(chat, '"}' + DONE + END))
            assert not is_turn(table, spell(chat, BEGIN) + plain)


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.none() | st.integers() | st.lists(st.text(max_size=4) | st.sampled_from(MARKERS)).map("".join),
        max_size=4,
    ),
    indent=st.none() | st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_json_arguments_in_any_spelling_are_a_call(arguments, indent, seed):
    table, chat = compiled("kimi_k2")
    # A closer behind a brace closes, also in a string: every parser reads it so.
    body = re.sub(r"[} ]+(?=<\|tool_call_end)", "", json.dumps(arguments, ensure_ascii=False, indent=indent))
    for how in SPELLINGS:
        ids = spell(chat, f"a{BEGIN}{CALL}functions.f:0{ARGUMENTS}{body}{DONE}", how, seed)
        assert is_turn(table, ids)
        state = table.host.walk(ids[:1]).state
        for token in ids[1:-1]:
            state = table.host.step(state, token)
            assert table.host.block_open(state)
            assert not table.host.may_end(state)


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("kimi_k2")
    for text in (*CORPUS.values(), *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        expected = is_turn(table, spell(chat, text))
        for seed in range(6):
            assert is_turn(table, spell(chat, text, "random", seed)) == expected


def test_the_real_tokenizer_of_kimi_k2_gives_the_same_verdicts():
    table, tokenizer = compiled_on("kimi_k2", "kimi_k2")
    assert table.info.controls[BEGIN] == 163595
    for text in (*WELL_FORMED, *CORPUS.values()):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *((text, True) for text in (*WELL_FORMED, "<think>a" + BEGIN + F + END, "a</think>b")),
        *((text, False) for text in (*MALFORMED.values(), f"<think>First {BEGIN} I think.</think>", "<think>" + OPEN)),
    ],
)
def test_a_tokenizer_without_reasoning_tokens_reads_them_as_text(text, accepted):
    assert is_turn_lacking("kimi_k2", text, "<think>", "</think>") == accepted
