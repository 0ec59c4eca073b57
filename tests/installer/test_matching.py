"""Finding anchors: enclosing definitions, counts, and what is said when something is missing."""

import pytest

from scripts.installer.errors import SeriesInvalid
from scripts.installer.matching import Status, find_patch
from scripts.installer.rules import Rule
from scripts.installer.series import Patch
from scripts.installer.source import Source


def find(text, *, class_name=None, function=None, matches=1, optional=False, rule=None):
    patch = Patch("p", "purpose", ("w",), ("f.py",), class_name, function, matches, "hook", "p.yml", optional)
    matcher = rule or {"all": [{"pattern": "$STMT"}, {"pattern": "$X = op($$$A)"}]}
    rule = Rule("p.yml", "p", "", {"rule": matcher}, "$STMT\nhook()  # structured-commit: p")
    return find_patch(Source("f.py", text.encode()), patch, rule)


TWO_CLASSES = """\
class A:
    def run(self):
        x = op(1)

class B:
    def run(self):
        x = op(2)
        def inner():
            x = op(3)

def run():
    x = op(4)
"""


@pytest.mark.parametrize(
    ("class_name", "function", "matches", "lines"),
    [
        ("A", "run", 1, (3,)),
        ("B", "run", 2, (7, 9)),
        ("B", "run.inner", 1, (9,)),
        (None, "run", 1, (12,)),
        ("A", None, 1, (3,)),
        (None, None, 4, (3, 7, 9, 12)),
    ],
)
def test_matches_are_looked_for_inside_the_named_definitions_alone(class_name, function, matches, lines):
    finding = find(TWO_CLASSES, class_name=class_name, function=function, matches=matches)
    assert (finding.status, finding.lines) == (Status.READY, lines)


def test_definitions_under_conditions_and_decorators_count():
    text = "if x:\n    @d\n    class A:\n        @d\n        async def run(self):\n            x = op(1)\n"
    assert find(text, class_name="A", function="run").lines == (6,)


def test_a_nested_class_is_named_with_a_dot_and_not_found_without():
    text = "class A:\n    class B:\n        def run(self):\n            x = op(1)\n"
    assert find(text, class_name="A.B", function="run").status is Status.READY
    assert find(text, class_name="B", function="run").status is Status.MISSING


def test_a_name_defined_twice_is_searched_in_both():
    text = "class A:\n    def run(self):\n        pass\n    def run(self):\n        x = op(1)\n"
    assert find(text, class_name="A", function="run").lines == (5,)


def test_too_many_matches_are_ambiguous_and_all_lines_are_named():
    finding = find("def run():\n    x = op(1)\n    y = op(2)\n", function="run")
    assert (finding.status, finding.lines) == (Status.AMBIGUOUS, (2, 3))
    assert finding.reason == "2 matches where 1 are expected"


def test_the_nearest_candidate_is_the_statement_that_shares_most_names():
    finding = find("def run():\n    y = other(1)\n    z = x\n    q = lib.op(1, 2)\n    return q\n", function="run")
    assert finding.status is Status.MISSING
    assert (finding.nearest.line, finding.nearest.text) == (4, "q = lib.op(1, 2)")


def test_the_nearest_candidate_of_a_missing_second_match_is_not_the_first():
    finding = find("def run():\n    x = op(1)\n    self.y = op\n", function="run", matches=2)
    assert (finding.status, finding.found, finding.nearest.line) == (Status.MISSING, 1, 3)


def test_a_function_that_moved_to_another_class_is_pointed_at():
    finding = find(
        "class A:\n    pass\n\nclass B:\n    def run(self):\n        x = op(1)\n", class_name="A", function="run"
    )
    assert finding.reason.startswith("no function run in class A, but")
    assert (finding.nearest.line, finding.nearest.text) == (5, "def run(self):")


def test_a_renamed_class_is_pointed_at():
    finding = find("class Worker2:\n    x = 1\n\nclass Else:\n    pass\n", class_name="Worker", function="run")
    assert (finding.reason, finding.nearest.line) == ("no class Worker", 1)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("x = 1\n", Status.ABSENT),
        ("class A:\n    pass\n", Status.ABSENT),
        ("class A:\n    def run(self):\n        pass\n", Status.ABSENT),
        ("class A:\n    def run(self):\n        x = op(1)\n        x = op(1)\n        x = op(1)\n", Status.AMBIGUOUS),
        ("class A:\n    def run(self):\n        x = op(1)\n", Status.MISSING),
    ],
    ids=["no class", "no function", "no anchor", "too many", "too few"],
)
def test_an_optional_patch_may_have_no_place_but_not_a_wrong_number_of_places(text, status):
    assert find(text, class_name="A", function="run", matches=2, optional=True).status is status


def test_markers_say_that_a_patch_is_applied_even_where_the_anchor_still_matches():
    finding = find("def run():\n    x = op(1)\n    hook()  # structured-commit: p\n", function="run")
    assert (finding.status, finding.lines) == (Status.APPLIED, (3,))


def test_another_patchs_marker_with_the_same_start_is_not_ours():
    assert (
        find("def run():\n    x = op(1)\n    hook()  # structured-commit: p-2\n", function="run").status is Status.READY
    )


def test_a_wrong_number_of_markers_is_ambiguous():
    text = "def run():\n    x = op(1)\n" + "    hook()  # structured-commit: p\n" * 2
    assert find(text, function="run").status is Status.AMBIGUOUS


def test_an_anchor_that_shares_its_line_is_missing_with_the_reason():
    finding = find("def run():\n    x = op(1); y = 2\n", function="run")
    assert finding.status is Status.MISSING
    assert "shares its line" in finding.reason


@pytest.mark.parametrize("rule", [{"patern": "x"}, {"kind": "no_such_kind"}])
def test_a_rule_that_ast_grep_refuses_is_an_error_of_the_series_without_a_stack_trace(rule):
    with pytest.raises(SeriesInvalid) as error:
        find("x = 1\n", rule=rule)
    assert "backtrace" not in error.value.what
