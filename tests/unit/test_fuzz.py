"""The fuzzer agrees with the stage, and does not agree with a stage that is wrong in any one place."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from scripts.fuzz.__main__ import main
from scripts.fuzz.case import Case
from scripts.fuzz.compare import MismatchError, run_case
from scripts.fuzz.model import sampled_weights, stream_words
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


TEMPERATURES = (0.0, 0.01, 0.0101, 0.3, 0.7, 1.0, 2.0, 1e30, torch.inf, torch.nan, -1.0)
TOP_KS = (-1, 0, 1, 2, 3, 5, 39, 40, 41, 1 << 20)
TOP_PS = (0.0, -1.0, 1e-12, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 2**-24, 1.0, 2.0, torch.nan)
ODD = (0.0, -0.0, -torch.inf, 1e38, -1e38, 1e-40, torch.nan, torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_definitions_weights_are_the_stages(dtype):
    generator = torch.Generator().manual_seed(17)
    rows, vocab = 150, 40

    def some(values: tuple, *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    logits = torch.randn(rows, vocab, generator=generator) * some((1.0, 3.0, 10.0), rows, 1)
    logits[::2] = logits[::2].round()  # many equal ones
    odd = torch.rand(rows, vocab, generator=generator) < 0.1
    logits = torch.where(odd, some(ODD[:6], rows, vocab), logits)
    logits[::15, 3] = some(ODD, rows)[::15]
    logits = logits.to(dtype)
    temperature, top_k, top_p = some(TEMPERATURES, rows), some(TOP_KS, rows).int(), some(TOP_PS, rows)
    legal = torch.rand(rows, vocab, generator=generator) < 0.5
    for limits in ((top_k, top_p), (top_k, None), (None, top_p), (None, None)):
        found = repair_module.sampled_weights(logits, temperature, *limits, legal=legal)
        for i in (temperature > repair_module.GREEDY_TEMPERATURE).nonzero()[:, 0].tolist():
            own = (None if t is None else t[i].item() for t in limits)
            assert found[i].tolist() == sampled_weights(logits[i], float(temperature[i]), *own, legal[i].tolist()), i


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
        ("exponential", lambda distance: _REAL.exponential(distance * 0)),
        ("mass_limit", lambda top_p, total: _REAL.mass_limit(top_p * 0.3, total)),
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


def test_several_processes_share_the_work():
    # As `make fuzz` starts it: what a spawned process is given must be found there.
    done = subprocess.run(
        [sys.executable, "-m", "scripts.fuzz", "--jobs", "2", "--windows", "2000"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "agree" in done.stdout


def test_options_are_checked(capsys):
    with pytest.raises(SystemExit):
        main(["--windows", "0"])
    assert "--windows and --jobs must be 1 or more" in capsys.readouterr().err


def test_a_table_of_the_fuzzer_is_a_table():
    assert isinstance(Case(3).table, StructureTable)


_REDRAW = ("random_words", "legal_weights", "best_legal", "draw", "exponential", "mass_limit")
_REAL = SimpleNamespace(**{n: getattr(repair_module, n) for n in _REDRAW})


def _found(**how) -> None:
    with pytest.raises(MismatchError, match=r"again: make fuzz ARGS=\"--case \d+\""):
        _run_many(**how)


def _run_many(**how) -> None:
    for number in ENOUGH:
        run_case(number, **how)
