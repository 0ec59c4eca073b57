"""The stage as a commit rule: real `CommitStage.commit` calls, one for all windows of a step, one slot for each.

Where the stage redraws a token, every redraw is enumerated: for each legal token a random word is passed that lies
inside that token's share of the draw. Along the way the rule asserts what must hold of any single call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structured_commit import CommitConfig, CommitOutput, CommitStage, Event
from structured_commit.repair import legal_weights

from .enumeration import Commits, Rule, Windows, sequences
from .instances import Family

NEVER_SPENT = 2**20  # more repairs than any of these streams can need
LOOKS_AT_NOTHING = ("off", "observe")


def stage_rule(policy: str, *, fewest_repair_rows: bool = False) -> Rule:
    """What the stage commits under `policy`.

    Args:
        fewest_repair_rows: give the stage just enough repair rows for windows that are illegal from their first
            column on, so that all others are cut before their illegal token.
    """

    def rule(family: Family, windows: Windows) -> Commits:
        call = _call(family, policy, windows)
        legal_start = family.legal[call.state[0], windows.tokens[:, 0]]
        words = torch.zeros(len(legal_start), 2, dtype=torch.int64)
        rows = max(1, int((~legal_start).sum())) if fewest_repair_rows else len(words)
        out, after = call.commit(words, repair_rows=rows)
        call.assert_legal_windows_pass_untouched(out)

        redrawn = (out.events & Event.REPAIRED) != 0
        once = (~redrawn).nonzero()[:, 0]
        parts = [call.commits(once, out, after)]
        if bool(redrawn.any()):
            parts.append(call.every_redraw(redrawn.nonzero()[:, 0], out))
        return Commits(*(torch.cat(column) for column in zip(*parts, strict=True)))

    return rule


def everything(family: Family, windows: Windows) -> Commits:
    """The rule that commits each window whole and stops at nothing."""
    rows = torch.arange(len(windows.prefix))
    never = torch.zeros(len(rows), dtype=torch.bool)
    return Commits(rows, windows.tokens, windows.lengths, torch.ones_like(windows.weight), never)


@dataclass(frozen=True)
class _Call:
    """One step: windows of B rows, with state: [W, B] int64 and probs: [B, W, V] float64 before each column."""

    family: Family
    policy: str
    windows: Windows
    state: Tensor
    probs: Tensor

    def commit(self, words: Tensor, repair_rows: int) -> tuple[CommitOutput, Tensor]:
        """Commit with slots in an order of their own; returns the output and the state of each row after it."""
        rows, width = self.windows.tokens.shape
        config = CommitConfig.of_rule(self.policy, repair_rows=repair_rows, max_repairs=NEVER_SPENT)
        stage = CommitStage(self.family.table, config, num_slots=rows, max_window=width)
        slots = torch.arange(rows - 1, -1, -1)
        stage.state[slots] = self.state[0].int()
        tokens, lengths = self.windows.tokens.int(), self.windows.lengths.int()
        generator = torch.get_rng_state()
        out = stage.commit(tokens, lengths, slots, probs=self.probs, words=words)
        assert torch.equal(generator, torch.get_rng_state()), "the stage drew from the sampler's generator"
        return out, stage.state[slots].long()

    def every_redraw(self, rows: Tensor, first: CommitOutput) -> Commits:
        """`rows`, whose last token was redrawn in `first`, once for each token that the redraw can give."""
        at = first.lengths.long()[rows] - 1
        weights = legal_weights(self.probs[rows, at], self.family.legal[self.state[at, rows]])
        escaped = (first.events[rows] & Event.ESCAPED) != 0
        assert torch.equal(escaped, weights.sum(dim=1) == 0), f"{self.family.name}: escaped where legal mass was"
        weights[escaped, first.tokens[rows, at].long()[escaped]] = 1

        row, token, words, share = every_draw(weights)
        source = rows[row]
        out, after = self.only(source).commit(words, repair_rows=len(source))
        assert torch.equal(out.tokens.long().gather(1, at[row, None])[:, 0], token), f"{self.family.name}: wrong draw"
        assert torch.equal(out.lengths, first.lengths[source]), self.family.name
        assert torch.equal(out.events & ~Event.ENDED, first.events[source] & ~Event.ENDED), self.family.name
        drawn = self.commits(torch.arange(len(source)), out, after)
        return drawn._replace(row=source, weight=share)

    def commits(self, rows: Tensor, out: CommitOutput, after: Tensor) -> Commits:
        tokens, lengths = out.tokens.long()[rows], out.lengths.long()[rows]
        ended = self.family.terminal[tokens.gather(1, lengths[:, None] - 1)[:, 0]]
        if self.policy in LOOKS_AT_NOTHING:
            ended = torch.zeros_like(ended)
        else:
            assert torch.equal(ended, after[rows] == self.family.table.ended), f"{self.family.name}: ended, or not?"
            assert torch.equal(ended, (out.events[rows] & Event.ENDED) != 0), self.family.name
        return Commits(rows, tokens, lengths, torch.ones(len(rows), dtype=torch.float64), ended)

    def only(self, rows: Tensor) -> _Call:
        """The same call with these rows, in this order, repeats included."""
        windows = Windows(self.windows.n, *(column[rows] for column in self.windows[1:]))
        return replace(self, windows=windows, state=self.state[:, rows], probs=self.probs[rows])

    def assert_legal_windows_pass_untouched(self, out: CommitOutput) -> None:
        """A window of legal tokens with no terminal before its last one is committed bit for bit."""
        windows, family = self.windows, self.family
        column = torch.arange(windows.tokens.shape[1])
        inside = column < windows.lengths[:, None]
        tokens = torch.where(inside, windows.tokens, 0)
        fits = family.legal[self.state.T, tokens] | ~inside
        ends_early = family.terminal[tokens] & (column < windows.lengths[:, None] - 1)
        whole = fits.all(dim=1) & ~ends_early.any(dim=1)
        if self.policy in LOOKS_AT_NOTHING:
            whole = torch.ones_like(whole)
        if self.policy in ("gate", "align", "rollback"):
            whole &= (out.events & (Event.GATED | Event.ALIGNED | Event.ROLLED_BACK)) == 0
        assert torch.equal(out.lengths[whole].long(), windows.lengths[whole]), family.name
        same = (out.tokens == windows.tokens) | ~inside
        assert bool(same[whole].all()), family.name
        if self.policy == "repair":
            assert not bool((out.events[whole] & ~Event.ENDED).any()), family.name


def every_draw(weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every token that rows of integer weights [R, V] can give: row, token, random words [M, 2] int64 in the middle of
    the token's share of the draw, and its probability, float64."""
    row, token = weights.nonzero(as_tuple=True)
    share, total = weights[row, token].double(), weights.sum(dim=1).double()[row]
    middle = (weights.cumsum(dim=1).double()[row, token] - share / 2) / total
    words = torch.stack([(middle * 2.0**32).long(), torch.zeros_like(row)], dim=1)
    return row, token, words, share / total


def _call(family: Family, policy: str, windows: Windows) -> _Call:
    """The call for `windows`, with garbage where the stage must not look: ids past a row's length and their probs."""
    rows, width = windows.tokens.shape
    inside = torch.arange(width) < windows.lengths[:, None]
    noise = torch.Generator().manual_seed(rows)
    junk = torch.randint(-1, family.vocab + 2, (rows, width), generator=noise)
    probs = torch.full((rows, width, family.vocab), torch.nan, dtype=torch.float64)
    state = torch.zeros(width, rows, dtype=torch.int64)
    for column, path in enumerate(sequences(windows, family)):
        at = inside[:, column]
        probs[at, column] = family.target[windows.n + column][path[at]]
        state[column, at] = family.states[windows.n + column][path[at]]
    windows = windows._replace(tokens=torch.where(inside, windows.tokens, junk))
    return _Call(family, policy, windows, state, probs)
