"""The configuration models around the one that is patched, and the modes they stand for.

Facts: X §4 (strict models, subclasses by `decoding_type`, Eagle rebuilt as Eagle3 from a dump).
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SpeculativeDecodingMode(Enum):
    MTP = "MTP"
    MTP_EAGLE = "MTP_EAGLE"
    EAGLE3_ONE_MODEL = "Eagle3"
    DRAFT_TARGET_ONE_MODEL = "Draft_Target"
    NGRAM = "NGram"
    DFLASH = "DFlash"
    PARD = "PARD"
    DSPARK = "DSpark"
    SA = "SA"
    TWO_MODEL = "User_Provided"

    def use_one_engine(self) -> bool:
        return self is not SpeculativeDecodingMode.TWO_MODEL

    def drafts_blocks(self) -> bool:
        kinds = SpeculativeDecodingMode.PARD, SpeculativeDecodingMode.DFLASH, SpeculativeDecodingMode.DSPARK
        return self in kinds


_RELAXED: dict[str, Any] = {
    "use_relaxed_acceptance_for_thinking": (bool, False),
    "relaxed_topk": (int, 1),
    "relaxed_delta": (float, 0.0),
    "begin_thinking_phase_token": (int, -2),
    "end_thinking_phase_token": (int, -2),
}
_FIELDS: dict[str, dict[str, Any]] = {
    "Eagle": {"use_dynamic_tree": (bool, False), "eagle3_one_model": (bool, True)},
    "Eagle3": {"use_dynamic_tree": (bool, False), "eagle3_one_model": (bool, True), **_RELAXED},
    "MTP": {"use_dynamic_tree": (bool, False), "use_mtp_vanilla": (bool, True), **_RELAXED},
    "Draft_Target": {},
    "NGram": {},
    "DFlash": {},
    "PARD": {},
    "DSpark": {"draft_is_embedded_in_target": (bool, True)},
    "SA": {"max_matching_ngram_size": (int, -1)},
    "User_Provided": {"eagle_choices": (bool, False)},
}


@cache
def config_classes(base: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """A subclass of the window's own `DecodingBaseConfig` for each decoding type."""
    return {
        kind: create_model(
            f"{kind.replace('_', '')}DecodingConfig", __base__=base, decoding_type=(Literal[kind], kind), **extra
        )
        for kind, extra in _FIELDS.items()
    }


class TorchLlmArgs(StrictBaseModel):
    """What `create_py_executor` is given. `_double` carries what a real tree would load from the checkpoint."""

    speculative_config: Any = None
    max_batch_size: int = 4
    max_seq_len: int = 64
    max_num_tokens: int = 64
    disable_overlap_scheduler: bool = True
    use_cuda_graph: bool = False
    enable_attention_dp: bool = False
    _double: Any = PrivateAttr(None)


def llm_args(module: ModuleType, speculative_config: dict[str, Any], **settings: Any) -> TorchLlmArgs:
    """As from YAML: the speculative section is a dictionary until it is validated by the window's models."""
    classes = config_classes(module.DecodingBaseConfig)
    config = classes[speculative_config["decoding_type"]](**speculative_config)
    if config.decoding_type == "Eagle":
        config = classes["Eagle3"](**config.model_dump(exclude={"decoding_type"}))
    return TorchLlmArgs(speculative_config=config, **settings)


def spec_dec_mode(config: Any) -> SpeculativeDecodingMode:
    if config.decoding_type == "MTP" and (config.use_dynamic_tree or not config.use_mtp_vanilla):
        return SpeculativeDecodingMode.MTP_EAGLE
    return SpeculativeDecodingMode(config.decoding_type)
