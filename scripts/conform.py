"""Compare a TensorRT-LLM tree with the facts that patches and doubles rely on: `python -m scripts.conform PATH`.

The facts are data (`patches/facts.toml`): by window and file, a class or function, its parameters, how many returns it
has, which calls it makes in which order, and which names are bound where a patch goes. Reads only the files named
there, as syntax trees; imports and changes nothing. Exit status 0 (all hold), 1 (something differs) or 2 (usage).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import tomllib
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scripts.installer.errors import InstallerError, SeriesInvalid, WindowAmbiguous, WindowUnknown
from scripts.installer.series import load_series
from scripts.installer.source import Source
from scripts.installer.tree import Tree, locate
from scripts.installer.window import recognise

_PATCHES = Path(__file__).resolve().parents[1] / "patches"
MAYBE = "?"  # before a parameter or call: it may be missing
Names = tuple[str, ...]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Fact(BaseModel):
    """One thing that is relied on, in the windows it names.

    `files`, `classes` and `functions` are alternatives: the first that exists is meant. `anchor` is `return` (the last
    one), `call NAME`, `assign NAME`, `if NAME` or `for NAME` (the first such statement); `bound` are names that must
    have a value once that statement is done, `later` names that must not stand before it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    windows: Names = Field(min_length=1)
    files: Names = Field(min_length=1)
    classes: Names = ()
    functions: Names = ()
    patch: str | None = None
    optional: bool = False
    parameters: Names | None = None
    returns: tuple[int, ...] | None = None
    calls: Names = ()
    attributes: Names = ()
    fields: Names = ()
    names: Names = ()
    anchor: str | None = Field(default=None, pattern=r"^(return|(call|assign|if|for) \w+)$")
    bound: Names = ()
    later: Names = ()

    @model_validator(mode="after")
    def _has_a_place(self) -> Fact:
        if not self.classes and not self.functions:
            raise ValueError("name a class or a function")
        return self


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a tree and a fact part."""

    file: str
    place: str
    what: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Conformity:
    """A tree held against the facts of its window."""

    window: str
    version: str | None
    held: int
    absent: int
    differences: tuple[Difference, ...]


def load_facts(path: Path) -> tuple[Fact, ...]:
    """The facts in a file; `SeriesInvalid` names the entry that is misspelt."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(Fact.model_validate(entry) for entry in data["fact"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValidationError) as error:
        raise SeriesInvalid(f"not a file of facts: {error}", place=str(path)) from None


def compare(tree: Tree, facts: Iterable[Fact], series: Path) -> Conformity:
    """Recognise the window, then hold each of its facts against the tree."""
    sources: dict[str, bytes | None] = {}

    def read(path: str) -> bytes | None:
        if path not in sources:
            sources[path] = tree.read(path)
        return sources[path]

    window = recognise(load_series(series), lambda path: None if read(path) is None else Source(path, read(path)))
    held, absent, differences = 0, 0, []
    for fact in facts:
        if window.id not in fact.windows:
            continue
        found = list(_hold(fact, read))
        differences += [difference for difference in found if difference]
        absent += None in found
        held += not found
    return Conformity(window.id, tree.version(), held, absent, tuple(differences))


def _hold(fact: Fact, read: Callable[[str], bytes | None]) -> Iterator[Difference | None]:
    """What differs; None where an optional place does not exist."""
    place = ".".join(" or ".join(names) for names in (fact.classes, fact.functions) if names)
    existing = [(file, data) for file in fact.files if (data := read(file)) is not None]
    if not existing:
        yield None if fact.optional else Difference(fact.files[0], place, "file", "exists", "missing")
        return
    for file, data in existing:
        try:
            module = _parsed(data)
        except (SyntaxError, ValueError) as error:
            yield Difference(file, place, "syntax", "Python", str(error))
            return
        scopes = _scopes(module, fact)
        if scopes is not None:
            place = ".".join(scope.name for scope in scopes)
            yield from (Difference(file, place, *parts) for parts in _compared(fact, module, scopes[-1]))
            return
    yield None if fact.optional else Difference(existing[0][0], place, "definition", "exists", "missing")


@cache
def _parsed(data: bytes) -> ast.Module:
    return ast.parse(data)


def _scopes(module: ast.Module, fact: Fact) -> list[Definition] | None:
    """The class, the function or both, one inside the other; None if one of them is not there."""
    scope, found = module, []
    for kinds, names in ((ast.ClassDef, fact.classes), ((ast.FunctionDef, ast.AsyncFunctionDef), fact.functions)):
        if names:
            defined = {node.name: node for node in scope.body if isinstance(node, kinds)}
            scope = next((defined[name] for name in names if name in defined), None)
            if scope is None:
                return None
            found.append(scope)
    return found


def _compared(fact: Fact, module: ast.Module, scope: Definition) -> Iterator[tuple[str, str, str]]:
    """(what, expected, found) of each part of a fact that does not hold."""
    if fact.parameters is not None:
        found = _parameters(scope)
        if not _fits(fact.parameters, found):
            yield "parameters", ", ".join(fact.parameters), ", ".join(found)
    if fact.returns is not None:
        count = sum(isinstance(node, ast.Return) for node in _own(scope))
        if count not in fact.returns:
            yield "returns", " or ".join(map(str, fact.returns)), str(count)
    calls = [name for node in _own(scope) if isinstance(node, ast.Call) for name in [_called(node)] if name]
    if not _in_order(fact.calls, calls):
        wanted = {name.removeprefix(MAYBE) for name in fact.calls}
        yield (
            "calls in order",
            ", ".join(fact.calls),
            ", ".join(n for n in dict.fromkeys(calls) if n in wanted) or "none",
        )
    yield from _lacking("attributes", fact.attributes, {n.attr for n in _own(scope) if isinstance(n, ast.Attribute)})
    yield from _lacking("fields", fact.fields, {n for node in scope.body for n in _binds(node)})
    yield from _lacking("module names", fact.names, {n for node in module.body for n in _binds(node)})
    if fact.anchor:
        yield from _compared_at_anchor(fact, scope)


def _compared_at_anchor(fact: Fact, scope: Definition) -> Iterator[tuple[str, str, str]]:
    anchor = _anchor(fact.anchor or "", scope)
    if anchor is None:
        yield "anchor", fact.anchor or "", "missing"
        return
    body = getattr(anchor, "body", None)
    end = body[0].lineno - 1 if body else anchor.end_lineno
    before = [node for node in _own(scope) if getattr(node, "lineno", 0) <= end]
    bound = {*_parameters(scope), "self"} | {name for node in before for name in _binds(node)}
    yield from _lacking(f"bound at `{fact.anchor}`", fact.bound, bound)
    seen = {node.id for node in before if isinstance(node, ast.Name)}
    seen |= {node.attr for node in before if isinstance(node, ast.Attribute)}
    if early := [name for name in fact.later if name in seen]:
        yield f"only after `{fact.anchor}`", ", ".join(fact.later), f"before it: {', '.join(early)}"


def _lacking(what: str, wanted: Names, there: set[str]) -> Iterator[tuple[str, str, str]]:
    if missing := [name for name in wanted if name not in there]:
        yield what, ", ".join(wanted), f"without {', '.join(missing)}"


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or class in the order of the text, without those of definitions inside it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own(child)


def _anchor(anchor: str, scope: Definition) -> ast.stmt | None:
    kind, _, name = anchor.partition(" ")
    statements = [node for node in _own(scope) if isinstance(node, ast.stmt)]
    simple = [s for s in statements if not hasattr(s, "body")]
    if kind == "return":
        return max((s for s in statements if isinstance(s, ast.Return)), key=lambda s: s.lineno, default=None)
    if kind == "call":
        return next((s for s in simple if any(_called(n) == name for n in _own(s) if isinstance(n, ast.Call))), None)
    if kind == "assign":
        return next((s for s in simple if isinstance(s, (ast.Assign, ast.AnnAssign)) and name in _binds(s)), None)
    if kind == "if":
        tests = (s for s in statements if isinstance(s, ast.If))
        return next((s for s in tests if name in _read(s.test)), None)
    loops = (s for s in statements if isinstance(s, ast.For))
    return next((s for s in loops if name in _targets(s.target)), None)


def _parameters(scope: Definition) -> list[str]:
    if isinstance(scope, ast.ClassDef):
        return []
    a = scope.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return [name for name in names if name != "self"]


def _binds(node: ast.AST) -> set[str]:
    """Names that a statement gives a value to."""
    if isinstance(node, ast.Assign):
        return {name for target in node.targets for name in _targets(target)}
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
        return _targets(node.target)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    return {name for item in getattr(node, "items", ()) if item.optional_vars for name in _targets(item.optional_vars)}


def _targets(target: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _called(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)


def _read(node: ast.AST) -> set[str]:
    """Names and attributes that stand in a node."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _fits(wanted: Names, found: Sequence[str]) -> bool:
    """Whether `found` is `wanted`, with or without what stands behind MAYBE."""
    maybe = {name.removeprefix(MAYBE) for name in wanted if name.startswith(MAYBE)}
    plain = [name.removeprefix(MAYBE) for name in wanted]
    return list(found) == [name for name in plain if name not in maybe or name in found]


def _in_order(wanted: Names, calls: Sequence[str]) -> bool:
    """Whether the first calls of those names come in the order wanted."""
    plain = [name.removeprefix(MAYBE) for name in wanted if not name.startswith(MAYBE) or name[1:] in calls]
    return [name for name in dict.fromkeys(calls) if name in plain] == plain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.conform", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="checkout, site-packages, or the package folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--facts", type=Path, default=_PATCHES / "facts.toml", metavar="FILE", help="other facts")
    options = parser.parse_args(arguments)
    try:
        result = compare(locate(options.path), load_facts(options.facts), _PATCHES / "series.toml")
    except InstallerError as error:
        if options.json:
            print(json.dumps({"ok": False, "error": {"name": error.name, "what": error.what, "place": error.place}}))
        else:
            details = [error.detail] if isinstance(error, (WindowUnknown, WindowAmbiguous)) else []
            print("\n".join([f"error: {error.what} [{error.name}]", *details]), file=sys.stderr)
        return error.exit_status
    if options.json:
        print(json.dumps({"ok": not result.differences, **asdict(result)}, indent=2))
    else:
        _print(result)
    return 1 if result.differences else 0


def _print(result: Conformity) -> None:
    head = ("file", "place", "what", "expected", "found")
    rows = [(Path(d.file).name, d.place, d.what, d.expected, d.found) for d in result.differences]
    if rows and sys.stdout.isatty():
        from rich.console import Console  # slow to import, and only terminals need it
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in head:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        for row in rows:
            print("\t".join(row))
    differ = f"{len(rows)} things differ, " if rows else ""
    where = f"window {result.window} (TensorRT-LLM {result.version})"
    print(f"{where}: {differ}{result.held} facts hold, {result.absent} have no place in this tree")


if __name__ == "__main__":
    sys.exit(main())
