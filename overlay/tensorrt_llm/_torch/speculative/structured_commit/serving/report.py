"""The optional field of a reply's choice that names where an incomplete turn stopped.

Response models forbid unknown fields and a disaggregated front end validates replies again, so the field is declared in
both, always; it stands in a reply only when it holds something, so that replies without it stay as they were.
"""

from __future__ import annotations

from typing import Any, Optional


def declare_report(model):
    """The same response model with an optional field `structured_commit`, left out of what it serialises while None.

    Args:
        model: a pydantic model. What it is called and where it lies stays the same, so pickles find it.
    """
    from pydantic import model_serializer

    class Declared(model):
        structured_commit: Optional[dict[str, Any]] = None  # noqa: UP045 - evaluated by pydantic

        @model_serializer(mode="wrap")
        def _without_empty_report(self, serialise):
            data = serialise(self)
            if isinstance(data, dict) and data.get("structured_commit") is None:
                data.pop("structured_commit", None)
            return data

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Declared, name, getattr(model, name))
    return Declared
