"""One forward of the target with the speculative worker inside it.

Facts: X §2.1 (order: scan on the engine's metadata, padding, the graph's own metadata, rows, populate, prepare), §2.4
(padding rows), §2.5 (warm-up with dummies, each batch size twice), A §4 (device tokens of the step before, lengths as
offsets), W §1 (keywords of the worker's call, one logits row per context, K + 1 per generation row).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import ops
from .attention import AttentionMetadata
from .block_workers import SaManager, reads_masks
from .configs import spec_dec_mode
from .drafting import MtpHiddenStatesManager, SaRecorder
from .invariants import StepChecker
from .recurrent import HybridModel
from .requests import LlmRequest, SamplingConfig, ScheduledRequests, dummy_request
from .spec_sampler import SpecSampler
from .tables import Table, TableModel
from .trees import NUM_DRAFTS, PARENTS


@dataclass
class Mapping:
    rank: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    world_size: int = 1
    enable_attention_dp: bool = False


@dataclass
class Weights:
    """What a real engine reads from the checkpoint: the two tables. `is_thop` picks MTP's fused strict op."""

    target: Table
    drafter: Table
    vocab_size: int
    is_thop: bool = False
    chunk_size: int = 1 << 20
    draft_len_schedule: list[int] | None = None  # draft length of each step, the last for all that follow
    enable_penalty: bool = False
    k3_decode: bool = False
    hybrid: bool = False  # the target has a recurrent state beside its cache


class PyTorchModelEngine:
    """Owns the models, the worker and the metadata; `utils` is the window's `speculative.utils`."""

    def __init__(
        self, *, model_path: str | None, mapping: Mapping, spec_config: Any, llm_args: Any, utils: Any
    ) -> None:
        ops.install()
        weights: Weights = llm_args._double
        self.model_path, self.mapping, self.spec_config, self.llm_args = model_path, mapping, spec_config, llm_args
        self.batch_size, self.max_seq_len = llm_args.max_batch_size, llm_args.max_seq_len
        self.max_num_tokens = llm_args.max_num_tokens
        self.num_seq_slots = llm_args.max_batch_size
        self.tree = bool(getattr(spec_config, "use_dynamic_tree", False))
        self.mode = spec_dec_mode(spec_config)
        lines, length = self.num_seq_slots + 1, llm_args.max_seq_len + 16
        model = HybridModel if weights.hybrid else TableModel
        self.target = as_model(model, weights.target, weights.vocab_size, lines, length)
        drafter = reads_masks(weights.drafter) if self.mode.drafts_blocks() else weights.drafter
        self.drafter = as_model(TableModel, drafter, weights.vocab_size, lines, length, complete=False)
        self.hidden_states_manager = MtpHiddenStatesManager(self.num_seq_slots, spec_config.max_draft_len)
        self.max_draft_len = spec_config.max_draft_len
        model_type = "kimi_k3" if weights.k3_decode else "some"
        pretrained = SimpleNamespace(vocab_size=weights.vocab_size, model_type=model_type)
        self.model = SimpleNamespace(
            model_config=SimpleNamespace(pretrained_config=pretrained, is_generation=True),
            config=pretrained,
            spec_worker=None,
        )
        self.spec_metadata = self.worker = None
        self.checker = StepChecker(self)
        self.views: dict[int, Any] = {}
        self.warmed = False
        if self.mode.use_one_engine():
            self.worker = self.model.spec_worker = utils.get_spec_worker(
                spec_config, self.model.model_config, mapping, False
            )
            if hasattr(self.worker, "init_tree"):
                self.worker.init_tree(self.batch_size + 1, self.num_seq_slots)
            if hasattr(self.worker, "init_context"):
                self.worker.init_context(self.num_seq_slots, length)
            self.worker.sa_enhancer = SaRecorder()  # workers that have none do not ask it
            self.worker._d2t = self.drafter.d2t
            self.worker.is_thop = weights.is_thop
            self.worker.k3_decode = weights.k3_decode
        self.max_total_draft_tokens = self.verified_tokens(spec_config.max_draft_len)
        if self.worker:
            self.spec_metadata = utils.SpecMetadata(
                max_num_requests=self.batch_size + 1,
                max_draft_len=spec_config.max_draft_len,
                max_total_draft_tokens=self.max_total_draft_tokens,
                spec_dec_mode=self.mode,
                vocab_size=weights.vocab_size,
                num_seq_slots=self.num_seq_slots,
                use_rejection_sampling=getattr(spec_config, "use_rejection_sampling", False),
                is_spec_dec_tree=self.tree,
                enable_penalty=weights.enable_penalty,
            )
            self.spec_metadata.mtp_hidden_states_manager = self.hidden_states_manager
            self.spec_metadata.spec_resource_manager = self.hidden_states_manager
            self.spec_metadata.sa_manager = SaManager()
            if hasattr(spec_config, "allow_advanced_sampling"):  # w12
                self.spec_metadata.allow_advanced_sampling = spec_config.allow_advanced_sampling

    def draft_len_at(self, step: int) -> int:
        schedule = self.llm_args._double.draft_len_schedule
        return schedule[min(step, len(schedule) - 1)] if schedule else self.spec_config.max_draft_len

    def warm_up(self) -> None:
        """Dummy rows only: eagerly; then, but for the throw-away executor, each graph size greedy and with sampling."""
        if not self.mode.use_one_engine():
            return
        draft_len, graphs = self.draft_len_at(0), self.llm_args.use_cuda_graph
        captures, self.warmed = graphs and self.warmed, True
        for size in (0, *sorted({1, 2, self.batch_size})) if captures else (0,):
            self.llm_args.use_cuda_graph = graphs and size > 0
            for sampling in (SamplingConfig(), SamplingConfig(temperature=[0.7])):
                row = self.padding_row(draft_len)
                row.sampling_config = sampling
                self.forward(ScheduledRequests(generation_requests=[row] * max(size, 1)), draft_len)
        self.llm_args.use_cuda_graph = graphs

    def padding_row(self, draft_len: int) -> LlmRequest:
        return dummy_request(self.verified_tokens(draft_len))

    def verified_tokens(self, draft_len: int) -> int:
        """Drafts that a generation row brings."""
        own = getattr(self.worker, "drafts_per_gen_step", None)
        return NUM_DRAFTS if self.tree else own(draft_len) if own else draft_len

    def forward(self, batch: ScheduledRequests, draft_len: int, previous: SpecSampler | None = None) -> dict:
        """The worker's outputs; rows as in `batch.all_requests()`, then padding. `previous` is set under overlap."""
        requests = self._padded(batch, draft_len)
        self._set_lengths(self.spec_metadata, draft_len)
        if hasattr(self.spec_metadata, "update_is_all_greedy_sample"):  # not in w12
            self.spec_metadata.update_is_all_greedy_sample(requests)
        metadata = self._metadata_for(batch, len(requests))
        self._set_lengths(metadata, draft_len)
        input_ids, attn_metadata, drafts = self._prepare_inputs(requests, batch.num_context_requests, previous)
        num_contexts = attn_metadata.num_contexts
        metadata.draft_tokens = torch.tensor(drafts, dtype=torch.int32)
        metadata.request_ids = attn_metadata.request_ids
        metadata.slot_ids = torch.tensor(attn_metadata.lines)
        ends = attn_metadata.seq_lens.cumsum(0) - 1
        metadata.gather_ids = torch.cat(
            [ends[:num_contexts], torch.arange(attn_metadata.num_ctx_tokens, int(attn_metadata.seq_lens.sum()))]
        )
        metadata.populate_sampling_params_for_one_model(requests)
        metadata.prepare()
        metadata.sa_manager.prepare(metadata.request_ids, num_contexts)
        self.checker.before(requests, batch.num_context_requests, draft_len, input_ids, attn_metadata)
        logits = self.target.forward(input_ids, attn_metadata, metadata.gather_ids)
        outputs = self.worker(
            input_ids=input_ids,
            position_ids=None,
            hidden_states=None,
            logits=logits,
            attn_metadata=attn_metadata,
            spec_metadata=metadata,
            draft_model=self.drafter,
            resource_manager=None,
        )
        self.checker.after(outputs, attn_metadata, metadata)
        return outputs

    def _padded(self, batch: ScheduledRequests, draft_len: int) -> list[LlmRequest]:
        requests = batch.all_requests()
        if self.llm_args.use_cuda_graph and not batch.num_context_requests and len(requests) < self.batch_size:
            bucket = 1 << (len(requests) - 1).bit_length()
            requests += [self.padding_row(draft_len)] * (min(bucket, self.batch_size) - len(requests))
        return requests

    def _metadata_for(self, batch: ScheduledRequests, rows: int) -> Any:
        if not self.llm_args.use_cuda_graph or batch.num_context_requests:
            return self.spec_metadata
        if rows not in self.views:
            self.views[rows] = self.spec_metadata.create_cuda_graph_metadata(rows)
        return self.views[rows]

    def _set_lengths(self, metadata: Any, draft_len: int) -> None:
        metadata.runtime_draft_len = draft_len
        metadata.runtime_tokens_per_gen_step = self.verified_tokens(draft_len) + 1

    def _prepare_inputs(self, requests: list[LlmRequest], num_contexts: int, previous: SpecSampler | None):
        tokens, seq_lens, kv_lens, lines, drafts = [], [], [], [], []
        for i, request in enumerate(requests):
            line = self.num_seq_slots if request.py_seq_slot is None else request.py_seq_slot
            if i < num_contexts:
                start = request.context_current_position
                new = request.get_tokens(0)[start : start + request.context_chunk_size]
            elif previous is not None and request.py_batch_idx is not None:
                width = len(request.py_draft_tokens) + 1
                new = previous.next_new_tokens[:width, line, 0].tolist()
                start = request.get_num_tokens(0) - 1 + int(previous.new_tokens_lens[line])
            else:
                new = [request.get_tokens(0)[-1], *request.py_draft_tokens]
                start = request.get_num_tokens(0) - 1
            tokens += new
            seq_lens.append(len(new))
            kv_lens.append(start + len(new))
            lines.append(line)
            if i >= num_contexts:
                drafts += new[1:]
        attn_metadata = AttentionMetadata(
            torch.tensor(kv_lens),
            seq_lens,
            num_contexts,
            lines,
            [request.py_request_id for request in requests],
            PARENTS if self.tree else None,
        )
        attn_metadata.kv_cache = self.target.cache
        attn_metadata.kv_cache_manager = getattr(self.target, "recurrent", None)
        return torch.tensor(tokens, dtype=torch.int32), attn_metadata, drafts


def as_model(kind: type, source: Any, *settings: Any, **more: Any) -> Any:
    """A model over a table; a source that makes a model of its own is asked for it."""
    make = getattr(source, "make_model", None)
    return make(*settings[1:]) if make else kind(source, *settings, **more)
