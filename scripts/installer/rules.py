"""Rule files: ordinary ast-grep YAML (`id`, `message`, `language`, `rule`, `fix`, and where needed `constraints`,
`utils`, `transform`). This module reads one into a value, refuses what the installer cannot honour, and knows the
marker comment by which a payload line is recognised later. It must not know where in a tree a rule is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import SeriesInvalid
from .series import Patch, Series

MARKER = "# structured-commit: "
_MARKED = re.compile(re.escape(MARKER) + r"(\S+)")
_VARIABLE = re.compile(r"\$\$\$[A-Z_][A-Z0-9_]*|\$[A-Z_][A-Z0-9_]*")
_MATCHER_KEYS = ("rule", "constraints", "utils", "transform")
_OTHER_KEYS = ("id", "message", "language", "fix", "severity", "note", "url", "metadata")
_MOST_PAYLOAD_LINES = 3

# PyYAML is built without libyaml on some platforms; the pure reader gives the same values, more slowly.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule file: what ast-grep is asked, and the text that takes the match's place."""

    path: str
    id: str
    message: str
    matcher: Mapping[str, Any]
    fix: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every pattern in the rule, to find out what a place that nearly fits would look like."""
        return tuple(_patterns(self.matcher["rule"]))


def markers(text: str) -> dict[str, int]:
    """How often the marker of each patch stands in a text."""
    found: dict[str, int] = {}
    for name in _MARKED.findall(text):
        found[name] = found.get(name, 0) + 1
    return found


def markers_expected(rule: Rule, patch: Patch) -> int:
    """How often a file holds the patch's marker once the patch is applied."""
    return markers(rule.fix).get(patch.id, 0) * patch.matches


def fix_variables(fix: str) -> tuple[re.Match[str], ...]:
    """The metavariables of one line of a fix, from left to right."""
    return tuple(_VARIABLE.finditer(fix))


def load_rule(series: Series, patch: Patch) -> Rule:
    """Reads the rule of a patch and checks it against the patch's entry in the series."""
    rule = _read(series.folder / patch.rule, patch.rule)
    found = markers(rule.fix)
    if set(found) != {patch.id}:
        hint = "" if found else " (write it as a block, `fix: |-`: elsewhere YAML takes the marker for a comment)"
        raise _fail(rule.path, f"`fix` must carry the marker `{MARKER}{patch.id}` and no other patch's{hint}")
    if found[patch.id] > _MOST_PAYLOAD_LINES:
        raise _fail(rule.path, f"a payload has at most {_MOST_PAYLOAD_LINES} lines; logic belongs into the overlay")
    if not re.search(rf"\b{re.escape(patch.hook)}\b", _MARKED.sub("", rule.fix)):
        raise _fail(rule.path, f"`fix` never mentions `{patch.hook}`, the hook that series.toml names for it")
    return rule


def _read(path: Path, name: str) -> Rule:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except FileNotFoundError:
        raise _fail(name, "series.toml names this rule, but there is no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _fail(name, f"not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise _fail(name, "a rule file holds one table")
    if unknown := sorted(set(data) - {*_MATCHER_KEYS, *_OTHER_KEYS}):
        raise _fail(name, f"the installer does not read `{unknown[0]}`")
    for key in ("id", "message", "language", "fix"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise _fail(name, f"`{key}` must be text")
    if data["language"].lower() != "python":
        raise _fail(name, "`language` must be python")
    if not isinstance(data.get("rule"), dict):
        raise _fail(name, "`rule` must be a table")
    matcher = {key: data[key] for key in _MATCHER_KEYS if key in data}
    return Rule(name, data["id"], data["message"], matcher, data["fix"].rstrip("\n"))


def _patterns(node: Any) -> list[str]:
    if isinstance(node, list):
        return [text for item in node for text in _patterns(item)]
    if not isinstance(node, dict):
        return []
    found = []
    for key, value in node.items():
        if key == "pattern":
            found.append(value if isinstance(value, str) else str(value.get("context", "")))
        elif key != "not":
            found += _patterns(value)
    return found


def _fail(place: str, what: str) -> SeriesInvalid:
    return SeriesInvalid(what, place=place, next_step="correct the rule; patches/README.md has the format")
