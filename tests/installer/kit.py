"""A small series and a small tree for the installer's tests, all written here: three files to patch, four patches,
two windows, an overlay of three files. Tests change copies of these in temporary folders."""

from __future__ import annotations

import io
import json
import os
import stat
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.installer.cli import main

WORKER = "tensorrt_llm/_torch/speculative/worker.py"
SAMPLER = "tensorrt_llm/_torch/sampler.py"
LOOP = "tensorrt_llm/_torch/loop.py"
OVERLAY = "tensorrt_llm/_torch/speculative/stage_kit"

TREE = {
    "tensorrt_llm/__init__.py": "",
    "tensorrt_llm/version.py": '__version__ = "9.1.0rc3"\n',
    "tensorrt_llm/unrelated.py": "anything = 1\n",
    WORKER: '''"""Verifies drafts."""


class Worker:
    def accept(self, logits, counts):
        tokens = self._names_of_window_two(logits)  # é
        if counts is None:
            counts = [
                1,
                len(tokens),
            ]

        return tokens, counts

    def draft(self, state):
        chosen, counts = fused_op(state.logits, state.drafts)  # one launch
        state.counts = counts
        return chosen


class Other:
    def accept(self, logits, counts):
        return tokens, counts
''',
    SAMPLER: """def add_tokens(request, tokens):
    for token in tokens:
        if token != request.next:
            break
        request.add(token)
    return request
""",
    LOOP: """class Loop:
    last = 0

    def advance(self, lengths, counts):
        self.last = lengths + counts
""",
}

RULES = {
    "worker/accept.yml": """id: accept
message: what is accepted is committed first
language: python
rule:
  all:
    - pattern: $STMT
    - pattern: return tokens, counts
fix: |
  from .stage_kit import hooks
  tokens, counts = hooks.commit(tokens, counts)  # structured-commit: accept
  $STMT
""",
    "worker/draft.yml": """id: draft
message: what the fused op accepted is committed at once
language: python
rule:
  all:
    - pattern: $STMT
    - any:
        - pattern: chosen, counts = fused_op($$$ARGS)
        - pattern: chosen, counts = (fused_op($$$ARGS))
fix: |-
  $STMT
  chosen, counts = hooks.commit_fused(chosen, counts)  # structured-commit: draft
""",
    "sampler/stop.yml": """id: stop
message: tokens past the commit are not added
language: python
rule:
  pattern: $REQUEST.add($TOKEN)
  kind: call
fix: |-
  hooks.add($REQUEST, $TOKEN)  # structured-commit: stop
""",
    "loop/guard.yml": """id: guard
message: the loop advances by what was committed
language: python
rule:
  all:
    - pattern: $STMT
    - any:
        - pattern: self.last = $A + $B
        - pattern: self.last = ($A + $B)
fix: |
  if hooks.guard(self):
      counts = hooks.counts(counts)  # structured-commit: guard
  $STMT
""",
}

CASES = {
    "worker/accept.yml": (
        "class Worker:\n    def accept(self):\n        return tokens, counts\n",
        "class Worker:\n    def accept(self):\n        from .stage_kit import hooks\n        tokens, counts = "
        "hooks.commit(tokens, counts)  # structured-commit: accept\n        return tokens, counts\n",
    ),
    "worker/draft.yml": (
        "class Worker:\n    def draft(self):\n        chosen, counts = fused_op(1)\n",
        "class Worker:\n    def draft(self):\n        chosen, counts = fused_op(1)\n"
        "        chosen, counts = hooks.commit_fused(chosen, counts)  # structured-commit: draft\n",
    ),
    "sampler/stop.yml": (
        "def add_tokens(r, t):\n    r.add(t)\n",
        "def add_tokens(r, t):\n    hooks.add(r, t)  # structured-commit: stop\n",
    ),
    "loop/guard.yml": (
        "class Loop:\n    def advance(self):\n        self.last = a + b\n",
        "class Loop:\n    def advance(self):\n        if hooks.guard(self):\n            counts = hooks.counts(counts)"
        "  # structured-commit: guard\n        self.last = a + b\n",
    ),
}

SERIES = f'''version = "7"

[overlay]
source = "overlay"

[[window]]
id = "one"
summary = "before the rename"
probe = [{{file = "{WORKER}", has = ["_names_of_window_one"], lacks = ["_names_of_window_two"]}}]

[[window]]
id = "two"
summary = "after the rename"
probe = [{{file = "{WORKER}", has = ["_names_of_window_two"]}}]

[[patch]]
id = "accept"
purpose = "commit what strict acceptance returns"
windows = ["one", "two"]
file = "{WORKER}"
class = "Worker"
function = "accept"
hook = "commit"
rule = "worker/accept.yml"

[[patch]]
id = "draft"
purpose = "commit what the fused op accepts"
windows = ["two"]
files = ["tensorrt_llm/_torch/speculative/moved.py", "{WORKER}"]
class = "Worker"
function = "draft"
hook = "commit_fused"
rule = "worker/draft.yml"

[[patch]]
id = "stop"
purpose = "stop adding tokens past the commit"
windows = ["one", "two"]
file = "{SAMPLER}"
function = "add_tokens"
matches = 1
hook = "add"
rule = "sampler/stop.yml"

[[patch]]
id = "guard"
purpose = "advance by what was committed — not more"
windows = ["one", "two"]
file = "{LOOP}"
class = "Loop"
function = "advance"
hook = "guard"
rule = "loop/guard.yml"
optional = true
'''

OVERLAY_FILES = {
    f"{OVERLAY}/__init__.py": "",
    f"{OVERLAY}/hooks.py": "def commit(tokens, counts):\n    return tokens, counts\n",
    f"{OVERLAY}/data/table.json": '{"ä": 1}\n',
}


@dataclass(frozen=True)
class Place:
    """A repository with a series, and a tree to work on."""

    repo: Path
    tree: Path

    @property
    def series(self) -> Path:
        return self.repo / "patches" / "series.toml"

    def run(self, command: str, *arguments: str) -> Outcome:
        """Runs a command as a user would, with --json; the last value is its parsed output."""
        out, err = io.StringIO(), io.StringIO()
        options = [str(self.tree)] if command != "check-series" else []
        with redirect_stdout(out), redirect_stderr(err):
            status = main([command, *options, *arguments, "--series", str(self.series), "--json"])
        return Outcome(status, json.loads(out.getvalue()))

    def text(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """Runs a command as a user would and returns what it prints: exit status, output, errors."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main([command, str(self.tree), *arguments, "--series", str(self.series)])
        return status, out.getvalue(), err.getvalue()

    def edit(self, path: str, old: str, new: str) -> None:
        """Changes one file of the tree; `old` must be in it."""
        file = self.tree / path
        data = file.read_bytes()
        assert old.encode() in data
        file.write_bytes(data.replace(old.encode(), new.encode()))

    def edit_series(self, old: str, new: str) -> None:
        text = self.series.read_text(encoding="utf-8")
        assert old in text
        self.series.write_text(text.replace(old, new), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    status: int
    report: dict[str, Any]

    @property
    def problem(self) -> dict[str, Any]:
        (problem,) = self.report["problems"]
        return problem

    def statuses(self) -> dict[str, str]:
        return {patch["id"]: patch["status"] for patch in self.report["patches"]}


def make_place(folder: Path, tree: dict[str, str | bytes] | None = None) -> Place:
    """Writes the series, its rules and cases, the overlay, and a tree."""
    place = Place(folder / "repo", folder / "tree")
    for name, text in RULES.items():
        write(place.repo / "patches" / name, text)
        before, after = CASES[name]
        case = f"[[case]]\nname = 'it fits'\nbefore = '''\n{before}'''\nafter = '''\n{after}'''\n"
        case += "[[case]]\nunchanged = 'x = 1'\n"
        write(place.repo / "patches" / name.replace(".yml", ".test.toml"), case)
    write(place.series, SERIES)
    for name, text in OVERLAY_FILES.items():
        write(place.repo / "overlay" / name, text)
    for name, text in (TREE if tree is None else tree).items():
        write(place.tree / name, text)
    return place


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything under a folder: kinds, modes, contents and link targets."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content: bytes | str = b""
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[path.relative_to(folder).as_posix()] = (mode, content)
    return found
