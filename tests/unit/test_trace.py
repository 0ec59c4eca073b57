"""Trace files: what is written is read again, and what is not a whole trace of this version is refused by name."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load, save

from structured_commit import Event, StructuredCommitError
from structured_commit.recording.trace import Choice, Trace, Window, read_trace, write_trace

WINDOWS = (
    Window(7, 4, (1, 2, 3), (1, 2), (1, 2), (1, 1, 2), 2, Event(0)),
    Window(
        8,
        4,
        (5, 6, 7),
        (5, 6, 9),
        (5, 4),
        (2, 3, -1, -1),
        3,
        Event.ILLEGAL | Event.REPAIRED,
        1,
        Choice(1, (4, 6), (0.75, 0.125), (True, False), 0.875),
    ),
    Window(9, 1, None, (3,), (3,), (3, 4), 4, Event.ENDED),
)
TRACE = Trace(
    windows=WINDOWS,
    reasons=("illegal", "repaired"),
    request={"id": "12", "slot": 3, "rank": 0, "prompt_tokens": 9, "prompt_sha256": "0" * 64},
    table={"format": "tiny", "format_digest": "f", "vocabulary_digest": "aaaa", "vocabulary": 16, "ended": 4},
    policy="repair",
    states={1: "text:1", 2: "header:2", 3: "block:3", 4: "ended"},
    controls={"<end>": 3},
    texts={1: "<script>", 4: "é\n"},
    consistent=True,
    written="2026-01-02T03:04:05Z",
)


@pytest.fixture
def pair(tmp_path):
    write_trace(TRACE, tmp_path, "incident-1")
    return tmp_path / "incident-1.json", tmp_path / "incident-1.safetensors"


def test_a_trace_is_read_as_it_was_written_by_either_file(pair):
    assert [read_trace(path) for path in pair] == [TRACE, TRACE]
    assert {p.name for p in pair[0].parent.iterdir()} == {p.name for p in pair}


@pytest.mark.parametrize("windows", [(), WINDOWS[:1], WINDOWS[2:]])
def test_traces_without_incidents_drafts_or_windows_are_read_too(tmp_path, windows):
    trace = replace(TRACE, windows=windows, texts={})
    write_trace(trace, tmp_path, "a")
    assert read_trace(tmp_path / "a.json") == trace


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("which", [0, 1])
def test_a_truncated_file_is_refused_by_name(pair, which, share):
    body = pair[which].read_bytes()
    pair[which].write_bytes(body[: int(len(body) * share)])
    with pytest.raises(
        StructuredCommitError, match=r"damaged or truncated: .*Copy both files of the pair again"
    ) as caught:
        read_trace(pair[0])
    assert str(pair[which]) in str(caught.value)


def test_another_version_is_refused_with_the_next_step(pair):
    data = json.loads(pair[0].read_text())
    pair[0].write_text(json.dumps({**data, "structured_commit_trace": 2}))
    with pytest.raises(StructuredCommitError, match="has version 2, and this reads version 1; replay it with the"):
        read_trace(pair[0])


def test_tensors_of_another_trace_are_refused(pair):
    tensors = load(pair[1].read_bytes())
    tensors["number"] += 1
    pair[1].write_bytes(save(tensors))
    with pytest.raises(StructuredCommitError, match=r"another checksum than incident-1\.json says"):
        read_trace(pair[0])


@pytest.mark.parametrize("name", ["windows", "states", "request", "table", "policy", "reasons", "controls"])
def test_a_description_that_lacks_something_is_refused(pair, name):
    data = json.loads(pair[0].read_text())
    if name == "windows":
        data["tensors"] = {}
    else:
        del data[name]
    pair[0].write_text(json.dumps(data))
    with pytest.raises(StructuredCommitError, match="damaged or truncated"):
        read_trace(pair[0])


def test_missing_and_foreign_files_are_refused(pair, tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[]")
    for path, message in (
        (tmp_path / "nothing.json", "there is no trace .*nothing.json"),
        (tmp_path / "other.json", "other.json is no trace of a recorder"),
        (tmp_path / "list.json", "list.json is no trace of a recorder"),
        (tmp_path / "picture.png", "picture.png is no trace: name the .json file"),
    ):
        with pytest.raises(StructuredCommitError, match=message):
            read_trace(path)
    pair[1].unlink()
    with pytest.raises(StructuredCommitError, match=r"cannot read .*incident-1\.safetensors, which holds the windows"):
        read_trace(pair[0])


def test_another_vocabulary_is_refused():
    TRACE.check_vocabulary("aaaa", "checkpoint /models/a")
    with pytest.raises(StructuredCommitError, match=r"recorded over vocabulary aaaa \(format tiny\), and checkpoint"):
        TRACE.check_vocabulary("bbbb", "checkpoint /models/b")


def test_a_description_cannot_lead_out_of_its_folder(pair, tmp_path):
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    pair[1].replace(secret / "incident-1.safetensors")
    data = json.loads(pair[0].read_text())
    data["tensors"]["file"] = "elsewhere/incident-1.safetensors"
    pair[0].write_text(json.dumps(data))
    with pytest.raises(StructuredCommitError, match="cannot read"):
        read_trace(pair[0])
