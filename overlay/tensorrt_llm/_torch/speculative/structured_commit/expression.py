"""The expression language of formats, turned into a plain regular expression.

An expression is a regular expression over *bytes of text* and *control tokens*:

    «<|start|>»      the control token of that name, one symbol
    ‹name›           the rule of that name, spliced in
    (?<header>...)   a region; inside it the state carries the flag of that name (`block`, `header`)
    .  [^...]        any byte of text, any byte of text but these; never a control token

Everything else is the usual syntax (groups, `|`, `*`, `+`, `?`, `{m,n}`, classes, escapes). The result is a
regular expression over code points: U+0000 to U+00FF stand for the bytes, private-use code points for control
tokens and for the two ends of each region. Nothing here knows a vocabulary or an automaton.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import FormatError

REGIONS = ("block", "header")
MAX_RULE_DEPTH = 32

_CONTROL_BASE = 0xE000
_REGION_BASE = 0xF000
_END = "\uf8ff"
_ANY_BYTE = r"[\x00-\x{ff}]"
_ESCAPED_SETS = {"d": "0-9", "s": r"\t\n\x0b\x0c\r ", "w": "0-9A-Za-z_"}
_ESCAPED_CHARS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Translated:
    """A regular expression over code points and the meaning of its private-use symbols.

    `regex` always ends in the `end` symbol: the automaton library gives alternatives a priority and drops the
    lower ones once a higher one has matched, so a match must be impossible before the very end.
    """

    regex: str
    controls: tuple[str, ...]
    control_symbols: tuple[str, ...]
    region_symbols: tuple[tuple[str, str], ...]
    end: str = _END


def translate(expression: str, rules: dict[str, str]) -> Translated:
    """Turn `expression` into a regular expression over code points.

    Args:
        expression: the expression, in the language of this module.
        rules: what `‹name›` stands for; rules may use rules that do not lead back to themselves.

    Raises:
        FormatError: an unknown rule, region or escape, unbalanced marks, or non-ASCII text inside a class.
    """
    return _Translator(rules).run(expression)


class _Translator:
    def __init__(self, rules: dict[str, str]) -> None:
        self.rules = rules
        self.controls: list[str] = []

    def run(self, expression: str) -> Translated:
        body = self._walk(expression, ())
        if len(self.controls) > _REGION_BASE - _CONTROL_BASE:
            raise FormatError(f"the expression names {len(self.controls)} control tokens; at most 4096 are supported")
        return Translated(
            regex=f"(?:{body}){_END}",
            controls=tuple(self.controls),
            control_symbols=tuple(chr(_CONTROL_BASE + i) for i in range(len(self.controls))),
            region_symbols=tuple((_region(i, False), _region(i, True)) for i in range(len(REGIONS))),
        )

    def _walk(self, text: str, inside: tuple[str, ...]) -> str:
        out: list[str] = []
        groups: list[str] = []
        i = 0
        while i < len(text):
            c = text[i]
            if c == "«":
                name, i = _until(text, i, "»")
                out.append(self._control(name))
            elif c == "‹":
                name, i = _until(text, i, "›")
                out.append(self._rule(name, inside))
            elif c == "[":
                piece, i = _read_class(text, i)
                out.append(piece)
            elif c == "\\":
                piece, i = _read_escape(text, i)
                out.append(piece)
            elif c == ".":
                out.append(_ANY_BYTE)
                i += 1
            elif c == "(":
                opening, closing, i = _read_group(text, i)
                out.append(opening)
                groups.append(closing)
            elif c == ")":
                if not groups:
                    raise FormatError(f"unbalanced ')' at offset {i} in {_quote(text)}")
                out.append(groups.pop())
                i += 1
            elif c in "^$":
                raise FormatError(
                    f"anchor {c!r} at offset {i} in {_quote(text)}: an expression always describes a whole turn; "
                    f"write \\{c} for the character"
                )
            elif c in "»›":
                raise FormatError(f"{c!r} without its opening mark at offset {i} in {_quote(text)}")
            else:
                out.append(c if ord(c) < 0x80 else _utf8(c))
                i += 1
        if groups:
            raise FormatError(f"{len(groups)} group(s) not closed in {_quote(text)}")
        return "".join(out)

    def _control(self, name: str) -> str:
        if not name:
            raise FormatError("empty control token «»: write its name between the marks")
        if name not in self.controls:
            self.controls.append(name)
        return chr(_CONTROL_BASE + self.controls.index(name))

    def _rule(self, name: str, inside: tuple[str, ...]) -> str:
        if name not in self.rules:
            raise FormatError(f"rule ‹{name}› is not defined; defined: {', '.join(sorted(self.rules)) or 'none'}")
        if name in inside or len(inside) >= MAX_RULE_DEPTH:
            raise FormatError(f"rule ‹{name}› leads back to itself: {' → '.join((*inside, name))}")
        return f"(?:{self._walk(self.rules[name], (*inside, name))})"


def _region(index: int, closing: bool) -> str:
    return chr(_REGION_BASE + 2 * index + closing)


def _literal(byte: int) -> str:
    return f"\\x{byte:02x}" if byte < 0x80 else chr(byte)


def _utf8(char: str) -> str:
    return f"(?:{''.join(_literal(b) for b in char.encode())})"


def _quote(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _until(text: str, start: int, mark: str) -> tuple[str, int]:
    end = text.find(mark, start + 1)
    if end < 0:
        raise FormatError(f"{text[start]!r} at offset {start} in {_quote(text)} is not closed by {mark!r}")
    return text[start + 1 : end], end + 1


def _read_group(text: str, start: int) -> tuple[str, str, int]:
    if not text.startswith("(?", start):
        return "(?:", ")", start + 1
    if text.startswith("(?:", start):
        return "(?:", ")", start + 3
    for prefix in ("(?<", "(?P<"):
        if text.startswith(prefix, start):
            name, end = _until(text, start + len(prefix) - 1, ">")
            if name not in REGIONS:
                raise FormatError(f"unknown region {name!r} in {_quote(text)}; known: {', '.join(REGIONS)}")
            index = REGIONS.index(name)
            return f"(?:{_region(index, False)}(?:", f"){_region(index, True)})", end
    raise FormatError(f"group {text[start : start + 4]!r} at offset {start} in {_quote(text)} is not supported")


def _read_escape(text: str, start: int) -> tuple[str, int]:
    c = text[start + 1 : start + 2]
    if c in _ESCAPED_SETS and c:
        return f"[{_ESCAPED_SETS[c]}]", start + 2
    if c.lower() in _ESCAPED_SETS and c:
        return f"[\\x00-\\x{{ff}}&&[^{_ESCAPED_SETS[c.lower()]}]]", start + 2
    byte, end = _escaped_byte(text, start)
    return _literal(byte), end


def _escaped_byte(text: str, start: int) -> tuple[int, int]:
    c = text[start + 1 : start + 2]
    if c == "x":
        digits = text[start + 2 : start + 4]
        try:
            return int(digits, 16), start + 4
        except ValueError:
            raise FormatError(
                f"\\x{digits} at offset {start} in {_quote(text)}: two hexadecimal digits expected"
            ) from None
    if c in _ESCAPED_CHARS and c:
        return ord(_ESCAPED_CHARS[c]), start + 2
    if not c or c.isalnum() or ord(c) >= 0x80:
        raise FormatError(f"escape \\{c} at offset {start} in {_quote(text)} is not supported")
    return ord(c), start + 2


def _read_class(text: str, start: int) -> tuple[str, int]:
    i = start + 1
    negated = text.startswith("^", i)
    i += negated
    items: list[str] = []
    first = True
    while True:
        if i >= len(text):
            raise FormatError(f"class at offset {start} in {_quote(text)} is not closed by ']'")
        c = text[i]
        if c == "]" and not first:
            break
        first = False
        if c == "\\" and text[i + 1 : i + 2] in _ESCAPED_SETS:
            items.append(_ESCAPED_SETS[text[i + 1]])
            i += 2
            continue
        low, i = _class_byte(text, i, start)
        if text.startswith("-", i) and not text.startswith("-]", i):
            high, i = _class_byte(text, i + 1, start)
            if high < low:
                raise FormatError(f"empty range in the class at offset {start} in {_quote(text)}")
            items.append(f"{_class_literal(low)}-{_class_literal(high)}")
        else:
            items.append(_class_literal(low))
    inner = "".join(items)
    return (f"[\\x00-\\x{{ff}}&&[^{inner}]]" if negated else f"[{inner}]"), i + 1


def _class_byte(text: str, i: int, start: int) -> tuple[int, int]:
    c = text[i : i + 1]
    if c == "\\":
        return _escaped_byte(text, i)
    if not c or ord(c) >= 0x80:
        raise FormatError(
            f"{c!r} inside the class at offset {start} in {_quote(text)}: text is read byte by byte, so a class "
            "holds ASCII only; write an alternation such as (?:ä|ö) instead"
        )
    return ord(c), i + 1


def _class_literal(byte: int) -> str:
    return f"\\x{{{byte:02x}}}"
