"""What `series.toml` and rule files may say, and how mistakes in them are named."""

import pytest

from scripts.installer.errors import SeriesInvalid
from scripts.installer.rules import load_rule
from scripts.installer.series import load_series
from scripts.installer.validate import validate
from tests.installer.kit import WORKER, write


def test_the_series_is_read_in_its_order(place):
    series = load_series(place.series)
    assert [patch.id for patch in series.patches] == ["accept", "draft", "stop", "guard"]
    assert series.overlay == place.repo / "overlay"
    assert [patch.id for patch in series.patches_for("one")] == ["accept", "stop", "guard"]


MISTAKES = {
    "not TOML": ('version = "7"', "version = 7 7", "not valid TOML"),
    "no version": ('version = "7"\n', "", "`version` is missing"),
    "unknown key": ("optional = true", "optonal = true", "unknown key `optonal`"),
    "wrong type": ("optional = true", 'optional = "yes"', "`optional` must be true or false"),
    "no match at all": ("matches = 1", "matches = 0", "`matches` must be"),
    "file twice": (f'file = "{WORKER}"\nclass', f'file = "{WORKER}"\nfiles = ["{WORKER}"]\nclass', "exactly one of"),
    "path that climbs": ('"tensorrt_llm/_torch/loop.py"', '"tensorrt_llm/../x.py"', "must be a plain path"),
    "absolute path": ('"tensorrt_llm/_torch/loop.py"', '"/etc/passwd"', "must be a plain path"),
    "patch twice": ('id = "guard"', 'id = "stop"', "the patch id `stop` stands twice"),
    "unknown window": ('windows = ["two"]', 'windows = ["three"]', "window `three`, which is not in the series"),
    "no window": ('windows = ["two"]', "windows = []", "names no window"),
    "shared rule": ('rule = "loop/guard.yml"', 'rule = "sampler/stop.yml"', "share the rule"),
    "several lines": ('purpose = "advance', 'purpose = "one\\nadvance', "must be one line of text"),
    "class with blanks": ('class = "Loop"', 'class = "class Loop"', "`class` must be a name"),
    "probe for nothing": ('has = ["_names_of_window_two"]', "has = []", "needs names"),
    "probe for a path": ('has = ["_names_of_window_two"]', 'has = ["a.b"]', "is not a name"),
    "window without names": (
        'has = ["_names_of_window_two"]',
        'lacks = ["_names_of_window_one"]',
        "at least one name that its tree `has`",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_series_is_named(place, old, new, message):
    place.edit_series(old, new)
    outcome = place.run("check")
    assert (outcome.status, outcome.problem["name"]) == (2, "SeriesInvalid")
    assert message in outcome.problem["what"]
    assert "series.toml" in outcome.problem["place"]


RULE_MISTAKES = {
    "not YAML": ("rule:", "rule: [", "not valid YAML"),
    "another language": ("language: python", "language: rust", "`language` must be python"),
    "no fix": ("fix: |\n", "note: |\n", "`fix` must be text"),
    "unreadable key": ("message:", "rewriters: []\nmessage:", "does not read `rewriters`"),
    "another patch's marker": ("structured-commit: accept", "structured-commit: stop", "must carry the marker"),
    "no marker": ("# structured-commit: accept", "", "must carry the marker"),
    "another hook": ("hooks.commit(", "hooks.other(", "never mentions `commit`"),
    "too much payload": ("  $STMT\n", "  a()  # structured-commit: accept\n" * 3 + "  $STMT\n", "at most 3 lines"),
}


@pytest.mark.parametrize(("old", "new", "message"), RULE_MISTAKES.values(), ids=RULE_MISTAKES)
def test_a_mistake_in_a_rule_is_named(place, old, new, message):
    file = place.repo / "patches/worker/accept.yml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text[::-1].replace(old[::-1], new[::-1], 1)[::-1], encoding="utf-8")
    series = load_series(place.series)
    with pytest.raises(SeriesInvalid) as error:
        load_rule(series, series.patches[0])
    assert message in error.value.what
    assert error.value.place == "worker/accept.yml"


def test_check_series_accepts_the_kit(place):
    outcome = place.run("check-series")
    assert (outcome.status, outcome.report["problems"]) == (0, [])


def _left_over_rule(place):
    write(place.repo / "patches/old/rule.yml", "id: x\n")
    return "no patch of the series uses this rule"


def _lost_rule(place):
    (place.repo / "patches/worker/accept.yml").unlink()
    return "there is no such file"


def _no_cases(place):
    (place.repo / "patches/worker/accept.test.toml").unlink()
    return "has no test cases"


def _wrong_output(place):
    file = place.repo / "patches/worker/accept.test.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("hooks.commit(", "hooks.comit("), encoding="utf-8")
    return "the outcome is"


def _matches_where_it_must_not(place):
    file = place.repo / "patches/worker/accept.test.toml"
    case = (
        "[[case]]\nname='no'\nunchanged='''\nclass Worker:\n    def accept(self):\n        return tokens, counts\n'''\n"
    )
    file.write_text(file.read_text(encoding="utf-8") + case, encoding="utf-8")
    return "it would be changed, at line 3"


def _nothing_changes(place):
    write(place.repo / "patches/worker/accept.test.toml", "[[case]]\nname='no'\nunchanged='x'\n")
    return "no case changes anything"


def _misspelt_case(place):
    write(place.repo / "patches/worker/accept.test.toml", "[[case]]\nname='no'\nunchanging='x'\n")
    return "unknown key `unchanging`"


def _half_a_case(place):
    write(place.repo / "patches/worker/accept.test.toml", "[[case]]\nbefore='x'\n")
    return "case 1 needs `before` and `after`"


@pytest.mark.parametrize(
    "spoil",
    [
        _left_over_rule,
        _lost_rule,
        _no_cases,
        _wrong_output,
        _matches_where_it_must_not,
        _nothing_changes,
        _misspelt_case,
        _half_a_case,
    ],
)
def test_check_series_names_what_is_wrong_with_rules_and_cases(place, spoil):
    message = spoil(place)
    problems = validate(load_series(place.series))
    assert any(message in problem.what for problem in problems)
    assert place.run("check-series").status == 2
