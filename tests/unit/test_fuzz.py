"""The fuzzer agrees with the stage, and does not agree with a stage that is wrong in any one place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scripts.fuzz.__main__ import main
from scripts.fuzz.case import Case
from scripts.fuzz.compare import MismatchError, run_case
from scripts.fuzz.model import stream_words
from structured_commit import CommitStage, Event, StructureTable
from structured_commit import repair as repair_module
from structured_commit.philox import philox4x32

ENOUGH = range(150)


def test_the_stage_its_definition_and_the_host_twin_agree():
    assert sum(run_case(number) for number in range(1000, 1500)) > 20_000


def test_a_case_is_the_same_every_time():
    first, again = (Case(7).step([0] * Case(7).num_slots) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.slots, again.slots)
    assert first.binding == again.binding


def test_the_definitions_philox_is_the_stages():
    words = philox4x32(torch.tensor([5, 7, 1, 0x5C0117ED]), torch.tensor([3, 9]))
    assert stream_words(3 | 9 << 32, 5, 7 | 1 << 32) == tuple(words[:2].tolist())


def _fault_lengths(stage, out):
    return out._replace(lengths=torch.where(out.lengths == stage.max_window, out.lengths - 1, out.lengths).int())


def _fault_padding(stage, out):
    tokens = out.tokens.clone()
    tokens[:, -1] = 0
    return out._replace(tokens=tokens)


def _fault_events(stage, out):
    return out._replace(events=out.events & ~int(Event.TRIMMED))


@pytest.mark.parametrize("fault", [_fault_lengths, _fault_padding, _fault_events])
def test_a_wrong_output_is_found(fault):
    class Wrong(CommitStage):
        def commit(self, *args, **kwargs):
            return fault(self, super().commit(*args, **kwargs))

    _found(make_stage=Wrong)


@pytest.mark.parametrize("tensor", ["state", "steps", "repairs", "counters"])
def test_a_wrong_state_is_found(tensor):
    class Wrong(CommitStage):
        def commit(self, *args, **kwargs):
            before = getattr(self, tensor).clone()
            out = super().commit(*args, **kwargs)
            getattr(self, tensor).copy_(before)
            return out

    _found(make_stage=Wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("random_words", lambda seed, slots, steps: _REAL.random_words(seed, slots, steps + 1)),
        ("legal_weights", lambda probs, legal: _REAL.legal_weights(probs, torch.ones_like(legal))),
        ("best_legal", lambda scores, legal: _REAL.best_legal(-scores, legal)),
        ("draw", lambda weights, words: _REAL.draw(weights, words.flip(1))),
    ],
)
def test_a_wrong_redraw_is_found(monkeypatch, name, wrong):
    monkeypatch.setattr(repair_module, name, wrong)
    _found()


def test_a_wrong_order_of_redraws_is_found(monkeypatch):
    real = torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda self, stable=False: real(self, stable=True).flip(0))
    _found()


def test_a_wrong_binding_is_found():
    class Wrong(CommitStage):
        def bind(self, slots, token_ids, **rest):
            super().bind(slots, token_ids, **rest | {"owners": None})

    _found(make_stage=Wrong)


def test_a_difference_comes_with_the_command_that_makes_it_again(monkeypatch, capsys):
    monkeypatch.setattr(repair_module, "best_legal", lambda scores, legal: _REAL.best_legal(-scores, legal))
    assert main(["--windows", "100000", "--jobs", "1"]) == 1
    shown = capsys.readouterr().out
    command = shown.split('make fuzz ARGS="')[1].split('"')[0]
    assert main(command.split()) == 1
    assert "instead of" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(command.split()) == 0
    assert "agree" in capsys.readouterr().out


def test_options_are_checked(capsys):
    with pytest.raises(SystemExit):
        main(["--windows", "0"])
    assert "--windows and --jobs must be 1 or more" in capsys.readouterr().err


def test_a_table_of_the_fuzzer_is_a_table():
    assert isinstance(Case(3).table, StructureTable)


_REAL = SimpleNamespace(
    **{n: getattr(repair_module, n) for n in ("random_words", "legal_weights", "best_legal", "draw")}
)


def _found(**how) -> None:
    with pytest.raises(MismatchError, match=r"again: make fuzz ARGS=\"--case \d+\""):
        _run_many(**how)


def _run_many(**how) -> None:
    for number in ENOUGH:
        run_case(number, **how)
