"""Tensor parallelism: replicated requests, a draft head sharded over the vocabulary, verification on every rank.

python -m tests.multi_gpu.tensor_parallel FOLDER --windows N [--policy P] [--acceptance A]

Prints the digest of every decision, which must be the same on all ranks and for any number of ranks, and the totals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from structured_commit.runtime import RUNTIME
from tests.upstream.toy import Checkpoint

from .engine import DRAFTS, MAX_ROWS, Engine, Model, build, mapping, new_request, sharded_head
from .world import CALLS, World, run


def engine_on(
    world: World, checkpoint: Checkpoint, policy: str, acceptance: str, check_every: int, counted: list[int]
) -> Engine:
    """An engine of this rank; it joins no requests yet."""
    place = mapping(rank=world.rank, tp_rank=world.rank, tp_size=world.size)
    build(checkpoint, policy, place, world.gather_objects, rank_check_every=check_every)
    model = Model(checkpoint, world.device)
    return Engine(model, sharded_head(model, world, counted), acceptance)


def decode(engine: Engine, steps: int) -> None:
    """So many steps with `MAX_ROWS` rows each: a request that leaves is followed at once, in the same slot."""
    number = len(engine.done) + len(engine.running)
    for _ in range(steps):
        while len(engine.running) < MAX_ROWS:
            engine.join(new_request(engine.model.checkpoint, number))
            number += 1
        engine.step()


def open_checkpoint(world: World, folder: Path) -> Checkpoint:
    """This rank's own copy of the checkpoint."""
    own = folder / f"rank{world.rank}"
    own.mkdir(parents=True, exist_ok=True)
    return Checkpoint.write(own)


def main(world: World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--policy", default="repair")
    parser.add_argument("--acceptance", default="rejection", choices=("rejection", "strict", "greedy"))
    args = parser.parse_args()
    checkpoint, counted = open_checkpoint(world, args.folder), [0]
    engine = engine_on(world, checkpoint, args.policy, args.acceptance, 0, counted)
    CALLS.clear()
    steps = -(-args.windows // MAX_ROWS)
    decode(engine, steps)
    assert counted[0] == steps * DRAFTS
    assert CALLS.total() == counted[0], f"{counted[0]} gathers by the draft head, yet {dict(CALLS)}"
    requests = [*engine.done, *engine.running]
    outputs = [r.output for r in requests]
    found = (engine.digest, outputs, RUNTIME.stage.read_counters() if RUNTIME.stage else {})
    everyone = world.gather_objects(found)
    assert all(other == found for other in everyone), f"ranks differ: {[digest for digest, _, _ in everyone]}"
    illegal = sum(checkpoint.first_illegal(r, r.output) is not None for r in requests)
    report = {
        "device": world.device.type,
        "digest": found[0],
        "windows": steps * MAX_ROWS,
        "requests": len(requests),
        "illegal": illegal,
        "counters": found[2],
    }
    if world.rank == 0:
        world.say(json.dumps(report))


if __name__ == "__main__":
    run(main)
