"""`StructureTable`: the automaton of a format over a vocabulary, as a few small tensors.

Built once, validated, immutable, saved and loaded as safetensors. It holds the one definition of what a token
does to a state (`transitions`); the commit stage gathers from it on the device and the host twin walks it in
Python. It knows nothing of policies, windows or slots.

States: 0 is *untracked* (everything is legal, it loops); 1 … S−1 are the format's; two more follow in
`transitions`: `ended` (a terminal was committed; nothing belongs here) and `stray` (an illegal token was let
through: everything is legal, a terminal still ends the turn). A token that is let through acts as it does in `stray`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import TableError

if TYPE_CHECKING:
    from .host import HostTwin

ILLEGAL = -1
UNTRACKED = 0
FILE_VERSION = "1"

IN_BLOCK, IN_HEADER, MAY_END = 1, 2, 4  # state_flags
TERMINAL, OPENS, CLOSES = 1, 2, 4  # class_flags


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table is about, beside its tensors.

    Attributes:
        format: name of the format. format_digest, vocabulary_digest: what it was compiled from.
        start: the state at the start of a turn.
        entries: for each turn opener, in the order to try them: the id of its control token and the state after
            that token, from which the rest of the opener's text leads to `start`.
        controls: name → id of the control tokens that the format uses.
    """

    format: str = "custom"
    format_digest: str = ""
    vocabulary_digest: str = ""
    start: int = 1
    entries: tuple[tuple[int, int], ...] = ()
    controls: dict[str, int] = field(default_factory=dict)


class StructureTable:
    """Immutable automaton over a vocabulary.

    Args:
        token_class: [V] int16, the class of each token, in [0, C).
        next_state: [S, C] int16, the state after a token of each class; −1 = illegal. Row 0 is all 0. In the
            column of a terminal class an entry ≥ 0 says only that the turn may end there.
        state_flags: [S] uint8, `IN_BLOCK` | `IN_HEADER` | `MAY_END`.
        class_flags: [C] uint8, `TERMINAL` | `OPENS` | `CLOSES`.
        info: what the table is about.
        byte_class: [256] int16 and byte_next: [S, Cb] int16, the same automaton over single bytes of text, for
            cutting inside a token; both or neither.

    Raises:
        TableError: a tensor has a wrong shape, dtype or value; a tracked state is dead (no legal end can be
            reached with this vocabulary); a terminal is legal in a state that may not end.
    """

    def __init__(
        self,
        token_class: Tensor,
        next_state: Tensor,
        state_flags: Tensor,
        class_flags: Tensor,
        info: TableInfo | None = None,
        byte_class: Tensor | None = None,
        byte_next: Tensor | None = None,
    ) -> None:
        _check_shapes(token_class, next_state, state_flags, class_flags)
        if (byte_class is None) != (byte_next is None):
            raise TableError("byte_class and byte_next belong together: pass both or neither")
        self.info = info or TableInfo()
        self.token_class = token_class.detach().clone().contiguous()
        self.next_state = next_state.detach().clone().contiguous()
        self.state_flags = state_flags.detach().clone().contiguous()
        self.class_flags = class_flags.detach().clone().contiguous()
        self.byte_class = None if byte_class is None else byte_class.detach().clone().contiguous()
        self.byte_next = None if byte_next is None else byte_next.detach().clone().contiguous()
        self._check_values()
        self.transitions = self._extended()
        self.escape_token = self._escape_tokens()

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return self.token_class.shape[0]

    @property
    def num_states(self) -> int:
        """S, the number of states, the untracked one included."""
        return self.next_state.shape[0]

    @property
    def num_classes(self) -> int:
        """C, the number of token classes."""
        return self.next_state.shape[1]

    @property
    def ended(self) -> int:
        """The state after a committed terminal."""
        return self.num_states

    @property
    def stray(self) -> int:
        """The state after an illegal token was let through."""
        return self.num_states + 1

    @property
    def extended_flags(self) -> Tensor:
        """[S + 2] uint8: `state_flags` as `transitions` counts the states; untracked, ended and stray have none."""
        flags = self.state_flags.new_zeros(self.num_states + 2)
        flags[1 : self.num_states] = self.state_flags[1:]
        return flags

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.token_class.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the stage gathers from."""
        parts = (self.token_class, self.transitions, self.state_flags, self.class_flags, self.escape_token)
        return sum(t.numel() * t.element_size() for t in parts)

    @cached_property
    def host(self) -> HostTwin:
        """The same automaton for code that runs on the CPU."""
        from .host import HostTwin

        return HostTwin(self)

    def to(self, device: torch.device | str) -> StructureTable:
        """The same table on another device."""
        if torch.device(device) == self.device:
            return self
        return StructureTable(*(t.to(device) for t in self._required()), self.info, *self._optional(device))

    def select(self, token_ids: Tensor) -> StructureTable:
        """The table of a smaller vocabulary: new id i is old id `token_ids[i]`. [N] int64, on the same device.

        Exact wherever every other token has probability zero.
        """
        moved = {int(old): new for new, old in enumerate(token_ids.tolist())}
        info = TableInfo(
            format=self.info.format,
            format_digest=self.info.format_digest,
            start=self.info.start,
            entries=tuple((moved[t], s) for t, s in self.info.entries if t in moved),
            controls={n: moved[t] for n, t in self.info.controls.items() if t in moved},
        )
        return StructureTable(self.token_class[token_ids], *self._required()[1:], info, *self._optional(self.device))

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors. The file appears whole or not at all."""
        from safetensors.torch import save

        names = ("token_class", "next_state", "state_flags", "class_flags", "byte_class", "byte_next")
        tensors = {n: getattr(self, n).cpu() for n in names if getattr(self, n) is not None}
        metadata = {"structured_commit": FILE_VERSION, "info": json.dumps(asdict(self.info))}
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int | None = None) -> StructureTable:
        """Read a table.

        Args:
            path: a file that `save` wrote.
            vocab_size: V of the model it is for, if it should be checked.

        Raises:
            TableError: the file is not such a table, is of another version, or is for another vocabulary size.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as f:
                metadata = f.metadata() or {}
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise TableError(f"cannot read structure table {path}: {error}; compile it again") from error
        version = metadata.get("structured_commit")
        if version != FILE_VERSION:
            raise TableError(f"{path} has table version {version}, not {FILE_VERSION}; compile it again")
        try:
            info = json.loads(metadata["info"])
            info["entries"] = tuple((int(t), int(s)) for t, s in info["entries"])
            table = cls(info=TableInfo(**info), **tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"structure table {path} is damaged: {error}; compile it again") from error
        if vocab_size is not None and vocab_size != table.vocab_size:
            raise TableError(
                f"structure table {path} is for a vocabulary of {table.vocab_size} tokens, the model has "
                f"{vocab_size}; compile it again with size={vocab_size}"
            )
        return table

    def _required(self) -> tuple[Tensor, ...]:
        return self.token_class, self.next_state, self.state_flags, self.class_flags

    def _optional(self, device) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.to(device) for t in (self.byte_class, self.byte_next))

    def _extended(self) -> Tensor:
        terminal = (self.class_flags & TERMINAL) != 0
        follow = self.next_state.clone()
        follow[1:, terminal] = torch.where(
            follow[1:, terminal] >= 0, follow.new_tensor(self.ended), follow.new_tensor(ILLEGAL)
        )
        ended = follow.new_full((1, self.num_classes), self.ended)
        stray = torch.where(terminal, self.ended, self.stray).to(follow.dtype)[None]
        return torch.cat([follow, ended, stray]).contiguous()

    def _check_values(self) -> None:
        s, c = self.next_state.shape
        if self.vocab_size and not 0 <= int(self.token_class.min()) <= int(self.token_class.max()) < c:
            raise TableError(f"token_class holds a class outside [0, {c})")
        if not ILLEGAL <= int(self.next_state.min()) <= int(self.next_state.max()) < s:
            raise TableError(f"next_state holds a state outside [−1, {s})")
        if bool((self.next_state[UNTRACKED] != UNTRACKED).any()):
            raise TableError("row 0 of next_state must be all 0: the untracked state loops on every class")
        if not 1 <= self.info.start < s:
            raise TableError(f"the start state {self.info.start} is not a tracked state of a table of {s} states")
        terminal = (self.class_flags & TERMINAL) != 0
        may_end = (self.state_flags & MAY_END) != 0
        if bool((self.next_state[1:][:, terminal] >= 0)[~may_end[1:]].any()):
            raise TableError("a terminal is legal in a state whose flags do not say that the turn may end")
        dead = self._dead_states(terminal, may_end)
        if dead:
            raise TableError(
                f"format {self.info.format}: states {dead[:8]} are dead: no legal end can be reached from them "
                "with the tokens of this vocabulary"
            )

    @cached_property
    def _present_classes(self) -> Tensor:
        """[C] bool: the classes that some token of the vocabulary has."""
        present = torch.zeros(self.num_classes, dtype=torch.bool, device=self.device)
        present[self.token_class.long()] = True
        return present

    def _dead_states(self, terminal: Tensor, may_end: Tensor) -> list[int]:
        legal = (self.next_state >= 0) & self._present_classes
        follow, leads_on = self.next_state.clamp(min=0).long(), legal & ~terminal
        alive = may_end.clone()
        while True:
            grown = alive | (leads_on & alive[follow]).any(dim=1)
            if bool((grown == alive).all()):
                break
            alive = grown
        stuck = ~legal.any(dim=1)
        return (self._reachable() & (stuck | ~alive)).nonzero()[:, 0].tolist()

    def _reachable(self) -> Tensor:
        """[S] bool: the tracked states that the tokens of this vocabulary lead to."""
        reached = torch.zeros(self.num_states, dtype=torch.bool, device=self.device)
        reached[[self.info.start, *(state for _, state in self.info.entries)]] = True
        targets = self.next_state.long()[:, self._present_classes]
        fresh = reached
        while bool(fresh.any()):
            following = targets[fresh]
            grown = reached.index_fill(0, following[following > 0], True)
            fresh, reached = grown & ~reached, grown
        return reached

    def _escape_tokens(self) -> Tensor:
        """[S + 2] int32: in each tracked state a legal token on a shortest way to the end, 0 elsewhere."""
        first_token = torch.full((self.num_classes,), self.vocab_size, device=self.device)
        ids = torch.arange(self.vocab_size, device=self.device)
        first_token = first_token.scatter_reduce(0, self.token_class.long(), ids, "amin")
        terminal = (self.class_flags & TERMINAL) != 0
        present = self._present_classes
        far = self.num_states + 2
        distance = torch.where((self.state_flags & MAY_END) != 0, 1, far)
        legal = (self.next_state >= 0) & present
        follow = self.next_state.clamp(min=0).long()
        for _ in range(self.num_states):
            cost = torch.where(terminal, 0, distance[follow])
            cost = torch.where(legal, cost, far) * (self.vocab_size + 1) + first_token
            best, chosen = cost.min(dim=1)
            shorter = torch.minimum(distance, best // (self.vocab_size + 1) + 1)
            if bool((shorter == distance).all()):
                break
            distance = shorter
        escape = torch.zeros(self.num_states + 2, dtype=torch.int32, device=self.device)
        known = first_token[chosen] < self.vocab_size  # states that no token leads to may have none
        escape[1 : self.num_states] = torch.where(known, first_token[chosen], 0)[1:].to(torch.int32)
        return escape


def _check_shapes(token_class: Tensor, next_state: Tensor, state_flags: Tensor, class_flags: Tensor) -> None:
    expected = (
        ("token_class", token_class, torch.int16, 1),
        ("next_state", next_state, torch.int16, 2),
        ("state_flags", state_flags, torch.uint8, 1),
        ("class_flags", class_flags, torch.uint8, 1),
    )
    for name, tensor, dtype, dims in expected:
        if tensor.dtype != dtype or tensor.dim() != dims:
            raise TableError(
                f"{name} must be a {dims}-dimensional {dtype} tensor, not {tuple(tensor.shape)} of {tensor.dtype}"
            )
    s, c = next_state.shape
    if s < 2 or c < 1:
        raise TableError(f"next_state has shape [{s}, {c}]; at least one tracked state and one class are needed")
    if s + 2 > 32767:
        raise TableError(f"{s} states do not fit int16")
    if state_flags.shape[0] != s or class_flags.shape[0] != c:
        raise TableError(
            f"state_flags [{state_flags.shape[0]}] and class_flags [{class_flags.shape[0]}] do not match "
            f"next_state [{s}, {c}]"
        )
