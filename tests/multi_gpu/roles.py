"""Roles that a rank can have: a pipeline's first stage, a context server, a generation server.

python -m tests.multi_gpu.roles FOLDER --requests N

Even ranks are a pipeline's first stage, or a context server, for the odd rank after them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from structured_commit import hooks
from structured_commit.runtime import RUNTIME
from structured_commit.table import IN_BLOCK, IN_HEADER

from .engine import MAX_ROWS, Engine, Model, build, mapping, new_request, whole_head
from .tensor_parallel import open_checkpoint
from .world import World, run


def decode(engine: Engine, requests: list) -> dict[int, list[int]]:
    """Outputs by request; a request joins when a slot is free."""
    waiting = list(requests)
    while waiting or engine.running:
        while waiting and len(engine.running) < MAX_ROWS:
            engine.join(waiting.pop(0))
        engine.step()
    return {r.py_request_id: r.output for r in engine.done}


def first_stage(world: World, model: Model) -> None:
    """Rows of the target for the last stage, until it has no more; the stage is never built here."""
    place = mapping(rank=world.rank, pp_size=2, is_last_pp_rank=lambda: False)
    build(model.checkpoint, "repair", place)
    assert RUNTIME.stage is None
    engine = Engine(model, whole_head(model), "greedy")
    while (asked := world.comm.recv(source=world.rank + 1)) is not None:
        rows = [new_request(model.checkpoint, 0)]
        hooks.bind(engine._metadata(1, 1), rows)  # the engine of a first stage calls it too
        tokens, counts = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        assert hooks.commit_strict(None, tokens, counts, None, 1, 1, None) == (tokens, counts)
        world.comm.send(model.logits(asked).cpu(), dest=world.rank + 1)
    assert RUNTIME.stage is None
    assert RUNTIME.rows is None
    assert not RUNTIME.aside


def last_stage(world: World, model: Model, requests: list) -> dict[int, list[int]]:
    """Accepts and commits what the first stage computed."""
    place = mapping(rank=world.rank, pp_size=2, is_last_pp_rank=lambda: True)
    build(model.checkpoint, "repair", place)
    assert RUNTIME.stage is not None
    engine = Engine(model, whole_head(model), "greedy")

    def target(contexts):
        world.comm.send(list(contexts), dest=world.rank - 1)
        return world.comm.recv(source=world.rank - 1).to(world.device)

    engine.target = target
    outputs = decode(engine, requests)
    world.comm.send(None, dest=world.rank - 1)
    return outputs


def context_server(world: World, model: Model, requests: list) -> None:
    """Context passes only; each first token goes to the generation server."""
    build(model.checkpoint, "repair", mapping(rank=0))
    engine = Engine(model, whole_head(model), "greedy")
    for request in requests:
        engine.join(request)
        engine.step()
        world.comm.send((request.py_request_id, request.output[0]), dest=world.rank + 1)
        engine.running.clear()
        engine.done.clear()


def generation_server(world: World, model: Model, requests: list) -> tuple[dict[int, list[int]], int]:
    """Outputs, and how many requests were bound inside a block or a header."""
    build(model.checkpoint, "repair", mapping(rank=0))
    engine, inside = Engine(model, whole_head(model), "greedy"), 0
    host = RUNTIME.stage.table.host
    flags = RUNTIME.stage.table.state_flags.cpu()
    for request in requests:
        number, first = world.comm.recv(source=world.rank - 1)
        assert number == request.py_request_id
        request.receive(first)
        request.py_draft_tokens = [0, 0, 0]  # the context server's drafts are not sent here
        request.py_seq_slot = 0
        if first == request.py_end_id:
            request.finish_by("end", 0)
            engine.done.append(request)
            continue
        hooks.bind(engine._metadata(0, 1), [request])
        bound = int(RUNTIME.stage.state[0])
        assert bound == host.locate([*request.prompt, first], len(request.prompt))
        inside += bool(int(flags[bound]) & (IN_BLOCK | IN_HEADER)) if bound < len(flags) else 0
        outputs = decode_received(engine, request)
        assert outputs
    return {r.py_request_id: r.output for r in engine.done}, inside


def decode_received(engine: Engine, request) -> list[int]:
    """A request that is past its context: it joins as it is."""
    engine.running.append(request)
    while engine.running:
        engine.step()
    return request.output


def main(world: World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, required=True)
    args = parser.parse_args()
    assert world.size % 2 == 0
    model = Model(open_checkpoint(world, args.folder), world.device)

    def requests() -> list:
        return [new_request(model.checkpoint, n) for n in range(args.requests)]

    if world.rank % 2 == 0:
        first_stage(world, model)
        context_server(world, model, requests())
        return
    build(model.checkpoint, "repair", mapping(rank=0))
    alone = decode(Engine(model, whole_head(model), "greedy"), requests())
    assert last_stage(world, model, requests()) == alone
    disaggregated, inside = generation_server(world, model, requests())
    assert disaggregated == alone
    illegal = sum(model.checkpoint.first_illegal(r, alone[r.py_request_id]) is not None for r in requests())
    world.say(json.dumps({"requests": len(alone), "inside": inside, "illegal": illegal}))


if __name__ == "__main__":
    run(main)
