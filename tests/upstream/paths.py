"""Every way a double accepts tokens, by window: what a user would configure, and what the checkpoint brings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .common.engine import Engine
from .common.loading import WINDOWS, Tree
from .common.model_engine import Weights
from .common.tables import Table

# Ways to run a batch. Contexts are chunked in all of them.
STEP_BY_STEP = {"use_cuda_graph": True}  # generation batches are padded and run on a graph's own metadata
OVERLAPPED = {"disable_overlap_scheduler": False, "enable_attention_dp": True}  # with a dummy row behind the batch
SETTINGS = {"padded": STEP_BY_STEP, "overlap": OVERLAPPED}


@dataclass(frozen=True)
class DecodingPath:
    """One acceptance path. `law` is "argmax", "sampled" or "relaxed"; `ways` are the settings it is run in."""

    name: str
    windows: tuple[str, ...]
    speculative: dict[str, Any]
    weights: dict[str, Any] = field(default_factory=dict)
    law: str = "argmax"
    ways: tuple[str, ...] = ("padded", "overlap")

    @property
    def two_model(self) -> bool:
        return self.speculative["decoding_type"] == "User_Provided"

    @property
    def temperature(self) -> float | None:
        return 1.0 if self.law == "sampled" else None

    def may_overlap(self) -> bool:
        return not self.speculative.get("eagle_choices")

    def with_thinking_tokens(self, begin: int, end: int) -> DecodingPath:
        """The same path where those tokens of another vocabulary switch relaxed acceptance."""
        if self.law != "relaxed":
            return self
        tokens = {"begin_thinking_phase_token": begin, "end_thinking_phase_token": end}
        return replace(self, speculative={**self.speculative, **tokens})

    def engine(
        self, tree: Tree, target: Table, drafter: Table, vocab_size: int, *, stage: Any = None, **settings: Any
    ) -> Engine:
        """An engine on this path; `stage` is the `structured_commit` section."""
        chunk = {} if self.two_model else {"chunk_size": 4}
        speculative = self.speculative if stage is None else {**self.speculative, "structured_commit": stage}
        if tree.window == "w12" and self.law == "sampled":
            speculative = {**speculative, "allow_advanced_sampling": True}
        return Engine(tree, speculative, Weights(target, drafter, vocab_size, **{**chunk, **self.weights}), **settings)


def _spec(decoding_type: str, max_draft_len: int = 3, **more: Any) -> dict[str, Any]:
    return {"decoding_type": decoding_type, "max_draft_len": max_draft_len, **more}


_RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 3,
    "relaxed_delta": 0.6,
    "begin_thinking_phase_token": 1,
    "end_thinking_phase_token": 2,
}
_TREES = ("w13a", "w13b")
_ONE = ("overlap",)  # what the same worker does in another setting is tested without the addition
_UP_TO_13 = ("w12", *_TREES)
_REJECTION = WINDOWS[1:]

PATHS = (
    DecodingPath("eagle3-strict", WINDOWS, _spec("Eagle")),
    DecodingPath("mtp-strict", WINDOWS, _spec("MTP")),
    DecodingPath("mtp-thop", WINDOWS, _spec("MTP"), {"is_thop": True}),
    DecodingPath("mtp-eagle-strict", WINDOWS, _spec("MTP", use_mtp_vanilla=False)),
    DecodingPath("mtp-eagle-hybrid", _REJECTION, _spec("MTP", use_mtp_vanilla=False), {"hybrid": True}, ways=_ONE),
    DecodingPath("draft-target-strict", _REJECTION, _spec("Draft_Target")),
    DecodingPath("pard-strict", WINDOWS, _spec("PARD")),
    DecodingPath("dflash-strict", _REJECTION, _spec("DFlash")),
    DecodingPath("dflash-hybrid", _REJECTION, _spec("DFlash"), {"hybrid": True}, ways=_ONE),
    DecodingPath("dspark-strict", _REJECTION[1:], _spec("DSpark")),
    DecodingPath("dspark-standalone", ("w14",), _spec("DSpark", draft_is_embedded_in_target=False), ways=_ONE),
    DecodingPath("sa-strict", _REJECTION, _spec("SA")),
    DecodingPath("ngram-strict", ("w14",), _spec("NGram")),
    DecodingPath("ngram-hybrid", ("w14",), _spec("NGram"), {"hybrid": True}, ways=_ONE),
    DecodingPath("k3-fused", ("w14",), _spec("DFlash"), {"k3_decode": True}),
    DecodingPath("k3-dspark", ("w14",), _spec("DSpark"), {"k3_decode": True}, ways=("padded",)),
    DecodingPath("eagle3-changing-length", WINDOWS, _spec("Eagle3"), {"draft_len_schedule": [3, 0, 2, 0, 0, 3, 1]}),
    DecodingPath("mtp-without-drafts", WINDOWS, _spec("MTP"), {"draft_len_schedule": [0]}),
    DecodingPath("eagle3-tree", _UP_TO_13, _spec("Eagle3", 2, use_dynamic_tree=True)),
    DecodingPath("mtp-tree", ("w13b",), _spec("MTP", 2, use_dynamic_tree=True)),
    DecodingPath("mtp-tree-hybrid", ("w13b",), _spec("MTP", 2, use_dynamic_tree=True), {"hybrid": True}, ways=_ONE),
    DecodingPath("two-model", _UP_TO_13, _spec("User_Provided")),
    DecodingPath("two-model-tree", _UP_TO_13, _spec("User_Provided", 5, eagle_choices=True)),
    DecodingPath("eagle3-sampled", WINDOWS, _spec("Eagle3"), law="sampled"),
    DecodingPath("eagle3-rejection", _REJECTION, _spec("Eagle3", use_rejection_sampling=True), law="sampled"),
    DecodingPath("pard-sampled", ("w12", "w13a"), _spec("PARD"), law="sampled"),
    DecodingPath("pard-rejection", _REJECTION[1:], _spec("PARD", use_rejection_sampling=True), law="sampled"),
    DecodingPath("dflash-sampled", ("w13a",), _spec("DFlash"), law="sampled"),
    DecodingPath("dflash-rejection", _REJECTION[1:], _spec("DFlash", use_rejection_sampling=True), law="sampled"),
    DecodingPath("dspark-rejection", _REJECTION[1:], _spec("DSpark", use_rejection_sampling=True), law="sampled"),
    DecodingPath("sa-sampled", ("w13a",), _spec("SA"), law="sampled"),
    DecodingPath("mtp-rejection", _REJECTION, _spec("MTP", use_rejection_sampling=True), law="sampled"),
    DecodingPath("mtp-sampled", WINDOWS, _spec("MTP"), law="sampled", ways=_ONE),
    DecodingPath("mtp-single-sampled", WINDOWS, _spec("MTP"), {"draft_len_schedule": [0]}, law="sampled"),
    DecodingPath("eagle3-tree-sampled", ("w13b",), _spec("Eagle3", 2, use_dynamic_tree=True), law="sampled"),
    DecodingPath(
        "eagle3-tree-rejection",
        ("w13b",),
        _spec("Eagle3", 2, use_dynamic_tree=True, use_rejection_sampling=True),
        law="sampled",
    ),
    DecodingPath("two-model-sampled", _TREES, _spec("User_Provided"), law="sampled"),
    DecodingPath("two-model-recovering", ("w12",), _spec("User_Provided"), law="sampled"),
    DecodingPath("two-model-rejection", _TREES, _spec("User_Provided", use_rejection_sampling=True), law="sampled"),
    DecodingPath("mtp-relaxed", WINDOWS, _spec("MTP", **_RELAXED), law="relaxed"),
    DecodingPath("eagle3-relaxed", WINDOWS, _spec("Eagle3", **_RELAXED), law="relaxed"),
)


def cases(*, law: str | None = None, two_model: bool | None = None, settings: bool = True) -> list[tuple]:
    """(window, path, settings) for a test's parameters, or (window, path)."""
    found = []
    for path in PATHS:
        if (law and path.law != law) or (two_model is not None and path.two_model != two_model):
            continue
        for window in path.windows:
            ways = [name for name in path.ways if name != "overlap" or path.may_overlap()]
            found += [(window, path, way) for way in ways] if settings else [(window, path)]
    return found


def name(value: Any) -> str:
    """How pytest shows a parameter."""
    return value.name if isinstance(value, DecodingPath) else str(value)
