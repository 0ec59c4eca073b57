"""Facts: serving.md §9."""

from __future__ import annotations


class MetricsCollector:
    def __init__(self, labels):
        self.labels, self.logged = labels, []

    def log_request_metrics_dict(self, metrics_dict):
        self.logged.append(dict(metrics_dict))

    def log_iteration_stats(self, iteration_stats):
        if "numActiveRequests" in iteration_stats:
            self.running = iteration_stats["numActiveRequests"]
        if "numQueuedRequests" in iteration_stats:
            self.waiting = iteration_stats["numQueuedRequests"]
