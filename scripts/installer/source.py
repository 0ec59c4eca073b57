"""Source text as the installer handles it: bytes that decode to characters and back without loss, and the syntax tree
that ast-grep makes of them, built at most once. Byte-order marks, CRLF, tabs and a missing last newline stay as they
are. This module must not know about patches."""

from __future__ import annotations

import io
import tokenize
from functools import cached_property
from typing import Any

from ast_grep_py import SgNode, SgRoot

from .errors import UnreadableSource

_DEFINITIONS = {"class_definition", "function_definition"}
_SUITES = {"block", "module"}
# A statement with one of these fields holds others.
_SUITE_FIELDS = ("body", "consequence", "definition")
_RESTORE = "restore the file from git or from the wheel"


class Source:
    """One Python file: its bytes, its text, its tree."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data
        self.encoding, self.text = _decode(path, data)

    @cached_property
    def root(self) -> SgNode:
        return SgRoot(self.text, "python").root()

    def encode(self, text: str) -> bytes:
        return text.encode(self.encoding)

    def has_identifier(self, name: str) -> bool:
        """Whether the name stands in the code: a definition, attribute, argument or variable, not a comment."""
        if name not in self.text:
            return False
        return self.root.find({"rule": {"kind": "identifier", "regex": f"^{name}$"}}) is not None

    def scopes(self, class_name: str | None, function: str | None) -> list[SgNode]:
        """The definitions that the dotted names lead to; the whole module if both are None. There may be several:
        a name can be defined twice, under a condition or as a property with a setter."""
        names = [("class_definition", name) for name in (class_name or "").split(".") if name]
        names += [("function_definition", name) for name in (function or "").split(".") if name]
        scopes = [self.root]
        for kind, name in names:
            scopes = [child for scope in scopes for child in _defined_in(scope, kind, name)]
        return scopes

    def definitions(self, kind: str, name: str | None = None) -> list[SgNode]:
        """Every class or function of the file, at any depth, or those of one name."""
        rule: dict[str, Any] = {"kind": kind}
        if name is not None:
            rule["has"] = {"field": "name", "regex": f"^{name}$"}
        return self.root.find_all({"rule": rule})

    def line_start(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def line_end(self, index: int) -> int:
        """Where the text of the line ends, before its newline characters."""
        end = self.text.find("\n", index)
        if end < 0:
            return len(self.text)
        return end - 1 if end > index and self.text[end - 1] == "\r" else end

    def indentation(self, index: int) -> str:
        """The white space that the line around `index` starts with."""
        start = self.line_start(index)
        line = self.text[start : self.line_end(start)].removeprefix("\ufeff")
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def newline(self, index: int) -> str:
        """The newline in use around `index`; in a last line that has none, the one before it."""
        end = self.text.find("\n", index)
        if end < 0:
            end = self.text.rfind("\n", 0, index)
        return "\r\n" if end > 0 and self.text[end - 1] == "\r" else "\n"


def span(node: SgNode) -> tuple[int, int]:
    """Where a node starts and ends, in characters."""
    place = node.range()
    return place.start.index, place.end.index


def line_number(node: SgNode) -> int:
    """The line a node starts on, counted from 1."""
    return node.range().start.line + 1


def outermost(node: SgNode) -> SgNode:
    """The largest node with the same text: the statement, where a match is the whole of one."""
    place = span(node)
    for parent in node.ancestors():
        if span(parent) != place or parent.kind() in _SUITES:
            break
        node = parent
    return node


def is_statement(node: SgNode) -> bool:
    parent = outermost(node).parent()
    return parent is not None and parent.kind() in _SUITES


def own_text(source: Source, node: SgNode) -> str:
    """A statement's text; of a compound one, only its head."""
    start, end = span(node)
    suites = [suite for name in _SUITE_FIELDS if (suite := node.field(name))]
    return source.text[start : min([span(suite)[0] for suite in suites], default=end)]


def enclosing_simple_statement(node: SgNode) -> tuple[int, int]:
    """The span of the simple statement around a node; its own span inside the head of a compound one."""
    for candidate in (node, *node.ancestors()):
        parent = candidate.parent()
        if parent is not None and parent.kind() in _SUITES:
            compound = any(candidate.field(name) for name in _SUITE_FIELDS)
            return span(node) if compound else span(candidate)
    return span(node)


def _defined_in(scope: SgNode, kind: str, name: str) -> list[SgNode]:
    found = scope.find_all({"rule": {"kind": kind, "has": {"field": "name", "regex": f"^{name}$"}}})
    return [node for node in found if _owner(node) == (span(scope) if scope.kind() in _DEFINITIONS else None)]


def _owner(node: SgNode) -> tuple[int, int] | None:
    return next((span(parent) for parent in node.ancestors() if parent.kind() in _DEFINITIONS), None)


def _decode(path: str, data: bytes) -> tuple[str, str]:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        # The mark stays in the text as a character, so that it is written back.
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = data.decode(encoding)
        lossless = text.encode(encoding) == data
    except (SyntaxError, UnicodeError) as error:
        raise UnreadableSource(f"not readable as Python source: {error}", place=path, next_step=_RESTORE) from None
    if not lossless:
        what = f"{encoding} text that does not survive reading and writing"
        raise UnreadableSource(what, place=path, next_step=_RESTORE)
    return encoding, text
