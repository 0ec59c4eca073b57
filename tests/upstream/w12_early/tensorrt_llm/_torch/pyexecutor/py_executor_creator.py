"""Facts: executor.md §2.5 (a throw-away executor on the same engine comes first), §6. Engine, sampler, `resources`,
then KV estimation and executors."""

from __future__ import annotations

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.sampler import TorchSampler
from tensorrt_llm._torch.speculative import utils
from tensorrt_llm._torch.speculative.drafting_loops import ChainDrafter
from tensorrt_llm._torch.speculative.spec_sampler_base import SpecSamplerBase

from tests.upstream.common.model_engine import Mapping, PyTorchModelEngine


def instantiate_sampler(model_engine, llm_args, mapping):
    sampler = SpecSamplerBase if model_engine.mode.use_one_engine() else TorchSampler
    return sampler(model_engine.num_seq_slots, model_engine.max_draft_len, model_engine.max_total_draft_tokens)


def create_py_executor(llm_args, checkpoint_dir=None, tokenizer=None, profiling_stage_data=None):
    spec_config = llm_args.speculative_config
    mapping = Mapping()
    model_engine = PyTorchModelEngine(
        model_path=checkpoint_dir, mapping=mapping, spec_config=spec_config, llm_args=llm_args, utils=utils
    )
    sampler = instantiate_sampler(model_engine, llm_args, mapping)
    resources = {}
    for resources["stage"] in ("estimating", "serving"):
        py_executor = PyExecutor(model_engine=model_engine, sampler=sampler, llm_args=llm_args)
        py_executor.drafting_loop = ChainDrafter(
            model_engine.max_draft_len, model_engine.max_total_draft_tokens, model_engine.drafter
        )
        model_engine.warm_up()
    return py_executor
