"""A table is immutable, validated, and the same on disk, on a part of its vocabulary, and on the host."""

import dataclasses

import pytest
import torch

from scripts.tables import compiled
from structured_commit import StructureTable, TableError, TableInfo, Vocabulary, compile_format
from structured_commit.table import CLOSES, OPENS, TERMINAL
from tests.support.streams import spell

LETTERS = {i: bytes([c]) for i, c in enumerate(b"abcd<>")}
SMALL = Vocabulary(10, LETTERS, {"<open>": 6, "<close>": 7, "<e>": 8})
CALLS = "(?:[abcd]*«<open>»(?<block>[ab]+«<close>»))*[abcd]*"


def small_table():
    return compile_format(CALLS, SMALL, terminals=("<e>",), turn_openers=("«<open>»",))


def raw(**changes):
    parts = {
        "token_class": torch.tensor([0, 1, 2], dtype=torch.int16),
        "next_state": torch.tensor([[0, 0, 0], [1, 2, -1], [2, 1, 0]], dtype=torch.int16),
        "state_flags": torch.tensor([4, 1, 4], dtype=torch.uint8),
        "class_flags": torch.tensor([0, 0, TERMINAL], dtype=torch.uint8),
    }
    return StructureTable(**{**parts, **changes})


def test_tokens_that_behave_alike_share_a_class():
    table = small_table()
    classes = table.token_class.tolist()
    assert classes[0] == classes[1] != classes[2] == classes[3]
    assert len(set(classes)) == table.num_classes


def test_class_flags_name_terminals_openers_and_closers():
    table = small_table()
    flags = [int(table.class_flags[c]) for c in table.token_class.long()]
    assert flags[8] == TERMINAL
    assert flags[6] == OPENS
    assert flags[7] == CLOSES
    assert flags[0] == 0


def test_a_saved_table_is_read_back_whole(tmp_path):
    table, _ = compiled("harmony")
    table.save(tmp_path / "t.safetensors")
    again = StructureTable.load(tmp_path / "t.safetensors", vocab_size=table.vocab_size)
    assert again.info == table.info
    for name in ("token_class", "next_state", "state_flags", "class_flags", "byte_class", "byte_next", "escape_token"):
        assert torch.equal(getattr(again, name), getattr(table, name))
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_part_of_the_vocabulary_behaves_as_the_whole():
    table, chat = compiled("harmony")
    ids = spell(chat, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>")
    chosen = torch.tensor(sorted(set(ids)))
    part = table.select(chosen)
    moved = [chosen.tolist().index(i) for i in ids]
    assert part.vocab_size == len(chosen)
    for n in range(len(ids) + 1):
        assert part.host.walk(moved[:n]) == table.host.walk(ids[:n])
    assert part.info.controls["<|message|>"] == chosen.tolist().index(200008)


def test_the_escape_token_always_leads_to_the_end():
    for table in (small_table(), compiled("harmony")[0]):
        for state in range(1, table.num_states):
            at, steps = state, 0
            while at != table.ended:
                at = table.host.step(at, int(table.escape_token[at]))
                steps += 1
                assert at > 0
                assert steps <= table.num_states


def test_bytes_and_tokens_are_one_automaton():
    table, chat = compiled("harmony")
    for token in [*range(0, 199_998, 997), *spell(chat, " to=functions.get_weather analysis assistant")]:
        for state in range(1, table.num_states):
            at = state
            for byte in chat.vocabulary.texts[token]:
                at = int(table.byte_next[at, table.byte_class[byte]]) if at >= 0 else at
            assert at == table.host.step(state, token)


def test_a_special_token_the_format_does_not_mention_is_opaque_text():
    table, chat = compiled("harmony")
    body = spell(chat, "<|channel|>final<|message|>")
    assert table.host.first_illegal([*body, 200018]) is None
    assert table.host.first_illegal([*body[:2], 200018]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_class": torch.tensor([0, 1, 3], dtype=torch.int16)}, r"class outside \[0, 3\)"),
        ({"token_class": torch.tensor([0, 1, 2])}, "token_class must be a 1-dimensional torch.int16"),
        ({"next_state": torch.tensor([[0, 0, 0]], dtype=torch.int16)}, "at least one tracked state"),
        ({"next_state": torch.tensor([[0, 0, 1], [1, 2, -1], [2, 1, 0]], dtype=torch.int16)}, "row 0"),
        ({"next_state": torch.tensor([[0, 0, 0], [1, 3, -1], [2, 1, 0]], dtype=torch.int16)}, "outside"),
        ({"next_state": torch.tensor([[0, 0, 0], [1, 2, 0], [2, 1, 0]], dtype=torch.int16)}, "may end"),
        ({"next_state": torch.tensor([[0, 0, 0], [1, 1, -1], [2, 1, 0]], dtype=torch.int16)}, r"states \[1\] are dead"),
        ({"token_class": torch.tensor([0, 0, 2], dtype=torch.int16)}, r"states \[1\] are dead"),
        ({"state_flags": torch.tensor([4, 1], dtype=torch.uint8)}, "do not match"),
        ({"info": TableInfo(start=3)}, "start state 3"),
        ({"byte_class": torch.zeros(256, dtype=torch.int16)}, "belong together"),
    ],
)
def test_a_table_with_wrong_tensors_is_refused(changes, message):
    with pytest.raises(TableError, match=message):
        raw(**changes)


def test_a_vocabulary_without_the_way_out_is_refused():
    without = Vocabulary(10, {i: b for i, b in LETTERS.items() if b not in (b"a", b"b")}, SMALL.controls)
    with pytest.raises(TableError, match="dead"):
        compile_format(CALLS, without, terminals=("<e>",))


def test_table_tensors_are_copies_and_info_is_frozen():
    source = torch.tensor([0, 1, 2], dtype=torch.int16)
    table = raw(token_class=source)
    source[0] = 2
    assert table.token_class.tolist() == [0, 1, 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.info.start = 2
