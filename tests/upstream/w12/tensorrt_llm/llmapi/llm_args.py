"""Facts: executor.md §4 (fields of `DecodingBaseConfig`, `Field` is a local wrapper, strict models); sampling other
than greedy is a switch here, and there is no rejection sampling to configure."""

# ruff: noqa: N802, UP007, UP045 - names and forms that upstream uses

from __future__ import annotations

from typing import Any, Optional, Union

from pydantic import Field as PydanticField
from pydantic import NonNegativeInt, field_validator

from tests.upstream.common.configs import StrictBaseModel


def Field(*, status: str | None = None, **settings: Any) -> Any:
    return PydanticField(**settings)


class DecodingBaseConfig(StrictBaseModel):
    max_draft_len: Optional[NonNegativeInt] = Field(default=None, description="Drafts of a step.")
    speculative_model: Optional[Union[str, None]] = Field(default=None, description="Drafter.")
    draft_len_schedule: Optional[dict[int, int]] = Field(default=None, description="By batch size.")
    load_format: Optional[str] = Field(default=None, description="How weights are loaded.")
    acceptance_window: Optional[NonNegativeInt] = Field(default=None, description="Averaged over.")
    acceptance_length_threshold: Optional[float] = Field(default=None, description="Below it: no more speculation.")
    allow_advanced_sampling: bool = Field(default=False, status="prototype", description="Sample as requests ask.")

    @field_validator("draft_len_schedule")
    @classmethod
    def validate_draft_len_schedule_and_sort(cls, value):
        return dict(sorted(value.items())) if value else value
