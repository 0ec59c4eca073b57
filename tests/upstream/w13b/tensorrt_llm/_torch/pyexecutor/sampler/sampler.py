"""Facts: executor.md §1.5; the variants moved to a handler in a file of its own."""

from __future__ import annotations

from tensorrt_llm._torch.pyexecutor.sampler.two_model_spec_dec import TwoModelSpecDecHandler

from tests.upstream.common.torch_sampler import TorchSamplerCommons


class TorchSampler(TorchSamplerCommons):
    def __init__(self, max_num_sequences, max_draft_len, max_total_draft_tokens):
        super().__init__(max_num_sequences, max_draft_len, max_total_draft_tokens)
        self._two_model_spec_dec = TwoModelSpecDecHandler(self)

    @property
    def spec_dec(self):
        return self._two_model_spec_dec
