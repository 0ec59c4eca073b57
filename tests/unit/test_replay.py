"""The replay of report #17437 says what its figures support, and its figures come from the real rule and stage."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from scripts.replay.__main__ import main
from scripts.replay.decoding import NUM_DRAFTS, decode, one_window
from scripts.replay.exact import largest_difference, plain_law, rejection_shares, speculative_law
from scripts.replay.model import (
    AGREES,
    ALT,
    CH,
    DELIVERED,
    DRAFTER,
    DRAFTS,
    END,
    LEAKS,
    MALFORMED,
    MSG,
    REJECTS,
    STOP,
    TERMINAL_INSIDE,
    TOK,
    TXT,
    UNFINISHED,
    calls_table,
    lost_shares,
    read_calls,
)
from scripts.replay.report import show
from scripts.replay.verdict import POLICIES, judge, measure

REQUESTS = 400


@pytest.fixture(scope="module")
def figures():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the command does
    yield measure(REQUESTS, seed=0)
    torch.set_num_threads(threads)


def test_the_tokens_of_the_report_keep_their_ids():
    assert (MSG, TOK, END) == (6, 7, 8)
    assert DRAFTS == (MSG, TOK, END)


@pytest.mark.parametrize(
    ("stream", "outcomes"),
    [
        ([CH, MSG, TOK, END, STOP], [DELIVERED]),
        ([CH, MSG, ALT, ALT, END, TXT, CH, MSG, TOK, END], [DELIVERED, DELIVERED]),
        ([CH, MSG, TOK], [UNFINISHED]),
        ([CH], [UNFINISHED]),
        ([CH, STOP], [TERMINAL_INSIDE]),
        ([CH, MSG, ALT, STOP, TXT], [TERMINAL_INSIDE]),
        ([CH, TOK, END, STOP], [MALFORMED]),
        ([CH, MSG, END, STOP], [MALFORMED]),
        ([CH, MSG, TOK, CH, END, CH, MSG, TOK, END], [MALFORMED, DELIVERED]),
        ([TXT, STOP, CH], []),
    ],
)
def test_the_parser_knows_what_became_of_each_call(stream, outcomes):
    assert [call.outcome for call in read_calls(stream)] == outcomes


def test_the_automaton_refuses_what_the_parser_cannot_read():
    host = calls_table().host
    for stream in ([CH, MSG, TOK, END, STOP], [TXT, CH, MSG, ALT, TOK, END]):
        assert host.first_illegal(stream) is None
    assert host.first_illegal([CH, TOK]) == 1
    assert host.first_illegal([CH, MSG, END]) == 2
    assert host.first_illegal([CH, MSG, TOK, STOP]) == 3


@pytest.mark.parametrize("law", [AGREES, REJECTS, LEAKS])
@pytest.mark.parametrize("num_drafts", [1, 2, NUM_DRAFTS])
def test_enumerated_speculation_has_the_law_of_plain_sampling(law, num_drafts):
    plain = plain_law(law, 6)
    assert sum(plain.values()) == pytest.approx(1)
    assert largest_difference(plain, speculative_law(law, DRAFTER, num_drafts, 6)) < 1e-15


def test_the_chance_of_an_interior_rejection_is_that_of_the_rule():
    assert rejection_shares(REJECTS, DRAFTER, DRAFTS) == pytest.approx([0, 8 / 9, (1 / 9) * (1 - 7 / 9)])
    assert sum(rejection_shares(AGREES, DRAFTER, DRAFTS)) == 0


def test_the_two_cases_of_the_report_differ_by_an_interior_rejection():
    agrees, rejects = (one_window(law, DRAFTER, "off", seed=0) for law in (AGREES, REJECTS))
    assert agrees.accepted[:3] == list(DRAFTS)
    assert agrees.call.outcome == DELIVERED
    assert rejects.rejected
    assert rejects.accepted == [MSG, ALT]
    assert rejects.call.outcome == UNFINISHED


def test_no_policy_finishes_the_rejected_call_in_one_window_and_none_needs_to(figures):
    assert {figures.one_window["rejects", p].call.outcome for p in POLICIES} == {UNFINISHED}
    for policy in POLICIES:
        ending = figures.sound[policy]
        assert ending.delivered == ending.opened
        assert ending.rejected_inside > 0


def test_calls_are_lost_by_terminals_and_headers_alone(figures):
    for ending in (figures.plain, *figures.leaking.values()):
        assert ending.opened == ending.delivered + ending.terminal_inside + ending.malformed
    assert figures.leaking["off"].lost == figures.leaking["observe"].lost > 0
    assert all(figures.leaking[policy].lost == 0 for policy in ("repair", "gate", "rollback"))


def test_lost_shares_are_those_of_the_target():
    shares = lost_shares(LEAKS)
    plain = plain_law(LEAKS, 14)
    for outcome in (TERMINAL_INSIDE, MALFORMED):
        first = sum(mass for s, mass in plain.items() if read_calls((CH, *s))[0].outcome == outcome)
        assert shares[outcome] == pytest.approx(first, abs=1e-5)


def test_tokens_behind_a_terminal_are_committed_without_the_stage_only(figures):
    assert figures.leaking["off"].behind_terminal > 0
    assert all(figures.leaking[policy].behind_terminal == 0 for policy in POLICIES[2:])


def test_a_greedy_stream_is_the_same_whatever_is_repaired_if_nothing_is_illegal():
    streams = [decode(REJECTS, DRAFTER, p, requests=1, seed=0, acceptance="strict").streams[0].tokens for p in POLICIES]
    assert streams == [[CH, MSG, ALT, END, STOP]] * len(POLICIES)


def test_every_sentence_of_the_verdict_is_supported(figures):
    sentences = judge(figures)
    assert [s.text for s in sentences if not s.holds] == []
    assert [s.claim for s in sentences] == ["1", "2"] + ["3"] * 7 + ["stage"] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verbatim": 1}, "Prefix emission"),
        ({"output": 1}, "No rollback"),
        ({"malformed": 0}, "A call is lost when"),
    ],
)
def test_evidence_against_a_sentence_wins_and_is_said(figures, changes, words):
    leaking = figures.leaking | {"off": replace(figures.leaking["off"], **changes)}
    against = replace(figures, leaking=leaking)
    sentences = judge(against)
    assert any(s.text.startswith(words) and not s.holds for s in sentences)
    printed = io.StringIO()
    show(Console(file=printed, width=100), against, sentences)
    assert f"Not supported by the figures: {words}" in printed.getvalue()


def test_a_lost_call_that_neither_cause_explains_would_refute_the_third_claim(figures):
    off = figures.sound["off"]
    against = replace(figures, sound=figures.sound | {"off": replace(off, delivered=off.delivered - 1)})
    assert [s.text[:10] for s in judge(against) if not s.holds] == ["The engine"]


def test_the_command_prints_the_verdict_and_writes_every_figure(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main(["--requests", str(REQUESTS), "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "The verdict" in printed
    assert "Every sentence of the verdict is supported by the figures." in " ".join(printed.split())
    written = json.loads(path.read_text())
    assert set(written) == {
        "report",
        "settings",
        "one_window",
        "interior_rejection_probability",
        "law",
        "to_the_end",
        "length_limit",
        "exact_lost_shares",
        "greedy",
        "verdict",
        "supported",
    }
    assert written["settings"] == {"requests": REQUESTS, "seed": 0}
    assert len(written["one_window"]) == 2 * len(POLICIES)
    assert len(written["to_the_end"]) == 2 * len(POLICIES) + 1
    assert written["supported"] is all(s["holds"] for s in written["verdict"])
    assert {"claim", "text", "evidence", "holds"} == set(written["verdict"][0])


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["--requests", "0"], 2), (["--seed", "-1"], 2), (["--loud"], 2)]
)
def test_help_and_wrong_arguments_have_their_exit_status(arguments, status, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status
    printed = capsys.readouterr()
    assert "usage: python -m scripts.replay" in printed.out + printed.err
