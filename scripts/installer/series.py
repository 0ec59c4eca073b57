"""The series: which windows of TensorRT-LLM are served, and which patch goes where in each. This module reads
`series.toml` into immutable values and refuses whatever is misspelt, missing or contradictory, naming the entry. It
must not know what a rule file says or what any tree looks like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomllib

from .errors import SeriesInvalid

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_PACKAGE = "tensorrt_llm"


@dataclass(frozen=True, slots=True)
class Probe:
    """Names one file must hold (`has`) and must not hold (`lacks`) as identifiers."""

    file: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of TensorRT-LLM's history that one set of patches serves."""

    id: str
    summary: str
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One hook: where its rule must match, how often, and in which windows."""

    id: str
    purpose: str
    windows: tuple[str, ...]
    files: tuple[str, ...]
    class_name: str | None
    function: str | None
    matches: int
    hook: str
    rule: str
    optional: bool

    @property
    def anchor(self) -> str:
        """The enclosing class and function as a reader would write it; empty for module level."""
        return ".".join(name for name in (self.class_name, self.function) if name)


@dataclass(frozen=True, slots=True)
class Series:
    """The whole of `series.toml`, in its order."""

    version: str
    overlay: Path
    folder: Path
    windows: tuple[Window, ...]
    patches: tuple[Patch, ...]

    def patches_for(self, window_id: str) -> tuple[Patch, ...]:
        return tuple(patch for patch in self.patches if window_id in patch.windows)


class _Table:
    """One TOML table, read key by key so that a wrong type or a left-over key is an error that names its place."""

    def __init__(self, data: Any, place: str) -> None:
        if not isinstance(data, Mapping):
            raise SeriesInvalid("a table is expected here", place=place)
        self.data, self.place, self.known = data, place, set[str]()

    def fail(self, what: str) -> SeriesInvalid:
        return SeriesInvalid(what, place=self.place, next_step="correct series.toml; patches/README.md has the format")

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self.fail(f"`{key}` is missing")
        return value

    def optional_text(self, key: str) -> str | None:
        self.known.add(key)
        value = self.data.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip() or "\n" in value):
            raise self.fail(f"`{key}` must be one line of text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        self.known.add(key)
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.fail(f"`{key}` must be a list of names")
        if len(set(value)) != len(value):
            raise self.fail(f"`{key}` names something twice")
        return tuple(value)

    def count(self, key: str) -> int:
        self.known.add(key)
        value = self.data.get(key, 1)
        if type(value) is not int or value < 1:
            raise self.fail(f"`{key}` must be a whole number of at least 1")
        return value

    def flag(self, key: str) -> bool:
        self.known.add(key)
        value = self.data.get(key, False)
        if type(value) is not bool:
            raise self.fail(f"`{key}` must be true or false")
        return value

    def tables(self, key: str) -> list[Any]:
        self.known.add(key)
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.fail(f"`{key}` must be a list of tables")
        return value

    def done(self) -> None:
        if unknown := sorted(set(self.data) - self.known):
            raise self.fail(f"unknown key `{unknown[0]}`; known are {', '.join(sorted(self.known))}")


def load_series(path: Path) -> Series:
    """Reads `series.toml`; the overlay's source is relative to the folder above the one that holds it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SeriesInvalid("there is no series here", place=str(path), next_step="pass --series FILE") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeriesInvalid(f"not valid TOML: {error}", place=str(path)) from None
    top = _Table(data, path.name)
    overlay = _Table(data.get("overlay", {}), f"{path.name} [overlay]")
    top.known.add("overlay")
    source = overlay.optional_text("source") or "overlay"
    overlay.done()
    windows = tuple(
        _window(_Table(entry, f"{path.name} window {n}")) for n, entry in enumerate(top.tables("window"), 1)
    )
    patches = tuple(_patch(_Table(entry, f"{path.name} patch {n}")) for n, entry in enumerate(top.tables("patch"), 1))
    version = top.text("version")
    top.done()
    _check_ids(top, windows, patches)
    return Series(version, path.parent.parent / source, path.parent, windows, patches)


def rule_files(series: Series) -> tuple[str, ...]:
    """Every rule file that lies under the series' folder, as the series would write it."""
    found = [*series.folder.rglob("*.yml"), *series.folder.rglob("*.yaml")]
    return tuple(sorted(file.relative_to(series.folder).as_posix() for file in found))


def _window(table: _Table) -> Window:
    window_id = _identifier(table)
    summary = table.text("summary")
    probes = []
    for number, entry in enumerate(table.tables("probe"), 1):
        probe = _Table(entry, f"{table.place} probe {number}")
        file, has, lacks = _tree_path(probe, probe.text("file")), probe.texts("has"), probe.texts("lacks")
        probe.done()
        if not has and not lacks:
            raise probe.fail("a probe needs names in `has` or in `lacks`")
        if wrong := [name for name in (*has, *lacks) if not name.isidentifier()]:
            raise probe.fail(f"`{wrong[0]}` is not a name; a probe looks for single names")
        probes.append(Probe(file, has, lacks))
    if not any(probe.has for probe in probes):
        raise table.fail("a window needs at least one name that its tree `has`")
    table.done()
    return Window(window_id, summary, tuple(probes))


def _patch(table: _Table) -> Patch:
    patch_id = _identifier(table)
    one, several = table.optional_text("file"), table.texts("files")
    if (one is None) == (not several):
        raise table.fail("exactly one of `file` and `files` is needed")
    windows = table.texts("windows")
    if not windows:
        raise table.fail("`windows` names no window")
    patch = Patch(
        id=patch_id,
        purpose=table.text("purpose"),
        windows=windows,
        files=tuple(_tree_path(table, file) for file in (several or (one or "",))),
        class_name=_dotted(table, "class"),
        function=_dotted(table, "function"),
        matches=table.count("matches"),
        hook=table.text("hook"),
        rule=table.text("rule"),
        optional=table.flag("optional"),
    )
    table.done()
    return patch


def _identifier(table: _Table) -> str:
    value = table.text("id")
    table.place += f" ({value})"
    if not _ID.match(value):
        raise table.fail("`id` may hold small letters, digits, dots, dashes and underscores")
    return value


def _dotted(table: _Table, key: str) -> str | None:
    value = table.optional_text(key)
    if value is not None and not _DOTTED.match(value):
        raise table.fail(f"`{key}` must be a name, or names joined by dots for nested definitions")
    return value


def _tree_path(table: _Table, value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (_PACKAGE,) or str(path) != value:
        raise table.fail(f"`{value}` must be a plain path that starts with {_PACKAGE}/")
    return value


def _check_ids(top: _Table, windows: tuple[Window, ...], patches: tuple[Patch, ...]) -> None:
    for kind, ids in (("window", [w.id for w in windows]), ("patch", [p.id for p in patches])):
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise top.fail(f"the {kind} id `{twice[0]}` stands twice")
    if not windows:
        raise top.fail("the series has no window")
    known = {window.id for window in windows}
    rules: dict[str, str] = {}
    for patch in patches:
        if unknown := [w for w in patch.windows if w not in known]:
            raise top.fail(f"patch `{patch.id}` is for the window `{unknown[0]}`, which is not in the series")
        other = rules.setdefault(patch.rule, patch.id)
        if other != patch.id:
            raise top.fail(f"patches `{other}` and `{patch.id}` share the rule `{patch.rule}`; give each its own")
