"""Whether the series is sound by itself, without any tree: every rule file named once and none left over, every rule
readable, its marker and hook in its fix, and its test cases true. A rule `a/b.yml` has its cases beside it in
`a/b.test.toml`, written by us:

    [[case]]
    name = "before the return"      # optional
    before = '''
    class Worker:
        def accept(self):
            return tokens
    '''
    after = '''...'''             # or `unchanged` alone: an input that the patch must leave as it is

A case is run as the installer would run it: confined to the class and function of the patch, with the number of
matches that the series wants. It is run with LF and with CRLF newlines; the outcome must compile, and a second run
must find the patch applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from .errors import InstallerError, SeriesInvalid
from .fixes import apply_edits
from .matching import Status, find_patch
from .rules import Rule, load_rule
from .series import Patch, Series, rule_files
from .source import Source

_FORMAT = "patches/README.md has the format"
_CASE_KEYS = {"name", "before", "after", "unchanged"}


@dataclass(frozen=True, slots=True)
class Case:
    """An input, and what the patch makes of it; `after` is None where it must make nothing of it."""

    name: str
    before: str
    after: str | None


def validate(series: Series) -> list[InstallerError]:
    """Everything that is wrong with the series; empty if it is sound."""
    named = {patch.rule for patch in series.patches}
    problems: list[InstallerError] = [
        SeriesInvalid(
            "no patch of the series uses this rule",
            place=name,
            next_step="add it to series.toml or remove it",
        )
        for name in rule_files(series)
        if name not in named
    ]
    for patch in series.patches:
        try:
            rule = load_rule(series, patch)
            for case in load_cases(series, patch):
                problems += run_case(patch, rule, case)
        except InstallerError as error:
            problems.append(error)
    return problems


def load_cases(series: Series, patch: Patch) -> tuple[Case, ...]:
    """The test cases beside a rule. There must be at least one that the rule changes."""
    name = str(Path(patch.rule).with_suffix(".test.toml"))
    try:
        data = tomllib.loads((series.folder / name).read_text(encoding="utf-8"))
        cases = tuple(_case(entry, number) for number, entry in enumerate(data.pop("case"), 1))
    except FileNotFoundError:
        raise SeriesInvalid("the rule has no test cases", place=name, next_step="write at least one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise SeriesInvalid(f"not a list of cases: {error}", place=name, next_step=_FORMAT) from None
    if data:
        raise SeriesInvalid(f"unknown key `{next(iter(data))}`", place=name, next_step=_FORMAT)
    if not any(case.after is not None for case in cases):
        raise SeriesInvalid("no case changes anything", place=name, next_step="show what the rule is for")
    return cases


def run_case(patch: Patch, rule: Rule, case: Case) -> list[InstallerError]:
    """What is wrong with one case; empty if it holds."""
    problems: list[InstallerError] = []
    for newline, kind in (("\n", "LF"), ("\r\n", "CRLF")):
        try:
            _run(patch, rule, case, newline)
        except _CaseError as error:
            what = f"{case.name} ({kind}): {error}"
            problems.append(SeriesInvalid(what, place=patch.rule, next_step="correct the rule or the case"))
    return problems


class _CaseError(Exception):
    pass


def _case(entry: Mapping[str, Any], number: int) -> Case:
    if unknown := sorted(set(entry) - _CASE_KEYS):
        raise ValueError(f"unknown key `{unknown[0]}`")
    if set(entry) - {"name"} not in ({"before", "after"}, {"unchanged"}):
        raise ValueError(f"case {number} needs `before` and `after`, or `unchanged` alone")
    name = f"case {number}" + (f", {entry['name']}" if "name" in entry else "")
    return Case(name, entry.get("before", entry.get("unchanged")), entry.get("after"))


def _run(patch: Patch, rule: Rule, case: Case, newline: str) -> None:
    before = case.before.replace("\n", newline)
    finding = find_patch(_source(before), patch, rule)
    if case.after is None:
        if finding.status is Status.READY:
            raise _CaseError(f"it would be changed, at line {finding.lines[0]}")
        return
    if finding.status is not Status.READY:
        raise _CaseError(f"{finding.status}: {finding.reason}")
    after = apply_edits(before, list(finding.edits))
    if after != case.after.replace("\n", newline):
        raise _CaseError(f"the outcome is\n{after}")
    try:
        compile(after.encode(), case.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise _CaseError(f"the outcome does not compile: {error}") from None
    if find_patch(_source(after), patch, rule).status is not Status.APPLIED:
        raise _CaseError("a second run does not find the patch applied")


def _source(text: str) -> Source:
    return Source("case", text.encode())
