"""Real assisted generation on the CPU with a block proposer, for report huggingface/transformers#47912.

`python -m tests.support.assisted_generation` runs whatever transformers it imports and prints JSON, so that a test can
run it on an older release beside the installed one. The target is a tiny seeded Llama. The proposer drafts a block at a
time of what the target itself would go on with, EOS or not, as a good drafter of blocks does; every third block has a
wrong last token, so that windows of several lengths occur. Nothing of the library is replaced but the proposer, in a
subclass of the model, and what its streamer is handed is what it committed, window by window.
"""

from __future__ import annotations

import json

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator

from structured_commit import CommitConfig, CommitStage, StructureTable, TableInfo
from structured_commit.table import MAY_END, TERMINAL

VOCABULARY, BLOCK, NEW, PROMPT = 96, 4, 14, (5, 17, 33, 2)
CASES = 7
TEXT = 1  # the one tracked state: any token, and the terminal ends it


class BlockProposer(CandidateGenerator):
    """Drafts the next `BLOCK` tokens of a known continuation."""

    def __init__(self, known: list[int]) -> None:
        self.known, self.blocks = known, 0

    def get_candidates(self, input_ids: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        """[1, n] ids so far in, [1, n + BLOCK] out."""
        done = input_ids.shape[1] - len(PROMPT)
        block = self.known[done : done + BLOCK]
        self.blocks += 1
        if self.blocks % 3 == 0 and block:
            block = [*block[:-1], (block[-1] + 1) % VOCABULARY]
        return torch.cat([input_ids, torch.tensor([block], dtype=input_ids.dtype)], dim=1), None

    def update_candidate_strategy(self, *args, **kwargs) -> None:
        """Blocks keep their size."""


class Target(LlamaForCausalLM):
    """A Llama whose assisted generation drafts with `proposer`."""

    proposer: BlockProposer

    def _get_candidate_generator(self, *args, **kwargs) -> CandidateGenerator:
        return self.proposer


class Windows:
    """A streamer that keeps each window as it is committed."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt first, then [1, n] committed tokens at a time."""
        if not self._prompt:
            self.windows.append(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing is buffered."""


class Commit(Windows, StoppingCriteria):
    """A streamer that commits each window through the stage, and a stopping criterion: the turn has ended there."""

    def __init__(self, eos: int, policy: str) -> None:
        super().__init__()
        self.stage = CommitStage(
            end_table(eos), CommitConfig(policy=policy), num_slots=1, max_window=BLOCK + 1, device="cpu"
        )
        self.stage.bind(slots=[0], token_ids=[PROMPT])
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """As `Windows.put`; `tokens` is what the stage lets out."""
        prompt = self._prompt
        super().put(value)
        if prompt:
            return
        window = self.windows[-1]
        out = self.stage.commit(
            torch.tensor([window], dtype=torch.int32),
            torch.tensor([len(window)], dtype=torch.int32),
            torch.tensor([0]),
            redraw=False,
        )
        self.tokens += out.tokens[0, : int(out.lengths[0])].tolist()

    def __call__(self, input_ids: Tensor, scores: object, **kwargs) -> Tensor:
        """[1] bool."""
        return torch.tensor([int(self.stage.state[0]) == self.stage.table.ended])


def end_table(eos: int) -> StructureTable:
    """Any text behind the prompt's last token, ended by one terminal."""
    classes = torch.zeros(VOCABULARY, dtype=torch.int16)
    classes[eos] = 1
    return StructureTable(
        token_class=classes,
        next_state=torch.tensor([[0, 0], [TEXT, 0]], dtype=torch.int16),
        state_flags=torch.tensor([MAY_END, MAY_END], dtype=torch.uint8),
        class_flags=torch.tensor([0, TERMINAL], dtype=torch.uint8),
        info=TableInfo(format="text and EOS", start=TEXT, entries=((PROMPT[-1], TEXT),)),
    )


def model() -> Target:
    """The target, the same for everybody."""
    torch.manual_seed(47912)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.6,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Target(config).eval()


def generate(target: Target, eos: int | None, assisted: bool, **kwargs) -> list[int]:
    """New tokens of a greedy run. `prompt_lookup_num_tokens` only opens the assisted path; `proposer` drafts."""
    if assisted:
        kwargs["prompt_lookup_num_tokens"] = BLOCK
    out = target.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=eos,
        **kwargs,
    )
    return out[0, len(PROMPT) :].tolist()


def run() -> dict[str, object]:
    """Each token of the target's continuation in turn is declared to be EOS, at the place where it occurs first."""
    target = model()
    known = generate(target, None, assisted=False)
    cases = []
    for at, eos in enumerate(known):
        if eos in known[:at] or len(cases) == CASES:
            continue
        case: dict[str, object] = {"at": at, "plain": generate(target, eos, assisted=False)}
        streamer, target.proposer = Windows(), BlockProposer(known)
        case["assisted"] = generate(target, eos, assisted=True, streamer=streamer)
        case["windows"] = streamer.windows
        for policy in ("trim", "repair"):
            commit, target.proposer = Commit(eos, policy), BlockProposer(known)
            generate(target, eos, assisted=True, streamer=commit, stopping_criteria=StoppingCriteriaList([commit]))
            case[policy] = commit.tokens
            case[f"windows, {policy}"] = commit.windows
        cases.append(case)
    return {"version": transformers.__version__, "known": known, "cases": cases}


if __name__ == "__main__":
    print(json.dumps(run()))
