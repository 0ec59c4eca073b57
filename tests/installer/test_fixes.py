"""How a fix takes its match's place: layout, newlines, captured text, and where it must be refused."""

import pytest

from scripts.installer.fixes import FixError, apply_edits, edit_for
from scripts.installer.rules import Rule
from scripts.installer.source import Source

MARK = "  # structured-commit: p"
STATEMENT = {"all": [{"pattern": "$STMT"}, {"pattern": "$X = f($$$ARGS)"}]}
RETURN = {"all": [{"pattern": "$STMT"}, {"pattern": "return $V"}]}


def patched(text, matcher, fix):
    source = Source("case.py", text.encode())
    rule = Rule("case.yml", "case", "", {"rule": matcher}, fix)
    edits = [edit_for(source, match, rule) for match in source.root.find_all({"rule": matcher})]
    assert edits, "the case matches nothing"
    return source.encode(apply_edits(source.text, edits)).decode()


LAYOUTS = {
    "lines before take the statement's depth": (
        "def g():\n    if a:\n        return v\n",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"def g():\n    if a:\n        log(){MARK}\n        return v\n",
    ),
    "lines after take the statement's depth": (
        "def g():\n  x = f(1)\n  y\n",
        STATEMENT,
        f"$STMT\nx = h(x){MARK}",
        f"def g():\n  x = f(1)\n  x = h(x){MARK}\n  y\n",
    ),
    "depth inside the fix is added": (
        "def g():\n    return v\n",
        RETURN,
        f"if h():\n    log()\n    if i():\n        pass{MARK}\n$STMT",
        f"def g():\n    if h():\n        log()\n        if i():\n            pass{MARK}\n    return v\n",
    ),
    "depth inside the fix becomes tabs where the tree has tabs": (
        "def g():\n\treturn v\n",
        RETURN,
        f"if h():\n    log(){MARK}\n$STMT",
        f"def g():\n\tif h():\n\t\tlog(){MARK}\n\treturn v\n",
    ),
    "carriage returns are kept and used": (
        "def g():\r\n    return v\r\n",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"def g():\r\n    log(){MARK}\r\n    return v\r\n",
    ),
    "each place of a mixed file uses its own newline": (
        "def g():\r\n    return v\r\n\ndef h():\n    return w\n",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"def g():\r\n    log(){MARK}\r\n    return v\r\n\ndef h():\n    log(){MARK}\n    return w\n",
    ),
    "a last line without newline stays without": (
        "def g():\n    return v",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"def g():\n    log(){MARK}\n    return v",
    ),
    "a statement of several lines is kept as written": (
        "def g():\n    x = f(  # one\n      a,\n          b, # two\n    )\n",
        STATEMENT,
        f"$STMT\nlog(){MARK}",
        f"def g():\n    x = f(  # one\n      a,\n          b, # two\n    )\n    log(){MARK}\n",
    ),
    "a trailing comment stays with its statement": (
        "def g():\n    x = f(1)  # why\n    y\n",
        STATEMENT,
        f"$STMT\nlog(){MARK}",
        f"def g():\n    x = f(1)  # why\n    log(){MARK}\n    y\n",
    ),
    "a trailing comment stays behind lines put before": (
        "def g():\n    return v  # why\n",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"def g():\n    log(){MARK}\n    return v  # why\n",
    ),
    "a trailing comment follows the marker of a replaced line": (
        "x = f(1)  # why\n",
        STATEMENT,
        f"$X = h($$$ARGS){MARK}",
        f"x = h(1){MARK}  # why\n",
    ),
    "a statement that moves deeper takes its lines along, but not those of strings": (
        'def g():\n    x = f(\n        a,\n        """b\n    c\n""",\n    )\n',
        STATEMENT,
        f"if h():{MARK}\n    $STMT",
        f'def g():\n    if h():{MARK}\n        x = f(\n            a,\n            """b\n    c\n""",\n        )\n',
    ),
    "a list of arguments keeps its commas and comments": (
        "x = f(a, *b, c=1)\n",
        STATEMENT,
        f"$X = h(f, $$$ARGS){MARK}",
        f"x = h(f, a, *b, c=1){MARK}\n",
    ),
    "an empty list of arguments is nothing": ("x = f()\n", STATEMENT, f"$X = h($$$ARGS){MARK}", f"x = h(){MARK}\n"),
    "characters outside the basic plane do not shift places": (
        "# é 𝄞 日本\nn = '𝄞'\ndef g():\n    return '𝄞' + v\n",
        RETURN,
        f"log(){MARK}\n$STMT",
        f"# é 𝄞 日本\nn = '𝄞'\ndef g():\n    log(){MARK}\n    return '𝄞' + v\n",
    ),
    "a byte order mark stays first and is no indentation": (
        "\ufeffx = f(1)\n",
        STATEMENT,
        f"log(){MARK}\n$STMT",
        f"\ufefflog(){MARK}\nx = f(1)\n",
    ),
    "one line may take the place of a statement after a colon": (
        "def g():\n    if a: return v\n",
        RETURN,
        f"return h($V){MARK}",
        f"def g():\n    if a: return h(v){MARK}\n",
    ),
    "blank lines of a fix are blank": (
        "def g():\n    return v\n",
        RETURN,
        f"log(){MARK}\n\n$STMT",
        f"def g():\n    log(){MARK}\n\n    return v\n",
    ),
}


@pytest.mark.parametrize(("before", "matcher", "fix", "after"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout(before, matcher, fix, after):
    assert patched(before, matcher, fix) == after


REFUSED = {
    "lines before a statement after a colon": ("if a: return v\n", RETURN, f"log(){MARK}\n$STMT"),
    "lines before a statement after a semicolon": ("a = 1; x = f(1)\n", STATEMENT, f"log(){MARK}\n$STMT"),
    "lines after a statement before a semicolon": ("x = f(1); a = 1\n", STATEMENT, f"$STMT\nlog(){MARK}"),
    "a comment before the rest of an expression": ("y = f(1) + 2\n", {"pattern": "f(1)"}, f"h(f(1)){MARK}"),
    "a variable that the rule does not capture": ("x = f(1)\n", STATEMENT, f"$NOTHING = f(1){MARK}"),
}


@pytest.mark.parametrize(("before", "matcher", "fix"), REFUSED.values(), ids=REFUSED)
def test_refused(before, matcher, fix):
    with pytest.raises(FixError):
        patched(before, matcher, fix)


def test_text_before_a_semicolon_may_follow_lines_put_before():
    assert patched("x = f(1); a = 1\n", STATEMENT, f"log(){MARK}\n$STMT") == f"log(){MARK}\nx = f(1); a = 1\n"
