"""Finding a patch's place in one file: the enclosing class and function that the series names, the matches of the
rule inside them, and, where there are too few, the statement that looks most like the anchor. It decides and writes
nothing, and must not know about windows, manifests or other patches."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from enum import StrEnum

from ast_grep_py import SgNode

from .errors import SeriesInvalid
from .fixes import Edit, FixError, edit_for
from .rules import MARKER, Rule, markers, markers_expected
from .series import Patch
from .source import Source, enclosing_simple_statement, line_number, outermost, own_text

_NAME = re.compile(r"\$*[A-Za-z_]\w*")
_SHOWN = 100
_KEYWORD_WEIGHT = 0.2


class Status(StrEnum):
    READY = "ready"
    APPLIED = "already applied"
    MISSING = "anchor missing"
    AMBIGUOUS = "ambiguous"
    ABSENT = "not in this tree"

    @property
    def fits(self) -> bool:
        return self in (Status.READY, Status.APPLIED, Status.ABSENT)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The place that comes closest to a missing anchor."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one patch in one tree. `covers` are the spans of the statements it changes."""

    patch: Patch
    status: Status
    file: str
    found: int = 0
    lines: tuple[int, ...] = ()
    reason: str = ""
    nearest: Nearest | None = None
    edits: tuple[Edit, ...] = ()
    covers: tuple[tuple[int, int], ...] = ()


def find_patch(source: Source, patch: Patch, rule: Rule) -> Finding:
    """Looks for one patch in the file it belongs to."""
    marked, expected = markers(source.text).get(patch.id, 0), markers_expected(rule, patch)
    if marked == expected:
        return Finding(patch, Status.APPLIED, source.path, patch.matches, _marker_lines(source, patch))
    if marked:
        reason = f"its marker stands {marked} times where {expected} are expected"
        return Finding(patch, Status.AMBIGUOUS, source.path, 0, _marker_lines(source, patch), reason)
    scopes = source.scopes(patch.class_name, patch.function)
    if not scopes:
        return _without_scope(source, patch)
    matches = _matches(scopes, rule)
    lines = tuple(line_number(match) for match in matches)
    if len(matches) > patch.matches:
        reason = f"{len(matches)} matches where {patch.matches} are expected"
        return Finding(patch, Status.AMBIGUOUS, source.path, len(matches), lines, reason)
    if len(matches) < patch.matches:
        reason = f"{len(matches)} matches where {patch.matches} are expected" if matches else "no match"
        nearest, holds_all_names = _most_alike(source, scopes, rule, matches)
        if patch.optional and not matches:
            # The place may be there in a shape that the rule does not know: worth a word, if not a refusal.
            return Finding(patch, Status.ABSENT, source.path, 0, (), reason, nearest if holds_all_names else None)
        return Finding(patch, Status.MISSING, source.path, len(matches), lines, reason, nearest)
    try:
        edits = tuple(edit_for(source, match, rule) for match in matches)
    except FixError as error:
        nearest = Nearest(source.path, lines[0], _first_line(matches[0].text()))
        return Finding(patch, Status.MISSING, source.path, len(matches), lines, str(error), nearest)
    covers = tuple(enclosing_simple_statement(match) for match in matches)
    return Finding(patch, Status.READY, source.path, len(matches), lines, "", None, edits, covers)


def overlapping(one: Finding, other: Finding) -> bool:
    """Whether two patches of one file change the same statement."""
    return any(a < d and c < b for a, b in one.covers for c, d in other.covers)


def _matches(scopes: list[SgNode], rule: Rule) -> list[SgNode]:
    try:
        return [match for scope in scopes for match in scope.find_all(dict(rule.matcher))]
    except Exception as error:  # ast-grep raises bare Exceptions, with a stack trace in the text
        what = str(error).partition("\n\nStack backtrace")[0].strip()
        raise SeriesInvalid(f"ast-grep refuses the rule: {what}", place=rule.path) from None


def _marker_lines(source: Source, patch: Patch) -> tuple[int, ...]:
    lines = enumerate(source.text.split("\n"), 1) if MARKER in source.text else ()
    return tuple(number for number, line in lines if patch.id in markers(line))


def _without_scope(source: Source, patch: Patch) -> Finding:
    inside = patch.class_name if patch.class_name and source.scopes(patch.class_name, None) else None
    if inside or not patch.class_name:
        missing, kind, name = f"function {patch.function}", "function_definition", patch.function or ""
    else:
        missing, kind, name = f"class {patch.class_name}", "class_definition", patch.class_name
    reason = f"no {missing}" + (f" in class {inside}" if inside else "")
    if patch.optional:
        return Finding(patch, Status.ABSENT, source.path, reason=reason)
    moved = source.definitions("function_definition", (patch.function or "").rpartition(".")[2] or None)
    if moved and patch.function:
        reason += ", but a function of that name stands elsewhere in the file"
        return Finding(patch, Status.MISSING, source.path, reason=reason, nearest=_definition(source, moved[0]))
    import difflib  # slow to import, and only misfits need it

    others = {_defined_name(node): node for node in source.definitions(kind)}
    alike = difflib.get_close_matches(name.rpartition(".")[2], list(others), n=1, cutoff=0.0)
    nearest = _definition(source, others[alike[0]]) if alike else None
    return Finding(patch, Status.MISSING, source.path, reason=reason, nearest=nearest)


def _most_alike(source: Source, scopes: list[SgNode], rule: Rule, taken: list[SgNode]) -> tuple[Nearest, bool]:
    """The statement that shares most names with one of the rule's patterns, the definition itself if none does; and
    whether it has all names of the pattern that has most."""
    wanted = sorted((_names(pattern) for pattern in rule.patterns), key=len)
    seen = {line_number(match) for match in taken}
    best, best_score, best_names = scopes[0], 0.0, set[str]()
    statements = {"rule": {"any": [{"inside": {"kind": "block"}}, {"inside": {"kind": "module"}}]}}
    for scope in scopes:
        for node in scope.find_all(statements):
            if line_number(node) in seen:
                continue
            names = _names(own_text(source, node))
            score = max((_likeness(pattern, names) for pattern in wanted), default=0.0)
            if score > best_score:
                best, best_score, best_names = node, score, set(names)
    nearest = Nearest(source.path, line_number(best), _first_line(outermost(best).text()))
    return nearest, bool(best_names) and set(wanted[-1]) <= best_names


def _names(text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if not name.startswith("$")]


def _likeness(pattern: list[str], names: list[str]) -> float:
    """How many of the pattern's names are there; among equals, fewer other names are better. A keyword counts less."""
    weight = {name: _KEYWORD_WEIGHT if keyword.iskeyword(name) else 1.0 for name in (*pattern, *names)}
    common = sum(weight[name] for name in set(pattern) & set(names))
    there = common / (sum(weight[name] for name in set(pattern)) or 1.0)
    alike = common / (sum(weight[name] for name in set(pattern) | set(names)) or 1.0)
    return there + alike / len(weight) if weight else 0.0


def _defined_name(node: SgNode) -> str:
    name = node.field("name")
    return name.text() if name else ""


def _definition(source: Source, node: SgNode) -> Nearest:
    return Nearest(source.path, line_number(node), _first_line(node.text()))


def _first_line(text: str) -> str:
    line = text.partition("\n")[0].strip()
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
