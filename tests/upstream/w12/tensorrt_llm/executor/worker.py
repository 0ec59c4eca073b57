"""Facts: serving.md §9 (each record of the iteration statistics is made here, as JSON)."""

from __future__ import annotations

import json


class GenerationExecutorWorker:
    @staticmethod
    def _stats_serializer(stats):
        iteration_stats, req_stats = stats[0], stats[1]
        stats_dict = json.loads(iteration_stats.to_json_str())
        if req_stats:
            stats_dict["requestStats"] = [json.loads(r.to_json_str()) for r in req_stats]
        return json.dumps(stats_dict)
