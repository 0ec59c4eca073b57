"""The demo's promises: the rows differ by policy alone, nothing is lost by decree, and replies are judged right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from scripts.demo.__main__ import main, measure
from scripts.demo.conversations import KINDS, draw_kinds, write_turn
from scripts.demo.decoding import ACCEPTANCES, POLICIES, Requests, Run, decode, rejection
from scripts.demo.delivery import Client, Delivery, receive_all
from scripts.demo.model import NOISELESS, Smoothing, World, build_world
from scripts.demo.recording import record_incidents
from scripts.demo.report import Example, Row, as_json
from scripts.incident.page import render
from scripts.incident.spelling import Speller
from scripts.tables import compiled
from scripts.vocabularies import HARMONY_CONTROLS, ChatVocabulary, harmony_encoding
from structured_commit import Event, StructureTable, rejection_reference
from structured_commit.philox import curand_philox_words, curand_uniform
from structured_commit.recording.trace import read_trace

NUM_REQUESTS = 60
SEED = 5
NOISY = Smoothing(last_token=0.008, any_token=0.016)  # eight times the demo's: few requests must show losses


@dataclass(frozen=True)
class Demo:
    """A small run of the demo."""

    chat: ChatVocabulary
    full: StructureTable  # over the whole vocabulary
    table: StructureTable
    world: World
    requests: Requests
    rows: dict[tuple[str, str], Row]
    example: Example | None


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the demo itself: its tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demo() -> Demo:
    full, chat = compiled("harmony")
    world = build_world(chat, SEED, target=NOISY)
    table = full.select(world.ids)
    requests = Requests(draw_kinds(NUM_REQUESTS, random.Random(SEED)), SEED)
    with ThreadPoolExecutor(1) as executor:
        rows, example = measure(world, table, requests, executor)
    return Demo(chat, full, table, world, requests, {(r.acceptance, r.policy): r for r in rows}, example)


@pytest.fixture(scope="module", params=ACCEPTANCES)
def runs(request: pytest.FixtureRequest, demo: Demo) -> dict[str, Run]:
    return {p: decode(demo.world, demo.table, demo.requests, request.param, p) for p in POLICIES}


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_repair_loses_no_call_silently(demo: Demo, acceptance: str) -> None:
    assert demo.rows[acceptance, "repair"].calls.silently_lost == 0
    assert demo.rows[acceptance, "repair"].calls.parse_errors == 0
    assert demo.rows[acceptance, "repair"].repaired > 0


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("policy", ["off", "observe"])
def test_calls_are_lost_silently_without_repair(demo: Demo, acceptance: str, policy: str) -> None:
    assert demo.rows[acceptance, policy].calls.silently_lost > 0
    assert demo.rows[acceptance, policy].repaired == 0


def test_every_intended_call_is_accounted_for(demo: Demo) -> None:
    for row in demo.rows.values():
        c = row.calls
        assert c.intended == c.delivered + c.silently_lost + c.wrong + c.in_error + c.unfinished
        assert min(asdict(c).values()) >= 0


def test_observe_sees_and_changes_nothing(runs: dict[str, Run]) -> None:
    assert runs["observe"].streams == runs["off"].streams
    assert runs["observe"].counters["illegal"] > 0


def test_streams_that_needed_no_repair_are_those_without_the_stage(runs: dict[str, Run]) -> None:
    untouched = [i for i, s in enumerate(runs["repair"].streams) if s.repairs == 0]
    assert 0 < len(untouched) < NUM_REQUESTS
    for i in untouched:
        assert runs["repair"].streams[i] == runs["off"].streams[i]


def test_every_stream_under_repair_is_a_legal_prefix(demo: Demo, runs: dict[str, Run]) -> None:
    for stream in runs["repair"].streams:
        walk = demo.full.host.walk(demo.world.to_real(stream.tokens))
        assert walk.illegal_at is None
        assert stream.ended == (walk.state == demo.full.host.ended)


def test_nothing_escapes_or_is_let_through_under_repair(runs: dict[str, Run]) -> None:
    assert {runs["repair"].counters[name] for name in ("escaped", "cut", "untracked", "out_of_range")} == {0}


def test_a_request_decoded_alone_is_the_same(demo: Demo) -> None:
    together = decode(demo.world, demo.table, demo.requests, "rejection", "repair").streams
    request = next(i for i, stream in enumerate(together) if stream.repairs)
    alone = decode(demo.world, demo.table, demo.requests, "rejection", "repair", only=request)
    assert alone.streams == [together[request]]
    assert [token for step in alone.trace for token in step.committed] == together[request].tokens


def test_the_example_loses_a_call_and_repair_keeps_it(demo: Demo) -> None:
    assert demo.example is not None
    assert not any(step.repaired for step in demo.example.before)
    assert any(step.repaired for step in demo.example.after)
    assert "functions." in demo.example.reply_after


def test_a_recorded_incident_is_the_example_in_real_ids(demo: Demo, tmp_path: Path) -> None:
    example = demo.example
    traces = record_incidents(
        demo.world, demo.table, demo.full, demo.requests, example.request, example.acceptance, tmp_path / "traces"
    )
    assert list(traces) == ["observe", "repair"]
    for policy, steps in (("observe", example.before), ("repair", example.after)):
        trace = read_trace(traces[policy])
        assert trace.policy == policy
        assert trace.consistent
        trace.check_vocabulary(demo.chat.vocabulary.digest, "the demo's vocabulary")
        windows = [(list(w.accepted), list(w.committed), w.number) for w in trace.windows]
        for accepted, committed, number in windows:
            step = steps[number]
            assert accepted == demo.world.to_real(step.window)
            assert committed[: len(step.committed)] == demo.world.to_real(step.committed)
        found = next(w for w in trace.windows if Event.ILLEGAL in w.events)
        assert (Event.REPAIRED in found.events) == (policy == "repair")
        assert found.drafts[: found.illegal_at] == found.accepted[: found.illegal_at]
        shown = dict(zip(found.choice.tokens, found.choice.probs, strict=True))
        assert 0 < shown[found.accepted[found.illegal_at]] < 1
        assert 0 < found.choice.legal_mass < 1
        assert "script" not in render(trace, Speller(trace))


def test_json_holds_every_row_and_the_example(demo: Demo) -> None:
    document = json.loads(json.dumps(as_json(list(demo.rows.values()), demo.example, {"requests": NUM_REQUESTS})))
    assert set(document) == {"settings", "rows", "example"}
    assert [(r["acceptance"], r["policy"]) for r in document["rows"]] == [(a, p) for a in ACCEPTANCES for p in POLICIES]
    for row in document["rows"]:
        assert {"intended", "delivered", "silently_lost", "wrong", "parse_errors"} <= set(row["calls"])
        assert row["tokens_per_step"] > 1
    assert document["example"]["after"][0].keys() == {"window", "committed", "repaired"}


def test_the_target_without_smoothing_makes_every_planned_call(demo: Demo) -> None:
    world = build_world(demo.chat, SEED, target=NOISELESS)
    for acceptance in ("strict", "rejection"):
        run = decode(world, demo.full.select(world.ids), demo.requests, acceptance, "repair")
        total = sum(_deliveries(world, demo.requests, run), Delivery())
        assert total.planned == total.intended == total.delivered > 0
        assert run.counters["illegal"] == 0


def test_probabilities_are_distributions_over_what_was_kept(demo: Demo) -> None:
    for model in (demo.world.target, demo.world.drafter):
        assert torch.allclose(model.probs.double().sum(dim=1), torch.ones(len(model.probs)).double(), atol=1e-5)
        assert float(model.probs.min()) > 0


def test_generated_turns_are_well_formed(demo: Demo) -> None:
    choose = random.Random(1)
    for kind in KINDS:
        for _ in range(20):
            tokens = demo.chat.encode(write_turn(kind, choose))
            assert demo.full.host.walk(tokens).state == demo.full.host.ended
            assert _receive(demo.chat, kind.name, write_turn(kind, choose)).delivered == kind.calls


def test_fast_rejection_equals_the_reference_given_its_random_numbers() -> None:
    n, k, vocab, seed, offset = 400, 4, 32, 11, 8
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(n, k + 1, vocab, generator=generator).pow(4)
    drafter = torch.rand(n, k, vocab, generator=generator).pow(4) + target[:, :k]
    target, drafter = (t / t.sum(dim=2, keepdim=True) for t in (target, drafter))
    drafts = drafter.flatten(0, 1).multinomial(1, generator=generator).view(n, k)
    reference = rejection_reference(drafter, drafts, target, seed, offset)
    numbers = curand_uniform(curand_philox_words(seed, torch.arange(n), offset, k + 2))
    last = numbers.gather(1, (k + (reference.emitted < k).long())[:, None])
    window = rejection(drafter, drafts, target, torch.cat([numbers[:, :k], last], dim=1))
    inside = torch.arange(k + 1) < window.lengths[:, None]
    assert reference.emitted.unique().tolist() == list(range(k + 1))
    assert torch.equal(window.lengths, reference.emitted + 1)
    assert torch.equal(window.tokens[inside], reference.output_tokens[inside])


A = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
WHOLE = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("stream", "delivery"),
    [
        pytest.param(A + CALL + WHOLE + "<|call|>", Delivery(1, 1, delivered=1), id="a call"),
        pytest.param(A + CALL + '{"city": "Os<|call|>', Delivery(1, 1, silently_lost=1), id="terminal in the object"),
        pytest.param(A + "<|channel|>comment<|return|>", Delivery(1, 1, silently_lost=1), id="terminal in a header"),
        pytest.param(A + CALL[:-11] + WHOLE + "<|call|>", Delivery(1, 1, silently_lost=1), id="no message marker"),
        pytest.param(
            "<|channel|>analysis<|message|>Hm.<|start|>assistant" + CALL + WHOLE + "<|call|>",
            Delivery(1, 1, silently_lost=1),
            id="an opener in reasoning swallows the call",
        ),
        pytest.param(
            "<|channel|>analysis<|call|>", Delivery(1, 0, in_error=0, parse_errors=1), id="terminal in the first header"
        ),
        pytest.param(
            A + " x" + CALL + WHOLE + "<|call|>", Delivery(1, 1, in_error=1, parse_errors=1), id="a word after the role"
        ),
        pytest.param(A + CALL + '{"city": Oslo}<|call|>', Delivery(1, 1, wrong=1), id="broken JSON"),
        pytest.param(A + CALL + "<|call|>", Delivery(1, 1, wrong=1), id="empty arguments"),
        pytest.param(
            A + CALL.replace("weather", "wether") + WHOLE + "<|call|>", Delivery(1, 1, wrong=1), id="unknown function"
        ),
        pytest.param(A + "<|channel|>final<|message|>No.<|return|>", Delivery(1, as_text=1), id="an answer instead"),
        pytest.param(
            A + "<|channel|>final odd.type<|message|>{}<|return|>", Delivery(1, as_text=1), id="an answer of some type"
        ),
        pytest.param(
            "<|channel|>analysis<|message|>Hm.<|return|>", Delivery(1, 0), id="ended before the call was begun"
        ),
        pytest.param(A + CALL + '{"city": "Os', Delivery(1, 1, unfinished=1), id="cut by the length limit"),
    ],
)
def test_what_became_of_a_call(demo: Demo, stream: str, delivery: Delivery) -> None:
    assert _receive(demo.chat, "weather", stream) == delivery


def test_the_command_refuses_no_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--requests", "0"])
    assert refused.value.code == 2
    assert "--requests is 0" in capsys.readouterr().err


def _receive(chat: ChatVocabulary, kind: str, stream: str) -> Delivery:
    client = Client(harmony_encoding(), HARMONY_CONTROLS)
    ended = stream.endswith(("<|call|>", "<|return|>"))
    return client.receive(next(k for k in KINDS if k.name == kind), chat.encode(stream), ended)


def _deliveries(world: World, requests: Requests, run: Run) -> list[Delivery]:
    return receive_all(requests.kinds, [(world.to_real(s.tokens), s.ended) for s in run.streams])
