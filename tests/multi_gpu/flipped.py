"""One rank of a tensor-parallel group is fed a flipped bit.

python -m tests.multi_gpu.flipped FOLDER --every N

With the debug switch on, every rank must stop with the same step, row and rank; with it off nothing stops, nothing
hangs, and the decisions differ (which shows that comparing them can fail).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from structured_commit.errors import RankMismatchError
from structured_commit.runtime import RUNTIME

from .engine import Engine
from .tensor_parallel import decode, engine_on, open_checkpoint
from .world import World, run

STEP, ROW, STEPS = 13, 5, 24


def flip_token(engine: Engine, victim: bool) -> None:
    """Bit 0 of an accepted token, between acceptance and the stage, in the first step from `STEP` on whose row is free
    text: there both tokens are legal, so the stage cannot mend it away."""

    def before_commit(rows, tokens, counts) -> None:
        request, step = rows[ROW], engine.steps + 1
        start = engine.model.checkpoint.table.info.start
        if engine.flipped is None and step >= STEP and int(RUNTIME.stage.state[request.py_seq_slot]) == start:
            engine.flipped = step
            if victim:
                tokens[ROW, 0] ^= 1

    engine.before_commit = before_commit


def flip_state(engine: Engine, victim: bool) -> None:
    """Bit 0 of a slot's count of steps, on the device: a fault in memory."""

    def before_commit(rows, tokens, counts) -> None:
        if engine.steps + 1 == STEP:
            engine.flipped = STEP
            if victim:
                RUNTIME.stage.steps[rows[ROW].py_seq_slot] ^= 1

    engine.before_commit = before_commit


def main(world: World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, required=True)
    args = parser.parse_args()
    checkpoint, victim = open_checkpoint(world, args.folder), world.size - 1
    for name, flip, every in (
        ("token", flip_token, args.every),
        ("state", flip_state, args.every),
        ("off", flip_token, 0),
    ):
        engine = engine_on(world, checkpoint, "repair", "rejection", every, [0])
        engine.flipped = None
        flip(engine, world.rank == victim)
        try:
            decode(engine, STEPS)
        except RankMismatchError as error:
            world.say(f"{name} flipped in step {engine.flipped} stopped in step {engine.steps + 1}: {error}")
            try:
                decode(engine, 1)
            except RankMismatchError:
                world.say(f"{name} stays stopped")
            continue
        digests = world.gather_objects(engine.digest)
        world.say(f"{name} flipped in step {engine.flipped} went on, digests differ: {len(set(digests)) > 1}")
    engine = engine_on(world, checkpoint, "repair", "rejection", args.every, [0])
    decode(engine, STEPS)
    digests = world.gather_objects(engine.digest)
    world.say(f"nothing flipped went on, digests differ: {len(set(digests)) > 1}")


if __name__ == "__main__":
    run(main)
