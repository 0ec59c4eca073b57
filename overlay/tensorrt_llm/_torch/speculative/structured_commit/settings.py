"""What a user writes under `structured_commit:` in the speculative configuration, checked once.

Knows nothing of TensorRT-LLM: a value comes in (from YAML, JSON or a variable), settings or an error come out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from .errors import StageError
from .format import format_names
from .policy import CommitConfig, Policy

VARIABLE = "TRTLLM_STRUCTURED_COMMIT"  # spawned workers inherit only variables with this prefix
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the stage in a server.

    Attributes:
        policy: see `Policy`.
        format: a built-in format's name, a path to a format file, or `auto` (from the checkpoint's model type).
        max_repairs, repair_rows, seed, check: see `CommitConfig`.
        report_every: log the counters every so many steps; 0 = never.
        cache_dir: where compiled tables are kept; None = a folder under the user's cache folder.
        checkpoint: folder of the checkpoint, if the one the server was given is not a local folder.
    """

    policy: str = Policy.REPAIR.value
    format: str = AUTO
    max_repairs: int = 64
    repair_rows: int = 8
    seed: int = 0
    check: bool = False
    report_every: int = 10_000
    cache_dir: str | None = None
    checkpoint: str | None = None

    @property
    def commit_config(self) -> CommitConfig:
        """The part that the stage itself reads."""
        return CommitConfig(self.policy, self.max_repairs, self.repair_rows, self.seed, self.check)


def parse_settings(value: object) -> Settings | None:
    """Read the configured value.

    Args:
        value: None (not configured), a policy name, a mapping of `Settings` fields, or either as JSON text.

    Returns:
        Settings, or None where the stage is not configured or its policy is `off`.

    Raises:
        StageError: an unknown field, policy or format, or a value of a wrong type; allowed ones are named.
    """
    if value is None or isinstance(value, Settings):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{"):
            try:
                value = json.loads(text)
            except ValueError as error:
                raise StageError(f"structured_commit: not valid JSON: {error}") from error
        else:
            value = {"policy": text}
    if not isinstance(value, Mapping):
        raise StageError(
            "structured_commit: write a policy name or a mapping such as {policy: repair, format: auto}, not "
            f"{type(value).__name__}"
        )
    kinds = {f.name: f.type for f in fields(Settings)}
    for key, given in value.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StageError(f"structured_commit: unknown field {key!r}{hint} Fields: {', '.join(kinds)}")
        if not _fits(given, kinds[key]):
            raise StageError(f"structured_commit: field {key!r} must be {kinds[key]}, not {given!r}")
    settings = Settings(**value)
    if settings.report_every < 0:
        raise StageError(f"structured_commit: report_every is {settings.report_every}; it must be 0 or more")
    config = settings.commit_config  # refuses an unknown policy and values out of range
    known = [AUTO, *format_names()]
    if settings.format not in known and not settings.format.endswith(".json"):
        raise StageError(
            f"structured_commit: unknown format {settings.format!r}; choose one of: {', '.join(known)}, or give "
            "the path of a format file (.json)"
        )
    return None if config.policy is Policy.OFF else settings


def validated_field(value: object) -> object:
    """For the configuration model: `value` as plain data once it has been read without an error."""
    settings = parse_settings(value)
    if value is None or settings is None:
        return value
    return asdict(settings)


def _fits(value: object, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (value is None and "None" in kind)
