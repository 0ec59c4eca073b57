"""What users write under `structured_commit:` is read as they mean it, or refused with what they may write."""

import pytest

from structured_commit import StageError
from structured_commit.settings import Settings, parse_settings, validated_field


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
        ({"seed": -1}, "seed -1"),
        ({"report_every": -1}, "report_every is -1"),
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
    assert parse_settings(validated_field({"policy": "gate"})) == Settings(policy="gate")
