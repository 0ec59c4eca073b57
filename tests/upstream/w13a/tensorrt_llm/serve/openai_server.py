"""Facts: serving.md §1.8, §2, §9. Routes return what they would send."""

from __future__ import annotations


class OpenAIServer:
    def __init__(self, generator, metrics_collector=None, postproc_worker_enabled=False, buffered=False):
        self.generator = generator
        self.metrics_collector = metrics_collector
        self.postproc_worker_enabled = postproc_worker_enabled
        self._iteration_stats_buffer = [] if buffered else None

    async def get_iteration_stats(self):
        stats = []
        async for stat in self.generator.get_stats_async(2):
            stats.append(stat)
        return stats

    async def collect_iteration_stats(self):
        """One turn of the background loop."""
        async for stat in self.generator.get_stats_async(0.5):
            self.metrics_collector.log_iteration_stats(stat)
            if self._iteration_stats_buffer is not None:
                self._iteration_stats_buffer.append(stat)

    async def _extract_metrics(self, res, raw_request):
        if not res.finished:
            return
        if self.metrics_collector:
            if res.candidate_metrics:
                for candidate in res.candidate_metrics:
                    self.metrics_collector.log_request_metrics_dict(candidate)
            elif res.metrics_dict:
                self.metrics_collector.log_request_metrics_dict(res.metrics_dict)

    async def stream(self, promise, post_processor, args):
        res = None
        async for res in promise:
            chunks = res.outputs[0]._postprocess_result if self.postproc_worker_enabled else post_processor(res, args)
            for chunk in chunks:
                yield chunk
        yield "data: [DONE]\n\n"
        await self._extract_metrics(res, None)

    async def whole(self, promise, post_processor, args):
        res = [response async for response in promise][-1]
        reply = res.outputs[0]._postprocess_result if self.postproc_worker_enabled else post_processor(res, args)
        await self._extract_metrics(res, None)
        return reply
