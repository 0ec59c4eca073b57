"""Facts: executor.md §2.5, §6; by 1.4.0rc the body is `_create_py_executor_impl`, and there is no draft engine."""

from __future__ import annotations

import functools

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative import utils
from tensorrt_llm._torch.speculative.spec_sampler_base import SpecSamplerBase

from tests.upstream.common.model_engine import Mapping, PyTorchModelEngine


def instantiate_sampler(model_engine, llm_args, mapping):
    return SpecSamplerBase(model_engine.num_seq_slots, model_engine.max_draft_len, model_engine.max_total_draft_tokens)


def _create_py_executor_impl(
    llm_args, checkpoint_dir=None, tokenizer=None, profiling_stage_data=None, resource_governor_queue=None
):
    spec_config = llm_args.speculative_config
    mapping = Mapping()
    model_engine = PyTorchModelEngine(
        model_path=checkpoint_dir, mapping=mapping, spec_config=spec_config, llm_args=llm_args, utils=utils
    )
    sampler = instantiate_sampler(model_engine, llm_args, mapping)
    resources = {}
    for resources["stage"] in ("estimating", "serving"):
        py_executor = PyExecutor(model_engine=model_engine, sampler=sampler, llm_args=llm_args)
        model_engine.warm_up()
    return py_executor


@functools.wraps(_create_py_executor_impl)
def create_py_executor(*args, **kwargs):
    return _create_py_executor_impl(*args, **kwargs)
