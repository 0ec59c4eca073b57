"""The splitter and its use before a parser, on every built-in format."""

from __future__ import annotations

import gc
import logging
import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from scripts.delivery.parsers import FAMILIES
from scripts.delivery.turns import WRITERS, turns
from structured_commit import StructureTable, builtin_format, format_names
from structured_commit.serving.delivery import MAX_ASKS, AlignedDelivery, Splitter, aligned_results
from structured_commit.serving.merge import Delivered
from structured_commit.vocabulary import _byte_level_alphabet
from tests.support.older_tokenizers import lacking
from tests.support.streams import spell
from tests.unit.test_merge import Item

BLANKS = " \t\r\n"


@cache
def table_of(form: str) -> StructureTable:
    return lacking(form)[0]


@cache
def splitter_of(form: str, with_cuts: bool = True) -> Splitter:
    return Splitter(table_of(form), builtin_format(form).cuts if with_cuts else ())


def pieces_of(splitter: Splitter, deltas: list[str]) -> list[str]:
    stream = splitter.stream()
    found = [piece for delta in deltas for piece in splitter.split(delta, stream)]
    return found + splitter.flush(stream)


def chunked(text: str, choose: random.Random, most: int = 12) -> list[str]:
    deltas = []
    while text:
        size = choose.randint(1, most)
        deltas.append(text[:size])
        text = text[size:]
    return deltas


# -- the splitter -------------------------------------------------------------------------------------------------


def fragments(form: str) -> st.SearchStrategy[str]:
    marks = [*table_of(form).info.controls, *builtin_format(form).cuts]
    halves = [mark[:n] for mark in marks for n in (1, len(mark) // 2, len(mark) - 1)]
    texts = (
        "",
        "{",
        "}",
        '"',
        ";",
        " ",
        "\n",
        "空",
        "🌤️",
        "\ufffd",
        "\ud83c",
        "\udf24",
        "f",
        '{"name": "f", "parameters": {',
    )
    return st.sampled_from([*marks, *marks, *halves, *texts])


@pytest.mark.parametrize("form", format_names())
@settings(max_examples=40)
@given(data=st.data())
def test_pieces_concatenate_to_the_deltas_whatever_they_are(form, data):
    deltas = data.draw(st.lists(st.lists(fragments(form), max_size=4).map("".join), max_size=6))
    splitter = splitter_of(form)
    stream, longest = splitter.stream(), max(map(len, table_of(form).info.controls))
    sent = ""
    for i, delta in enumerate(deltas):
        pieces = splitter.split(delta, stream)
        sent += "".join(pieces)
        assert sent + stream.held == "".join(deltas[: i + 1])
        assert len(stream.held) < longest
        assert "" not in pieces
    assert sent + "".join(splitter.flush(stream)) == "".join(deltas)
    assert not splitter.flush(stream)


def regions(form: str, text: str) -> tuple[list[int], int]:
    """Where a region opens or closes or a control token begins or ends, walked token by token, a byte a token, by the
    host twin; and the last state."""
    table, chat = lacking(form)
    host, state = table.host, table.host.start
    names = {token: name for name, token in chat.vocabulary.controls.items()}
    found, at = set(), 0
    for token in spell(chat, text, "bytes"):
        before = host.block_open(state), host.header_open(state)
        state = host.step(state, token)
        assert state >= 0, f"{text!r} is no turn"
        if token in names:
            found.update((at, at + len(names[token].encode())))
        at += len(names[token].encode()) if token in names else 1
        if (host.block_open(state), host.header_open(state)) != before:
            found.add(at)
    return sorted(found), state


def legal_turns(parser: str, count: int) -> list[str]:
    form = FAMILIES[parser].format
    table, chat = lacking(form)
    texts = [turn.text for turn in turns(parser, 6 * count)]
    return [t for t in texts if table.host.walk(spell(chat, t, "bytes")).illegal_at is None][:count]


@pytest.mark.parametrize("parser", WRITERS)
def test_no_piece_crosses_a_boundary_wherever_deltas_end(parser):
    splitter, choose = splitter_of(FAMILIES[parser].format), random.Random(5)
    texts = legal_turns(parser, 12)
    assert len(texts) == 12
    crossed = 0
    for text in texts:
        marks, _ = regions(FAMILIES[parser].format, text)
        data = text.encode()
        for deltas in ([text], list(text), *(chunked(text, choose) for _ in range(6))):
            at = 0
            for piece in pieces_of(splitter, deltas):
                end = at + len(piece.encode())
                for mark in marks:
                    if at < mark < end:  # only where all behind it is white space
                        assert not data[mark:end].decode().strip(BLANKS), (piece, data[mark:end])
                at = end
            crossed += len(marks)
    assert crossed > 100


@pytest.mark.parametrize("parser", WRITERS)
def test_the_walk_over_text_ends_where_the_walk_over_tokens_ends(parser):
    form, choose = FAMILIES[parser].format, random.Random(6)
    table, chat = lacking(form)
    splitter = splitter_of(form)
    for text in legal_turns(parser, 12):
        stream = splitter.stream()
        for delta in chunked(text, choose):
            splitter.split(delta, stream)
        splitter.flush(stream)
        expected = table.host.walk(spell(chat, text, "bytes")).state
        assert stream.state == (expected if table.host.tracks(expected) else 0)


CUTS = {
    "llama_3": (
        '{"name": "f", "parameters": {"s": "}"}};{"name": "g", "parameters": {}}',
        ['{"name": "f", "parameters": {', '"s": "}"}}', ";", '{"name": "g", "parameters": {', "}}"],
    ),
    "minimax_m2": (
        '</think>A<minimax:tool_call><invoke name="f"></invoke><invoke name="g"></invoke></minimax:tool_call>',
        [
            *("</think>", "A", "<minimax:tool_call>", "<invoke", ' name="f">', "</invoke>"),
            *("<invoke", ' name="g">', "</invoke>", "</minimax:tool_call>"),
        ],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        ["<tool_call>", "\n", "<function=", "f>\n", "</function>", "\n", "</tool_call>"],
    ),
    "hermes": (
        'A <tool_call>\n{"name": "f", "arguments": {"s": "<tool_call>"}}\n</tool_call>B',
        ["A ", "<tool_call>", '\n{"name": "f", "arguments": {"s": "', "<tool_call>", '"}}\n', "</tool_call>", "B"],
    ),
}


@pytest.mark.parametrize("form", CUTS)
def test_boundaries_of_ordinary_text_are_cut_too(form):
    text, pieces = CUTS[form]
    assert pieces_of(splitter_of(form), [text]) == pieces


def test_the_beginning_of_a_spelling_waits_for_the_rest():
    splitter = splitter_of("hermes")
    stream = splitter.stream()
    assert splitter.split("a <tool", stream) == ["a "]
    assert splitter.split("_ca", stream) == []
    assert splitter.split("ll>{", stream) == ["<tool_call>", "{"]
    assert splitter.split("<", stream) == []
    assert splitter.split(" b", stream) == ["< b"]
    assert splitter.split("</tool_call", stream) == []
    assert splitter.flush(stream) == ["</tool_call"]


def test_a_cut_that_began_in_an_earlier_delta_ends_a_piece():
    splitter = splitter_of("minimax_m2")
    deltas = ['<minimax:tool_call><invoke name="f"><parameter name="x">1</par', "ameter></inv", 'oke><invoke name="g">']
    assert pieces_of(splitter, deltas)[-5:] == ["ameter>", "</inv", "oke>", "<invoke", ' name="g">']


def test_text_that_fits_no_turn_is_cut_at_spellings_and_the_walk_starts_again_at_the_next_opener():
    splitter = splitter_of("gemma_4")
    stream = splitter.stream()
    broken = "<|tool_call>nonsense<|tool_call><tool_call|>and"
    assert splitter.split(broken, stream) == ["<|tool_call>", "nonsense", "<|tool_call>", "<tool_call|>", "and"]
    assert stream.state == 0
    assert splitter.split("<|tool_call>call:f{x:1}<tool_call|>", stream) == [
        *("<|tool_call>", "call:f{", "x:1}", "<tool_call|>")
    ]
    assert stream.state != 0


def test_behind_a_terminal_nothing_is_followed_and_nothing_is_lost():
    splitter = splitter_of("hermes")
    assert pieces_of(splitter, ["Blue.<|im_end|>x<"]) == ["Blue.", "<|im_end|>", "x", "<"]


def test_a_character_split_over_tokens_arrives_whole_from_the_incremental_detokeniser():
    alphabet = dict(_byte_level_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[], byte_fallback=False))
    tokenizer.decoder = decoders.ByteLevel()
    text = "空 🌤️ <tool_call>\n{é}"
    stream, decode = splitter_of("hermes").stream(), DecodeStream(skip_special_tokens=False)
    pieces = []
    for byte in text.encode():
        pieces += splitter_of("hermes").split(decode.step(tokenizer, byte) or "", stream)
    assert "".join(pieces) + "".join(splitter_of("hermes").flush(stream)) == text
    assert "<tool_call>" in pieces


def test_bad_input_is_named():
    table = table_of("hermes")
    bare = StructureTable(table.token_class, table.next_state, table.state_flags, table.class_flags, table.info)
    with pytest.raises(ValueError, match="hermes has no byte automaton"):
        Splitter(bare)
    with pytest.raises(ValueError, match="empty text among the cuts"):
        Splitter(table, ("", ";"))


def test_cuts_are_no_part_of_what_a_table_is_compiled_from():
    form = builtin_format("llama_3")
    assert form.cuts == (";",)
    assert replace(form, cuts=()).digest == form.digest


# -- before a parser ----------------------------------------------------------------------------------------------


class Parser:
    """Says one thing an increment, as TensorRT-LLM's base parser: `(name)` is a call, `!` raises, the rest is text."""

    def __init__(self) -> None:
        self._buffer = ""
        self.asked: list[str] = []
        self.calls = 0

    def parse_streaming_increment(self, text: str, tools) -> Delivered:
        self.asked.append(text)
        self._buffer += text
        if "!" in self._buffer:
            raise RuntimeError("cannot read this")
        begin, end = self._buffer.find("("), self._buffer.find(")")
        if begin < 0:
            said, self._buffer = self._buffer, ""
            return Delivered(said)
        if begin:
            said, self._buffer = self._buffer[:begin], self._buffer[begin:]
            return Delivered(said)
        if end < 0:
            return Delivered()
        name, self._buffer = self._buffer[1:end], self._buffer[end + 1 :]
        self.calls += 1
        return Delivered("", [Item(self.calls - 1, name), Item(self.calls - 1, None, "{}")])


def delivery() -> AlignedDelivery:
    return AlignedDelivery(splitter_of("hermes"))


def test_the_parser_is_asked_until_nothing_comes():
    assert delivery().parse(Parser(), "a(f)(g)b", None) == Delivered("ab", [Item(0, "f", "{}"), Item(1, "g", "{}")])


def test_text_between_calls_keeps_its_place_where_several_chunks_may_be_sent():
    found = delivery().parse_in_order(Parser(), "a(f)b(g)c", None)
    assert found == [Delivered("a", [Item(0, "f", "{}")]), Delivered("b", [Item(1, "g", "{}")]), Delivered("c")]


def test_an_empty_delta_asks_the_parser_too():
    parser = Parser()
    parser._buffer = "(f)"
    assert delivery().parse(parser, "", None).calls == [Item(0, "f", "{}")]
    assert parser.asked == ["", ""]


def test_the_last_delta_releases_what_was_held_back():
    parser, aligned = Parser(), delivery()
    assert aligned.parse(parser, "a<tool", None) == Delivered("a")
    assert aligned.parse(parser, "", None, finished=True) == Delivered("<tool")
    assert aligned.parse(parser, "", None, finished=True) == Delivered()


def test_streams_are_told_apart_by_their_parser():
    first, second, aligned = Parser(), Parser(), delivery()
    assert aligned.parse(first, "a<tool", None) == Delivered("a")
    assert aligned.parse(second, "b", None, finished=True) == Delivered("b")
    assert aligned.parse(first, "x", None) == Delivered("<toolx")


def test_a_client_that_leaves_in_mid_stream_leaves_nothing_behind():
    parser, aligned = Parser(), delivery()
    aligned.parse(parser, "a<tool", None)
    assert len(aligned._streams) == 1
    del parser
    gc.collect()
    assert len(aligned._streams) == 0


def test_a_piece_at_which_the_parser_raises_is_content_and_the_others_survive(caplog):
    parser, aligned = Parser(), delivery()
    with caplog.at_level(logging.WARNING, "structured_commit"):
        got = aligned.parse(parser, "(f)</think>bad!</think>(g)</think>worse!", None)
        assert aligned.parse(parser, "(h", None) == Delivered("")
        assert aligned.parse(parser, ")", None, finished=True) == Delivered("", [Item(2, "h", "{}")])
    assert got == Delivered("</think>bad!</think></think>worse!", [Item(0, "f", "{}"), Item(1, "g", "{}")])
    assert [record.message for record in caplog.records] == [
        "structured_commit: tool parser Parser: RuntimeError at a piece of 4 characters, delivered as content; "
        "said once a stream"
    ]


class Endless:
    """Has always one more thing to say."""

    def parse_streaming_increment(self, text: str, tools) -> Delivered:
        return Delivered("x")


def test_a_parser_that_never_stops_is_not_asked_for_ever():
    splitter = splitter_of("hermes")
    assert len(aligned_results(Endless(), "a", None, splitter, splitter.stream())) == 1 + MAX_ASKS


class Slotted:
    """Keeps its state where it cannot be put back."""

    __slots__ = ("__weakref__",)

    def parse_streaming_increment(self, text: str, tools) -> Delivered:
        raise ValueError(text)


def test_a_parser_whose_state_cannot_be_put_back_is_contained_too():
    assert delivery().parse(Slotted(), "ab", None) == Delivered("ab")
