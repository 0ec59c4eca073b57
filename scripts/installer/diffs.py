"""Unified diffs as git reads them: `diff --git` headers, new files, files without a last newline, carriage returns
kept. Pure functions over bytes; this module must not know about patches or mail."""

from __future__ import annotations

import hashlib

from .errors import UnreadableSource

_CONTEXT = 3
_NO_NEWLINE = b"\n\\ No newline at end of file\n"


def unified(path: str, before: bytes | None, after: bytes, mode: int = 0o644) -> bytes:
    """The diff of one file in git's form; empty if nothing changes. `before` is None for a new file."""
    if before == after:
        return b""
    if b"\0" in after:
        raise UnreadableSource("a binary file cannot be shown as a diff", place=path, next_step="use apply instead")
    git_mode = "100755" if mode & 0o111 else "100644"
    old_hash, new_hash = ("0" * 40 if before is None else _blob(before)), _blob(after)
    lines = [f"diff --git a/{path} b/{path}\n"]
    lines += [f"new file mode {git_mode}\n"] if before is None else []
    lines += [f"index {old_hash}..{new_hash}{'' if before is None else ' ' + git_mode}\n"]
    old_name = "/dev/null" if before is None else f"a/{path}"
    return "".join(lines).encode() + _hunks(before or b"", after, old_name, f"b/{path}")


def edited(path: str, before: bytes, after: bytes) -> bytes:
    """The difference between a file as we left it and as it is now."""
    return _hunks(before, after, f"{path} (as applied)", f"{path} (as it is now)")


def _hunks(before: bytes, after: bytes, old_name: str, new_name: str) -> bytes:
    import difflib  # slow to import, and check and apply show no differences

    lines = difflib.diff_bytes(
        difflib.unified_diff, _lines(before), _lines(after), old_name.encode(), new_name.encode(), n=_CONTEXT
    )
    return b"".join(line if line.endswith(b"\n") else line + _NO_NEWLINE for line in lines)


def _lines(data: bytes) -> list[bytes]:
    """Split at line feeds alone, as git does; `splitlines` would split at form feeds and carriage returns too."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()
