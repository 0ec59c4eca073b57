"""Patches as mail that `git am` applies: the overlay first, then one per patch of the series, each against the tree
that the ones before it leave. Pure: it makes the texts, and must not know where they are written."""

from __future__ import annotations

import binascii
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from .diffs import unified
from .errors import NothingToExport
from .matching import Finding, Status
from .plan import Assessment, patched, require_fit
from .series import Series

_AUTHOR = "structured-commit <structured-commit@users.noreply.github.com>"
_MAGIC_DATE = "Mon Sep 17 00:00:00 2001"  # what git format-patch writes into every first line
_DATE = "%a, %d %b %Y %H:%M:%S +0000"
_LONGEST_NAME = 52


@dataclass(frozen=True, slots=True)
class Mail:
    """One file for `git am`."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class _Step:
    subject: str
    body: str
    diff: bytes


def export(
    series: Series, assessment: Assessment, overlay: Mapping[str, bytes], modes: Mapping[str, int]
) -> list[Mail]:
    """The numbered patches for one tree."""
    require_fit(assessment)
    ready = assessment.having(Status.READY)
    if not ready:
        raise NothingToExport(
            "every patch of the series already stands in this tree",
            next_step="run export on a tree without them",
        )
    window = assessment.window.id
    steps = [
        _Step(
            "add the overlay package",
            f"The modules that the patches after this one call.\n\nSeries {series.version}, window {window}.",
            b"".join(unified(path, None, data) for path, data in overlay.items()),
        )
    ]
    for number, finding in enumerate(ready):
        before, done = ready[:number], ready[: number + 1]
        steps.append(
            _Step(
                finding.patch.purpose,
                f"Patch {finding.patch.id} in {finding.patch.anchor or 'the module'}.\n\n"
                f"Series {series.version}, window {window}.",
                _step_diff(assessment, finding, before, done, modes),
            )
        )
    return [_mail(number, len(steps), step, series.version) for number, step in enumerate(steps, 1)]


def _step_diff(
    assessment: Assessment,
    finding: Finding,
    before: tuple[Finding, ...],
    done: tuple[Finding, ...],
    modes: Mapping[str, int],
) -> bytes:
    source = assessment.sources[finding.file]
    return unified(finding.file, patched(source, before), patched(source, done), modes[finding.file])


def _mail(number: int, total: int, step: _Step, version: str) -> Mail:
    subject = f"[PATCH {number}/{total}] structured-commit: {step.subject}"
    date = time.strftime(_DATE, time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    # git am drops the carriage returns of plain mail; quoted-printable keeps them.
    quoted = b"\r" in step.diff
    headers = [
        f"From {'0' * 40} {_MAGIC_DATE}",
        f"From: {_AUTHOR}",
        f"Date: {date}",
        f"Subject: {subject}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        f"Content-Transfer-Encoding: {'quoted-printable' if quoted else '8bit'}",
    ]
    body = f"{step.body}\n---\n".encode() + step.diff + f"-- \nstructured-commit {version}\n".encode()
    if quoted:
        body = b"\n".join(binascii.b2a_qp(line, istext=False) for line in body.split(b"\n"))
    words = re.sub(r"[^A-Za-z0-9]+", "-", step.subject).strip("-")[:_LONGEST_NAME].rstrip("-")
    return Mail(f"{number:04d}-{words}.patch", "\n".join(headers).encode() + b"\n\n" + body)
