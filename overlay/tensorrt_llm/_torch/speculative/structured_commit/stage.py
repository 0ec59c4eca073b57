"""The commit stage: between acceptance and everything that consumes accepted tokens.

Vocabulary of this module, used for nothing else: *draft* tokens are proposed; a *window* is what acceptance
returns for a row, [W] columns of which the first `length` are *accepted* (accepted drafts, then one *bonus* or
*recovered* token); *committed* is what the stage lets pass. A *slot* is the place of a request's state.

`commit` is a pure function of its inputs and the device state: no host synchronisation, static shapes, stable
addresses, no communication. Ranks that are given the same inputs commit the same tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .backend import choose_backend
from .checks import check_bindings, check_in_place, check_shapes, check_values
from .counters import CounterReader
from .errors import StageError
from .plain import CommitOutput
from .policy import COUNTERS, CommitConfig, Policy
from .repair import Distribution
from .table import UNTRACKED, StructureTable


class CommitStage:
    """Structure-checked commit for up to `num_slots` requests.

    Args:
        table: the format's automaton over the model's vocabulary.
        config: policy and bounds.
        num_slots: N; slots 0 … N−1 belong to requests, N is for rows without one (dummies, padding).
        max_window: the widest window, draft length + 1.
        device: where the state lives and `commit` runs.

    Attributes:
        state: [N + 1] int32, may be read: the state of each slot (see `StructureTable`).
        steps: [N + 1] int64, commits per slot so far, the counter of its random stream.
        repairs: [N + 1] int32, repairs of the request in each slot.
        counters: [len(COUNTERS)] int64 totals, in the order of `COUNTERS`; rows without a slot are not counted.
        counter_reader: copies them out without waiting.
        backend: "torch" or "triton", what `commit` runs on.
    """

    def __init__(
        self,
        table: StructureTable,
        config: CommitConfig | None = None,
        *,
        num_slots: int,
        max_window: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1 or max_window < 1:
            raise StageError(f"num_slots ({num_slots}) and max_window ({max_window}) must be 1 or more")
        self.config = config or CommitConfig()
        self.table = table.to(device)
        self.num_slots, self.max_window = num_slots, max_window
        self.device = torch.device(device)
        self.state = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.steps = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.repairs = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.counter_reader = CounterReader(self.counters)
        self._owners: dict[int, Hashable] = {}
        self._backend = choose_backend(self)

    @property
    def backend(self) -> str:
        return self._backend.name

    def bind(
        self,
        slots: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        *,
        owners: Sequence[Hashable] | None = None,
        in_context: Sequence[bool] | None = None,
        tracked: Sequence[bool] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        """Set the state of slots from what their requests hold so far. Host side, outside any captured graph.

        Args:
            slots: the slot of each request, all different.
            token_ids: prompt and generated tokens of each request.
            owners: an identity for each request. If given, a slot is written only when its owner changed or the
                request is in its context phase; otherwise the device knows more than the host and is kept.
            in_context: whether each request is in its context phase (prefill, chunk, resume). Default: no.
            prompt_lengths: how many tokens of each request are its prompt; the rest was committed as output.
            tracked: False for a request that must be let alone, such as one that ignores end tokens.

        Raises:
            StageError: lengths differ, a slot is out of range or named twice. Nothing is written then.
        """
        check_bindings(self.num_slots, slots, token_ids, owners, in_context, tracked, prompt_lengths)
        written, states = [], []
        for i, slot in enumerate(slots):
            in_phase = in_context is not None and in_context[i]
            if owners is not None and self.owned_by(slot, owners[i]) and not in_phase:
                continue
            written.append(slot)
            prompt_length = None if prompt_lengths is None else prompt_lengths[i]
            is_tracked = tracked is None or tracked[i]
            states.append(self.table.host.locate(token_ids[i], prompt_length) if is_tracked else UNTRACKED)
        for i, slot in enumerate(slots):
            if owners is not None:
                self._owners[slot] = owners[i]
            else:
                self._owners.pop(slot, None)
        if written:
            index = torch.tensor(written, dtype=torch.int64).to(self.device, non_blocking=True)
            values = torch.tensor(states, dtype=torch.int32).to(self.device, non_blocking=True)
            self.state.index_copy_(0, index, values)
            self.repairs.index_fill_(0, index, 0)

    def owned_by(self, slot: int, owner: Hashable) -> bool:
        """Whether `bind` last wrote `slot` for `owner`."""
        return slot in self._owners and self._owners[slot] == owner

    def legal_tokens(self, state: int) -> Tensor:
        """[V] bool: the tokens that are legal in `state`."""
        return self.table.transitions[state][self.table.token_class.long()] >= 0

    def untrack_(self, slots: Tensor) -> None:
        """Set `slots` [B] int64 untracked, in place: for rows whose tokens the stage will not see."""
        self.state.index_fill_(0, slots, UNTRACKED)

    def commit(
        self,
        tokens: Tensor,
        lengths: Tensor,
        slots: Tensor,
        *,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        source_rows: Tensor | None = None,
        words: Tensor | None = None,
        redraw: bool = True,
    ) -> CommitOutput:
        """Commit one window per row. The inputs are not changed; the stage's state and counters are, in place.

        Under `off` and `observe` the given tensors themselves are returned.

        Args:
            tokens: [B, W] int32, accepted tokens; columns at or past a row's length may hold anything.
            lengths: [B] int32, accepted tokens per row, bonus or recovered token included. Outside [1, W] they are
                clamped and the row is flagged `OUT_OF_RANGE`.
            slots: [B] int64, each slot at most once; N, or anything out of range, for rows without one.
            probs: [B, W, V] float, the target's sampling distribution at each column. Illegal tokens are redrawn
                from its legal part.
            logits: [B, W, V] float, instead of `probs`: the target's logits.
            temperature: [B] float, with `logits`; None or ≤ `GREEDY_TEMPERATURE` = greedy, redrawn as the best
                legal token. top_k: [B] int32 and top_p: [B] float, with `logits`; None = no limit.
            source_rows: [B, W] int64, with `probs` or `logits` of shape [M, V]: the row of each column, as for the
                accepted path of a tree.
            words: [B, 2] int64 random 32-bit words to use instead of the stage's own stream, to replay a step.
            redraw: False where a repairing policy has no distribution at hand: a window is cut before its illegal
                token, and an illegal first token is let through.

        Returns:
            `CommitOutput`.

        Raises:
            StageError: a wrong shape, dtype or device; a repairing policy without probabilities or logits; with
                `config.check`, a wrong value. State and counters are as before then.
        """
        given = Distribution(probs, logits, temperature, top_k, top_p, source_rows, words)
        if not self._is_work(tokens, lengths, slots, given, redraw):
            return CommitOutput(tokens, lengths, torch.zeros_like(lengths))
        return self._backend.commit(tokens, lengths, slots, given if redraw else None)

    def commit_(
        self, tokens: Tensor, lengths: Tensor, slots: Tensor, *, redraw: bool = True, **distribution: Tensor | None
    ) -> Tensor:
        """`commit`, written back into `tokens` and `lengths` in place.

        Returns:
            events: [B] int32.

        Raises:
            StageError: as `commit`; or tokens or lengths are expanded.
        """
        given = Distribution(**distribution)
        if not self._is_work(tokens, lengths, slots, given, redraw):
            return torch.zeros_like(lengths)
        check_in_place(tokens, lengths)
        return self._backend.commit_(tokens, lengths, slots, given if redraw else None)

    def read_counters(self) -> dict[str, int]:
        """The counters by name. Waits for the device; `counter_reader` does not."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    def _is_work(self, tokens: Tensor, lengths: Tensor, slots: Tensor, given: Distribution, redraw: bool) -> bool:
        """Refuse bad arguments, then say whether there is anything to do."""
        check_shapes(self, tokens, lengths, slots, given, redraw)
        if self.config.policy is Policy.OFF:
            return False
        if self.config.check:
            check_values(self, tokens, lengths, slots, given.probs)
        return tokens.shape[0] > 0
