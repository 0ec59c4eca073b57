"""Chat formats as data: what one assistant turn of a model family looks like.

A format is read from a JSON file (the built-in ones lie in `formats/`) or made from an expression. It names
control tokens by their spelling; ids belong to a vocabulary and are never written here. This module checks what
can be checked without a vocabulary and knows nothing of automata or tensors.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from .errors import FormatError

_FOLDER = Path(__file__).parent / "formats"
_NOT_MEANING = ("summary", "notes", "model_types", "template_marks", "cuts")
_EXPRESSION_MARKS = set("«»‹›()[]\\*+?|.")


@dataclass(frozen=True, slots=True)
class Format:
    """One assistant turn of a model family.

    Attributes:
        name: short name, as used in configuration.
        turn: expression of a turn without its terminal, from the point where generation starts.
        rules: named parts of the expression.
        terminals: control tokens that end a turn. They are legal exactly where `turn` may end.
        turn_openers: expressions of what stands before a turn in a prompt, each beginning with a control token;
            earlier ones are tried first.
        never: control tokens that no turn can hold anywhere (role openers of the family).
        optional: control tokens that some checkpoints lack. There, what the expression says of one is left out and
            its spelling is ordinary text; as a terminal, opener or `never` it is left out too.
        model_types: the `model_type` values of checkpoints that speak this format.
        template_marks: strings in a checkpoint's chat template that tell this format from others of its model types.
        cuts: text at whose ends a delta for a streaming parser is cut, beside the automaton's boundaries: markers of
            ordinary text that the expression cannot tell from data.
        summary, notes: for people.
    """

    name: str
    turn: str
    terminals: tuple[str, ...]
    turn_openers: tuple[str, ...] = ()
    rules: dict[str, str] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    model_types: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    summary: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.turn:
            raise FormatError(f"format {self.name}: the expression is empty")
        if not self.terminals:
            raise FormatError(f"format {self.name}: name at least one terminal control token")
        for opener in self.turn_openers:
            if not opener.startswith("«") or "»" not in opener:
                raise FormatError(f"format {self.name}: turn opener {opener!r} must begin with a «control token»")

    @property
    def written_controls(self) -> tuple[str, ...]:
        """The control tokens that stand in the format's expressions, once each."""
        expressions = (self.turn, *self.turn_openers, *self.rules.values())
        return tuple(dict.fromkeys(name for e in expressions for name in re.findall("«([^»]+)»", e)))

    @property
    def required_controls(self) -> frozenset[str]:
        """Control tokens without which a tokenizer cannot speak this format."""
        return frozenset((*self.written_controls, *self.terminals)) - self.optional

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change whenever the meaning of the format does."""
        meaning = {k: v for k, v in asdict(self).items() if k not in _NOT_MEANING}
        meaning["optional"] = sorted(self.optional)
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


def format_names() -> list[str]:
    """Names of the built-in formats, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def builtin_format(name: str) -> Format:
    """The built-in format `name`.

    Raises:
        FormatError: there is none of that name; the message lists those there are.
    """
    if name not in format_names():
        near = difflib.get_close_matches(name, format_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FormatError(f"unknown format {name!r}{hint} Built-in formats: {', '.join(format_names())}")
    return read_format(_FOLDER / f"{name}.json")


def read_format(path: str | Path) -> Format:
    """Read a format from a JSON file with the fields of `Format`.

    Raises:
        FormatError: the file cannot be read, is not JSON, or has a field that does not belong.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"cannot read format file {path}: {error.strerror}") from error
    except ValueError as error:
        raise FormatError(f"format file {path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f"format file {path} must hold one JSON object")
    data.setdefault("name", path.stem)
    return format_from_dict(data, str(path))


def format_from_dict(data: dict, where: str = "format") -> Format:
    """Make a `Format` from the fields of a format file; `where` stands in error messages."""
    allowed = set(Format.__dataclass_fields__)
    unknown = sorted(set(data) - allowed)
    missing = sorted({"name", "turn", "terminals"} - set(data))
    if unknown or missing:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"missing field {missing[0]!r}"
        raise FormatError(f"{where}: {problem}; fields: {', '.join(sorted(allowed))}")
    fields = dict(data)
    for key in ("terminals", "turn_openers", "never", "model_types", "template_marks", "cuts", "notes"):
        if key in fields:
            fields[key] = _strings(fields[key], where, key)
    if "optional" in fields:
        fields["optional"] = frozenset(_strings(fields["optional"], where, "optional"))
    rules = fields.get("rules", {})
    if not isinstance(rules, dict) or not all(isinstance(v, str) for v in rules.values()):
        raise FormatError(f"{where}: field 'rules' must map names to expressions")
    if not isinstance(fields["turn"], str):
        raise FormatError(f"{where}: field 'turn' must be an expression")
    return Format(**fields)


def resolve_format(source: str | Format, terminals=(), turn_openers=(), never=()) -> Format:
    """A `Format` from a built-in name, a path to a format file, an expression, or a `Format` itself.

    A string is a path if it ends in `.json`, an expression if it holds any mark of the expression language, and
    a name otherwise. `terminals`, `turn_openers` and `never` complete an expression and nothing else.
    """
    if isinstance(source, Format):
        return source
    if not isinstance(source, str):
        raise FormatError(f"a format is a name, an expression or a Format, not {type(source).__name__}")
    if source.endswith(".json"):
        return read_format(source)
    if not _EXPRESSION_MARKS & set(source):
        return builtin_format(source)
    return Format(
        name="custom",
        turn=source,
        terminals=tuple(terminals),
        turn_openers=tuple(turn_openers),
        never=tuple(never),
    )


def _strings(value: object, where: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise FormatError(f"{where}: field {key!r} must be a list of strings")
    return tuple(value)
