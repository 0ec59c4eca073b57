"""What users write under `structured_commit:` is read as they mean it, or refused with what they may write."""

import json

import pytest

from structured_commit import StageError
from structured_commit.settings import RecordSettings, Settings, parse_settings, validated_field


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("off", None),
        ({"policy": "off"}, None),
        ("repair", Settings()),
        ({}, Settings()),
        ({"policy": "observe", "format": "harmony"}, Settings(policy="observe", format="harmony")),
        ('{"policy": "trim", "max_repairs": 3}', Settings(policy="trim", max_repairs=3)),
        ({"format": "/models/mine.json"}, Settings(format="/models/mine.json")),
        ({"cache_dir": None}, Settings()),
        ({"record": None}, Settings()),
        ({"record": "/traces"}, Settings(record=RecordSettings("/traces"))),
        (
            {"record": {"folder": "/traces", "windows": 8, "text": True}},
            Settings(record=RecordSettings("/traces", 8, text=True)),
        ),
        ({"backend": "torch"}, Settings(backend="torch")),
    ],
)
def test_a_value_is_read(value, expected):
    assert parse_settings(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fix", "unknown policy 'fix'; choose one of: off, observe, trim, repair, gate, rollback"),
        ({"polcy": "repair"}, "unknown field 'polcy'; did you mean 'policy'?"),
        ({"format": "harmoni"}, "unknown format 'harmoni'; choose one of: auto, "),
        ({"max_repairs": "3"}, "field 'max_repairs' must be int"),
        ({"max_repairs": True}, "field 'max_repairs' must be int"),
        ({"check": 1}, "field 'check' must be bool"),
        ({"repair_rows": 0}, "repair_rows is 0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose one of: auto, host, torch, triton"),
        ({"seed": -1}, "seed -1"),
        ({"report_every": -1}, "report_every is -1"),
        ({"record": 3}, "field 'record' must be RecordSettings | None, not 3"),
        ({"record": {"windows": 8}}, "structured_commit.record: field 'folder' is missing"),
        ({"record": ""}, "structured_commit.record: folder is empty"),
        (
            {"record": {"folder": "a", "window": 8}},
            "record: unknown field 'window'; did you mean 'windows'? Fields: folder",
        ),
        ({"record": {"folder": "a", "text": 1}}, "structured_commit.record: field 'text' must be bool, not 1"),
        ({"record": {"folder": "a", "windows": 2}}, "record: windows is 2; it must be 4 to 4096"),
        ({"record": {"folder": "a", "incidents": 0}}, "incidents is 0; it must be 1 to"),
        ("{policy", "not valid JSON"),
        (3, "not int"),
    ],
)
def test_a_bad_value_is_refused_with_the_allowed_ones(value, message):
    with pytest.raises(StageError) as caught:
        parse_settings(value)
    assert message in str(caught.value)


def test_the_configuration_model_keeps_plain_data():
    assert validated_field(None) is None
    assert validated_field("off") == "off"
    assert validated_field("repair")["policy"] == "repair"
    for section in ({"policy": "gate"}, {"record": {"folder": "/traces", "incidents": 5}}):
        assert parse_settings(json.loads(json.dumps(validated_field(section)))) == parse_settings(section)
