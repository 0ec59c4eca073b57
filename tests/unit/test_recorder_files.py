"""What the flight recorder writes: how many files, of how much, on whose asking, and what on a full disk."""

import json
import logging
import os
import resource
from collections import Counter

from structured_commit.recording.incidents import IncidentFiles, Note, ask_for_trace
from structured_commit.recording.trace import Recorded
from structured_commit.settings import RecordSettings
from tests.support.calls import CLOSE, NAME, OPEN, TEXT, VOCAB
from tests.support.flight import BROKEN, ORDINARY, Flight


def test_the_folder_holds_the_newest_traces_up_to_its_count(tmp_path):
    flight = Flight(tmp_path, incidents=3)
    flight.bind(0, "a")
    for i in range(6):
        flight.window(0, *ORDINARY)
        flight.recorder.write_now("a", f"number {i}")
        flight.recorder.flush()
    assert [t.reasons for t in flight.traces()] == [("number 3",), ("number 4",), ("number 5",)]
    assert len(list(tmp_path.iterdir())) == 6


def test_the_folder_holds_the_newest_traces_up_to_its_size(tmp_path):
    flight = Flight(tmp_path)
    files = IncidentFiles(flight.stage, RecordSettings(str(tmp_path), megabytes=1), 7, Counter(), None)
    row = (TEXT,) * 64
    windows = [Recorded(n, 64, 0, 1, 1, None, accepted=row, committed=row, drafts=row) for n in range(600)]
    for i in range(4):
        files.submit(Note.of(1, 0, "a", [], False), windows, [f"number {i}"], {})
    files.flush()
    assert [t.reasons for t in flight.traces()] == [("number 3",)]  # each takes more than half of what there is
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) > 1 << 19


def test_other_ranks_and_other_files_are_left_alone(tmp_path):
    others = [tmp_path / "incident-1-rank8-1-1.json", tmp_path / "incident-1-rank70-1-1.json", tmp_path / "notes.json"]
    for path in others:
        path.write_text("{}")
    flight = Flight(tmp_path, incidents=1)
    flight.bind(0, "a")
    for _ in range(3):
        flight.recorder.write_now("a")
        flight.window(0, *ORDINARY)
        flight.recorder.flush()
    assert all(path.exists() for path in others)


def test_a_full_disk_costs_the_trace_a_count_and_one_line(tmp_path, caplog):
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "structured_commit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # every write beyond 100 bytes is refused
        try:
            for _ in range(3):
                flight.window(0, *BROKEN)
                assert flight.seen["a"][-1][1] == (TEXT, TEXT)
                flight.recorder.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert flight.recorder.counts["record_failed"] == 3
    assert flight.recorder.counts["record_written"] == 0
    assert list(tmp_path.iterdir()) == []
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    assert "serving goes on" in caplog.text
    flight.window(0, *BROKEN)
    assert len(flight.traces()) == 1  # there is room again


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    flight = Flight(tmp_path / "file" / "traces")
    flight.bind(0, "a")
    for _ in range(3):
        flight.window(0, *BROKEN)
        flight.recorder.flush()
    assert flight.recorder.counts["record_failed"] == 3
    assert len(caplog.records) == 1


def test_a_window_wider_than_was_said_stops_the_recorder_and_not_the_stage(tmp_path, caplog):
    flight = Flight(tmp_path)
    flight.bind(0, "a")
    for _ in range(2):
        flight.window(0, TEXT, CLOSE, TEXT, TEXT, TEXT)
    assert [committed for _, committed, *_ in flight.seen["a"]] == [(TEXT, TEXT)] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "structured_commit: the flight recorder stops (ValueError: a window of 5 columns, wider than the 4 that were "
        "expected); serving goes on"
    ]
    assert flight.recorder.counts["record_failed"] == 1


def test_another_process_asks_for_a_request_or_for_all(tmp_path):
    flight = Flight(tmp_path, slots=6)
    for slot in range(6):
        flight.bind(slot, f"request-{slot}")
        flight.window(slot, *ORDINARY)
    ask_for_trace(tmp_path, "request-4", "ended inside a block")
    ask_for_trace(tmp_path, "unknown", "ended inside a block")
    (trace,) = flight.traces()
    assert (trace.request["id"], trace.reasons) == ("request-4", ("ended inside a block",))
    (tmp_path / "ask" / "all").touch()
    assert sorted(t.request["id"] for t in flight.traces()[1:]) == [f"request-{i}" for i in range(6)]
    os.utime(tmp_path / "ask" / "all", ns=(1, 1))  # touched again, by a clock far off
    assert len(flight.traces()) == 13
    flight.recorder.flush()
    assert {p.name for p in (tmp_path / "ask").iterdir()} == {"request-4", "unknown"}  # the old one was taken away


def test_without_asking_a_trace_holds_no_text_and_no_prompt(tmp_path):
    prompt = [TEXT, NAME, TEXT, OPEN]
    for text in (False, True):
        flight = Flight(tmp_path / str(text), text=text, texts=lambda token: f"«{token}»")
        flight.bind(0, "a", prompt)
        flight.window(0, *BROKEN)
        (trace,) = flight.traces()
        assert trace.request["prompt_tokens"] == 4
        assert len(trace.request["prompt_sha256"]) == 64
        written = json.loads(next((tmp_path / str(text)).glob("*.json")).read_text())
        assert ("texts" in written, "prompt" in written["request"]) == (text, text)
        assert trace.texts == ({t: f"«{t}»" for t in range(VOCAB)} if text else {})
        if text:
            assert trace.request["prompt"] == prompt


def test_equal_prompts_have_equal_hashes_and_others_do_not(tmp_path):
    flight = Flight(tmp_path)
    for slot, prompt in enumerate(([TEXT, OPEN], [TEXT, OPEN], [TEXT, OPEN, TEXT])):
        flight.bind(slot, slot, prompt)
        flight.window(slot, *ORDINARY)
    flight.recorder.write_now()
    hashes = [t.request["prompt_sha256"] for t in sorted(flight.traces(), key=lambda t: t.request["id"])]
    assert hashes[0] == hashes[1] != hashes[2]
