"""Facts: workers.md §1 (which worker for which mode, column D, and age E's NGram and K3 workers)."""

from __future__ import annotations

from importlib import import_module

from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.interface import SpecMetadata as SpecMetadata
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker, MTPWorker
from tensorrt_llm._torch.speculative.ngram_worker import NGramWorker

_K3 = (
    "tensorrt_llm._torch._experimental.modeling_v2.models.kimi_k3_vl.kimi_k3_mxfp4__sm_100__tp16_moetp4ep4.spec_worker"
)


def get_spec_worker(spec_config, model_config, mapping, use_separate_draft_kv_cache=False):
    if spec_config.decoding_type == "MTP":
        worker = MTPWorker if spec_config.use_mtp_vanilla else MTPEagleWorker
        return worker(spec_config, model_config, use_separate_draft_kv_cache, mapping=mapping)
    if spec_config.decoding_type == "NGram":
        return NGramWorker(spec_config, model_config)
    if spec_config.decoding_type == "DFlash":
        return import_module(_K3).KimiK3DFlashWorker(spec_config, mapping, use_separate_draft_kv_cache)
    return Eagle3OneModelWorker(spec_config, mapping, use_separate_draft_kv_cache)
