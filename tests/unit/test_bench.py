"""What the benchmark measures is what it says: the windows, the peers' verdicts, the counts. No times are tested."""

from __future__ import annotations

import json
from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from scripts.bench import accepted, compiling
from scripts.bench.contenders import LLGuidance, XGrammar, host_call, stage_call
from scripts.bench.report import Cell, Results, draw, show
from scripts.bench.timing import Cost, compare
from scripts.bench.workload import World


@cache
def world() -> World:
    return World("cpu")


def test_legal_batches_are_legal_and_illegal_ones_hold_their_share():
    host = world().table.host
    for share, expected in ((0.0, 0), (0.01, 1), (0.25, 8), (1.0, 32)):
        batch = world().batch(32, 4, share)
        refused = [
            row
            for row, (state, window) in enumerate(zip(batch.states.tolist(), batch.tokens.tolist(), strict=True))
            if host.walk(window, state).illegal_at is not None
        ]
        assert refused == sorted(batch.illegal)
        assert len(refused) == expected


@pytest.mark.parametrize("peer", [XGrammar, LLGuidance])
def test_the_peers_accept_every_window_and_come_back_to_where_they_were(peer):
    batch = world().batch(8, 4, 0.0)
    for call in peer(world()).calls(batch).values():
        call()
        call()  # a peer that did not roll back would refuse the same tokens now


def test_the_peers_masks_allow_the_tokens_that_come_next():
    batch = world().batch(4, 3, 0.0)
    peer = XGrammar(world())
    import xgrammar

    for row in batch.rows:
        matcher = xgrammar.GrammarMatcher(peer.compiled)
        mask = xgrammar.allocate_token_bitmask(1, peer.size)
        for token in row.before:
            assert matcher.accept_token(token)
        for token in row.window:
            matcher.fill_next_token_bitmask(mask)
            assert (int(mask[0, token // 32]) >> (token % 32)) & 1
            assert matcher.accept_token(token)


def test_the_host_scan_and_the_stage_find_the_same_windows():
    batch = world().batch(16, 4, 0.5)
    found = [i for i, at in enumerate(host_call(world(), batch)()) if at is not None]
    assert found == sorted(batch.illegal)
    stage_call(world(), batch)()


def test_repair_costs_no_token_where_all_is_legal_and_gate_does():
    off, repair, gate = accepted.measure(world(), (0.0,), ("off", "repair", "gate"))
    assert (off.illegal, repair.tokens, repair.steps) == (0.0, off.tokens, off.steps)
    assert gate.tokens == off.tokens
    assert gate.steps > off.steps


def test_repair_costs_steps_where_windows_are_illegal():
    off, repair = accepted.measure(world(), (0.05,), ("off", "repair"))
    assert 0.02 < off.illegal < 0.08
    assert repair.tokens == off.tokens
    assert repair.steps > off.steps


def test_every_round_runs_every_call():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    costs = compare(calls, rounds=3)
    assert set(costs) == {"a", "b"}
    runs = [a for a, b in zip(order, [None, *order], strict=False) if a != b]
    assert "".join(runs) == "ab" * 4  # once to warm up, then the rounds
    assert all(cost.low <= cost.median <= cost.high for cost in costs.values())


def test_the_structure_of_a_family_is_measured_everywhere():
    compiled = compiling.measure("hermes")
    assert compiled.bytes == compiling.compile_format("hermes", compiling.family_vocabulary("hermes").vocabulary).nbytes
    assert None not in compiled.as_dict().values()
    assert compiling.measure("mistral").xgrammar_seconds is None


def test_results_are_shown_written_and_drawn(tmp_path):
    cost = Cost(2e-4, 1e-4, 3e-4)
    results = Results(device="cpu", rounds=1, threads=2, torch="2")
    names = ("stage (torch)", "peer")
    results.axes = [Cell(n, b, k, 0.0, cost) for n in names for b, k in ((64, 8), (64, 2), (1, 8))]
    results.grid = [Cell("stage (torch)", 64, 8, s, cost) for s in (0.0, 1.0)]
    results.acceptance = [Cell("rule", 64, 8, 0.0, Cost(2e-2, 2e-2, 2e-2)), Cell("stage", 64, 8, 0.0, cost)]
    results.accepted = [accepted.Accepted("off", 0.01, 400, 100), accepted.Accepted("gate", 0.01, 400, 200)]
    results.compiled = [compiling.Compiled("mistral", 0.5, 400_000, 0.001)]
    out = StringIO()
    show(results, Console(file=out, width=160))
    shown = out.getvalue()
    for expected in ("200 ±50%", "1.000%", "4.000 (+0.0%)", "2.000 (-50.0%)", "200 / 200", "mistral"):
        assert expected in shown
    assert json.loads(json.dumps(results.as_dict()))["accepted"][1]["per_step"] == 2.0
    draw(results, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
