"""A stage with a flight recorder, stepped as hooks do it."""

import torch

from structured_commit import CommitConfig, CommitStage
from structured_commit.recording.recorder import Recorder
from structured_commit.recording.trace import read_trace
from structured_commit.repair import Distribution
from structured_commit.settings import RecordSettings
from tests.support.calls import CLOSE, OPEN, TEXT, calls_table, certain, int32

WIDTH = 4
ORDINARY, BROKEN = (TEXT, TEXT, TEXT), (TEXT, CLOSE, TEXT)


class Flight:
    """A stage with a recorder, stepped as hooks do it."""

    def __init__(self, folder, policy="repair", table=None, *, width=WIDTH, texts=None, config=None, slots=3, **record):
        self.folder = folder
        self.config = config or CommitConfig(policy=policy)
        self.stage = CommitStage(table or calls_table(), self.config, num_slots=slots, max_window=2 * width)
        settings = RecordSettings(str(folder), **{"windows": 4, **record})
        self.recorder = Recorder(self.stage, settings, rank=7, width=width, texts=texts)
        self.owners = {}  # slot → the request that was bound last
        self.seen = {}  # request → what was done to it, window by window

    def bind(self, slot, name, prompt=(TEXT, OPEN), state=1):
        self.recorder.bind([slot], [name], [list(prompt)], [len(prompt)], [True])
        self.stage.state[slot] = state
        self.owners[slot] = str(name)
        self.seen[str(name)] = []

    def step(self, tokens, lengths, slots, given, drafts=None, redraw=True):
        before = self.recorder.before(tokens, lengths, slots)
        accepted, states = tokens.tolist(), self.stage.state.tolist()
        counts = lengths.clamp(1, tokens.shape[1]).tolist()
        events = self.stage.commit_(tokens, lengths, slots, redraw=redraw, **given._asdict())
        self.recorder.after(before, tokens, lengths, events, given, drafts)
        for i, slot in enumerate(slots.tolist()):
            if slot in self.owners:
                committed = tuple(tokens[i, : max(1, min(int(lengths[i]), tokens.shape[1]))].tolist())
                what = (tuple(accepted[i][: counts[i]]), committed, int(events[i]))
                self.seen[self.owners[slot]].append((*what, states[slot], int(self.stage.state[slot])))
        self.recorder.next_step()

    def window(self, slot, *tokens, drafts=None):
        """One window of one slot, all mass of every column on TEXT."""
        given = Distribution(probs=certain(TEXT, width=len(tokens)))
        drafts = None if drafts is None else torch.tensor([drafts])
        self.step(int32([list(tokens)]), int32([len(tokens)]), torch.tensor([slot]), given, drafts)

    def traces(self):
        self.recorder.flush()
        return [read_trace(path) for path in sorted(self.folder.glob("*.json"))]
