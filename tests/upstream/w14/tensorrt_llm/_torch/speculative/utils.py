"""Facts: workers.md §1 (which worker for which mode, column D, and age E's NGram and K3 workers)."""

from __future__ import annotations

from importlib import import_module

from tensorrt_llm._torch.speculative.dflash import DFlashWorker
from tensorrt_llm._torch.speculative.draft_target import DraftTargetOneModelWorker
from tensorrt_llm._torch.speculative.dspark import DSparkWorker, DSv4DSparkWorker
from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.interface import SpecMetadata as SpecMetadata
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker, MTPWorker
from tensorrt_llm._torch.speculative.ngram_worker import NGramWorker
from tensorrt_llm._torch.speculative.pard import PARDWorker
from tensorrt_llm._torch.speculative.sa_worker import SAWorker

_K3 = (
    "tensorrt_llm._torch._experimental.modeling_v2.models.kimi_k3_vl.kimi_k3_mxfp4__sm_100__tp16_moetp4ep4.spec_worker"
)


def get_spec_worker(spec_config, model_config, mapping, use_separate_draft_kv_cache=False):
    if spec_config.decoding_type == "MTP":
        worker = MTPWorker if spec_config.use_mtp_vanilla else MTPEagleWorker
        return worker(spec_config, model_config, use_separate_draft_kv_cache, mapping=mapping)
    if spec_config.decoding_type == "NGram":
        return NGramWorker(spec_config, model_config)
    if spec_config.decoding_type == "SA":
        return SAWorker(spec_config, model_config)
    return _worker_class(spec_config, model_config)(spec_config, mapping, use_separate_draft_kv_cache)


def _worker_class(spec_config, model_config):
    if spec_config.decoding_type in ("DFlash", "DSpark") and model_config.pretrained_config.model_type == "kimi_k3":
        name = f"KimiK3{'DFlash' if spec_config.decoding_type == 'DFlash' else 'DSpark'}Worker"
        return getattr(import_module(_K3), name)
    if spec_config.decoding_type == "DSpark":
        return DSv4DSparkWorker if spec_config.draft_is_embedded_in_target else DSparkWorker
    plain = {"Draft_Target": DraftTargetOneModelWorker, "PARD": PARDWorker, "DFlash": DFlashWorker}
    return plain.get(spec_config.decoding_type, Eagle3OneModelWorker)
