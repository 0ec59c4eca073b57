"""The harmony format (gpt-oss) on the real o200k vocabulary: what one turn may be, spelled every way."""

from __future__ import annotations

import pytest

from scripts.tables import compiled
from structured_commit import builtin_format
from tests.support.streams import SPELLINGS, is_prefix, is_turn, spell
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

PROMPT = "<|start|>user<|message|>Why is the sky blue?<|end|><|start|>assistant"
IN_ANALYSIS = PROMPT + "<|channel|>analysis<|message|>"

WELL_FORMED = [
    "<|channel|>final<|message|>It is blue.<|return|>",
    "<|channel|>analysis<|message|>Sky question.<|end|><|start|>assistant<|channel|>final<|message|>Blue.<|return|>",
    "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"x":1}<|call|>',
    '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"x":1}<|end|><|start|>assistant<|channel|>'
    "commentary to=functions.g json<|message|>{}<|call|>",
    "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
    '<|message|>{"x":1}<|call|>',
    '<|channel|>analysis to=browser.search code<|message|>{"query":"sky"}<|call|>',
]

MALFORMED = {
    "no start after end": "<|channel|>analysis<|message|>t<|end|><|channel|>final<|message|>x<|return|>",
    "content type before the recipient": "<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>",
    "header never reaches message": "<|channel|>final",
    "blank where the channel name must start": "<|channel|> final<|message|>x<|return|>",
    "text between messages": "<|channel|>analysis<|message|>t<|end|>ok<|start|>assistant<|channel|>final<|message|>x"
    "<|return|>",
}

ANSWERS = {
    "plain": "<|channel|>final<|message|>It is blue.",
    "empty body": "<|channel|>final<|message|>",
    "many lines": "<|channel|>final<|message|># Sky⏎⏎- blue⏎- *very* blue⏎⏎```py⏎print('}')⏎```⏎",
    "unicode": "<|channel|>final<|message|>Ciel bleu — 空は青い 🌤️ \u00a0ﷺ e\u0301",
    "zero bytes and odd blanks": "<|channel|>final<|message|>\x00\x0b\x0c\x7f\u2028",
    "control tokens spelled as text": "<|channel|>final<|message|>Write <|en d|> or < |call|> or <|unknown|>.",
    "line feed before the body": "<|channel|>final⏎<|message|>x",
    "structured": '<|channel|>final <|constrain|>json<|message|>{"colour":"blue"}',
    "structured, not JSON": "<|channel|>final<|constrain|>response_schema<|message|>blue",
    "structured, type as a word": '<|channel|>final json<|message|>{"colour":"blue"}',
    "structured, several blanks": "<|channel|>final \t <|constrain|>json <|message|>[1]",
    "blank before the channel": " <|channel|>final<|message|>x",
    "answer on the analysis channel only": "<|channel|>analysis<|message|>Sky question.",
    "preamble only": "<|channel|>commentary<|message|>Let me look.",
}

REASONED = {
    "one thought": "<|channel|>analysis<|message|>Sky.<|end|><|start|>assistant<|channel|>final<|message|>Blue.",
    "empty thought": "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>Blue.",
    "three thoughts": "<|channel|>analysis<|message|>a<|end|>"
    + "<|start|>assistant<|channel|>analysis<|message|>b<|end|>" * 2
    + "<|start|>assistant<|channel|>final<|message|>Blue.",
    "thought after the preamble": "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Blue.",
    "blank after the role": "<|channel|>analysis<|message|>a<|end|><|start|>assistant <|channel|>final<|message|>x",
    "end token for the last message": "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
    "<|message|>x<|end|>",
}

CALLS = {
    "blank before constrain": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}',
    "no blank before constrain": '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"x":1}',
    "type as a word": '<|channel|>commentary to=functions.f json<|message|>{"x":1}',
    "no content type": '<|channel|>commentary to=functions.f<|message|>{"x":1}',
    "recipient first": ' to=functions.f<|channel|>commentary json<|message|>{"x":1}',
    "recipient first, no blank": 'to=functions.f<|channel|>commentary<|constrain|>json<|message|>{"x":1}',
    "recipient first, no content type": ' to=functions.f<|channel|>commentary<|message|>{"x":1}',
    "on the analysis channel": '<|channel|>analysis to=functions.f <|constrain|>json<|message|>{"x":1}',
    "any blanks": '<|channel|>commentary⏎\tto=functions.f⏎ <|constrain|>json⏎ <|message|>{"x":1}',
    "dotted, dashed, unicode names": '<|channel|>commentary to=functions.a.b-c_ü9 json<|message|>{"x":1}',
    "blanks round the object": '<|channel|>commentary to=functions.f json<|message|>⏎ {"x":⏎1}⏎ ',
    "empty arguments": "<|channel|>commentary to=functions.f json<|message|>{}",
    "empty body": "<|channel|>commentary to=functions.f json<|message|>",
    "braces and quotes in strings": r'<|channel|>commentary to=functions.f json<|message|>{"s":"}\"{ a","t":"‹é›"}',
    "nested objects": '<|channel|>commentary to=functions.f json<|message|>{"a":{"b":[{},{"c":null}]}}',
    "markers in other words in a string": '<|channel|>commentary to=functions.f json<|message|>{"s":"<| end |>"}',
    "not JSON by its content type": "<|channel|>commentary to=functions.f <|constrain|>lark<|message|>start: x",
    "closed by end": '<|channel|>commentary to=functions.f json<|message|>{"x":1}<|end|>',
}

BUILT_IN = {
    "python code": "<|channel|>analysis to=python code<|message|>print(1)⏎",
    "python, no content type": "<|channel|>analysis to=python<|message|>print({",
    "browser": '<|channel|>analysis to=browser.open code<|message|>{"id":1}',
    "on commentary": '<|channel|>commentary to=browser.find code<|message|>{"pattern":"}',
    "recipient first": ' to=browser.search<|channel|>analysis code<|message|>{"query":"sky"}',
    "named like functions": "<|channel|>commentary to=function.f code<|message|>x",
    "named functions": "<|channel|>commentary to=functions code<|message|>x",
}

SEVERAL = {
    "two calls": '<|channel|>commentary to=functions.f json<|message|>{"x":1}<|end|><|start|>assistant'
    "<|channel|>commentary to=functions.g json<|message|>{}",
    "call, thought, call": "<|channel|>commentary to=functions.f json<|message|>{}<|end|><|start|>assistant<|channel|>"
    "analysis<|message|>And g.<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
    "call and answer": "<|channel|>commentary to=functions.f json<|message|>{}<|end|><|start|>assistant<|channel|>final"
    "<|message|>Asked.",
    "everything": "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>p<|end|>"
    "<|start|>assistant<|channel|>analysis to=python code<|message|>1<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"x":1}<|end|><|start|>assistant<|channel|>final<|message|>d',
}

CORPUS = {
    f"{kind}: {name}": text
    for kind, part in (
        ("answer", ANSWERS),
        ("reasoned", REASONED),
        ("call", CALLS),
        ("built-in", BUILT_IN),
        ("several", SEVERAL),
    )
    for name, text in part.items()
}

CALL_HEADER = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

REFUSED = {
    "terminal before the channel": ("<|return|>", "<|return|>"),
    "terminal in a header": ("<|channel|>final<|return|>", "<|return|>"),
    "terminal after the recipient": ("<|channel|>commentary to=functions.f<|call|>", "<|call|>"),
    "terminal after the content type": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|call|>",
        "<|call|>",
    ),
    "terminal after an opener": ("<|channel|>analysis<|message|>t<|end|><|start|><|return|>", "<|return|>"),
    "end in a header": ("<|channel|>final<|end|>", "<|end|>"),
    "call in an open object": (CALL_HEADER + '{"x":1<|call|>', "<|call|>"),
    "return in an open string": (CALL_HEADER + '{"x":"a<|return|>', "<|return|>"),
    "end of text in an open object": (CALL_HEADER + "{<|endoftext|>", "<|endoftext|>"),
    "end in an open object": (CALL_HEADER + '{"x":<|end|>', "<|end|>"),
    "start in a body": ("<|channel|>final<|message|>x<|start|>assistant", "<|start|>"),
    "channel in a body": ("<|channel|>analysis<|message|>x<|channel|>final<|message|>y", "<|channel|>"),
    "message in a body": ("<|channel|>final<|message|>x<|message|>y", "<|message|>"),
    "constrain in a body": ("<|channel|>final<|message|>x<|constrain|>json", "<|constrain|>"),
    "second channel in a header": ("<|channel|>analysis<|channel|>final<|message|>y", "<|channel|>"),
    "second constrain": ("<|channel|>final <|constrain|>json<|constrain|>json<|message|>", "<|constrain|>"),
    "two starts": ("<|channel|>analysis<|message|>t<|end|><|start|><|start|>assistant", "<|start|>"),
    "start before the first channel": ("<|start|>assistant<|channel|>final<|message|>x", "<|start|>"),
    "message with no channel": ("<|message|>x", "<|message|>"),
    "constrain with no channel": ("<|constrain|>json<|channel|>final<|message|>x", "<|constrain|>"),
    "nothing after constrain": ("<|channel|>final <|constrain|><|message|>x", "<|message|>"),
    "line feed after end": ("<|channel|>analysis<|message|>t<|end|>⏎<|start|>assistant", "\n"),
    "another role": ("<|channel|>analysis<|message|>t<|end|><|start|>user<|message|>x", "user"),
    "truncated channel": ("<|channel|>comment<|message|>x", "<|message|>"),
    "unknown channel": ("<|channel|>thought<|message|>x", "thought"),
    "no blank between role and recipient": (
        "<|channel|>analysis<|message|>t<|end|><|start|>assistantto=functions.f<|channel|>commentary json<|message|>{}",
        "to",
    ),
    "unnamed special token in a recipient": (
        "<|channel|>commentary to=functions.<|startoftext|>f json<|message|>{}",
        "<|startoftext|>",
    ),
    "recipient without a name": ("<|channel|>commentary to=functions. json<|message|>{}", " json"),
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("harmony", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("harmony", text)


def test_a_header_that_never_ends_is_a_prefix_and_no_turn():
    assert is_unfinished("harmony", "<|channel|>final")
    assert is_unfinished("harmony", "<|channel|>commentary to=functions." + "f" * 300)
    assert is_unfinished("harmony", "<|channel|>analysis<|message|>t<|end|><|start|>assistant")


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("harmony", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("harmony", text)
    assert refused_at("harmony", text) == token


def test_control_tokens_spelled_as_ordinary_text_are_text():
    table, chat = compiled("harmony")
    header = chat.encode("<|channel|>final<|message|>")
    for name in (*builtin_format("harmony").terminals, "<|end|>", "<|start|>", "<|channel|>", "<|message|>"):
        for how in ("bytes", "longest", "random"):
            plain = [i for part in name for i in spell(chat, part, how)]
            assert is_turn(table, header + plain + chat.encode("x<|return|>"))
    spelled = [i for part in "<|message|>" for i in spell(chat, part, "bytes")]
    assert not is_prefix(table, chat.encode("<|channel|>final") + spelled)


@pytest.mark.parametrize("name", ["<|startoftext|>", "<|endofprompt|>"])
def test_special_tokens_that_the_format_does_not_name_count_as_text_of_a_body(name):
    assert accepts("harmony", f"<|channel|>final<|message|>a{name}b<|return|>")
    assert refused_at("harmony", f"<|channel|>{name}") == name


def test_bytes_that_are_no_utf_8_are_legal_text_of_a_body():
    table, chat = compiled("harmony")
    halves = [token for token, data in chat.vocabulary.texts.items() if data in (b"\xff", b"\xc3", b"\x80")]
    assert len(halves) == 3
    assert is_turn(table, chat.encode("<|channel|>final<|message|>") + halves * 3 + chat.encode("<|return|>"))


START_STATES = {
    "assistant header": PROMPT,
    "after a tool result": "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"
    "<|start|>assistant",
    "after a developer message": "<|start|>developer<|message|># Tools<|end|><|start|>assistant",
    "second message of a resumed turn": IN_ANALYSIS + "t<|end|><|start|>assistant",
}


@pytest.mark.parametrize("prompt", START_STATES.values(), ids=START_STATES)
def test_every_prompt_that_ends_in_the_header_starts_a_turn(prompt):
    assert flags("harmony", "", prompt) == "header"
    for text in WELL_FORMED:
        assert accepts("harmony", text, prompt)
    for text in MALFORMED.values():
        assert refuses("harmony", text, prompt)


def test_a_prefilled_thought_starts_in_its_body():
    assert flags("harmony", "", IN_ANALYSIS) == "end"
    assert accepts("harmony", "t<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>", IN_ANALYSIS)
    assert accepts("harmony", "", IN_ANALYSIS)
    assert refuses("harmony", WELL_FORMED[0], IN_ANALYSIS)


RESUMED = {
    "in a channel name": ("<|channel|>comm", "entary to=functions.f json<|message|>{}<|call|>"),
    "in a recipient": ("<|channel|>commentary to=func", "tions.f json<|message|>{}<|call|>"),
    "after constrain": ("<|channel|>commentary to=functions.f <|constrain|>", "json<|message|>{}<|call|>"),
    "in the arguments": (CALL_HEADER + '{"x', '":1}<|call|>'),
    "after the first message": (
        "<|channel|>analysis<|message|>t<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    "in an opener": (
        "<|channel|>analysis<|message|>t<|end|><|start|>",
        "assistant<|channel|>final<|message|>x<|return|>",
    ),
}


@pytest.mark.parametrize(("before", "rest"), RESUMED.values(), ids=RESUMED)
def test_a_turn_resumed_anywhere_goes_on(before, rest):
    assert accepts("harmony", rest, PROMPT + before)


@pytest.mark.parametrize(
    "prompt",
    [
        "Why is the sky blue?",
        "<|start|>user<|message|>hi",
        PROMPT + WELL_FORMED[0],
        PROMPT + WELL_FORMED[0] + "<|start|>user<|message|>And at night?<|end|>",
        PROMPT + MALFORMED["blank where the channel name must start"],
    ],
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("harmony")
    assert table.host.locate(chat.encode(prompt)) == 0


FLAGS = {
    "": "header",
    "<|channel|>": "header",
    "<|channel|>final": "header",
    "<|channel|>final<|message|>": "end",
    "<|channel|>final<|message|>x": "end",
    "<|channel|>analysis<|message|>x<|end|>": "end",
    "<|channel|>analysis<|message|>x<|end|><|start|>": "header",
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant": "header",
    "<|channel|>commentary": "header",
    "<|channel|>commentary to=": "block header",
    "<|channel|>commentary to=functions.f": "block header",
    "<|channel|>commentary to=functions.f <|constrain|>json": "block header",
    CALL_HEADER: "end",
    CALL_HEADER + "{": "block",
    CALL_HEADER + '{"x": {"y": 1': "block",
    CALL_HEADER + '{"x": 1}': "end",
    CALL_HEADER + '{"x": 1},': "block",
    CALL_HEADER + '{"x": 1}<|end|>': "end",
    " to=functions.f": "block header",
    " to=functions.f<|channel|>commentary json<|message|>{": "block",
    "<|channel|>analysis to=python code<|message|>print(": "end",
    CALL_HEADER + "{}<|end|><|start|>assistant<|channel|>commentary": "header",
}


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("harmony", text) == expected


def test_every_token_boundary_gives_the_same_verdict():
    table, chat = compiled("harmony")
    for text in (*WELL_FORMED, *MALFORMED.values(), *(text for text, _ in REFUSED.values())):
        for cut in range(0, len(chat.encode(text)), 3):
            for how in SPELLINGS:
                ids = spell(chat, text, how, seed=cut)
                assert is_turn(table, ids) == is_turn(table, spell(chat, text))
