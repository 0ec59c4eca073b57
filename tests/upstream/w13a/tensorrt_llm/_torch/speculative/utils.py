"""Facts: workers.md §1 (which worker for which mode, column A2), executor.md §4 (who gets `model_config`)."""

from __future__ import annotations

from tensorrt_llm._torch.speculative.dflash import DFlashWorker
from tensorrt_llm._torch.speculative.draft_target import DraftTargetOneModelWorker
from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker
from tensorrt_llm._torch.speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker
from tensorrt_llm._torch.speculative.interface import SpecMetadata as SpecMetadata
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker, MTPWorker
from tensorrt_llm._torch.speculative.pard import PARDWorker
from tensorrt_llm._torch.speculative.sa_worker import SAWorker

_BY_TYPE = {"Draft_Target": DraftTargetOneModelWorker, "PARD": PARDWorker, "DFlash": DFlashWorker}


def get_spec_worker(spec_config, model_config, mapping, use_separate_draft_kv_cache=False):
    if spec_config.decoding_type == "MTP":
        worker = MTPWorker if spec_config.use_mtp_vanilla else MTPEagleWorker
        return worker(spec_config, model_config, use_separate_draft_kv_cache)
    if spec_config.decoding_type == "SA":
        return SAWorker(spec_config, model_config)
    if spec_config.decoding_type in _BY_TYPE:
        return _BY_TYPE[spec_config.decoding_type](spec_config, mapping, use_separate_draft_kv_cache)
    worker = Eagle3OneModelDynamicTreeWorker if spec_config.use_dynamic_tree else Eagle3OneModelWorker
    return worker(spec_config, mapping, use_separate_draft_kv_cache)
