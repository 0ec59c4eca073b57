"""Facts: workers.md §1 (column A1)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.interface import SpecMetadata as SpecMetadata
from tensorrt_llm._torch.speculative.mtp import MTPWorker


def get_spec_worker(spec_config, model_config, mapping, use_separate_draft_kv_cache=False):
    if spec_config.decoding_type == "MTP":
        return MTPWorker(spec_config, model_config)
    return Eagle3OneModelWorker(spec_config, mapping)
