"""Attention data parallelism: each rank owns other requests, and the draft head is shared by the group.

python -m tests.multi_gpu.attention_dp FOLDER --steps N [--acceptance A]

Rank 0 is busy to the end, rank 1 has nothing for a while and leaves early, the last rank never has a request. Each
rank's streams must equal those of the same requests decoded by that rank alone, without communication.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from structured_commit.runtime import RUNTIME

from .engine import DRAFTS, MAX_ROWS, Engine, Head, Model, build, mapping, new_request, stacked_head, whole_head
from .tensor_parallel import open_checkpoint
from .world import CALLS, World, run

LATE = 4
SHORT = 5  # tokens, so that what came late leaves early


def rows_wanted(rank: int, size: int, step: int, steps: int) -> int:
    """How many requests this rank should have running: all ranks differ, and none needs to be asked."""
    if rank == 0:
        return MAX_ROWS - step % 3
    if rank == size - 1 and size > 2:
        return 0
    return 1 + rank if LATE <= step < steps // 2 else 0


def decode(world: World, model: Model, head: Head, args: argparse.Namespace) -> tuple[Engine, list[int]]:
    """This rank's requests, in lockstep with the others only as far as `head` is."""
    place = mapping(rank=world.rank, tp_rank=world.rank, tp_size=world.size, enable_attention_dp=True)
    build(model.checkpoint, "repair", place, world.gather_objects, rank_check_every=4)
    assert RUNTIME.rank_check is None  # each rank owns other requests: a comparison would hang
    engine = Engine(model, head, args.acceptance)
    number, sizes = 100 * world.rank, []
    for step in range(args.steps):
        for _ in range(rows_wanted(world.rank, world.size, step, args.steps) - len(engine.running)):
            request = new_request(model.checkpoint, number)
            request.py_max_new_tokens = SHORT if world.rank else request.py_max_new_tokens
            engine.join(request)
            number += 1
        # A rank without requests has a dummy row in one step, as the executor adds one, and no row in the next.
        idle = not engine.running
        sizes.append(len(engine.running))
        engine.step(dummies=step % 2 if idle else 0)
    return engine, sizes


def main(world: World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--acceptance", default="rejection", choices=("rejection", "strict", "greedy"))
    args = parser.parse_args()
    model, counted = Model(open_checkpoint(world, args.folder), world.device), [0]
    CALLS.clear()
    engine, sizes = decode(world, model, stacked_head(model, world, counted), args)
    assert counted[0] == 2 * args.steps * DRAFTS
    assert CALLS.total() == counted[0], f"{counted[0]} gathers by the draft head, yet {dict(CALLS)}"
    together = engine.digest, [r.output for r in (*engine.done, *engine.running)], RUNTIME.stage.read_counters()
    alone, _ = decode(world, model, whole_head(model), args)
    found = alone.digest, [r.output for r in (*alone.done, *alone.running)], RUNTIME.stage.read_counters()
    assert found == together, f"rank {world.rank} of {world.size} decodes otherwise than alone"
    world.comm.Barrier()
    illegal = sum(model.checkpoint.first_illegal(r, r.output) is not None for r in (*engine.done, *engine.running))
    report = {"sizes": sizes, "requests": len(found[1]), "illegal": illegal, "counters": found[2]}
    world.say(json.dumps(report))


if __name__ == "__main__":
    run(main)
