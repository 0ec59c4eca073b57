"""Bad input gets a named error that says what to do, or the documented fallback; and nothing is half done."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from structured_commit import (
    CommitConfig,
    CommitStage,
    Event,
    FormatError,
    StageError,
    StructuredCommitError,
    StructureTable,
    TableError,
    Vocabulary,
    VocabularyError,
    compile_format,
)
from structured_commit.table import FILE_VERSION
from tests.support.calls import END, ENDED, IN_TEXT, IN_THE_HEADER, NAME, TEXT, VOCAB, calls_table, certain, int32

LETTERS = Vocabulary(8, {i: bytes([c]) for i, c in enumerate(b"abc")}, {"<open>": 3, "<close>": 4, "<end>": 5})


def test_every_named_error_is_a_value_error():
    for error in (FormatError, VocabularyError, TableError, StageError):
        assert issubclass(error, StructuredCommitError)
        assert issubclass(error, ValueError)


# --- formats and vocabularies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("harmonie", FormatError, r"unknown format 'harmonie'; did you mean 'harmony'\?"),
        ("nothing like it", FormatError, "Built-in formats: .*harmony"),
        ("no/such/file.json", FormatError, "cannot read format file no/such/file.json"),
        (r"a[^\x00-\xff]", FormatError, "format custom: the expression has a dead state"),
        ("«<tool>»[abc]*", VocabularyError, "needs the control token '<tool>', which this tokenizer does not have"),
        ("[abc]*«<end>»", FormatError, "'<end>' is a terminal and also stands in the expression"),
        ("[abc]*z", TableError, r"are dead: no legal end can be reached .* with the tokens of this vocabulary"),
        (7, FormatError, "not int"),
    ],
)
def test_a_format_that_cannot_be_compiled_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        compile_format(source, LETTERS, terminals=("<end>",))


@pytest.mark.parametrize(
    ("terminals", "error", "message"),
    [((), FormatError, "at least one terminal"), (("<eos>",), VocabularyError, "control token '<eos>'")],
)
def test_a_format_without_a_terminal_of_this_tokenizer_is_refused(terminals, error, message):
    with pytest.raises(error, match=message):
        compile_format("[abc]*", LETTERS, terminals=terminals)


# --- table files --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "table.safetensors"
    calls_table().save(path)
    return path


def rewrite(path, tensors=None, info=None, version=FILE_VERSION):
    """Write a table file with some parts replaced; a tensor of None is left out."""
    original = load_file(path)
    kept = {name: t for name, t in {**original, **(tensors or {})}.items() if t is not None}
    described = {"format": "calls", "start": 1, "entries": []} if info is None else info
    save_file(kept, path, {"structured_commit": version, "info": json.dumps(described)})


def test_a_table_for_another_vocabulary_size_is_refused(saved):
    with pytest.raises(TableError, match=f"is for a vocabulary of {VOCAB} tokens, the model has 9; compile it again"):
        StructureTable.load(saved, vocab_size=9)


def test_a_missing_table_file_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"cannot read structure table .*none\.safetensors"):
        StructureTable.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_table_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(TableError, match="cannot read structure table"):
        StructureTable.load(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": "0"}, "has table version 0, not 1"),
        ({"tensors": {"next_state": None}}, "is damaged"),
        ({"tensors": {"more": torch.zeros(1)}}, "is damaged"),
        ({"tensors": {"next_state": torch.zeros(4, 6)}}, "is damaged: next_state must be"),
        ({"tensors": {"token_class": torch.full((6,), 6, dtype=torch.int16)}}, "class outside"),
        ({"tensors": {"state_flags": torch.zeros(4, dtype=torch.uint8)}}, "is damaged"),
        ({"info": {"format": "calls"}}, "is damaged"),
        ({"info": {"entries": [], "color": "red"}}, "is damaged"),
        ({"info": {"entries": [1]}}, "is damaged"),
        ({"info": {"entries": [], "start": 99}}, "start state 99"),
        ({"info": []}, "is damaged"),
    ],
)
def test_a_damaged_table_file_is_refused_with_its_name(saved, damage, message):
    rewrite(saved, **damage)
    with pytest.raises(TableError, match=message) as caught:
        StructureTable.load(saved)
    assert str(saved) in str(caught.value)
    assert "compile it again" in str(caught.value)


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(TableError, match="has table version None"):
        StructureTable.load(tmp_path / "model.safetensors")


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "mend"},
            "unknown policy 'mend'; choose one of: off, observe, trim, repair, gate, rollback",
        ),
        ({"policy": None}, "unknown policy None"),
        ({"max_repairs": -1}, "max_repairs is -1"),
        ({"repair_rows": 0}, "repair_rows is 0"),
        ({"seed": -1}, "seed -1 does not fit"),
        ({"seed": 2**64}, "does not fit 64 bits"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(StageError, match=message):
        CommitConfig(**settings)


@pytest.mark.parametrize("sizes", [{"num_slots": 0, "max_window": 4}, {"num_slots": 2, "max_window": 0}])
def test_a_stage_without_slots_or_columns_is_refused(sizes):
    with pytest.raises(StageError, match="must be 1 or more"):
        CommitStage(calls_table(), **sizes)


# --- calls --------------------------------------------------------------------------------------------------------

WIDTH = 3


def make_stage(policy: str = "repair", **config) -> CommitStage:
    stage = CommitStage(calls_table(), CommitConfig(policy=policy, **config), num_slots=4, max_window=WIDTH)
    stage.state[:4] = int32([IN_TEXT, IN_THE_HEADER, ENDED, 0])
    stage.commit(int32([[NAME]]), int32([1]), torch.tensor([0]), probs=certain(TEXT))
    return stage


def arguments(**changes) -> dict:
    """A call that would repair, trim and count; with some arguments replaced, None to leave one out."""
    call = {
        "tokens": int32([[TEXT, END, TEXT], [TEXT, NAME, NAME]]),
        "lengths": int32([3, 3]),
        "slots": torch.tensor([0, 1]),
        "probs": certain(NAME, width=WIDTH).expand(2, -1, -1),
    }
    return {name: value for name, value in {**call, **changes}.items() if value is not None}


def refuse(stage: CommitStage, message: str, call: dict) -> None:
    """The call raises, and leaves the state, the random stream and the counters of the stage as they were."""
    kept = [t.clone() for t in (stage.state, stage.steps, stage.repairs, stage.counters)]
    with pytest.raises(StageError, match=message):
        stage.commit(**call)
    for before, after in zip(kept, (stage.state, stage.steps, stage.repairs, stage.counters), strict=True):
        assert torch.equal(before, after)


LOGITS = torch.zeros(2, WIDTH, VOCAB)
WITHOUT_PROBS = {"probs": None, "logits": LOGITS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [[TEXT]]}, r"tokens must be a \[B, W\] int32 tensor, not list"),
        ({"tokens": int32([TEXT, END])}, r"tokens must be a \[B, W\] int32 tensor, not \[2\] int32"),
        ({"tokens": torch.zeros(2, WIDTH, dtype=torch.int64)}, r"tokens must be a \[2, 3\] int32 .*, not .* int64"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int32)}, "windows of 4 columns; this stage was built for 1 to 3"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int32)}, "windows of 0 columns"),
        ({"lengths": int32([3])}, r"lengths must be a \[2\] int32 tensor"),
        ({"lengths": torch.tensor([3, 3])}, r"lengths must be a \[2\] int32 tensor, not \[2\] int64"),
        ({"slots": int32([0, 1])}, r"slots must be a \[2\] int64 tensor, not \[2\] int32"),
        ({"slots": torch.tensor([[0, 1]])}, "slots must be"),
        ({"probs": LOGITS[:, :2]}, r"probs must be a \[2, 3, 6\] float16 or .*, not \[2, 2, 6\] float32"),
        ({"probs": LOGITS[..., :5]}, r"probs must be a \[2, 3, 6\]"),
        ({"probs": LOGITS.long()}, "probs must be .* not .* int64"),
        ({"probs": None, "logits": LOGITS[0]}, r"logits must be a \[2, 3, 6\]"),
        ({**WITHOUT_PROBS, "temperature": torch.zeros(3)}, r"temperature must be a \[2\]"),
        ({**WITHOUT_PROBS, "temperature": torch.ones(2), "top_k": torch.ones(2)}, r"top_k must be .* int32 or int64"),
        ({**WITHOUT_PROBS, "temperature": torch.ones(2), "top_p": torch.ones(2, 1)}, r"top_p must be a \[2\]"),
        ({"words": torch.zeros(2, 1, dtype=torch.int64)}, r"words must be a \[2, 2\] int64"),
        ({"source_rows": torch.zeros(2, WIDTH, dtype=torch.int64)}, r"probs must be a \[2, 6\]"),
        ({"logits": LOGITS}, "pass probs or logits, not both"),
        ({"temperature": torch.ones(2)}, "temperature, top_k and top_p belong to logits"),
        ({**WITHOUT_PROBS, "top_k": int32([1, 1])}, "top_k and top_p need a temperature"),
        ({"probs": None}, "policy 'repair' redraws illegal tokens and needs probs or logits"),
        ({"slots": torch.zeros(2, dtype=torch.int64, device="meta")}, "slots is on meta, the stage on cpu"),
    ],
)  # fmt: skip
def test_a_call_of_the_wrong_form_is_refused_and_changes_nothing(changes, message):
    refuse(make_stage(), message, arguments(**changes))


@pytest.mark.parametrize("policy", ["observe", "repair"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": int32([3, 0])}, r"lengths: 0 in row 1 is outside \[1, 3\]"),
        ({"lengths": int32([4, 1])}, r"lengths: 4 in row 0 is outside \[1, 3\]"),
        ({"tokens": int32([[TEXT] * 3, [TEXT, VOCAB, TEXT]])}, r"row 1 holds an id outside \[0, 6\)"),
        ({"tokens": int32([[TEXT, TEXT, -1], [TEXT] * 3])}, r"row 0 holds an id outside \[0, 6\)"),
        ({"slots": torch.tensor([0, 5])}, r"slots: 5 in row 1 is outside \[0, 4\] \(4 = no slot\)"),
        ({"slots": torch.tensor([-1, 0])}, r"slots: -1 in row 0"),
        ({"slots": torch.tensor([1, 1])}, "slots: 1 stands in two rows"),
        ({"probs": LOGITS + 0.2}, "a column of row 0 does not sum to one"),
    ],
)
def test_checked_values_are_refused_and_change_nothing(policy, changes, message):
    refuse(make_stage(policy, check=True), message, arguments(**changes))


def test_checks_accept_garbage_past_a_rows_length_and_rows_without_a_slot():
    probs = certain(TEXT, width=WIDTH).repeat(2, 1, 1)
    probs[:, 2] = torch.nan
    call = arguments(
        tokens=int32([[TEXT, END, -7], [TEXT, TEXT, 1_000_000]]),
        lengths=int32([2, 2]),
        slots=torch.tensor([4, 4]),
        probs=probs,
    )
    make_stage(check=True).commit(**call)


def test_unchecked_values_out_of_range_are_clamped_flagged_and_never_indexed_with():
    stage = make_stage()
    tokens = int32([[TEXT, 2**31 - 1, -(2**31)], [NAME, -1, VOCAB]])
    out = stage.commit(**arguments(tokens=tokens, lengths=int32([-5, 2**31 - 1])))
    assert out.lengths.tolist() == [1, 2]
    assert out.tokens.tolist() == [[TEXT] * 3, [NAME] * 3]
    assert all(Event.OUT_OF_RANGE in Event(e) for e in out.events.tolist())


def test_a_target_with_all_its_mass_on_illegal_tokens_gets_the_documented_fallback():
    stage = make_stage()
    out = stage.commit(**arguments(tokens=int32([[NAME] * 3, [TEXT] * 3])))
    committed = out.tokens[:, 0].tolist()
    assert [Event.ESCAPED in Event(e) for e in out.events.tolist()] == [True, False]
    assert stage.table.host.step(IN_TEXT, committed[0]) > 0
    assert committed[1] == NAME


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_target_that_is_not_a_distribution_still_gets_a_legal_token(value):
    for name in ("probs", "logits"):
        stage = make_stage()
        call = arguments(probs=None) | {name: torch.full((2, WIDTH, VOCAB), value)}
        out = stage.commit(**call | {"tokens": int32([[NAME] * 3, [TEXT] * 3])})
        for state, token in zip((IN_TEXT, IN_THE_HEADER), out.tokens[:, 0].tolist(), strict=True):
            assert stage.table.host.step(state, token) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (([0, 1], [[TEXT]]), "2 slots but 1 token_ids"),
        (([4], [[TEXT]]), r"slot 4 is outside \[0, 4\)"),
        (([-1], [[TEXT]]), "slot -1 is outside"),
        (([2, 2], [[TEXT], [TEXT]]), "slot 2 is named twice"),
    ],
)
def test_a_binding_that_does_not_fit_is_refused_and_changes_nothing(call, message):
    stage = make_stage()
    before = stage.state.clone()
    with pytest.raises(StageError, match=message):
        stage.bind(*call)
    assert torch.equal(stage.state, before)


@pytest.mark.parametrize("name", ["owners", "in_context", "tracked"])
def test_a_binding_needs_one_of_each_for_each_slot(name):
    with pytest.raises(StageError, match=f"2 slots but 1 {name}"):
        make_stage().bind([0, 1], [[TEXT], [TEXT]], **{name: [True]})


def test_an_owner_whose_binding_was_refused_is_not_taken_for_known():
    stage = make_stage()
    with pytest.raises(StageError):
        stage.bind([0, 9], [[TEXT], [TEXT]], owners=["a", "b"])
    assert not stage.owned_by(0, "a")
