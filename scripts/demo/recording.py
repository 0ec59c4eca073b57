"""The demo's losing request once more, with a flight recorder beside a stage over the whole vocabulary.

The demo decodes over the tokens that its turns use; a trace holds the real ids. Where every other token has probability
zero both stages commit the same, and the stage here is given exactly what the other one is given.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from structured_commit import CommitConfig, CommitStage, StructureTable
from structured_commit.recording.recorder import Recorder
from structured_commit.repair import Distribution
from structured_commit.settings import RecordSettings

from .decoding import NUM_DRAFTS, Requests, Window, decode
from .model import World

RECORDED = ("observe", "repair")


def record_incidents(
    world: World,
    local: StructureTable,
    full: StructureTable,
    requests: Requests,
    request: int,
    acceptance: str,
    folder: Path,
) -> dict[str, Path]:
    """Decode `request` under each policy of `RECORDED`; the trace of each one's first incident, by policy.

    Args:
        local: the format over the demo's ids. full: over the whole vocabulary.

    Raises:
        OSError: `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    for policy in RECORDED:
        before = set(folder.glob("*.json"))
        flight = _Flight(world, full, requests, request, policy, folder)
        decode(world, local, requests, acceptance, policy, only=request, watch=flight.step)
        flight.recorder.flush()
        written = sorted(set(folder.glob("*.json")) - before)
        if flight.recorder.counts["record_failed"]:
            raise OSError(None, "a trace could not be written", str(folder))
        if written:
            found[policy] = written[0]
    return found


class _Flight:
    """A stage of the whole vocabulary beside the demo's, and its recorder."""

    def __init__(
        self, world: World, table: StructureTable, requests: Requests, request: int, policy: str, folder: Path
    ) -> None:
        self._world, self._policy, self._vocab = world, policy, table.vocab_size
        config = CommitConfig(policy=policy, repair_rows=1, seed=requests.seed)
        # The stage's own random numbers are a function of the slot: the same one as in the demo.
        self.stage = CommitStage(table, config, num_slots=len(requests), max_window=NUM_DRAFTS + 1)
        self.recorder = Recorder(self.stage, RecordSettings(str(folder)), width=NUM_DRAFTS + 1)
        prompt = world.to_real(world.prompt)
        self._slot = torch.tensor([request])
        self.stage.bind([request], [prompt])
        self.recorder.bind([request], [f"demo-{request}"], [prompt], [len(prompt)], [True])

    def step(self, drafts: Tensor, window: Window, probs: Tensor) -> None:
        """One step, as the demo is about to commit it: drafts [1, K], its window, probabilities [1, K+1, V']."""
        ids = self._world.ids
        tokens, lengths = ids[window.tokens.long()].int(), window.lengths.clone()
        wide = torch.zeros(*probs.shape[:2], self._vocab).index_copy_(2, ids, probs)
        given = Distribution(probs=wide)
        before = self.recorder.before(tokens, lengths, self._slot)
        events = self.stage.commit_(tokens, lengths, self._slot, **given._asdict())
        self.recorder.after(before, tokens, lengths, events, given, ids[drafts])
        self.recorder.next_step()
