"""Which window of TensorRT-LLM's history a tree belongs to, told by the names in its files and never by version
strings. A pure decision over a reader of files; it must not know about patches."""

from __future__ import annotations

from collections.abc import Callable

from .errors import WindowAmbiguous, WindowUnknown
from .series import Probe, Series, Window
from .source import Source

ReadSource = Callable[[str], Source | None]

_ADD_A_WINDOW = "patches/README.md says how to add a window when upstream has moved"


def recognise(series: Series, read: ReadSource) -> Window:
    """The one window whose probes all hold."""
    misfits = {window.id: _misfits(window, read) for window in series.windows}
    fitting = [window for window in series.windows if not misfits[window.id]]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(window.id for window in fitting)
        raise WindowAmbiguous(
            f"the tree looks like {len(fitting)} windows at once: {names}",
            next_step="tighten the probes of those windows in patches/series.toml",
        )
    detail = "\n".join(f"{name}: {'; '.join(reasons)}" for name, reasons in misfits.items())
    raise WindowUnknown("the tree fits no window of the series", detail=detail, next_step=_ADD_A_WINDOW)


def _misfits(window: Window, read: ReadSource) -> list[str]:
    return [reason for probe in window.probes for reason in _probe_misfits(probe, read(probe.file))]


def _probe_misfits(probe: Probe, source: Source | None) -> list[str]:
    if source is None:
        return [f"{probe.file} does not exist"] if probe.has else []
    lacking = [f"{probe.file} has no `{name}`" for name in probe.has if not source.has_identifier(name)]
    return lacking + [f"{probe.file} has `{name}`" for name in probe.lacks if source.has_identifier(name)]
