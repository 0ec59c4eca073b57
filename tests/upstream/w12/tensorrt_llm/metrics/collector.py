"""Facts: serving.md §9 (requests only)."""

from __future__ import annotations


class MetricsCollector:
    def __init__(self, labels):
        self.labels, self.logged = labels, []

    def log_metrics_dict(self, metrics_dict):
        self.logged.append(dict(metrics_dict))
