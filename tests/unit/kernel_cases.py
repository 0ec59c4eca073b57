"""The fused kernels give what plain torch gives, to the bit: outputs, state, steps, repairs and counters.

Compiled where there is a GPU, else in Triton's interpreter, which must be switched on before Triton is imported: that
is why `test_kernel.py` runs this file in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/unit/kernel_cases.py
"""

from __future__ import annotations

import random

import pytest
import torch

from scripts.fuzz.compare import run_case
from structured_commit import CommitConfig, CommitStage, Policy, StageError, StructureTable, fused
from structured_commit.table import MAY_END, TERMINAL
from tests.support.calls import (
    BODY,
    CLOSE,
    END,
    ENDED,
    IN_TEXT,
    IN_THE_BODY,
    IN_THE_HEADER,
    NAME,
    OPEN,
    STRAY,
    TEXT,
    VOCAB,
    calls_table,
    int32,
)
from tests.support.kernel_pair import DEVICE, OnDevice, Pair, distribution, small_cases, windows

POLICIES = [p.value for p in Policy if p is not Policy.OFF]
REPAIRING = [p.value for p in Policy if p.repairs]
STATES = (0, IN_TEXT, IN_THE_HEADER, IN_THE_BODY, ENDED, STRAY)
KINDS = ("probs", "greedy", "sampled", "none")
WAYS = [(p, k) for p in POLICIES for k in KINDS if p in REPAIRING or k == "probs"]


# --- anything -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*POLICIES, "align"])
def test_the_kernels_do_what_the_definition_says_on_the_fuzzers_cases(rule):
    assert sum(run_case(n, "triton", OnDevice) for n in small_cases(rule, count=2 if DEVICE == "cpu" else 200))


@pytest.mark.parametrize(("policy", "kind"), WAYS)
def test_both_agree_on_rows_in_every_state_with_tokens_in_and_out_of_range(policy, kind):
    generator = torch.Generator().manual_seed(3)
    rows, width = 14, 3
    pair = Pair(calls_table(), num_slots=12, max_window=width, policy=policy, max_repairs=1, repair_rows=5, seed=9)
    slots = torch.tensor([*range(10), 12, 12, -1, 99])
    pair.set("state", [STATES[i % 6] for i in range(12)])
    tokens, lengths = windows(rows, width, generator, low=-1, high=VOCAB + 1)
    pair.commit(tokens, lengths - 1, slots, **distribution(kind, rows, width, VOCAB, generator))


@pytest.mark.parametrize(
    ("policy", "kind"), [way for way in WAYS if way[0] in REPAIRING and {*way} & {"repair", "probs"}]
)
def test_both_agree_where_nothing_is_legal_and_repairs_run_out(policy, kind):
    """Two repair rows for five rows that are illegal from the start, then repairs are spent."""
    generator = torch.Generator().manual_seed(4)
    pair = Pair(calls_table(), num_slots=6, max_window=3, policy=policy, max_repairs=1, repair_rows=2)
    pair.set("state", [IN_TEXT, IN_THE_HEADER, IN_THE_BODY] * 2)
    tokens = int32([[NAME, NAME, END], [TEXT, END, NAME], [OPEN, BODY, TEXT]] * 2)
    tokens[5] = int32([TEXT, NAME, OPEN])
    for _ in range(2):  # with repairs left, and without
        pair.commit(tokens, int32([3] * 6), torch.arange(6), **distribution(kind, 6, 3, VOCAB, generator))


@pytest.mark.parametrize("repair_rows", [1, 40])
def test_the_most_urgent_rows_are_redrawn_whatever_their_place(monkeypatch, repair_rows):
    """More rows than a program of the first kernel holds, and than one of the second looks at in one go."""
    monkeypatch.setattr(fused, "SCAN", 16)
    generator = torch.Generator().manual_seed(repair_rows)
    rows = 35
    pair = Pair(calls_table(), num_slots=rows, max_window=2, repair_rows=repair_rows, max_repairs=3)
    pair.set("state", [IN_TEXT] * rows)
    choice = (torch.randint(9, (rows,), generator=generator) - 6).clamp(min=0)  # two rows in nine are illegal
    choice[-1] = 2
    tokens = int32([[TEXT, TEXT], [TEXT, NAME], [NAME, TEXT]])[choice]
    given = distribution("probs", rows, 2, VOCAB, generator)
    out = pair.commit(tokens, int32([2] * rows), torch.randperm(rows, generator=generator), **given)
    assert len(set(out.events.tolist())) > 1


# --- the draw -----------------------------------------------------------------------------------------------------

EXTREMES = (0, 2**31 + 1, 2**32 - 1)


@pytest.mark.parametrize("kind", ["probs", "greedy", "sampled"])
def test_a_draw_is_the_same_from_a_vocabulary_of_many_blocks(monkeypatch, kind):
    monkeypatch.setattr(fused, "BLOCK", 32)
    table, generator = wide_table(states=5, classes=9, vocab=70, seed=1), torch.Generator().manual_seed(5)
    rows = len(EXTREMES) ** 2
    pair = Pair(table, num_slots=rows, max_window=1, repair_rows=rows)
    states = [2 + i % 3 for i in range(rows)]
    pair.set("state", states)
    illegal = [next(t for t in range(70) if table.host.step(s, t) < 0) for s in states]
    words = torch.tensor([[high, low] for high in EXTREMES for low in EXTREMES])
    given = distribution(kind, rows, 1, 70, generator)
    given["probs" if kind == "probs" else "logits"][0, 0, :40] = (
        0  # the smallest number, and no weight in a whole block
    )
    out = pair.commit(int32(illegal)[:, None], int32([1] * rows), torch.arange(rows), words=words, **given)
    assert len(set(out.tokens.flatten().tolist())) > 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["probs", "greedy", "sampled"])
def test_scores_of_every_dtype_and_of_no_sense_give_the_same_draw(kind, dtype):
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(8, 1, VOCAB, generator=generator).to(dtype)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 2.0, 1e-30, 0.0]).to(dtype)
    scores[2:, 0, TEXT], scores[4:, 0, END], scores[6:, 0, OPEN] = odd[:6], odd[[1, 0, 2, 6]], odd[[2, 0]]
    pair = Pair(calls_table(), num_slots=8, max_window=1, repair_rows=8)
    pair.set("state", [IN_TEXT] * 8)
    given = {"probs" if kind == "probs" else "logits": scores}
    if kind == "sampled":
        given["temperature"] = torch.ones(8)
    pair.commit(int32([[NAME]] * 8), int32([1] * 8), torch.arange(8), **given)


def sampled_rows(monkeypatch, logits: torch.Tensor, **filters: torch.Tensor) -> list[int]:
    """What takes an illegal token's place, from [R, V] logits in blocks of 16 tokens; words go from 0 to the last."""
    monkeypatch.setattr(fused, "BLOCK", 16)
    rows, vocab = logits.shape
    table = wide_table(states=5, classes=9, vocab=vocab, seed=1)
    pair = Pair(table, num_slots=rows, max_window=1, repair_rows=rows)
    pair.set("state", [2] * rows)
    illegal = next(t for t in range(vocab) if table.host.step(2, t) < 0)
    words = torch.tensor([[(2**32 - 1) * i // max(1, rows - 1), 0] for i in range(rows)])
    out = pair.commit(
        int32([[illegal]] * rows), int32([1] * rows), torch.arange(rows), logits=logits[:, None], words=words, **filters
    )
    assert all(table.host.step(2, t) >= 0 for t in out.tokens.flatten().tolist())
    return out.tokens.flatten().tolist()


STRANGE = (torch.nan, torch.inf, -torch.inf, 3e38, -3e38, -0.0)


def test_filters_are_found_by_bisection_where_torch_sorts(monkeypatch):
    """Limits below, at and above what they can be; values that tie over blocks, and that are no numbers."""
    generator = torch.Generator().manual_seed(16)
    logits = (torch.randn(12, 40, generator=generator) * 4).round()
    logits[6:, ::9] = torch.tensor(STRANGE)[:, None]
    temperature = torch.tensor([1.0, 0.3, 2.0, 0.0, torch.inf, torch.nan]).repeat(2)
    top_k = int32([3, 0, 1, 5, 40, 1 << 20, 39, -1, 2, 7, 12, 1])
    top_p = torch.tensor([0.9, 0.5, 1 - 2**-24, 0.1, 0.0, -1.0, torch.nan, 1e-9, 0.75, 1.0, 2.0, 0.99])
    sampled_rows(monkeypatch, logits, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("filters", [{"top_k": int32([38] * 3)}, {"top_p": torch.tensor([0.9] * 3)}, {}])
def test_a_legal_part_that_is_hardly_possible_is_drawn_from_by_its_own_odds(monkeypatch, filters):
    """All legal tokens e^-60 below the illegal ones: top-p leaves none of them, so the best comes."""
    host = wide_table(states=5, classes=9, vocab=40, seed=1).host
    unlikely = torch.tensor([60.0 * (host.step(2, token) >= 0) for token in range(40)])
    logits = (torch.arange(40) * 0.01 - unlikely).repeat(3, 1)
    found = sampled_rows(monkeypatch, logits, temperature=torch.ones(3), **filters)
    assert len(set(found)) == (1 if "top_p" in filters else 3)


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**64 - 1])
def test_the_random_stream_is_the_same_for_any_seed_and_step(seed):
    pair = Pair(calls_table(), num_slots=3, max_window=1, seed=seed, repair_rows=3)
    pair.set("state", [IN_TEXT] * 3)
    pair.set("steps", [0, 2**32 - 1, 2**45 + 7])
    probs = torch.full((3, 1, VOCAB), 1 / VOCAB)
    pair.commit(int32([[NAME]] * 3), int32([1] * 3), torch.tensor([2, 0, 1]), probs=probs)


def test_a_tree_takes_each_columns_scores_from_its_own_row():
    generator = torch.Generator().manual_seed(7)
    pair = Pair(calls_table(), num_slots=4, max_window=3, repair_rows=4)
    pair.set("state", [IN_TEXT] * 4)
    tokens = int32([[NAME, TEXT, TEXT], [TEXT, NAME, TEXT], [TEXT, TEXT, NAME], [TEXT, TEXT, TEXT]])
    source_rows = torch.randperm(12, generator=generator).reshape(4, 3)
    for kind in ("probs", "greedy", "sampled"):
        given = distribution(kind, 4, 3, VOCAB, generator)
        name = "probs" if kind == "probs" else "logits"
        given[name] = given[name].reshape(12, VOCAB)
        pair.commit(tokens, int32([3] * 4), torch.arange(4), source_rows=source_rows, **given)


@pytest.mark.parametrize("kind", ["probs", "sampled"])
def test_source_rows_past_a_rows_length_are_not_looked_at(kind):
    generator = torch.Generator().manual_seed(8)
    pair = Pair(calls_table(), num_slots=2, max_window=2)
    pair.set("state", [IN_TEXT] * 2)
    given = distribution(kind, 2, 1, VOCAB, generator)
    name = "probs" if kind == "probs" else "logits"
    given[name] = given[name].reshape(2, VOCAB)
    source_rows = torch.tensor([[0, 10**9], [1, -(10**9)]])
    pair.commit(int32([[NAME, TEXT], [TEXT, TEXT]]), int32([1, 1]), torch.arange(2), source_rows=source_rows, **given)


# --- shapes and layouts -------------------------------------------------------------------------------------------


def wide_table(states: int, classes: int, vocab: int, seed: int) -> StructureTable:
    """A random table; from every state class 1 leads to state 1, where class 0, the terminal, ends the turn."""
    choose = random.Random(seed)
    rows = [[0] * classes]
    for state in range(1, states):
        rows.append([choose.randrange(1, states) if choose.random() < 0.6 else -1 for _ in range(classes)])
        rows[-1][0], rows[-1][1] = (1 if state == 1 else -1), 1
    token_class = [*range(classes), *(choose.randrange(classes) for _ in range(vocab - classes))]
    return StructureTable(
        torch.tensor(token_class, dtype=torch.int16),
        torch.tensor(rows, dtype=torch.int16),
        torch.tensor([MAY_END, MAY_END] + [0] * (states - 2), dtype=torch.uint8),
        torch.tensor([TERMINAL] + [0] * (classes - 1), dtype=torch.uint8),
    )


@pytest.mark.parametrize(("states", "classes"), [(253, 256), (254, 257), (300, 300)])
def test_tables_on_both_sides_of_a_byte_are_read_alike(states, classes):
    table = wide_table(states, classes, vocab=310, seed=states)
    generator = torch.Generator().manual_seed(9)
    pair = Pair(table, num_slots=6, max_window=4, repair_rows=6)
    pair.set("state", [1, 2, states - 1, states - 2, table.ended, table.stray])
    tokens, lengths = windows(6, 4, generator, high=310)
    tokens[4:] = int32([[1, 0, 5, 6]] * 2)
    pair.commit(tokens, lengths, torch.arange(6), **distribution("probs", 6, 4, 310, generator))


def test_inputs_may_lie_anywhere():
    generator = torch.Generator().manual_seed(10)
    rows, width = 5, 3
    pair = Pair(calls_table(), num_slots=rows, max_window=width, repair_rows=rows)
    tokens, lengths = windows(rows, width, generator)

    def spread(t: torch.Tensor) -> torch.Tensor:
        """The same values, every dimension strided, none dense."""
        turned = torch.zeros(*(2 * n + 1 for n in t.shape[::-1]), dtype=t.dtype)
        view = turned.permute(*range(t.dim() - 1, -1, -1))[tuple(slice(1, None, 2) for _ in t.shape)]
        view.copy_(t)
        assert t.dim() == 1 or not view.is_contiguous()
        return view

    words = torch.randint(2**32, (rows, 2), generator=generator)
    source_rows = torch.randperm(rows * width, generator=generator).reshape(rows, width)
    for kind in ("probs", "greedy", "sampled"):
        given = distribution(kind, rows, width, VOCAB, generator) | {"words": words}
        name = "probs" if kind == "probs" else "logits"
        flat = given[name].reshape(-1, VOCAB)
        for extra in ({}, {name: flat, "source_rows": source_rows}):
            pair.set("state", [IN_TEXT] * rows)
            strided = {n: spread(t) for n, t in (given | extra).items()}
            pair.commit(spread(tokens), spread(lengths), spread(torch.arange(rows)), **strided)


@pytest.mark.parametrize("policy", ["observe", "trim", "repair"])
def test_in_place_writes_what_commit_returns_wherever_it_lies(policy):
    generator = torch.Generator().manual_seed(11)
    pair = Pair(calls_table(), num_slots=6, max_window=4, policy=policy, repair_rows=3)
    pair.set("state", [IN_TEXT] * 6)
    tokens, lengths = (t.to(DEVICE) for t in windows(6, 4, generator))
    slots = torch.arange(6, device=DEVICE)
    given = {"probs": distribution("probs", 6, 4, VOCAB, generator)["probs"].to(DEVICE)}
    expected = pair.torch.commit(tokens, lengths, slots, **given)
    wide, long = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE), int32([7] * 12).to(DEVICE)
    own_tokens, own_lengths = wide.T[::2], long[::2]
    own_tokens.copy_(tokens)
    own_lengths.copy_(lengths)
    events = pair.triton.commit_(own_tokens, own_lengths, slots, **given)
    assert torch.equal(own_tokens, expected.tokens)
    assert torch.equal(own_lengths, expected.lengths)
    assert torch.equal(events, expected.events)
    assert not wide.T[1::2].any()
    assert set(long[1::2].tolist()) == {7}
    pair.compare()


def test_in_place_refuses_rows_that_share_memory_before_anything_is_written():
    pair = Pair(calls_table(), num_slots=2, max_window=2)
    shared = int32([[NAME, TEXT]]).to(DEVICE).expand(2, -1)
    probs = torch.full((2, 2, VOCAB), 1 / VOCAB, device=DEVICE)
    with pytest.raises(StageError, match="tokens is expanded: its rows share memory"):
        pair.triton.commit_(shared, int32([2, 2]).to(DEVICE), torch.arange(2, device=DEVICE), probs=probs)
    assert not pair.triton.steps.any()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_batch_is_an_empty_batch(policy):
    pair = Pair(calls_table(), num_slots=2, max_window=3, policy=policy)
    empty = torch.empty(0, 3, dtype=torch.int32)
    out = pair.commit(empty, empty[:, 0], torch.empty(0, dtype=torch.int64), probs=torch.empty(0, 3, VOCAB))
    assert out.tokens.shape == (0, 3)


def test_windows_of_any_width_up_to_the_stages_own_and_none_beyond():
    """The kernel has no width built in; what bounds it is the stage."""
    generator = torch.Generator().manual_seed(12)
    pair = Pair(calls_table(), num_slots=2, max_window=20)
    for width in (1, 2, 3, 20):
        pair.set("state", [IN_TEXT, IN_THE_BODY])
        tokens = torch.full((2, width), TEXT, dtype=torch.int32)
        tokens[0, -1] = NAME
        given = distribution("probs", 2, width, VOCAB, generator)
        pair.commit(tokens, int32([width] * 2), torch.arange(2), **given)
    with pytest.raises(StageError, match="windows of 21 columns; this stage was built for 1 to 20"):
        pair.commit(*windows(2, 21, generator), torch.arange(2), redraw=False)


def test_the_state_follows_over_many_steps():
    generator = torch.Generator().manual_seed(13)
    pair = Pair(calls_table(), num_slots=3, max_window=3, policy="gate", repair_rows=2, max_repairs=4)
    for stage in (pair.torch, pair.triton):
        stage.bind([0, 1, 2], [[OPEN], [OPEN, BODY], [OPEN, BODY, CLOSE]], prompt_lengths=[1, 1, 1])
    for _ in range(4):
        tokens, lengths = windows(3, 3, generator, high=END)
        pair.commit(tokens, lengths, torch.arange(3), **distribution("probs", 3, 3, VOCAB, generator))
    assert pair.triton.repairs.any()


# --- launches -----------------------------------------------------------------------------------------------------


class Recorded:
    """Stands for a kernel: notes grid, tensor layouts and constants of each launch, then launches."""

    def __init__(self, kernel, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **constants):
            shapes = [(tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
            self.launches.append((self.kernel.__name__, grid, shapes, constants))
            return self.kernel[grid](*args, **constants)

        return launch


@pytest.mark.parametrize(("policy", "kind"), [way for way in WAYS if "repair" in way or "probs" in way])
def test_launches_do_not_depend_on_values(monkeypatch, policy, kind):
    launches: list = []
    for name in ("commit_kernel", "repair_kernel"):
        monkeypatch.setattr(fused, name, Recorded(getattr(fused, name), launches))
    generator = torch.Generator().manual_seed(14)
    stage = CommitStage(
        calls_table(),
        CommitConfig(policy=policy, backend="triton", repair_rows=2),
        num_slots=4,
        max_window=2,
        device=DEVICE,
    )
    given = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v
        for k, v in distribution(kind, 4, 2, VOCAB, generator).items()
    }
    persistent = (stage.state, stage.steps, stage.repairs, stage.counters)
    addresses = [t.data_ptr() for t in persistent]
    seen = []
    for token in (TEXT, NAME):
        launches.clear()
        stage.state[:4] = IN_TEXT
        tokens = torch.full((4, 2), token, dtype=torch.int32, device=DEVICE)
        stage.commit_(tokens, int32([2] * 4).to(DEVICE), torch.arange(4, device=DEVICE), **given)
        seen.append(list(launches))
    assert seen[0] == seen[1]
    assert len(seen[0]) == (2 if policy in REPAIRING and kind != "none" else 1)
    assert [t.data_ptr() for t in persistent] == addresses


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("policy", "kind"), WAYS)
def test_a_captured_graph_does_what_torch_does(policy, kind):
    generator = torch.Generator().manual_seed(15)
    rows, width = 12, 4
    pair = Pair(calls_table(), num_slots=rows, max_window=width, policy=policy, repair_rows=3)
    tokens, lengths = (t.to(DEVICE) for t in windows(rows, width, generator))
    slots = torch.arange(rows, device=DEVICE)
    given = distribution(kind, rows, width, VOCAB, generator)
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    pair.commit(tokens, lengths, slots, **given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.triton.commit(tokens, lengths, slots, **given)
    for _ in range(5):
        fresh = windows(rows, width, generator)
        tokens.copy_(fresh[0])
        lengths.copy_(fresh[1])
        pair.set("state", [STATES[i % 6] for i in range(rows)])
        graph.replay()
        expected = pair.torch.commit(tokens, lengths, slots, **given)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        pair.compare()
