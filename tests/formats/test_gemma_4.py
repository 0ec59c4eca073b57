"""The gemma_4 format: thoughts in channels, calls in Gemma's own notation, a terminal that opens the tool response."""

from __future__ import annotations

import pytest

from scripts.tables import compiled
from tests.support.streams import is_turn, spell
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

ASKED = "<bos><|turn>user⏎Why is the sky blue?<turn|>⏎<|turn>model⏎"
ANSWERED_BY_TOOL = ASKED + "<|tool_call>call:f{x:1}<tool_call|><|tool_response>response:f{value:2}<tool_response|>"

PROMPTS = {
    "thinking on": ASKED,
    "thinking off, empty thought": ASKED + "<|channel>thought⏎<channel|>",
    "after a tool result": ANSWERED_BY_TOOL,
    "after two tool results": ANSWERED_BY_TOOL + "<|tool_response>response:g{value:3}<tool_response|>",
    "second turn": ASKED + "Blue.<turn|>⏎<|turn>user⏎And at night?<turn|>⏎<|turn>model⏎",
    "second turn, tools used in the first": ANSWERED_BY_TOOL + "Two.<turn|>⏎<|turn>user⏎Sure?<turn|>⏎<|turn>model⏎",
}
IN_A_THOUGHT = ANSWERED_BY_TOOL + "<|channel>thought⏎"

WELL_FORMED = [
    "It is blue.<turn|>",
    "<|channel>thought⏎Sky question.⏎<channel|>Blue.<turn|>",
    "<|channel>thought⏎Need f.⏎<channel|><|tool_call>call:f{x:1}<tool_call|><|tool_response>",
    '<|tool_call>call:f{s:<|"|>a, {b}<|"|>,x:1}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>',
    "Wait.<|channel>thought⏎More.<channel|>Done.<turn|>",
]

MALFORMED = {
    "call: missing": "<|tool_call>f{x:1}<tool_call|>",
    "brace not closed": "<|tool_call>call:f{x:1<tool_call|>",
    "no argument braces": "<|tool_call>call:f<tool_call|>",
    "opener missing": "call:f{x:1}<tool_call|>",
    "string not closed": '<|tool_call>call:f{x:<|"|>a}<tool_call|>',
    "channel opened twice": "<|channel>thought⏎Sky <|channel>thought⏎again<channel|>Blue.<turn|>",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

CALL = "<|tool_call>call:f{x:1}<tool_call|>"

CORPUS = {
    "empty turn": "",
    "blank turn": " ⏎⏎",
    "one character": "B",
    "unicode": "空は青い 🌤️ é e\u0301 \u00a0",
    "braces, quotes and colons in text": 'call:f{x:1} "{[(" call: {',
    "markers spelled in other words": "<|tool_call >call:f{}<tool_call |> < channel|>",
    "an empty thought": "<|channel>thought⏎<channel|>Blue.",
    "only a thought": "<|channel>thought⏎Sky.⏎<channel|>",
    "a thought of many lines": "<|channel>thought⏎1. {x}⏎2. call:f{}⏎⏎空<channel|>Blue.",
    "three thoughts": "<|channel>thought⏎a<channel|>b<|channel>thought⏎c<channel|><|channel>thought⏎d<channel|>e",
    "a thought closed that the prompt may have opened": "Sky.<channel|>Blue.",
    "a thought closed twice": "<|channel>thought⏎Sky.<channel|><channel|>Blue.",
    "one call": CALL,
    "text before a call": "Looking.⏎" + CALL,
    "text after a call": CALL + "⏎Asked.",
    "text between calls": CALL + " and " + CALL,
    "three calls": CALL * 3,
    "a thought between calls": CALL + "<|channel>thought⏎And g.<channel|><|tool_call>call:g{}<tool_call|>",
    "a call that ends a thought": "<|channel>thought⏎Need f." + CALL,
    "a call in a thought that goes on": "<|channel>thought⏎I could " + CALL + " but no.<channel|>Blue.",
    "a new thought after a call that ended one": "<|channel>thought⏎a" + CALL + "<|channel>thought⏎b<channel|>c",
    "no arguments": "<|tool_call>call:f{}<tool_call|>",
    "white space everywhere": "<|tool_call>⏎ call: f {⏎ x : 1 ,⏎ y : 2 }⏎ <tool_call|>",
    "dotted and dashed name": "<|tool_call>call:mcp.server-1:get/weather_2{}<tool_call|>",
    "unicode name and key": "<|tool_call>call:wetter_für{größe:1}<tool_call|>",
    "numbers, literals, lists, objects": "<|tool_call>call:f{a:-1e-05,b:true,c:null,d:[1,[2,{}]],e:{f:{g:0.5}}}"
    "<tool_call|>",
    "keys with blanks": "<|tool_call>call:f{two words:1}<tool_call|>",
    "quoted key": '<|tool_call>call:f{<|"|>x<|"|>:1}<tool_call|>',
    "keys in double quotes": '<|tool_call>call:f{"x":1}<tool_call|>',
    "empty string": '<|tool_call>call:f{s:<|"|><|"|>}<tool_call|>',
    "strings in a list": '<|tool_call>call:f{s:[<|"|>a<|"|>,<|"|>}<|"|>]}<tool_call|>',
    "code in a string": '<|tool_call>call:f{s:<|"|>if (a < "b") {⏎\t print(\'}\');⏎}<|"|>}<tool_call|>',
    "unicode in a string": '<|tool_call>call:f{s:<|"|>空 🌤️ é<|"|>}<tool_call|>',
    "the closer in a string": '<|tool_call>call:f{s:<|"|>a<tool_call|>b<|"|>}<tool_call|>',
    "other markers in a string": '<|tool_call>call:f{s:<|"|><|tool_call><|channel><channel|><|tool><|think|>'
    '<tool_response|><|"|>}<tool_call|>',
}

REFUSED = {
    "turn end in an open thought": ("<|channel>thought⏎Sky.<turn|>", "<turn|>"),
    "turn end in a channel's label": ("<|channel>thou<turn|>", "<turn|>"),
    "tool response in an open thought": ("<|channel>thought⏎Need f.<|tool_response>", "<|tool_response>"),
    "turn end in a call's name": ("<|tool_call>call:f<turn|>", "<turn|>"),
    "turn end right after the opener": ("<|tool_call><turn|>", "<turn|>"),
    "tool response in open arguments": ("<|tool_call>call:f{x:1<|tool_response>", "<|tool_response>"),
    "tool response before the closer": ("<|tool_call>call:f{x:1}<|tool_response>", "<|tool_response>"),
    "end of text in an open string": ('<|tool_call>call:f{s:<|"|>a<eos>', "<eos>"),
    "closer in an open string, then the end": ('<|tool_call>call:f{s:<|"|>a<tool_call|><turn|>', "<turn|>"),
    "call in a call": ("<|tool_call>call:f{x:<|tool_call>call:g{}<tool_call|>}<tool_call|>", "<|tool_call>"),
    "opener twice": ("<|tool_call>" + CALL, "<|tool_call>"),
    "thought in a call": ("<|tool_call>call:f{<|channel>thought⏎<channel|>}<tool_call|>", "<|channel>"),
    "a channel of another name": ("<|channel>final⏎Blue.<channel|>", "final"),
    "string mark outside a call": ('Blue <|"|>sky<|"|>', '<|"|>'),
    "string mark before the braces": ('<|tool_call>call:<|"|>f<|"|>{}<tool_call|>', '<|"|>'),
    "closer outside a call": ("Blue.<tool_call|>", "<tool_call|>"),
    "closer twice": (CALL + "<tool_call|>", "<tool_call|>"),
    "parentheses for braces": ("<|tool_call>call:f(x=1)<tool_call|>", "(x"),
    "a colon for the label": ("<|tool_call>:f{x:1}<tool_call|>", ":f"),
    "another turn": ("Blue.<|turn>user⏎", "<|turn>"),
    "a tool declaration": ("<|tool>declaration:f{}<tool|>", "<|tool>"),
    "a tool response written by the model": ("<tool_response|>", "<tool_response|>"),
    "the thinking switch": ("<|think|>Blue.", "<|think|>"),
    "start of text": ("<bos>Blue.", "<bos>"),
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("gemma_4", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("gemma_4", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("gemma_4", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("gemma_4", text)
    assert refused_at("gemma_4", text) == token


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_that_ends_in_text_starts_any_turn(prompt):
    assert flags("gemma_4", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("gemma_4", text, prompt)
    for text in MALFORMED.values():
        assert refuses("gemma_4", text, prompt)


def test_a_prompt_that_opened_a_thought_starts_inside_it():
    assert is_unfinished("gemma_4", "", IN_A_THOUGHT)
    assert is_unfinished("gemma_4", "Two is right.", IN_A_THOUGHT)
    assert accepts("gemma_4", "Two is right.<channel|>Two.<turn|>", IN_A_THOUGHT)
    assert accepts("gemma_4", "<channel|>" + CALL + "<|tool_response>", IN_A_THOUGHT)
    assert accepts("gemma_4", "Again." + CALL + "<|tool_response>", IN_A_THOUGHT)
    assert refuses("gemma_4", "<|channel>thought⏎Two.<channel|>Two.<turn|>", IN_A_THOUGHT)


@pytest.mark.parametrize(
    "prompt", ["Why?", "<|turn>user⏎hi", ASKED + "Blue.<turn|>", ASKED + "Blue.<turn|>⏎<|turn>user⏎hi<turn|>⏎"]
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("gemma_4")
    assert table.host.locate(spell(chat, prompt)) == 0


FLAGS = {
    "": "end",
    "Blue.": "end",
    "<|channel>": "header",
    "<|channel>though": "header",
    "<|channel>thought⏎": "",
    "<|channel>thought⏎Sky.": "",
    "<|channel>thought⏎Sky.<channel|>": "end",
    "<|tool_call>": "block header",
    "<|tool_call>call:": "block header",
    "<|tool_call>call:f": "block header",
    "<|tool_call>call:f{": "block",
    "<|tool_call>call:f{x:1}": "block",
    "<|tool_call>call:f{x:{y:1}": "block",
    '<|tool_call>call:f{s:<|"|>}': "block",
    '<|tool_call>call:f{s:<|"|><tool_call|>': "block",
    CALL: "end",
    CALL + "<|tool_call>": "block header",
    "<|channel>thought⏎Need f.<|tool_call>": "block header",
    "<|channel>thought⏎Need f." + CALL: "end",
}


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("gemma_4", text) == expected


def test_markers_spelled_as_ordinary_text_are_text():
    table, chat = compiled("gemma_4")
    for marker in ("<|tool_call>", "<tool_call|>", "<|channel>", '<|"|>', "<turn|>", "<|tool_response>", "<|turn>"):
        for how in ("bytes", "longest", "random"):
            plain = [token for part in marker for token in spell(chat, part, how)]
            assert is_turn(table, plain + chat.encode("x<turn|>"))
            assert is_turn(table, chat.encode("<|tool_call>call:f{s:") + plain + chat.encode("}<tool_call|>"))
