"""The flight recorder: what its traces say is what the stage did, and an ordinary step costs nothing on the host."""

import pytest
import torch

from scripts.fuzz.case import Case
from structured_commit import CommitConfig, CommitStage, Event, Policy
from structured_commit.recording.recorder import DEVICE_BYTES, Recorder
from structured_commit.recording.trace import read_trace
from structured_commit.repair import Distribution
from structured_commit.settings import RecordSettings
from tests.support.calls import BODY, CLOSE, END, NAME, OPEN, TEXT, VOCAB, calls_table, certain, int32
from tests.support.flight import BROKEN, ORDINARY, WIDTH, Flight
from tests.support.graph_watch import GraphWatch, addresses, tensors_of


def recorded(window):
    return window.accepted, window.committed, int(window.events), window.states[0], window.state_after


def test_a_trace_says_what_the_stage_did(tmp_path):
    """Random automata, policies and schedules, the same as `make fuzz` has; strange lengths, slots and ids too."""
    windows = wrapped = chosen = earlier = 0
    for number in range(16):
        case = Case(number)
        if case.config.policy is Policy.OFF:
            continue
        folder = tmp_path / str(number)
        flight = Flight(folder, table=case.table, width=case.width, config=case.config, slots=case.num_slots)
        for at in range(case.num_steps + 4):
            for slot in range(case.num_slots) if at == 0 else [s for s in range(case.num_slots) if (s + at) % 9 == 0]:
                flight.bind(slot, f"{slot} from {at}", state=case.table.info.start)
            step = case.step(flight.stage.state[:-1].tolist())
            arguments = dict(step.arguments)
            redraw = arguments.pop("redraw", True)
            flight.step(step.tokens, step.lengths, step.slots, Distribution(**arguments), redraw=redraw)
        flight.recorder.write_now()
        for trace in flight.traces():
            assert trace.consistent
            done, told = flight.seen[trace.request["id"]], [recorded(w) for w in trace.windows]
            if "asked for" in trace.reasons:
                assert told == done[-4:]
                wrapped += len(done) > 4
            else:
                starts = range(len(done) - len(told) + 1)
                assert any(done[i : i + len(told)] == told for i in starts)
            windows += len(told)
            chosen += sum(w.choice is not None for w in trace.windows)
            earlier += flight.owners[trace.request["slot"]] != trace.request["id"]
        assert flight.recorder.counts["record_failed"] == 0
    assert windows > 500
    assert min(wrapped, chosen, earlier) > 5


def test_the_ring_keeps_the_last_windows_and_only_those(tmp_path):
    flight = Flight(tmp_path)
    flight.bind(1, "a")
    for count in range(1, 12):
        flight.window(1, TEXT, *[TEXT] * (count % 3))
        flight.recorder.write_now("a", f"after {count}")
        trace = flight.traces()[-1]
        assert trace.reasons == (f"after {count}",)
        assert [recorded(w) for w in trace.windows] == flight.seen["a"][-4:]
        assert [w.number for w in trace.windows] == list(range(max(0, count - 4), count))


def test_the_choice_at_a_violation_is_the_targets(tmp_path):
    probs = torch.tensor([[[0.5, 0.1, 0.0, 0.0, 0.3, 0.1]] * 3])
    rows = int32([list(BROKEN)]), int32([3]), torch.tensor([0])
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    flight.step(*rows, Distribution(probs=probs))
    window = flight.traces()[0].windows[-1]
    assert window.illegal_at == window.choice.column == 1
    assert window.choice.tokens[:4] == (TEXT, CLOSE, *sorted((OPEN, END), key=window.choice.tokens.index))
    assert window.choice.probs[:4] == pytest.approx([0.5, 0.3, 0.1, 0.1])
    assert window.choice.legal_mass == pytest.approx(0.7)
    legal = dict(zip(window.choice.tokens, window.choice.legal, strict=True))
    assert legal == {TEXT: True, OPEN: True, NAME: False, BODY: False, CLOSE: False, END: True}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0.6, 0.3, 0.1]),  # greedy: the model's own distribution
        ({"temperature": 0.5}, [0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46]),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0.0]),
        ({"temperature": 1.0, "top_p": 0.5}, [1.0, 0.0, 0.0]),
    ],
)
def test_logits_are_shown_as_the_sampler_draws_from_them(tmp_path, filters, expected):
    logits = torch.full((1, 3, VOCAB), -torch.inf)
    logits[..., [TEXT, CLOSE, END]] = torch.tensor([0.6, 0.3, 0.1]).log()
    given = {k: torch.tensor([v], dtype=torch.int32 if k == "top_k" else torch.float32) for k, v in filters.items()}
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    flight.step(int32([list(BROKEN)]), int32([3]), torch.tensor([0]), Distribution(logits=logits, **given))
    choice = flight.traces()[0].windows[-1].choice
    assert choice.tokens[:1] == (TEXT,)
    assert choice.probs[:3] == pytest.approx(expected, abs=1e-6)


def test_an_ordinary_run_writes_nothing_and_copies_no_window(tmp_path, monkeypatch):
    flight = Flight(tmp_path / "traces")
    monkeypatch.setattr(flight.recorder, "_start_dump", None)  # a call would stop the recorder and count as failed
    flight.bind(0, "a")
    for _ in range(40):
        flight.window(0, *ORDINARY)
        flight.window(0, OPEN, BODY, CLOSE)
    assert flight.traces() == []
    assert not (tmp_path / "traces").exists()
    assert set(flight.recorder.counts.values()) == {0}


@pytest.mark.parametrize("windows", [4, 8, 32])
def test_an_incident_is_noticed_while_the_ring_still_holds_it(tmp_path, windows):
    for at in range(windows, windows + windows // 4, max(1, windows // 16)):  # wherever it falls between two looks
        flight = Flight(tmp_path / str(at), windows=windows)
        flight.bind(0, "a")
        for i in range(at + windows):
            flight.window(0, *(BROKEN if i == at else ORDINARY))
        (trace,) = flight.traces()
        numbers = [w.number for w in trace.windows]
        assert at in numbers
        assert numbers[-1] - at <= windows // 4 + 2
        assert trace.reasons == ("illegal", "repaired")
        assert flight.recorder.counts == {
            "record_incidents": 1,
            "record_written": 1,
            "record_missed": 0,
            "record_failed": 0,
        }


def test_a_request_whose_slot_was_given_away_is_still_told(tmp_path):
    flight = Flight(tmp_path, windows=8)
    flight.bind(0, "first", prompt=[TEXT] * 5)
    flight.window(0, *ORDINARY)
    flight.window(0, *BROKEN)
    done = flight.seen["first"]
    flight.bind(0, "second")
    flight.window(0, *ORDINARY)
    (trace,) = flight.traces()
    assert (trace.request["id"], trace.request["prompt_tokens"]) == ("first", 5)
    assert [recorded(w) for w in trace.windows] == done


def test_each_policy_is_told_from_the_others(tmp_path):
    expected = {
        "observe": (BROKEN, Event.ILLEGAL | Event.UNTRACKED),
        "trim": (BROKEN, Event.ILLEGAL | Event.UNTRACKED),
        "repair": ((TEXT, TEXT), Event.ILLEGAL | Event.REPAIRED),
        "gate": ((TEXT, TEXT), Event.ILLEGAL | Event.REPAIRED),
    }
    for policy, (committed, events) in expected.items():
        flight = Flight(tmp_path / policy, policy)
        flight.bind(0, "a")
        flight.window(0, *BROKEN)
        (trace,) = flight.traces()
        assert trace.policy == policy
        assert (trace.windows[0].committed, trace.windows[0].events) == (committed, events)


def test_drafts_and_what_became_of_each_token(tmp_path):
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    flight.window(0, TEXT, CLOSE, TEXT, drafts=[TEXT, CLOSE, OPEN])
    flight.window(0, TEXT, TEXT, TEXT, TEXT, drafts=[TEXT, TEXT, TEXT])
    flight.window(0, TEXT)
    flight.window(0, OPEN, NAME, drafts=[OPEN])
    flight.recorder.write_now("a")
    trace = flight.traces()[-1]
    marks = [[(m.token, m.role, m.state, m.legal) for m in w.marks()] for w in trace.windows]
    assert marks[0] == [
        (TEXT, "accepted", 1, True),
        (TEXT, "repaired", 1, True),
        (CLOSE, "cut", None, False),
        (TEXT, "cut", None, None),
        (OPEN, "rejected", None, None),
    ]
    assert [role for _, role, _, _ in marks[1]] == ["accepted"] * 3 + ["bonus"]
    assert [role for _, role, _, _ in marks[2]] == ["sampled"]
    assert marks[3] == [(OPEN, "accepted", 2, True), (NAME, "bonus", 2, True)]
    assert trace.windows[2].drafts is None
    assert {s: trace.states[s] for s in (1, 2)} == {1: "text:1", 2: "header:2"}


@pytest.mark.parametrize("kind", ["probs", "greedy", "sampled", "none"])
@pytest.mark.parametrize("policy", ["observe", "repair"])
def test_recording_can_be_captured(tmp_path, policy, kind):
    flight = Flight(tmp_path, config=CommitConfig(policy=policy, backend="torch"))  # not the CPU's short cut
    programs, ring, stage = [], flight.recorder.ring, flight.stage
    slots = torch.tensor([0, 1, 2, 3, 3])
    where = addresses(ring)
    for seed, top in ((0, 1), (1, VOCAB), (2, VOCAB)):  # nothing illegal, then anything
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, top, (5, WIDTH), dtype=torch.int32, generator=generator)
        lengths = torch.randint(1, WIDTH + 1, (5,), dtype=torch.int32, generator=generator)
        scores = torch.rand(5, WIDTH, VOCAB, generator=generator)
        filters = {"temperature": torch.ones(5), "top_k": int32([2] * 5)} if kind == "sampled" else {}
        scored = Distribution(**{"probs" if kind == "probs" else "logits": scores}, **filters)
        given = Distribution() if kind == "none" else scored
        drafts = tokens[:, 1:].clone()
        stage.state[:3] = 1
        static = [*tensors_of(ring).values(), *tensors_of(stage).values(), tokens, lengths, slots, drafts]
        static += [t for t in scored if t is not None]
        with GraphWatch(static) as watch:
            before = flight.recorder.before(tokens, lengths, slots)
            counted = len(watch.seen)
            events = stage.commit_(tokens, lengths, slots, redraw=kind != "none", **given._asdict())
            done = len(watch.seen)
            flight.recorder.after(before, tokens, lengths, events, given, drafts)
        programs.append(watch.seen)
        assert counted + len(watch.seen) - done < 110
    assert programs[0] == programs[1] == programs[2]
    assert addresses(ring) == where
    assert flight.recorder.counts["record_failed"] == 0
    assert int(ring.log[-1, 1]) > 0


def test_the_host_side_never_waits_for_the_device(tmp_path):
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    for i in range(12):
        tokens, lengths, given = int32([list(BROKEN)]), int32([3]), Distribution(probs=certain(TEXT, width=3))
        before = flight.recorder.before(tokens, lengths, torch.tensor([0]))
        events = flight.stage.commit_(tokens, lengths, torch.tensor([0]), **given._asdict())
        flight.recorder.after(before, tokens, lengths, events, given)
        with GraphWatch(host_side=True):
            flight.recorder.next_step()
            flight.recorder.bind([i % 3], [f"r{i}"], [[TEXT]], [1], [i % 3 > 0])
    flight.recorder.flush()
    assert flight.recorder.counts["record_failed"] == 0
    assert flight.recorder.counts["record_written"] > 0


def test_the_device_takes_a_bounded_amount_and_slots_beyond_it_are_left_out(tmp_path):
    stage = CommitStage(calls_table(), num_slots=16_384, max_window=1_024)
    recorder = Recorder(stage, RecordSettings(str(tmp_path)), width=8)
    assert recorder.bytes_per_slot == 32 * 4 * (10 + 3 * 8) == 4_352
    assert recorder.ring.slots == DEVICE_BYTES // 4_352 == 7_710
    assert recorder.ring.nbytes < DEVICE_BYTES + (1 << 20)
    assert recorder.describe() == "the last 32 windows of 7710 slots, 4352 bytes a slot, 32 MiB on the device"
    tokens, lengths, slots = int32([list(BROKEN)] * 2), int32([3, 3]), torch.tensor([7_709, 7_710])
    stage.state[slots] = 1
    recorder.bind([7_709, 7_710], ["in", "out"], [[], []], [0, 0], [True, True])
    given = Distribution(probs=certain(TEXT, width=3).expand(2, -1, -1))
    before = recorder.before(tokens, lengths, slots)
    recorder.after(before, tokens, lengths, stage.commit_(tokens, lengths, slots, **given._asdict()), given)
    recorder.flush()
    assert [read_trace(p).request["id"] for p in tmp_path.glob("*.json")] == ["in"]


def test_incidents_are_found_wherever_they_stand_in_a_batch(tmp_path):
    for at in range(10):
        flight = Flight(tmp_path / str(at), slots=10)
        for slot in range(10):
            flight.bind(slot, slot)
        rows = [list(BROKEN if i == at else ORDINARY) for i in range(10)]
        given = Distribution(probs=certain(TEXT, width=3).expand(10, -1, -1))
        flight.step(int32(rows), int32([3] * 10), torch.arange(10), given)
        (trace,) = flight.traces()
        assert trace.request["id"] == str(at)
        assert trace.windows[0].choice.tokens[0] == TEXT


def test_more_incidents_than_are_followed_up_are_counted(tmp_path):
    flight = Flight(tmp_path, slots=10)
    for slot in range(10):
        flight.bind(slot, slot)
    given = Distribution(probs=certain(TEXT, width=3).expand(10, -1, -1))
    flight.step(int32([list(BROKEN)] * 10), int32([3] * 10), torch.arange(10), given)
    assert len(flight.traces()) == 4
    assert flight.recorder.counts["record_incidents"] == 10
    assert flight.recorder.counts["record_missed"] == 6
