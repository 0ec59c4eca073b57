"""Deciding what would change: every patch of the recognised window looked up, checked against the others, and the new
content of each file computed and compiled, all in memory. Pure over a reader of files; it must not write, and must
not know how a plan is carried out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

from .errors import AnchorsDoNotFit, CannotCompile, PartlyPatched, PatchesOverlap, SeriesInvalid
from .fixes import apply_edits
from .matching import Finding, Status, find_patch, overlapping
from .rules import load_rule
from .series import Patch, Series, Window
from .source import Source
from .tree import PACKAGE
from .window import recognise

ReadBytes = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class Assessment:
    """How the series stands to a tree: its window, one finding per patch, and the files they were found in."""

    window: Window
    findings: tuple[Finding, ...]
    sources: Mapping[str, Source]

    @property
    def fits(self) -> bool:
        return all(finding.status.fits for finding in self.findings)

    def having(self, status: Status) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status is status)


@dataclass(frozen=True, slots=True)
class Change:
    """One file's content before (None: it is added) and after."""

    path: str
    before: bytes | None
    after: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an apply will write: added files first, so that patched files never call what is not there."""

    series_version: str
    window: str
    patches: tuple[str, ...]
    changes: tuple[Change, ...]


def assess(series: Series, read: ReadBytes) -> Assessment:
    """Recognises the window and looks up each of its patches."""
    sources: dict[str, Source | None] = {}

    def source(path: str) -> Source | None:
        if path not in sources:
            data = read(path)
            sources[path] = None if data is None else Source(path, data)
        return sources[path]

    window = recognise(series, source)
    findings = tuple(_find(series, patch, source) for patch in series.patches_for(window.id))
    for one, other in combinations(findings, 2):
        if one.file == other.file and overlapping(one, other):
            raise PatchesOverlap(
                f"patches `{one.patch.id}` and `{other.patch.id}` cover the same statement",
                place=f"{one.file}, lines {_numbers(one.lines)} and {_numbers(other.lines)}",
                next_step="anchor one of the two rules on another statement",
            )
    return Assessment(window, findings, {path: found for path, found in sources.items() if found})


def make_plan(series: Series, assessment: Assessment, overlay: Mapping[str, bytes]) -> Plan:
    """What to write, if every patch fits and everything compiles; refused otherwise."""
    require_fit(assessment)
    ready = assessment.having(Status.READY)
    applied = assessment.having(Status.APPLIED)
    if ready and applied:
        raise PartlyPatched(
            f"{len(applied)} of {len(ready) + len(applied)} patches stand in the tree, but nothing says who put them",
            place=applied[0].file,
            next_step="take them back the way they came (for exported patches: git revert), then apply",
        )
    changes = [Change(path, None, data) for path, data in overlay.items()]
    for path in dict.fromkeys(finding.file for finding in ready):
        source = assessment.sources[path]
        changes.append(Change(path, source.data, patched(source, ready)))
    for change in changes:
        _require_compilable(change)
    patches = tuple(finding.patch.id for finding in ready)
    return Plan(series.version, assessment.window.id, patches, tuple(changes))


def patched(source: Source, findings: tuple[Finding, ...]) -> bytes:
    """A file's content with the edits of those findings that are about it."""
    edits = [edit for finding in findings if finding.file == source.path for edit in finding.edits]
    return source.encode(apply_edits(source.text, edits))


def require_fit(assessment: Assessment) -> None:
    if assessment.fits:
        return
    bad = [finding for finding in assessment.findings if not finding.status.fits]
    raise AnchorsDoNotFit(
        f"{len(bad)} of {len(assessment.findings)} patches do not fit",
        place=f"window {assessment.window.id}",
        next_step="patches/README.md says how to follow upstream; nothing was written",
        detail="\n".join(describe(finding) for finding in bad),
    )


def describe(finding: Finding) -> str:
    """One line about a patch that does not fit: what, where, and what comes closest."""
    where = f"{finding.file} {finding.patch.anchor}".strip()
    line = f"{finding.patch.id}: {finding.status} in {where}: {finding.reason}"
    if finding.status is Status.AMBIGUOUS and finding.lines:
        line += f" (lines {_numbers(finding.lines)})"
    if finding.nearest:
        line += f"; nearest is line {finding.nearest.line}: {finding.nearest.text}"
    return line


def _find(series: Series, patch: Patch, source: Callable[[str], Source | None]) -> Finding:
    rule = load_rule(series, patch)
    existing = [found for found in map(source, patch.files) if found]
    if not existing:
        status = Status.ABSENT if patch.optional else Status.MISSING
        return Finding(patch, status, patch.files[0], reason=f"no file {' or '.join(patch.files)}")
    # Code that moved can leave a file behind that only imports it.
    holding = [found for found in existing if found.scopes(patch.class_name, patch.function)] or existing
    findings = [find_patch(found, patch, rule) for found in holding]
    there = (finding for finding in findings if finding.status not in (Status.MISSING, Status.ABSENT))
    return next(there, findings[0])


def _require_compilable(change: Change) -> None:
    if not change.path.endswith(".py"):
        return
    try:
        _compile(change.after, change.path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise CannotCompile(
            f"would not compile: {getattr(error, 'msg', error)}",
            place=f"{change.path}, line {line}" if line else change.path,
            next_step=_why_not(change),
        ) from None


def _why_not(change: Change) -> str:
    if change.before is None:
        return "this is an overlay file: correct it there"
    try:
        _compile(change.before, change.path)
    except (SyntaxError, ValueError):
        return "it does not compile unpatched either: run the installer with the Python that the tree is for"
    return "a rule's fix does not suit this file; please report it with the lines around the anchor"


def _compile(data: bytes, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(data, path, "exec", dont_inherit=True)


def _numbers(lines: tuple[int, ...]) -> str:
    return ", ".join(map(str, lines))


_BY_PRODUCTS = ("__pycache__", ".pyc", ".egg-info")


def read_overlay(series: Series) -> dict[str, bytes]:
    """The files that are added to a tree, by their path there."""
    files: dict[str, bytes] = {}
    for place in sorted(series.overlay.rglob("*")):
        path = place.relative_to(series.overlay).as_posix()
        made_by_tools = any(part.endswith(_BY_PRODUCTS) for part in path.split("/"))
        if made_by_tools or (place.is_dir() and not place.is_symlink()):
            continue
        if place.is_symlink() or not path.startswith(f"{PACKAGE}/"):
            raise SeriesInvalid(f"an overlay holds plain files under {PACKAGE}/", place=str(place))
        files[path] = place.read_bytes()
    if not files:
        raise SeriesInvalid("the overlay holds no files", place=str(series.overlay))
    return files
