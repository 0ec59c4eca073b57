"""Counters for TensorRT-LLM's Prometheus registry.

`prometheus_client` decides at its import whether it serves several processes, so it is imported when the first value
comes: TensorRT-LLM has set its folder by then. Totals come in, differences go out; nothing here is read back.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "trtllm_structured_commit_"
_HELP = {
    "windows": "Accepted windows that the stage looked at.",
    "tokens_in": "Accepted tokens that came in.",
    "tokens_committed": "Tokens that were committed.",
    "trimmed": "Windows whose tokens behind the end of a turn were cut.",
    "illegal": "Windows that held a token the format does not allow.",
    "repaired": "Illegal tokens that were redrawn.",
    "untracked": "Requests that are no longer checked.",
    "incomplete": "Replies that ended before their turn was complete.",
}


class Metrics:
    """The counters of one process, made when first needed."""

    def __init__(self) -> None:
        self._counters: dict[str, object] = {}
        self._last: dict[tuple[str, ...], int] = {}

    def totals(self, values: Mapping[str, int], labels: Mapping[str, str]) -> None:
        """Bring counters up to running totals. A total below the last one is a new start."""
        for name, total in values.items():
            key = (name, *labels.values())
            last = self._last.get(key, 0)
            self._last[key] = total
            self._add(name, total - last if total >= last else total, labels)

    def incomplete(self, labels: Mapping[str, str]) -> None:
        """Count a reply that ended before its turn was complete; labels name its policy, format and state."""
        self._add("incomplete", 1, labels)

    def _add(self, name: str, amount: int, labels: Mapping[str, str]) -> None:
        if name not in self._counters:
            from prometheus_client import Counter

            text = _HELP.get(name, f"Counter `{name}` of the stage.")
            self._counters[name] = Counter(PREFIX + name, text, labelnames=tuple(labels))
        if amount > 0:
            self._counters[name].labels(**labels).inc(amount)
