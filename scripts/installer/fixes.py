"""From a match and a rule's `fix` to an edit of the text. Only the replaced range changes, and inside it captured
text stays as it was written.

How a fix of several lines is laid out: its first line stands where the match stood. Every further line starts with
the indentation of the line the match is on, plus the indentation it has in the fix (whole steps of four spaces become
tabs where the tree indents by tabs), and ends with the newline in use there. Captured text keeps its own further
lines; where a fix moves it to another depth they move along, except inside string literals. If the fix starts with
the whole match and adds lines after it, those go below a comment that trails the match. Where other code shares the
match's line so that lines cannot be added, the edit is refused.

This module must not know about files, series or windows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ast_grep_py import SgNode

from .rules import MARKER, Rule, fix_variables
from .source import Source, is_statement, span

_STEP = 4


class FixError(Exception):
    """The fix cannot take this match's place; the text says why."""


@dataclass(frozen=True, slots=True)
class Edit:
    """`text[start:end]` becomes `replacement`."""

    start: int
    end: int
    replacement: str


def edit_for(source: Source, match: SgNode, rule: Rule) -> Edit:
    """The edit that puts the rule's fix in the place of a match."""
    start, end = span(match)
    first_line, *other_lines = rule.fix.split("\n")
    head = source.text[source.line_start(start) : start].removeprefix("\ufeff")
    tail = source.text[end : source.line_end(end)]
    if other_lines and head.strip() and is_statement(match):
        raise FixError("it shares its line with other code, so that no line can be added")
    base, newline = source.indentation(start), source.newline(start)
    lines = [_expand(source, match, first_line, base)]
    for line in other_lines:
        body = line.lstrip(" ")
        indent = base + _in_file_units(" " * (len(line) - len(body)), base)
        lines.append(indent + _expand(source, match, body, indent) if body else "")
    if tail.strip() and MARKER in lines[-1].rpartition("\n")[2]:
        if not tail.lstrip().startswith("#"):
            raise FixError("it shares its line with other code, which the payload's comment would swallow")
        if other_lines and lines[0] == source.text[start:end]:
            return Edit(source.line_end(end), source.line_end(end), newline + newline.join(lines[1:]))
    return Edit(start, end, newline.join(lines))


def apply_edits(text: str, edits: list[Edit]) -> str:
    """The text with all edits made; they must not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.replacement + text[edit.end :]
    return text


def _expand(source: Source, match: SgNode, line: str, indent: str) -> str:
    parts, position = [], 0
    for variable in fix_variables(line):
        parts += [line[position : variable.start()], _captured(source, match, variable.group(), indent)]
        position = variable.end()
    return "".join(parts) + line[position:]


def _captured(source: Source, match: SgNode, variable: str, indent: str) -> str:
    if variable.startswith("$$$"):
        nodes = match.get_multiple_matches(variable[3:])
        return _moved(source, nodes, indent) if nodes else ""
    node = match.get_match(variable[1:])
    if node is not None:
        return _moved(source, [node], indent)
    transformed = match.get_transformed(variable[1:])
    if transformed is None:
        raise FixError(f"the rule captures nothing as `{variable}`")
    return transformed


def _moved(source: Source, nodes: list[SgNode], indent: str) -> str:
    start, end = span(nodes[0])[0], span(nodes[-1])[1]
    text, own = source.text[start:end], source.indentation(start)
    if own == indent or "\n" not in text:
        return text
    frozen = _lines_inside_strings(nodes)
    number = nodes[0].range().start.line
    lines = text.split("\n")
    for offset, line in enumerate(lines[1:], 1):
        if number + offset not in frozen and line.startswith(own) and line.strip():
            lines[offset] = indent + line[len(own) :]
    return "\n".join(lines)


def _lines_inside_strings(nodes: list[SgNode]) -> set[int]:
    frozen: set[int] = set()
    for node in nodes:
        for string in ([node] if node.kind() == "string" else []) + node.find_all({"rule": {"kind": "string"}}):
            place = string.range()
            frozen.update(range(place.start.line + 1, place.end.line + 1))
    return frozen


def _in_file_units(spaces: str, base: str) -> str:
    return re.sub(" " * _STEP, "\t", spaces) if "\t" in base else spaces
