"""What must hold after every step of every double: one checker in each engine, so that no test can leave it out.

It keeps a stream of its own for each request: its prompt, then what the worker said it committed, which under overlap
is a step ahead of the host. Whatever else has a memory (caches, KV lengths, pools, counts, automata, recurrent
states, the drafter) is compared with that stream, at the length that was committed and no other. Facts: W §5 (who
remembers what, and how far `kv_lens_cuda` moves), W §4 (deltas), A §5 (order of consumers).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import AttentionMetadata
from .block_workers import WINDOW
from .requests import LlmRequest

HAS_AUTOMATON = ("chain", "pools", "parallel")


class _Row(NamedTuple):
    """One row of a step that belongs to a request whose token counts."""

    index: int
    request: LlmRequest
    in_context: bool
    start: int  # tokens in its cache before the step
    length: int  # tokens it fed

    @property
    def slot(self) -> int:
        return self.request.py_seq_slot


class StepChecker:
    """Follows one engine.

    Attributes:
        requests, num_contexts, fed: the rows of the step that runs or ran last, and the tokens that each was fed.
        last: what that step committed, by request id.
        streams, since_context: by request id, all its tokens, and those committed since its last prefill chunk.
        slots_of: by request id, the slots it has held, in order.
        windows: everything that was ever committed, (request id, tokens of one step) in order.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: list[LlmRequest] = []
        self.num_contexts, self.fed = 0, []
        self.streams: dict[int, list[int]] = {}
        self.since_context: dict[int, list[int]] = {}
        self.slots_of: dict[int, list[int]] = {}
        self.windows: list[tuple[int, list[int]]] = []
        self.last: dict[int, list[int]] = {}
        self.steps = 0
        self._fed: dict[int, dict[int, int]] = {}  # by request: drafter's cache place → committed token
        self._counted: dict[int, Counter] = {}
        self._deltas: dict[int, float] = {}
        self._starved: set[int] = set()  # drafters that missed tokens, in steps without drafts

    @property
    def forced(self) -> bool:
        return bool(getattr(self.engine.worker, "force_num_accepted_tokens", 0))

    def before(
        self,
        requests: list[LlmRequest],
        num_contexts: int,
        draft_len: int,
        input_ids: Tensor,
        attn_metadata: AttentionMetadata,
    ) -> None:
        self.requests, self.num_contexts, self.fed = requests, num_contexts, []
        self._rows, self._chunks, self._draft_len = [], [], draft_len
        recorder = getattr(self.engine.worker, "sa_enhancer", None)
        self._extended = len(getattr(recorder, "extended", ()))
        starts = (attn_metadata.kv_lens_cuda - attn_metadata.seq_lens_cuda).tolist()
        at = 0
        for i, (request, length) in enumerate(zip(requests, attn_metadata.seq_lens.tolist(), strict=True)):
            row = _Row(i, request, i < num_contexts, starts[i], length)
            fed = input_ids[at : at + length].tolist()
            at += length
            self.fed.append(fed)
            if request.is_dummy:
                continue
            if row.in_context:
                self._chunks.append((row, fed))
            if row.in_context and not request.is_last_context_chunk:
                continue
            self._rows.append(row)
            self._begin(row, fed)

    def _begin(self, row: _Row, fed: list[int]) -> None:
        request = row.request.py_request_id
        if row.in_context:
            self.streams[request] = row.request.get_tokens(0)
            self.since_context[request], self._fed[request] = [], {}
            self._starved.discard(request)
            self._counted[row.slot] = Counter()
            slots = self.slots_of.setdefault(request, [])
            if not slots or slots[-1] != row.slot:
                slots.append(row.slot)
            return
        if request not in self.streams:  # another server computed its context
            self.streams[request] = row.request.get_tokens(0)
            self.since_context[request], self._fed[request] = [], {}
            self._starved.add(request)
            self._counted[row.slot] = Counter()
        stream = self.streams[request]
        assert fed[0] == stream[-1], f"request {request}: fed {fed[0]}, its last committed token is {stream[-1]}"
        assert row.start == len(stream) - 1, f"request {request}: starts at {row.start}, has {len(stream)} tokens"

    def after(self, outputs: dict, attn_metadata: AttentionMetadata, metadata: Any) -> None:
        self.steps, self.last = self.steps + 1, {}
        worker = self.engine.worker
        seen, worker.seen_by_drafter = worker.seen_by_drafter, None
        self._check_deltas(outputs, metadata)
        for row in self._rows:
            request, count = row.request.py_request_id, int(outputs["new_tokens_lens"][row.index])
            most = 1 if row.in_context else min(row.length, outputs["new_tokens"].shape[1])
            assert 1 <= count <= most, f"request {request}: {count} tokens from {row.length}"
            tokens = outputs["new_tokens"][row.index, :count].tolist()
            if seen is not None:
                told = (int(seen[1][row.index]), seen[0][row.index, :count].tolist())
                assert told == (count, tokens), f"request {request}: drafted from {told}, the host is told {tokens}"
            following = [tokens[-1], *outputs["next_draft_tokens"][row.index].tolist()]
            assert outputs["next_new_tokens"][row.index].tolist() == following, f"request {request}: next inputs"
            self.streams[request] += tokens
            self.since_context[request] += tokens
            self.windows.append((request, tokens))
            self.last[request] = tokens
            if not self._draft_len:
                self._starved.add(request)
            if not self.forced:
                self._check_target(row)
                self._check_memory(row, tokens, attn_metadata, metadata)
            self._check_counts(row, tokens, metadata)

    def _check_target(self, row: _Row) -> None:
        request, target = row.request.py_request_id, self.engine.target
        held = self.streams[request][:-1]
        cached = target.cache[row.slot, : len(held)].tolist()
        assert cached == held, f"request {request}: target's cache {cached}, committed {held}"
        recurrent = getattr(target, "recurrent", None)
        if recurrent is not None:
            state = recurrent.states[row.slot]
            assert state == tuple(held), f"request {request}: recurrent state {state}, committed {held}"

    def _check_memory(self, row: _Row, tokens: list[int], attn_metadata: AttentionMetadata, metadata: Any) -> None:
        """What the drafter keeps of the request."""
        worker, request = self.engine.worker, row.request.py_request_id
        memory = getattr(worker, "memory", None)
        if not self._draft_len or memory is None:
            return
        stream, n, draft_len = self.streams[request], len(tokens), self._draft_len
        held = expected = None
        if memory in ("chain", "tree", "parallel") and not (memory == "parallel" and row.in_context):
            shift = 0 if memory == "parallel" else 1
            first = len(stream) - n - shift
            self._fed[request].update({first + i: token for i, token in enumerate(tokens)})
            places = sorted(self._fed[request])
            held = self.engine.drafter.cache[row.slot, places].tolist()
            expected = [self._fed[request][place] for place in places]
        elif memory == "history":
            held = worker.history_of(row.slot, request, metadata)[-len(self.since_context[request]) :]
            expected = self.since_context[request]
        elif request not in self._starved and memory != "parallel":
            expected = stream[:-1]
            if memory == "pools":
                kept = min(draft_len, len(expected))
                held = metadata.mtp_hidden_states_manager.past_tokens[row.slot, -kept:].tolist()
                expected = expected[-kept:]
            else:
                held = worker.held_context(row.slot)
                expected = expected[-WINDOW:] if memory == "frames" else expected
        assert held == expected, f"request {request}: the drafter ({memory}) keeps {held}, committed {expected}"
        moved = {
            "chain": draft_len if row.in_context else draft_len + n - row.length,
            "pools": 0 if row.in_context else n - row.length,
            "parallel": 0 if row.in_context else n,
            "context": 0 if row.in_context else n,
        }.get(memory)
        if moved is not None:
            length = int(attn_metadata.kv_lens_cuda[row.index])
            there = row.start + row.length + moved
            assert length == there, f"request {request}: KV length {length} after drafting, not {there}"
        self._check_automaton(row, tokens, memory)

    def _check_automaton(self, row: _Row, tokens: list[int], memory: str) -> None:
        recorder = getattr(self.engine.worker, "sa_enhancer", None)
        has_one = memory in HAS_AUTOMATON and getattr(self.engine.worker, "has_automaton", True)
        if row.in_context or not has_one or not hasattr(recorder, "extended"):
            return
        assert len(recorder.extended) == self._extended + 1, "the suffix automaton is extended once a step"
        took = recorder.extended[-1][row.index - self.num_contexts]
        assert took == tokens, f"request {row.request.py_request_id}: the automaton took {took}, committed {tokens}"

    def _check_counts(self, row: _Row, tokens: list[int], metadata: Any) -> None:
        """Penalty counts: what was committed since the last prefill chunk, in steps with drafts."""
        if not metadata.enable_penalty or getattr(metadata, "penalty_state", None) is None:
            return
        if self._draft_len:
            self._counted[row.slot].update(tokens)
        counts = metadata.penalty_state.counts[row.slot]
        found = {token: int(counts[token]) for token in counts.nonzero()[:, 0].tolist()}
        assert found == self._counted[row.slot], f"slot {row.slot}: penalties count {found}"

    def _check_deltas(self, outputs: dict, metadata: Any) -> None:
        """The pool of relaxed acceptance, which also moves by chunks whose token nobody uses."""
        config = self.engine.spec_config
        if not self._draft_len or not getattr(config, "use_relaxed_acceptance_for_thinking", False):
            return
        begin, end, delta = (
            config.begin_thinking_phase_token,
            config.end_thinking_phase_token,
            config.relaxed_delta,
        )
        for row, fed in self._chunks:
            self._deltas[row.slot] = delta if begin in fed else 0.0
        chunks = [row for row, _ in self._chunks]
        for row in [*chunks, *(row for row in self._rows if not row.in_context)]:
            count = int(outputs["new_tokens_lens"][row.index])
            for token in outputs["new_tokens"][row.index, :count].tolist():
                if token in (begin, end):
                    self._deltas[row.slot] = delta if token == begin else 0.0
            held = float(metadata.mtp_hidden_states_manager.relaxed_delta_pool[row.slot])
            there = float(torch.tensor(self._deltas.get(row.slot, 0.0)))
            assert held == there, f"slot {row.slot}: its delta is {held}, what was committed says {there}"

    def check_host(self, request: LlmRequest, new: list[int], accepted: list[int] | None, drafted: int) -> None:
        """What the host took of a step is what the device committed in it, up to where the request ended."""
        if accepted is None:
            return
        whole = new == accepted or (request.is_finished and new == accepted[: len(new)])
        assert whole, f"request {request.py_request_id}: the host took {new}, committed {accepted}"
        assert request.py_rewind_len == drafted - (len(accepted) - 1), f"request {request.py_request_id}: rewind"
        assert request.py_num_accepted_draft_tokens == len(accepted) - 1, f"request {request.py_request_id}: accepted"
