"""An engine in miniature: draft, accept by a reference rule, pass the commit stage, and go on to the natural end.

The rules are the package's references and the stage is the real one. What an engine does around them is here in
its simplest form: a request is over when a terminal was committed, and what lies behind it is not output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structured_commit import CommitConfig, CommitStage, rejection_reference, relaxed_reference, strict_reference

from .model import CH, DRAFTS, PROMPT, STOP, VOCAB, Call, Law, calls_table, read_calls, rows

NUM_DRAFTS = 3
WORDS_A_STEP = 16  # more than a row draws in one step, so that no number serves twice
TOP_K, DELTA = 2, 0.6  # of relaxed acceptance


@dataclass
class Stream:
    """One request: the golden token and what was output, how long each window was, and whether it ended."""

    tokens: list[int] = field(default_factory=lambda: [CH])
    windows: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def calls(self) -> list[Call]:
        return read_calls(self.tokens)

    def window_of(self, index: int) -> int:
        """Which window output token `index`; 0 is the prompt."""
        past = 1
        for number, length in enumerate(self.windows, start=1):
            if index < past:
                return number - 1
            past += length
        return len(self.windows)


@dataclass
class Run:
    """What came of it.

    Attributes:
        streams: one for each request.
        windows: windows accepted. verbatim: of these, committed token for token. accepted: tokens in them.
        rejected_inside: windows that ended in a rejection and left a call open.
        dropped_behind_terminal: committed tokens that the host then dropped, since they stood behind a terminal.
        repaired: tokens redrawn by the stage.
    """

    streams: list[Stream]
    windows: int = 0
    accepted: int = 0
    verbatim: int = 0
    rejected_inside: int = 0
    dropped_behind_terminal: int = 0
    repaired: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The report's window under one policy: what acceptance gave and what was committed."""

    accepted: list[int]
    committed: list[int]
    rejected: bool
    call: Call


def one_window(law: Law, drafter: Law, policy: str, seed: int) -> Window:
    """The drafts MSG TOK END behind the golden CH, once, as the report does."""
    stage = _make_stage(policy, 1)
    drafts = torch.tensor([DRAFTS])
    path = torch.tensor([[CH, *DRAFTS]])
    p, q = rows(law), rows(drafter)
    window = rejection_reference(q[path[:, :-1]], drafts, p[path], seed, 0)
    lengths = window.emitted + 1
    out = stage.commit(window.output_tokens, lengths, torch.tensor([0]), probs=p[path])
    committed = out.tokens[0, : int(out.lengths[0])].tolist()
    return Window(
        accepted=window.output_tokens[0, : int(lengths[0])].tolist(),
        committed=committed,
        rejected=int(window.emitted[0]) < NUM_DRAFTS,
        call=read_calls([CH, *committed])[0],
    )


def decode(
    law: Law,
    drafter: Law,
    policy: str,
    *,
    requests: int,
    seed: int,
    acceptance: str = "rejection",
    num_drafts: int = NUM_DRAFTS,
    max_tokens: int = 500,
) -> Run:
    """Decode `requests` streams to their natural end. `strict` and `relaxed` acceptance are greedy."""
    p, q = rows(law), rows(drafter)
    stage = _make_stage(policy, requests)
    generator = torch.Generator().manual_seed(seed)
    run = Run([Stream() for _ in range(requests)])
    live, step = torch.arange(requests), 0
    while len(live):
        last = torch.tensor([run.streams[i].tokens[-1] for i in live.tolist()])
        path = _drafted(q, last, num_drafts, None if acceptance != "rejection" else generator)
        tokens, lengths = _accept(p, q, path, acceptance, seed, step * WORDS_A_STEP)
        target = {"probs": p[path]} if acceptance == "rejection" else {"logits": p[path].log()}
        out = stage.commit(tokens, lengths, live, **target)
        _output(run, live.tolist(), lengths, num_drafts, out, tokens, max_tokens)
        live = torch.tensor([i for i in live.tolist() if not run.streams[i].ended], dtype=torch.int64)
        step += 1
    run.repaired = stage.read_counters()["repaired"]
    return run


def _make_stage(policy: str, requests: int) -> CommitStage:
    config = CommitConfig(policy=policy, repair_rows=requests)
    stage = CommitStage(calls_table(), config, num_slots=requests, max_window=NUM_DRAFTS + 1)
    stage.bind(range(requests), [PROMPT] * requests)
    return stage


def _drafted(q: Tensor, last: Tensor, num_drafts: int, generator: torch.Generator | None) -> Tensor:
    """[n, K + 1]: the last token and K drafts, sampled, or the best ones if there is no generator."""
    path = [last]
    for _ in range(num_drafts):
        law = q[path[-1]]
        path.append(law.argmax(1) if generator is None else law.multinomial(1, generator=generator)[:, 0])
    return torch.stack(path, dim=1)


def _accept(p: Tensor, q: Tensor, path: Tensor, acceptance: str, seed: int, offset: int) -> tuple[Tensor, Tensor]:
    drafts = path[:, 1:]
    if acceptance == "strict":
        return strict_reference(drafts, p[path].argmax(2))
    if acceptance == "relaxed":
        return relaxed_reference(drafts, p[path], TOP_K, DELTA)
    window = rejection_reference(q[path[:, :-1]].view(len(path), -1, VOCAB), drafts, p[path], seed, offset)
    return window.output_tokens, window.emitted + 1


def _output(run: Run, live: list[int], lengths: Tensor, num_drafts: int, out, accepted: Tensor, limit: int) -> None:
    """What the host does with a step: append, and stop behind a terminal or at the length limit."""
    rejected = (lengths <= num_drafts).tolist()
    for row, request in enumerate(live):
        stream, length = run.streams[request], int(out.lengths[row])
        committed = out.tokens[row, :length].tolist()
        run.windows += 1
        run.accepted += int(lengths[row])
        run.verbatim += committed == accepted[row, : int(lengths[row])].tolist()
        if STOP in committed:
            kept = committed[: committed.index(STOP) + 1]
            run.dropped_behind_terminal += len(committed) - len(kept)
            committed, stream.ended = kept, True
        committed = committed[: limit - len(stream.tokens) + 1]
        stream.tokens += committed
        stream.windows.append(len(committed))
        stream.ended = stream.ended or len(stream.tokens) > limit
        run.rejected_inside += rejected[row] and not stream.ended and _inside_a_call(stream)


def _inside_a_call(stream: Stream) -> bool:
    return bool(stream.calls) and stream.calls[-1].decided_at == len(stream.tokens)
