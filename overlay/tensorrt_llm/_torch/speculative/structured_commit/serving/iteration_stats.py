"""Counters where people look for them: in the iteration statistics that `/metrics` returns, and for Prometheus."""

from __future__ import annotations

from ..runtime import RUNTIME
from .process import SERVING
from .prometheus import Metrics
from .replies import KEY

SECTION = "structuredCommitStats"
_LABELS = ("policy", "format", "state")
_METRICS = Metrics()


def add_statistics(stats: dict) -> None:
    """Where an engine's iteration statistics are serialised: add the stage's counters as a section of their own."""
    if RUNTIME.stage is None:
        return
    recorded = {} if RUNTIME.recorder is None else RUNTIME.recorder.counts
    counts = {**RUNTIME.counts, "aside": sum(RUNTIME.aside.values()), **recorded}
    stats[SECTION] = {**RUNTIME.labels, **counts}


def add_finishes(stats: dict) -> None:
    """Where the server hands out iteration statistics: add how many incomplete replies it has counted so far."""
    if SERVING.finished and isinstance(stats, dict):
        found = sorted(SERVING.finished.items())
        stats.setdefault(SECTION, {})["incomplete"] = [
            {**dict(zip(_LABELS, labels, strict=True)), "replies": n} for labels, n in found
        ]


def log_statistics(collector, stats: dict) -> None:
    """Where the server's collector reads iteration statistics: bring the stage's counters up to them. `/metrics`
    returns the same dictionary, so the incomplete replies are added here too."""
    SERVING.guarded(_log_statistics, None, collector, stats)


def collect_finish(server, rsp) -> None:
    """Where the server takes a finished request's metrics: count its incomplete replies, wherever they were found."""
    for metrics in (getattr(rsp, "candidate_metrics", None) or [])[-1:] or [getattr(rsp, "metrics_dict", None)]:
        if isinstance(metrics, dict) and KEY in metrics:
            SERVING.guarded(_collect_finish, None, server, metrics.pop(KEY))


def _log_statistics(collector, stats: dict) -> None:
    section = stats.get(SECTION, {})
    if {"policy", "format"} <= set(section):
        labels = {**collector.labels, "policy": section["policy"], "format": section["format"]}
        _METRICS.totals({name: v for name, v in section.items() if type(v) is int}, labels)
    add_finishes(stats)


def _collect_finish(server, found: list) -> None:
    collector = getattr(server, "metrics_collector", None)
    for labels in found:
        SERVING.finished[tuple(labels)] += 1
        if collector is not None:  # else TensorRT-LLM has no registry, and none is made
            _METRICS.incomplete({**collector.labels, **dict(zip(_LABELS, labels, strict=True))})
