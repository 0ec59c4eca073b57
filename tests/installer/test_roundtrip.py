"""apply then revert is the identity, and apply means the same, on trees written in any style: comments, blank lines,
arguments over several lines, other quotes, trailing commas, tabs, CRLF, marks and missing last newlines."""

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.installer.kit import LOOP, SAMPLER, TREE, WORKER, make_place, snapshot

COMMENTS = st.sampled_from(["", "  # why", "  # é 𝄞", "  # structured-commit", "  #"])
BLANKS = st.sampled_from(["", "", "\n", "\n\n", "    \n", "# alone\n", "\x0c\n"])
DEPTHS = st.sampled_from(["  ", "    ", "\t", "        "])
NEWLINES = st.sampled_from(["\n", "\r\n"])


@st.composite
def statements(draw, text):
    """One statement of a suite, with what may stand before and after it."""
    return [*draw(BLANKS).splitlines(), text + draw(COMMENTS)]


@st.composite
def calls(draw, name, *arguments):
    """A call, on one line or over several, with or without comments and a trailing comma."""
    style = draw(st.sampled_from(["one line", "hanging", "aligned", "black"]))
    if style == "one line":
        return f"{name}({', '.join(arguments)})"
    comment, comma = draw(COMMENTS), draw(st.sampled_from(["", ","]))
    if style == "hanging":
        return f"{name}({comment}\n        {arguments[0]},\n            {', '.join(arguments[1:])}{comma})"
    if style == "aligned":
        return f"{name}({arguments[0]},{comment}\n{' ' * 20}{', '.join(arguments[1:])}{comma})"
    lines = f",{comment}\n          ".join(arguments)
    return f"{name}(\n          {lines}{comma}\n    )"


@st.composite
def sources(draw):
    """The three patched files in one style."""
    depth, newline, quote = draw(DEPTHS), draw(NEWLINES), draw(st.sampled_from("'\""))
    op = draw(calls("fused_op", "state.logits", f"state[{quote}drafts{quote}]"))
    names = draw(calls("self._names_of_window_two", "logits", "None"))
    returned = draw(st.sampled_from(["tokens, counts", "tokens,counts", "tokens,  counts"]))
    worker = [
        ("", "class Worker:"),
        (depth, "def accept(self, logits, counts):"),
        (depth * 2, f"tokens = {names}"),
        (depth * 2, f"return {returned}"),
        (depth, "def draft(self, state):"),
        (depth * 2, f"chosen, counts = {op}"),
        (depth * 2, f"state.text = {quote * 3}\n    # structured-commit: nothing\n{quote * 3}"),
        (depth * 2, "return chosen"),
    ]
    token = draw(st.sampled_from(["token", "(token)", "token,"]))
    sampler = [
        ("", "def add_tokens(request, tokens):"),
        (depth, "for token in tokens:"),
        (depth * 2, f"request.add({token})"),
        (depth, "return request"),
    ]
    loop = [
        ("", "class Loop:"),
        (depth, "def advance(self, lengths, counts):"),
        (depth * 2, draw(st.sampled_from(["self.last = lengths + counts", "self.last = lengths+counts"]))),
    ]
    tree = dict(TREE)
    for path, lines in ((WORKER, worker), (SAMPLER, sampler), (LOOP, loop)):
        text = "".join(f"{before}{indent}{line}{after}\n" for before, indent, line, after in draw(_dressed(lines)))
        text = draw(st.sampled_from(["", "\ufeff"])) + text
        text = text.rstrip("\n") if draw(st.booleans()) else text
        tree[path] = text.replace("\n", newline).encode()
    return tree


@st.composite
def _dressed(draw, lines):
    return [(draw(BLANKS), indent, line, draw(COMMENTS)) for indent, line in lines]


def outline(data):
    """What Python makes of a file, without the statements that the patches added."""
    tree = ast.parse(data)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [statement for statement in node.body if "hooks" not in ast.dump(statement)]
    return ast.dump(tree)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=sources())
def test_revert_after_apply_is_the_identity_in_every_style(tree):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        place = make_place(Path(folder), tree)
        before = snapshot(place.tree)
        outcome = place.run("apply")
        assert outcome.status == 0, outcome.report["problems"]
        assert set(outcome.statuses().values()) == {"already applied"}
        for path in (WORKER, LOOP):
            after = (place.tree / path).read_bytes()
            assert outline(after) == outline(tree[path])
            assert set(tree[path].split(b"\n")) <= {*after.split(b"\n"), *_last_line(tree[path])}
        assert place.run("check").status == 0
        assert place.run("revert").status == 0
        assert snapshot(place.tree) == before


def _last_line(data):
    return {data.split(b"\n")[-1]}


STYLES = {
    "narrow": ["--line-length", "30"],
    "two blanks": ["--config", "indent-width=2", "--line-length", "50"],
    "tabs": ["--config", "format.indent-style='tab'"],
    "single quotes, CRLF": ["--config", "format.quote-style='single'", "--config", "format.line-ending='cr-lf'"],
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_tree_that_a_formatter_rewrote_is_patched_and_comes_back(place, style):
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", *style, str(place.tree)]
    subprocess.run(command, check=True)
    before = snapshot(place.tree)
    assert before[WORKER][1] != TREE[WORKER].encode()
    outcome = place.run("apply")
    assert outcome.status == 0, outcome.report["problems"]
    assert {finding["found"] for finding in outcome.report["patches"]} == {1}
    assert place.run("revert").status == 0
    assert snapshot(place.tree) == before
