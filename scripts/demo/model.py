"""The table language models of the demo: smoothed n-grams over the real o200k ids, every probability exact.

A *context* is a plan position (the kind of the request, the message it is at) and up to `ORDER` − 1 last tokens.
The target looks at all of it, the drafter at the last two tokens only. Both spread a little mass over what
follows the last token anywhere, and over all tokens by frequency: that is where a terminal inside a block or a
header that nobody can read comes from, as it does for a real model. Tokens that no generated turn holds and that
are no control tokens have probability zero, so only the others are kept (*local* ids, ascending in the real ones).

After a token that the plan position has never seen, an ordinary one is passed over (the context stays), while a
control token is believed: the context is then that token alone, whatever the request was.

Nothing here knows acceptance or the commit stage.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.vocabularies import ChatVocabulary

from .conversations import KINDS, write_turn

ORDER = 4
DRAFTER_ORDER = 3
TURNS_PER_KIND = 400
PROMPT = "<|start|>assistant"  # the end of every prompt: the turn starts inside its first header

_STAYS = -1  # in place of a context: keep the one there was
_NONE = -1  # in place of a context: there is no shorter one

Plan = int
Suffix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Smoothing:
    """How much mass the counts of the full context give away.

    Attributes:
        last_token: to what follows the last token, whatever came before it and whatever the request.
        any_token: to all tokens, by how frequent they are (add-one).
    """

    last_token: float
    any_token: float


# Chosen so that 3 to 4 % of the replies get a malformed header, as reported of gpt-oss at temperature 1
# (llama.cpp #27720). Everything else follows from it.
TARGET = Smoothing(last_token=0.0005, any_token=0.002)
DRAFTER = Smoothing(last_token=0.05, any_token=0.02)
NOISELESS = Smoothing(last_token=0.0, any_token=0.0)


class Contexts:
    """Which context follows which. Shared by target and drafter, so that one number tells both where they are.

    Numbers below `num_known` are the contexts that were seen; then, for each plan position, one for each token by
    itself.

    Args:
        streams: (kind, local ids of prompt and turn) of the turns to count from.
        controls: [V'] bool, which local ids are control tokens.
        opener: local id of `<|start|>`; each one moves the plan to the next message.

    Attributes:
        suffixes: for each known context, its plan position and its tokens.
        counts: for each known context, what followed it how often.
    """

    def __init__(self, streams: Sequence[tuple[int, list[int]]], controls: Tensor, opener: int) -> None:
        self.num_tokens, self.opener = len(controls), opener
        self._plan_width = 1 + max(len(k.messages) for k in KINDS)  # the last position lies beyond any plan
        self.num_plans = len(KINDS) * self._plan_width
        counts: dict[tuple[Plan, Suffix], Counter[int]] = defaultdict(Counter)
        for kind, tokens in streams:
            plan = kind * self._plan_width
            for i in range(1, len(tokens)):
                if i > 1 and tokens[i - 1] == opener:
                    plan += 1
                for n in range(1, min(ORDER, i + 1)):
                    counts[plan, tuple(tokens[i - n : i])][tokens[i]] += 1
        self.suffixes = list(counts)
        self.counts = list(counts.values())
        self.num_known = len(counts)
        index = {suffix: i for i, suffix in enumerate(self.suffixes)}
        alone = torch.arange(self.num_plans * self.num_tokens).view(self.num_plans, -1) + self.num_known
        self._after_unseen = torch.where(controls, alone, _STAYS)
        for (plan, suffix), i in index.items():
            if len(suffix) == 1:
                alone[plan, suffix[0]] = self._after_unseen[plan, suffix[0]] = i
        self._alone = alone
        self._plan = torch.cat(
            [
                torch.tensor([plan for plan, _ in self.suffixes]),
                torch.arange(self.num_plans).repeat_interleave(self.num_tokens),
            ]
        )
        shorter = torch.tensor([index[plan, s[1:]] if len(s) > 1 else _NONE for plan, s in self.suffixes])
        self._shorter = torch.cat([shorter, torch.full((self.num_plans * self.num_tokens,), _NONE)])
        self._keys, self._follow = self._transitions(index)

    def start(self, kinds: Sequence[int], prompt: Sequence[int]) -> Tensor:
        """[N] int64: the context at the end of the prompt, for requests of these kinds."""
        context = self._alone[torch.tensor(kinds) * self._plan_width, prompt[0]]
        for token in prompt[1:]:
            context = self.step(context, torch.full_like(context, token))
        return context

    def step(self, context: Tensor, token: Tensor) -> Tensor:
        """[N] int64: the context after `token` [N] int64, the longest one that was seen."""
        known = context < self.num_known
        plan = self._plan[context]
        last = plan % self._plan_width == self._plan_width - 1
        plan = torch.where((token == self.opener) & ~last, plan + 1, plan)
        follow = torch.where(known, self._after_unseen[plan, token], self._alone[plan, token])
        follow = torch.where(follow == _STAYS, context, follow)
        unsettled = known
        at = context
        for _ in range(ORDER - 1):
            key = at * self.num_tokens + token
            place = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
            hit = unsettled & (self._keys[place] == key)
            follow = torch.where(hit, self._follow[place], follow)
            unsettled = unsettled & ~hit
            at = self._shorter[at]
        return follow

    def _transitions(self, index: dict[tuple[Plan, Suffix], int]) -> tuple[Tensor, Tensor]:
        """Sorted keys, context · V' + token, of the transitions that were seen, and where they lead."""
        follow = {}
        for i, ((plan, suffix), seen) in enumerate(zip(self.suffixes, self.counts, strict=True)):
            for token in seen:
                after = plan + 1 if token == self.opener else plan
                whole = (*suffix, token)[-(ORDER - 1) :]
                known = (index[after, whole[n:]] for n in range(len(whole)) if (after, whole[n:]) in index)
                if (longest := next(known, None)) is not None:
                    follow[i * self.num_tokens + token] = longest
        keys = sorted(follow)
        return torch.tensor(keys), torch.tensor([follow[k] for k in keys])


class TableModel:
    """Next-token distributions, one row for each context that tells them apart.

    Attributes:
        probs: [rows, V'] float32, each row sums to one.
    """

    def __init__(self, contexts: Contexts, order: int, knows_plan: bool, smoothing: Smoothing) -> None:
        tokens = contexts.num_tokens
        groups: dict[tuple[Plan, Suffix], int] = {}
        row_of = []
        for plan, suffix in contexts.suffixes:
            key = (plan if knows_plan else -1, suffix[-(order - 1) :])
            row_of.append(groups.setdefault(key, len(groups)))
        counts = torch.zeros(len(groups), tokens)
        single = torch.zeros(tokens, tokens)
        for (_, suffix), row, seen in zip(contexts.suffixes, row_of, contexts.counts, strict=True):
            ids = torch.tensor(list(seen))
            amounts = torch.tensor(list(seen.values()), dtype=torch.float32)
            if len(suffix) < order:  # a longer one repeats the occurrences of its end
                counts[row, ids] += amounts
            if len(suffix) == 1:
                single[suffix[0], ids] += amounts
        frequency = single.sum(dim=0) + (1.0 if smoothing.any_token > 0 else 0.0)
        frequency /= frequency.sum()
        seen_single = single.sum(dim=1, keepdim=True)
        single = torch.where(seen_single > 0, single / seen_single.clamp(min=1), frequency)
        last = torch.zeros(len(groups), dtype=torch.int64)
        last[torch.tensor(row_of)] = torch.tensor([suffix[-1] for _, suffix in contexts.suffixes])
        counts /= counts.sum(dim=1, keepdim=True)
        counts *= 1 - smoothing.last_token - smoothing.any_token
        counts.add_(single[last], alpha=smoothing.last_token).add_(frequency, alpha=smoothing.any_token)
        single = single * (1 - smoothing.any_token) + smoothing.any_token * frequency
        self.probs = torch.cat([counts, single])
        self.probs /= self.probs.sum(dim=1, keepdim=True, dtype=torch.float64).float()
        unknown = torch.arange(tokens).repeat(contexts.num_plans) + len(groups)
        self._row = torch.cat([torch.tensor(row_of), unknown])

    def __call__(self, context: Tensor) -> Tensor:
        """[..., V'] float32: the distributions after contexts [...]."""
        return self.probs[self._row[context]]


@dataclass(frozen=True, eq=False)
class World:
    """Target, drafter, and the real ids behind their local ones.

    Attributes:
        ids: [V'] int64, the real id of each local one. local: the other way round.
        prompt: local ids of `PROMPT`.
        contexts, target, drafter: the models.
        thinking: local ids of what begins and ends the thinking phase for relaxed acceptance. TensorRT-LLM wants
            one token each, and Harmony has none that opens reasoning alone: any channel begins it.
    """

    ids: Tensor
    local: dict[int, int]
    prompt: list[int]
    thinking: tuple[int, int]
    contexts: Contexts
    target: TableModel
    drafter: TableModel

    def to_real(self, tokens: Sequence[int]) -> list[int]:
        """Real ids of local ones."""
        return self.ids[torch.as_tensor(tokens, dtype=torch.int64)].tolist()


def build_world(chat: ChatVocabulary, seed: int, target: Smoothing = TARGET, drafter: Smoothing = DRAFTER) -> World:
    """Generate turns, count them, smooth the counts."""
    choose = random.Random(seed)
    real = [
        (kind, chat.encode(PROMPT + write_turn(KINDS[kind], choose)))
        for kind in range(len(KINDS))
        for _ in range(TURNS_PER_KIND)
    ]
    used = {token for _, tokens in real for token in tokens} | set(chat.vocabulary.controls.values())
    used |= {chat.encode(chr(code))[0] for code in range(32, 127)}  # any half-spelled word can be finished
    ids = sorted(used)
    local = {token: i for i, token in enumerate(ids)}
    streams = [(kind, [local[t] for t in tokens]) for kind, tokens in real]
    controls = torch.tensor([token in chat.vocabulary.controls.values() for token in ids])
    contexts = Contexts(streams, controls, local[chat.vocabulary.controls["<|start|>"]])
    return World(
        ids=torch.tensor(ids),
        local=local,
        prompt=[local[t] for t in chat.encode(PROMPT)],
        thinking=(local[chat.vocabulary.controls["<|channel|>"]], local[chat.vocabulary.controls["<|end|>"]]),
        contexts=contexts,
        target=TableModel(contexts, ORDER, True, target),
        drafter=TableModel(contexts, DRAFTER_ORDER, False, drafter),
    )
