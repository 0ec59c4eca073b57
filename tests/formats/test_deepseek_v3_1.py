"""The deepseek_v3_1 format (V3, R1, V3.1, V3.2): sections of calls between markers, or blocks of DSML tags."""

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

EOS = "<｜end▁of▁sentence｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, DONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
D = "｜DSML｜"

F = f'{CALL}f{SEP}{{"x": 1}}{DONE}'
G = f"{CALL}g{SEP}{{}}{DONE}"
F_FENCED = f'{CALL}function{SEP}f⏎```json⏎{{"x": 1}}⏎```{DONE}'
G_FENCED = f"{CALL}function{SEP}g⏎```json⏎{{}}⏎```{DONE}"
F_READ, G_READ = ("f", {"x": 1}), ("g", {})


def block(*invokes: str) -> str:
    return f"⏎⏎<{D}function_calls>⏎{''.join(invokes)}</{D}function_calls>"


def parameter(key: str, value: str, string: str = "true") -> str:
    return f'<{D}parameter name="{key}" string="{string}">{value}</{D}parameter>⏎'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D}invoke name="{name}">⏎{"".join(parameters)}</{D}invoke>⏎'


F_TAGS, G_TAGS = invoke("f", parameter("x", "1", "false")), invoke("g")

ASKED = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Why?<｜Assistant｜>"
RESULT = "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>"
CALLED = ASKED + "</think>" + BEGIN + F + END + EOS
CALLED_BY_TAGS = ASKED + "<think>a</think>" + block(F_TAGS) + EOS
RESULTS = "⏎⏎<function_results>⏎<result>{}</result>⏎<result></function</result>⏎</function_results>⏎⏎"
ODD_RESULTS = f"⏎⏎<function_results>⏎<result><</function_<{D}x <think>a</think></result>⏎</function_results>⏎⏎"

IN_TEXT = {
    "V3, R1, which opens reasoning itself": ASKED,
    "V3.1, V3.2, thinking off": ASKED + "</think>",
    "V3.1, after a tool result": CALLED + RESULT,
    "V3.1, after two tool results": CALLED + RESULT * 2,
    "V3, after tool results": ASKED
    + BEGIN
    + F_FENCED
    + END
    + EOS
    + "<｜tool▁outputs▁begin｜>"
    + RESULT
    + "⏎"
    + RESULT
    + "<｜tool▁outputs▁end｜>",
    "V3.2, after tool results, thinking off": CALLED_BY_TAGS + RESULTS + "</think>",
    "V3.2, after results that hold markers": CALLED_BY_TAGS + ODD_RESULTS + "</think>",
    "second turn, tools used in the first": CALLED + RESULT + "Two." + EOS + "<｜User｜>Sure?<｜Assistant｜></think>",
}
IN_REASONING = {
    "R1, V3.1, V3.2": ASKED + "<think>",
    "R1 with a line feed": ASKED + "<think>⏎",
    "V3.2, after tool results": CALLED_BY_TAGS + RESULTS + "<think>",
    "V3.2, after results that hold markers": CALLED_BY_TAGS + ODD_RESULTS + "<think>",
}

WELL_FORMED = [
    "It is blue.<｜end▁of▁sentence｜>",
    "Sky question.</think>Blue.<｜end▁of▁sentence｜>",
    BEGIN + F + END + EOS,
    "Both." + BEGIN + F + G + END + EOS,
    "Need f.</think>" + block(F_TAGS) + EOS,
    BEGIN + "⏎" + F + "⏎" + END + EOS,
]

MALFORMED = {
    "call outside a section": F,
    "separator missing": f'{BEGIN}{CALL}f{{"x": 1}}{DONE}{END}',
    "call not closed": f'{BEGIN}{CALL}f{SEP}{{"x": 1}}{END}',
    "empty section": BEGIN + END,
}

NOT_SKELETON = {
    "V3.2 without the blank line, self-closing invoke: SGLang reads the call": f"hi<{D}function_calls>⏎"
    f'<{D}invoke name="f"/>⏎</{D}function_calls>',
}

ANSWERS = {
    "empty turn": "",
    "white space only": " ⏎⏎\t",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "braces and quotes": '{"name": "f", "arguments": {"x": "}',
    "tags in text": "Write <function_calls> or <invoke name=>, then </.",
    "markers spelled in other words": "<|tool_calls_begin|> <｜User ｜> <｜ DSML｜function_calls>",
    "a second closer of reasoning": "Sky.</think>Blue.</think>Yes.",
    "empty reasoning, opened by the prompt": "</think>Blue.",
    "reasoning that the model opens": "<think>⏎Sky.⏎</think>⏎⏎Blue.",
    "reasoning opened twice": "<think><think>⏎Sky.⏎</think>⏎⏎Blue.",
    "blank before reasoning": "⏎<think>Sky.</think>Blue.",
    "reasoning cut short by the end": "<think>⏎Sky ques",
    "markers in reasoning": f"<think>First {BEGIN}, {CALL}, {SEP}, {DONE}, {END} and <{D}invoke>.</think>Blue.",
    "a section in open reasoning is reasoning": "<think>Need f." + BEGIN + F + END,
    "a block in open reasoning is reasoning": "<think>Need f." + block(F_TAGS),
}

CALLS = {
    "one call": (BEGIN + F + END, [F_READ]),
    "two calls": (BEGIN + F + G + END, [F_READ, G_READ]),
    "line feeds round the markers": (f"{BEGIN}⏎{F}⏎{G}⏎{END}", [F_READ, G_READ]),
    "a section that is not closed": (BEGIN + F + G, [F_READ, G_READ]),
    "two sections": (BEGIN + F + END + BEGIN + G + END, [F_READ, G_READ]),
    "text before, between, after": ("A." + BEGIN + F + END + "b" + BEGIN + G + END + "c", [F_READ, G_READ]),
    "reasoning before": ("Need f.</think>" + BEGIN + F + END, [F_READ]),
    "pretty-printed arguments": (f'{BEGIN}{CALL}f{SEP}⏎{{⏎  "x": 1⏎}}⏎{DONE}{END}', [F_READ]),
    "braces, quotes and escapes in a string": (
        BEGIN + CALL + "f" + SEP + r'{"s": "}\"{\\ \n"}' + DONE + END,
        [("f", {"s": '}"{\\ \n'})],
    ),
    "unicode in a string": (f'{BEGIN}{CALL}f{SEP}{{"s": "空 🌤️"}}{DONE}{END}', [("f", {"s": "空 🌤️"})]),
    "markers in a string": (
        f'{BEGIN}{CALL}f{SEP}{{"s": "{BEGIN}{END}<think></think>"}}{DONE}{END}',
        [("f", {"s": f"{BEGIN}{END}<think></think>"})],
    ),
}

FENCED_CALLS = {
    "one call": (BEGIN + F_FENCED + END, [F_READ]),
    "two calls": (BEGIN + F_FENCED + "⏎" + G_FENCED + END, [F_READ, G_READ]),
    "after reasoning": ("<think>⏎Need f.⏎</think>⏎⏎" + BEGIN + F_FENCED + END, [F_READ]),
}

TAG_CALLS = {
    "one call": (block(F_TAGS), [F_READ]),
    "two calls": ("Both." + block(F_TAGS, G_TAGS), [F_READ, G_READ]),
    "two blocks": (block(F_TAGS) + block(G_TAGS), [F_READ, G_READ]),
    "text after": (block(F_TAGS) + "⏎Asked.", [F_READ]),
    "no blank line before": (block(F_TAGS).lstrip("⏎"), [F_READ]),
    "no line feeds": (block(F_TAGS).replace("⏎", ""), [F_READ]),
    "two parameters": (
        block(invoke("f", parameter("x", "1", "false"), parameter("s", "a b"))),
        [("f", {"x": 1, "s": "a b"})],
    ),
    "a value of many lines": (
        block(invoke("f", parameter("s", 'if a < b:⏎\t"{}"</'))),
        [("f", {"s": 'if a < b:\n\t"{}"</'})],
    ),
    "unicode in a value": (block(invoke("f", parameter("s", "空 🌤️"))), [("f", {"s": "空 🌤️"})]),
    "tags in a value": (
        block(invoke("f", parameter("s", f'<{D}invoke name="g"> <{D}function_calls>'))),
        [("f", {"s": f'<{D}invoke name="g"> <{D}function_calls>'})],
    ),
    "markers in a value": (
        block(invoke("f", parameter("s", f"<think></think>{BEGIN}{DONE}"))),
        [("f", {"s": f"<think></think>{BEGIN}{DONE}"})],
    ),
    "an empty value": (block(invoke("f", parameter("s", ""))), [("f", {"s": ""})]),
    "arguments as JSON": (block(f'<{D}invoke name="f">⏎{{"x": 1}}⏎</{D}invoke>⏎'), [F_READ]),
    "self-closing": (block(f'<{D}invoke name="g"/>⏎'), [G_READ]),
    "no block": ("A." + F_TAGS, [F_READ]),
    "no block, two calls": (F_TAGS + G_TAGS, [F_READ, G_READ]),
}

LENIENT = {
    "blanks round a name": f'{BEGIN}{CALL} f {SEP}{{"x": 1}}{DONE}{END}',
    "dotted, dashed, unicode name": f"{BEGIN}{CALL}mcp.wetter-für/1{SEP}{{}}{DONE}{END}",
    "a quote not escaped": f'{BEGIN}{CALL}f{SEP}{{"s": "it"s"}}{DONE}{END}',
    "a quote not escaped, fenced": F_FENCED.join((BEGIN, END)).replace("1", '"it"s"'),
    "JSON not closed inside": f'{BEGIN}{CALL}f{SEP}{{"x": {{"y": 1}}{DONE}{END}',
    "text after a section that is not closed": BEGIN + F + "⏎Asked.",
}

OPEN = f'{BEGIN}{CALL}f{SEP}{{"x": 1'
OPEN_TAGS = f'<{D}function_calls>⏎<{D}invoke name="f">⏎<{D}parameter name="s" string="true">a'

REFUSED = {
    "terminal in open arguments": (OPEN + EOS, EOS),
    "terminal in an open string": (OPEN + ', "s": "a' + EOS, EOS),
    "terminal right after the section's opener": (BEGIN + EOS, EOS),
    "terminal in a name": (BEGIN + CALL + "f" + EOS, EOS),
    "terminal before the arguments": (BEGIN + CALL + "f" + SEP + EOS, EOS),
    "terminal before the call's closer": (OPEN + "}" + EOS, EOS),
    "terminal in the second call": (BEGIN + F + CALL + "g" + EOS, EOS),
    "section in a section": (BEGIN + BEGIN, BEGIN),
    "call in a call": (BEGIN + CALL + CALL, CALL),
    "call for the missing closer": (OPEN + "}" + CALL, CALL),
    "section closed twice": (BEGIN + F + END + END, END),
    "call closed twice": (BEGIN + F + DONE, DONE),
    "call after the section": (BEGIN + F + END + G, CALL),
    "text between calls": (BEGIN + F + "and" + G, CALL),
    "two separators": (BEGIN + CALL + "f" + SEP + SEP, SEP),
    "empty name": (BEGIN + CALL + SEP, SEP),
    "empty arguments": (BEGIN + CALL + "f" + SEP + DONE, DONE),
    "arguments that are no object": (BEGIN + CALL + "f" + SEP + "[1]" + DONE, DONE),
    "separator in text": ("f" + SEP, SEP),
    "reasoning opened in text": ("Blue.<think>Or not?", "<think>"),
    "reasoning opened after it was closed": ("<think>a</think>b<think>", "<think>"),
    "terminal in open tags": (OPEN_TAGS + EOS, EOS),
    "terminal behind a parameter": (OPEN_TAGS + f"</{D}parameter>⏎" + EOS, EOS),
    "terminal behind an invoke": (OPEN_TAGS + f"</{D}parameter>⏎</{D}invoke>⏎" + EOS, EOS),
    "terminal in a block's tag": (f"⏎⏎<{D}function" + EOS, EOS),
    "terminal in an invoke's tag": (f'<{D}function_calls>⏎<{D}invoke name="f' + EOS, EOS),
    "terminal in a bare invoke": (f'<{D}invoke name="f">⏎' + EOS, EOS),
    "empty block": (f"<{D}function_calls>⏎</{D}function_calls>", "</"),
    "invoke closed in a parameter": (OPEN_TAGS + f"⏎</{D}invoke>", "invoke"),
    "parameter outside an invoke": (f"<{D}function_calls>⏎<{D}parameter", "parameter"),
    "unknown tag": (f"<{D}tool>", "tool"),
    "tag marker without a tag": (f"Blue.{D}", D),
    "closing tag without a block": (f"Blue.</{D}function_calls>", D),
    "parameter without its kind": (f'<{D}invoke name="f">⏎<{D}parameter name="x">1', '">'),
    "text between tags": (f'<{D}invoke name="f">⏎and', "and"),
    "another turn": ("Blue.<｜User｜>", "<｜User｜>"),
    "another turn of its own": ("Blue.<｜Assistant｜>", "<｜Assistant｜>"),
    "another turn in a string": (OPEN + ', "s": "<｜User｜>', "<｜User｜>"),
    "another turn in a value": (OPEN_TAGS + "<｜User｜>", "<｜User｜>"),
    "another turn in reasoning": ("<think><｜User｜>", "<｜User｜>"),
    "a tool result written by the model": (BEGIN + F + END + "<｜tool▁output▁begin｜>", "<｜tool▁output▁begin｜>"),
}

FLAGS = {
    "": "end",
    "<think>Sky": "end",
    BEGIN: "block",
    BEGIN + CALL: "block header",
    BEGIN + CALL + "f": "block header",
    BEGIN + CALL + "f" + SEP: "block",
    OPEN: "block",
    OPEN + "}": "block",
    BEGIN + F: "end",
    BEGIN + F + "⏎": "end",
    BEGIN + F + CALL: "block header",
    BEGIN + F + END: "end",
    BEGIN + CALL + "function" + SEP + "f⏎```json⏎": "block",
    BEGIN + F_FENCED: "end",
    "⏎⏎<": "end",
    f"⏎⏎<{D}": "block",
    f"⏎⏎<{D}function_calls>⏎": "block",
    f"⏎⏎<{D}function_calls>⏎<{D}": "block header",
    f'⏎⏎<{D}function_calls>⏎<{D}invoke name="f"': "block header",
    f'⏎⏎<{D}function_calls>⏎<{D}invoke name="f">': "block",
    OPEN_TAGS: "block",
    OPEN_TAGS + f"</{D}parameter>⏎</{D}invoke>": "block",
    OPEN_TAGS + f"</{D}parameter>⏎</{D}invoke>⏎</{D}function_calls": "block",
    OPEN_TAGS + f"</{D}parameter>⏎</{D}invoke>⏎</{D}function_calls>": "end",
    f'<{D}invoke name="f">': "block",
    f'<{D}invoke name="f"></{D}invoke>': "end",
}

CORPUS = {
    **{f"answer: {name}": text for name, text in ANSWERS.items()},
    **{f"call: {name}": text for name, (text, _) in CALLS.items()},
    **{f"fenced call: {name}": text for name, (text, _) in FENCED_CALLS.items()},
    **{f"tags: {name}": text for name, (text, _) in TAG_CALLS.items()},
    **{f"lenient: {name}": text for name, text in LENIENT.items()},
    **{f"not of the skeleton: {name}": text for name, text in NOT_SKELETON.items()},
}
MARKERS = [BEGIN, END, CALL, SEP, DONE, "<think>", "</think>"]


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("deepseek_v3_1", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("deepseek_v3_1", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("deepseek_v3_1", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("deepseek_v3_1", text)
    assert refused_at("deepseek_v3_1", text) == token


def test_a_name_or_a_call_that_never_ends_is_a_prefix_and_no_turn():
    for text in (BEGIN, BEGIN + CALL + "f" * 300, OPEN, OPEN + "}", f"<{D}", OPEN_TAGS + "a" * 300):
        assert is_unfinished("deepseek_v3_1", text)


@pytest.mark.parametrize("prompt", IN_TEXT.values(), ids=IN_TEXT)
def test_every_prompt_that_ends_in_text_starts_a_turn(prompt):
    assert flags("deepseek_v3_1", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("deepseek_v3_1", text, prompt)
    for text in MALFORMED.values():
        assert refuses("deepseek_v3_1", text, prompt)


@pytest.mark.parametrize("prompt", IN_REASONING.values(), ids=IN_REASONING)
def test_a_prompt_that_opened_reasoning_starts_inside_it(prompt):
    assert flags("deepseek_v3_1", "", prompt) == "end"
    for text in ("Sky.</think>Blue.", "</think>" + BEGIN + F + END, "a</think>" + block(F_TAGS), "Sky ques", ""):
        assert accepts("deepseek_v3_1", text, prompt)
    assert accepts("deepseek_v3_1", ANSWERS["markers in reasoning"].removeprefix("<think>"), prompt)
    assert refuses("deepseek_v3_1", "Need f.</think>" + OPEN + EOS, prompt)
    assert refuses("deepseek_v3_1", "Sky.</think>" + MALFORMED["empty section"], prompt)


@pytest.mark.parametrize(
    ("text", "prompt"), [(WELL_FORMED[3], CALLED + RESULT), (WELL_FORMED[4], CALLED_BY_TAGS + RESULTS + "<think>")]
)
def test_a_turn_resumed_anywhere_goes_on(text, prompt):
    table, chat = compiled("deepseek_v3_1")
    ids = spell(chat, text)
    for cut in range(1, len(ids)):
        assert is_turn(table, ids[cut:], table.host.locate(spell(chat, prompt) + ids[:cut]))


@pytest.mark.parametrize(
    "prompt",
    [
        "Why?",
        "<｜User｜>Why?",
        ASKED + WELL_FORMED[0],
        ASKED + F,
        CALLED_BY_TAGS + RESULTS.rstrip("⏎"),
        CALLED_BY_TAGS + "⏎⏎<function_results>⏎<result>1</result>",
        CALLED + "<｜tool▁output▁begin｜>1",
    ],
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("deepseek_v3_1")
    state = table.host.locate(spell(chat, prompt))
    assert state == 0 or not table.host.may_end(state)


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("deepseek_v3_1", text) == expected


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("deepseek_v3_1")
    for name in (*builtin_format("deepseek_v3_1").terminals, *MARKERS, D, "<｜User｜>", "<｜Assistant｜>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a") + plain + chat.encode("b" + EOS))
            assert is_turn(table, spell(chat, OPEN + ', "s": "') + plain + spell(chat, '"}' + DONE + END))
            assert not is_turn(table, spell(chat, BEGIN) + plain)


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.none() | st.integers() | st.lists(st.text(max_size=4) | st.sampled_from([*MARKERS, D])).map("".join),
        max_size=4,
    ),
    fenced=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_json_arguments_in_any_spelling_are_a_call(arguments, fenced, seed):
    table, chat = compiled("deepseek_v3_1")
    # A closer behind a brace or a fence closes, also in a string: every parser reads it so.
    body = re.sub(r"[}` ]+(?=<｜tool▁call▁end)", "", json.dumps(arguments, ensure_ascii=False))
    start, end = (f"function{SEP}f⏎```json⏎", "⏎```") if fenced else (f"f{SEP}", "")
    for how in SPELLINGS:
        assert_one_call(table, spell(chat, f"a{BEGIN}{CALL}{start}{body}{end}{DONE}", how, seed))


@given(
    values=st.lists(
        st.lists(st.text(max_size=4) | st.sampled_from([*MARKERS, f"<{D}invoke", f"/{D}", "<", "</"])).map("".join),
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_values_in_any_spelling_are_a_call(values, seed):
    table, chat = compiled("deepseek_v3_1")
    parameters = (parameter("k", value.replace(f"</{D}", "")) for value in values)
    text = block(invoke("f", *parameters)).removeprefix("⏎⏎<")
    for how in SPELLINGS:
        assert_one_call(table, spell(chat, text, how, seed), table.host.walk(chat.encode("a<")).state)


def assert_one_call(table, ids, state=None):
    """The last token closes the call that the second one opens, or the first one if `state` is given."""
    assert is_turn(table, ids, state)
    if state is None:
        state, ids = table.host.walk(ids[:1]).state, ids[1:]
    for token in ids[:-1]:
        state = table.host.step(state, token)
        assert table.host.block_open(state)
        assert not table.host.may_end(state)


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("deepseek_v3_1")
    for text in (*CORPUS.values(), *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        expected = is_turn(table, spell(chat, text))
        for seed in range(6):
            assert is_turn(table, spell(chat, text, "random", seed)) == expected


def test_the_real_tokenizer_of_v3_2_gives_the_same_verdicts():
    table, tokenizer = compiled_on("deepseek_v3_1", "deepseek_v3", D)
    assert table.info.controls[SEP] == 128814
    for text in (*WELL_FORMED, *CORPUS.values()):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}


def test_the_real_tokenizer_of_v3_1_gives_the_same_verdicts():
    table, tokenizer = compiled_on("deepseek_v3_1", "deepseek_v3")
    for text in (*WELL_FORMED, *(text for text in CORPUS.values() if D not in text)):
        assert verdicts_on(tokenizer, table, text, ASKED) == {True}
    for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values() if D not in text)):
        assert verdicts_on(tokenizer, table, text, ASKED) == {False}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *((text, True) for text in WELL_FORMED),
        *((text, True) for name, text in CORPUS.items() if name not in ("tags: markers in a value",)),
        *((text, True) for text, token in REFUSED.values() if D in text and token not in (EOS, "<｜User｜>")),
        *((text, False) for text in (*MALFORMED.values(), *(text for text, _ in REFUSED.values() if D not in text))),
    ],
)
def test_a_tokenizer_without_the_tag_marker_reads_tags_as_text(text, accepted):
    assert is_turn_lacking("deepseek_v3_1", text, D) == accepted


@pytest.mark.parametrize("text", [WELL_FORMED[0], WELL_FORMED[1], WELL_FORMED[3], "a<think>b", "<think>a</think>b"])
def test_the_first_tokenizer_of_v3_has_no_reasoning_tokens(text):
    assert is_turn_lacking("deepseek_v3_1", text, D, "<think>", "</think>")
