"""Facts: serving.md §7 (workers are spawned while the executor is created, and inherit what is set by then)."""

from __future__ import annotations


class BaseLLM:
    def __init__(self, args, hf_model_dir, executor_cls):
        self.args, self._hf_model_dir, self._executor_cls = args, hf_model_dir, executor_cls
        self._executor = None
        self._build_model()

    def _build_model(self):
        self._engine_dir = None


class _TorchLLM(BaseLLM):
    def _build_model(self):
        super()._build_model()
        self._executor = self._executor_cls.create(
            self._engine_dir, hf_model_dir=self._hf_model_dir, llm_args=self.args
        )
