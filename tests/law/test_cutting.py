"""Where a window may be cut without changing the law of the stream, and what it costs to cut elsewhere.

A cut that depends on the committed tokens alone is a stopping time: the rest is drawn again later, and nobody can
tell. A cut that looks at the tokens it discards is not: they were drawn once, disliked, and are drawn again. The
distances below are total variation on one small world in which every token that can be drawn is legal, so that
cutting is all a rule can do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from structured_commit.table import IN_BLOCK, MAY_END

from .enumeration import Commits, Law, Windows, deviation, law_of, rejection_windows, stream_law, total_variation
from .instances import Automaton, Family, make_table, random_family
from .rules import stage_rule

TOLERANCE = 1e-12

TEXT, OPEN, CLOSE, END = range(4)
OUTSIDE, INSIDE = 1, 2
BLOCKS = Automaton(
    rows=[[0, 0, 0, 0], [OUTSIDE, INSIDE, -1, 0], [INSIDE, -1, OUTSIDE, -1]],
    flags=[MAY_END, MAY_END, IN_BLOCK],
)
TARGET = {OUTSIDE: (0.4, 0.4, 0.0, 0.2), INSIDE: (0.5, 0.0, 0.5, 0.0)}
DRAFTER = {OUTSIDE: (0.7, 0.2, 0.0, 0.1), INSIDE: (0.8, 0.0, 0.2, 0.0)}
DISTANCES = {"drop a last opener": 0.103552, "block only if it closes": 0.335168, "rollback": 0.131456}


def world_of_blocks(target=TARGET, drafter=DRAFTER, num_drafts: int = 2, length: int = 4) -> Family:
    """Text and blocks; the next token depends only on whether a block is open. Nothing illegal has any mass.

    Windows may run over the end of the stream: a window shortened there could not hold a block.
    """
    table = make_table([TEXT, OPEN, CLOSE, END], [BLOCKS], {END})
    blank = tuple(torch.zeros(4**n, 4, dtype=torch.float64) for n in range(length + num_drafts))
    empty = Family("blocks", num_drafts, length, blank, blank, torch.tensor([OUTSIDE]), table, overruns=True)

    def spread(law: dict[int, tuple[float, ...]]) -> tuple[Tensor, ...]:
        rows = torch.tensor([law[OUTSIDE], law[OUTSIDE], law[INSIDE]], dtype=torch.float64)
        return tuple(rows[states.clamp(max=INSIDE)] for states in empty.states)

    return replace(empty, target=spread(target), drafter=spread(drafter))


def target_law(family: Family) -> Law:
    return law_of(family, lambda n: family.target[n], family.terminal)


def commit_prefixes(windows: Windows, family: Family, kept: Tensor, weight: Tensor | None = None) -> Commits:
    """Commit the first `kept` [B] tokens of each window, 0 for none, and stop at a terminal."""
    ends = family.terminal[windows.tokens]
    first = torch.where(ends, torch.arange(ends.shape[1]), ends.shape[1]).amin(dim=1)
    kept = torch.minimum(kept, first + 1)
    rows = (kept > 0).nonzero()[:, 0]
    weight = torch.ones_like(windows.weight) if weight is None else weight
    return Commits(rows, windows.tokens[rows], kept[rows], weight[rows], (first + 1 == kept)[rows])


def stop_where_told(family: Family, seed: int):
    """A stopping time: cut behind the first prefix that a random list names. The list knows nothing of what follows."""
    depth = family.length + family.num_drafts + 1
    generator = torch.Generator().manual_seed(seed)
    named = [torch.rand(family.worlds * family.vocab**n, generator=generator) < 0.4 for n in range(depth)]

    def rule(family: Family, windows: Windows) -> Commits:
        kept, path = windows.lengths.clone(), windows.prefix
        for column in range(windows.tokens.shape[1]):
            path = path * family.vocab + windows.tokens[:, column]
            stops = named[windows.n + column + 1][path] & (column + 1 < kept)
            kept = torch.where(stops, column + 1, kept)
        return commit_prefixes(windows, family, kept)

    return rule


def drop_a_last_opener(family: Family, windows: Windows) -> Commits:
    """Looks at what it discards: a window's last token is put off if it opens a block."""
    last = windows.tokens.gather(1, windows.lengths[:, None] - 1)[:, 0]
    return commit_prefixes(windows, family, windows.lengths - ((last == OPEN) & (windows.lengths > 1)).long())


def blocks_whole_or_not_at_all(family: Family, windows: Windows) -> Commits:
    """Commit a block only if it closes in this window; a window that begins with one that does not is drawn again."""
    tokens, lengths = windows.tokens, windows.lengths
    column = torch.arange(tokens.shape[1])
    opens = torch.where((tokens == OPEN) & (column < lengths[:, None]), column, -1).amax(dim=1)
    closes = torch.where((tokens == CLOSE) & (column < lengths[:, None]), column, -1).amax(dim=1)
    kept = torch.where(opens > closes, opens, lengths)
    # Drawing again until something can be committed conditions the window on that.
    committed = torch.zeros(family.worlds * family.vocab**windows.n, dtype=torch.float64)
    committed.index_add_(0, windows.prefix, torch.where(kept > 0, windows.weight, 0.0))
    return commit_prefixes(windows, family, kept, 1 / committed[windows.prefix])


def distance(family: Family, rule) -> float:
    return float(total_variation(stream_law(family, rule), target_law(family)))


@pytest.mark.parametrize("seed", range(12))
def test_cutting_at_a_stopping_time_is_exact(seed):
    family = random_family(seed, worlds=4)
    rule = stop_where_told(family, seed)
    assert deviation(stream_law(family, rule), target_law(family)) < TOLERANCE


def test_cutting_by_a_look_at_the_discarded_token_is_not_exact():
    assert distance(world_of_blocks(), drop_a_last_opener) == pytest.approx(DISTANCES["drop a last opener"], abs=1e-9)


def test_a_block_only_if_it_closes_in_this_window_is_not_exact():
    found = distance(world_of_blocks(), blocks_whole_or_not_at_all)
    assert found == pytest.approx(DISTANCES["block only if it closes"], abs=1e-9)


def test_rollback_is_not_exact():
    assert distance(world_of_blocks(), stage_rule("rollback")) == pytest.approx(DISTANCES["rollback"], abs=1e-9)


@pytest.mark.parametrize("policy", ["trim", "repair", "gate", "align"])
def test_the_other_policies_are_exact_on_the_same_world(policy):
    assert distance(world_of_blocks(), stage_rule(policy)) < TOLERANCE


def test_a_block_longer_than_a_window_never_comes_if_it_must_close_in_this_window():
    only_blocks = {OUTSIDE: (0.0, 1.0, 0.0, 0.0), INSIDE: (1.0, 0.0, 0.0, 0.0)}
    family = world_of_blocks(target=only_blocks, drafter=only_blocks)
    windows = rejection_windows(family, 0, torch.zeros(1, dtype=torch.int64))
    assert len(blocks_whole_or_not_at_all(family, windows).row) == 0


def test_rollback_lets_a_block_longer_than_a_window_come():
    only_blocks = {OUTSIDE: (0.5, 0.5, 0.0, 0.0), INSIDE: (1.0, 0.0, 0.0, 0.0)}
    family = world_of_blocks(target=only_blocks, drafter=only_blocks)
    law = stream_law(family, stage_rule("rollback"))
    open_text_text_text = ((OPEN * 4 + TEXT) * 4 + TEXT) * 4 + TEXT
    assert float(law.cut[open_text_text_text]) > 0
