"""The minimax_m2 format: reasoning that the prompt opened, text, blocks of <invoke> elements in ordinary text."""

from __future__ import annotations

import pytest

from scripts.tables import compiled
from tests.support.streams import is_turn, spell
from tests.support.turns import accepts, flags, is_unfinished, refused_at, refuses

ASKED = "]~!b[]~b]system⏎Be brief.[e~[⏎]~b]user⏎Why is the sky blue?[e~[⏎]~b]ai⏎"
F = '<invoke name="f">⏎<parameter name="x">1</parameter>⏎</invoke>'
BLOCK = f"<minimax:tool_call>⏎{F}⏎</minimax:tool_call>"

PROMPTS = {
    "first turn": ASKED + "<think>⏎",
    "second turn": ASKED + "<think>⏎Hm.⏎</think>⏎⏎Blue.[e~[⏎]~b]user⏎Sure?[e~[⏎]~b]ai⏎<think>⏎",
    "after a tool result": ASKED
    + f"<think>⏎Need f.⏎</think>⏎⏎{BLOCK}[e~[⏎]~b]tool⏎<response>2</response>[e~[⏎]~b]ai⏎<think>⏎",
    "without reasoning": ASKED,
}

WELL_FORMED = [
    "Sky question.⏎</think>⏎⏎It is blue.[e~[",
    "⏎</think>⏎⏎Blue.[e~[",
    f"Need f.⏎</think>⏎⏎⏎{BLOCK}[e~[",
    f'Both.⏎</think>⏎⏎Looking.⏎<minimax:tool_call>⏎{F}⏎<invoke name="g">⏎</invoke>⏎</minimax:tool_call>[e~[',
    'Need f.</think><minimax:tool_call><invoke name="f"><parameter name="s">a < b</parameter></invoke>'
    "</minimax:tool_call>[e~[",
]

MALFORMED = {
    "block not opened": 'Need f.⏎</think>⏎⏎<invoke name="f">⏎</invoke>⏎</minimax:tool_call>[e~[',
    "empty block": "t⏎</think>⏎⏎<minimax:tool_call>⏎</minimax:tool_call>[e~[",
    "JSON body": 't⏎</think>⏎⏎<minimax:tool_call>⏎{"name": "f", "arguments": {}}⏎</minimax:tool_call>[e~[',
    "parameter outside an invoke": 't⏎</think>⏎⏎<minimax:tool_call>⏎<parameter name="x">1</parameter>⏎'
    "</minimax:tool_call>[e~[",
    "role prefix generated": "t⏎</think>⏎⏎]~b]ai⏎Blue.[e~[",
}

NOT_SKELETON: dict[str, str] = {}  # every fault above shows in the skeleton

CORPUS = {
    "empty turn": "",
    "blank turn": " ⏎⏎",
    "only reasoning, not closed": "Sky question.",
    "only reasoning": "Sky question.⏎</think>",
    "an opener of its own": "<think>Sky.</think>Blue.",
    "an opener of its own, not closed": "<think>Sky.",
    "reasoning closed twice": "a</think>b</think>c",
    "think tokens in text": "a</think>b<think>c</think><think>d",
    "unicode": "空は青い</think>🌤️ é e\u0301 \u00a0",
    "tags in text": 'a</think><invoke name="f"> <parameter name="x"> </invoke> <response> </p>',
    "a bare invoke": f"Need f.</think>{F}",
    "markers spelled in other words": "a</think><minimax: tool_call> </minimax:tool-call> [e~ [",
    "one block": f"a</think>{BLOCK}",
    "one block, no reasoning": BLOCK,
    "a block that ends reasoning": f"Need f.⏎{BLOCK}",
    "a block in reasoning that goes on": f"I could {BLOCK} but no.⏎</think>⏎⏎Blue.",
    "markup in reasoning": "The format is <minimax:tool_call>…</minimax:tool_call>, so</think>⏎⏎Blue.",
    "an opener in reasoning": "I write <minimax:tool_call> first.</think>⏎⏎Blue.",
    "a closer in reasoning": "I write </minimax:tool_call> last.</think>⏎⏎Blue.",
    "two blocks": f"a</think>{BLOCK}⏎{BLOCK}",
    "text around blocks": f"a</think>Looking. {BLOCK} and {BLOCK} Asked.",
    "three invokes": f"a</think><minimax:tool_call>{F}{F} {F}</minimax:tool_call>",
    "no parameters": 'a</think><minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>',
    "invokes without parameters": 'a</think><minimax:tool_call><invoke name="f"></invoke>⏎<invoke name="g"></invoke>'
    "</minimax:tool_call>",
    "single quotes": "a</think><minimax:tool_call><invoke name='f'><parameter name='x'>1</parameter></invoke>"
    "</minimax:tool_call>",
    "no quotes": "a</think><minimax:tool_call><invoke name=f><parameter name=x>1</parameter></invoke>"
    "</minimax:tool_call>",
    "dotted, dashed, unicode name": 'a</think><minimax:tool_call><invoke name="mcp.für-2:get/x"></invoke>'
    "</minimax:tool_call>",
    "parameter not closed": 'a</think><minimax:tool_call><invoke name="f"><parameter name="x">1⏎<parameter name="y">2'
    "</parameter></invoke></minimax:tool_call>",
    "invoke not closed": 'a</think><minimax:tool_call><invoke name="f"><parameter name="x">1</parameter>'
    "</minimax:tool_call>",
    "invoke without parameters not closed": 'a</think><minimax:tool_call><invoke name="f"></minimax:tool_call>',
    "empty value": 'a</think><minimax:tool_call><invoke name="f"><parameter name="x"></parameter></invoke>'
    "</minimax:tool_call>",
    "a value of many lines": 'a</think><minimax:tool_call><invoke name="f"><parameter name="s">⏎a < b && c > "d"⏎空 {⏎}'
    "⏎</parameter></invoke></minimax:tool_call>",
    "a JSON value": 'a</think><minimax:tool_call><invoke name="f"><parameter name="s">{"a": [1, "</p>"]}</parameter>'
    "</invoke></minimax:tool_call>",
    "XML in a value": 'a</think><minimax:tool_call><invoke name="w"><parameter name="s"><plugin><parameter name="y">'
    "1</parameter></plugin></invoke> and more</parameter></invoke></minimax:tool_call>",
    "markers in a value": 'a</think><minimax:tool_call><invoke name="w"><parameter name="s"><think> </think> '
    "<minimax:tool_call></parameter></invoke></minimax:tool_call>",
}

REFUSED = {
    "end right after the opener": ("a</think><minimax:tool_call>[e~[", "[e~["),
    "end in a name": ('a</think><minimax:tool_call><invoke name="f[e~[', "[e~["),
    "end in a value": ('a</think><minimax:tool_call><invoke name="f"><parameter name="x">1[e~[', "[e~["),
    "end between invokes": (f"a</think><minimax:tool_call>{F}[e~[", "[e~["),
    "end in a block that ends reasoning": (f"Need f.<minimax:tool_call>{F}[e~[", "[e~["),
    "end in a second block": (f"a</think>{BLOCK}<minimax:tool_call>[e~[", "[e~["),
    "opener twice": (f"a</think><minimax:tool_call>{BLOCK}", "<minimax:tool_call>"),
    "opener in a name": ('a</think><minimax:tool_call><invoke name="<minimax:tool_call>', "<minimax:tool_call>"),
    "opener between invokes": (
        'a</think><minimax:tool_call><invoke name="f"></invoke><minimax:tool_call>',
        "<minimax:tool_call>",
    ),
    "reasoning in a block": ("a</think><minimax:tool_call><think>", "<think>"),
    "closer twice": (f"a</think>{BLOCK}</minimax:tool_call>", "</minimax:tool_call>"),
    "words in a block": ("a</think><minimax:tool_call>f(x=1)</minimax:tool_call>", "f"),
    "empty name": ('a</think><minimax:tool_call><invoke name=""></invoke></minimax:tool_call>', '=""></'),
    "name of another attribute": ('a</think><minimax:tool_call><invoke id="f">', " id"),
    "words in an invoke": ('a</think><minimax:tool_call><invoke name="f">x=1</invoke></minimax:tool_call>', "x"),
    "another role": ("a</think>Blue.]~b]user⏎", "]~b]"),
    "a role in reasoning": ("Sky.]~b]ai⏎", "]~b]"),
    "a role in a value": ('a</think><minimax:tool_call><invoke name="f"><parameter name="x">]~b]', "]~b]"),
    "start of text": ("]~!b[a", "]~!b["),
}


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_turns_are_accepted_with_and_without_terminal(text):
    assert accepts("minimax_m2", text)


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_turns_are_refused(text):
    assert refuses("minimax_m2", text)


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS)
def test_corpus_is_accepted(text):
    assert accepts("minimax_m2", text)


@pytest.mark.parametrize(("text", "token"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_first_token_that_no_turn_can_hold(text, token):
    assert refuses("minimax_m2", text)
    assert refused_at("minimax_m2", text) == token


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_prompt_starts_any_turn(prompt):
    assert flags("minimax_m2", "", prompt) == "end"
    for text in WELL_FORMED:
        assert accepts("minimax_m2", text, prompt)
    for text in MALFORMED.values():
        assert refuses("minimax_m2", text, prompt)


def test_a_turn_resumed_anywhere_goes_on():
    prompt = ASKED + "<think>⏎"
    assert accepts("minimax_m2", "question.⏎</think>Blue.[e~[", prompt + "Sky ")
    assert is_unfinished(
        "minimax_m2", "2", prompt + '</think><minimax:tool_call><invoke name="f"><parameter name="x">1'
    )
    assert accepts("minimax_m2", f"{F}</minimax:tool_call>[e~[", prompt + "</think><minimax:tool_call>⏎")


@pytest.mark.parametrize(
    "prompt", ["Why?", "]~b]user⏎hi", ASKED + "a</think>Blue.[e~[", ASKED + "a[e~[⏎]~b]user⏎hi[e~[⏎"]
)
def test_a_prompt_that_ends_in_no_turn_is_untracked(prompt):
    table, chat = compiled("minimax_m2")
    assert table.host.locate(spell(chat, prompt)) == 0


FLAGS = {
    "": "end",
    "<think>": "end",
    "Sky.</think>": "end",
    "a</think><minimax:tool_call>": "block header",
    "a</think><minimax:tool_call>⏎<inv": "block header",
    'a</think><minimax:tool_call><invoke name="f"': "block header",
    'a</think><minimax:tool_call><invoke name="f">': "block",
    'a</think><minimax:tool_call><invoke name="f"><parameter name="x">1': "block",
    'a</think><minimax:tool_call><invoke name="f"></invoke><invoke name="g': "block header",
    f"a</think><minimax:tool_call>{F}": "block",
    f"a</think>{BLOCK}": "end",
    f"a</think>{BLOCK}Asked.": "end",
    "Need f.<minimax:tool_call>": "block",
    f"Need f.<minimax:tool_call>{F}": "block",
    f"Need f.{BLOCK}": "end",
}


@pytest.mark.parametrize(("text", "expected"), FLAGS.items(), ids=FLAGS)
def test_regions(text, expected):
    assert flags("minimax_m2", text) == expected


def test_markers_spelled_as_ordinary_text_are_text():
    table, chat = compiled("minimax_m2")
    for marker in ("<minimax:tool_call>", "</minimax:tool_call>", "</think>", "[e~[", "]~b]"):
        for how in ("bytes", "longest", "random"):
            plain = [token for part in marker for token in spell(chat, part, how)]
            assert is_turn(table, chat.encode("a</think>") + plain + chat.encode("x[e~["))
            value = chat.encode('a</think><minimax:tool_call><invoke name="f"><parameter name="s">') + plain
            assert is_turn(table, value + chat.encode("</parameter></invoke></minimax:tool_call>[e~["))
