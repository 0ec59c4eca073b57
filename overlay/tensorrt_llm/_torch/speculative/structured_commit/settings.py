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

MAX_RANK_CHECK_EVERY = 1_000  # a step's checksums take 128 KiB on the device
VARIABLE = "TRTLLM_STRUCTURED_COMMIT"  # spawned workers inherit only variables with this prefix
SERVING_VARIABLE = "TRTLLM_STRUCTURED_COMMIT_SERVING"  # written for post-processing workers, not by users
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of the flight recorder.

    Attributes:
        folder: where traces are written; made if need be.
        windows: how many windows of each request are kept on the device.
        incidents, megabytes: what the folder may hold of each rank; the oldest traces go.
        text: whether traces may hold texts and the end of the prompt; without it ids and a hash of the prompt.
    """

    folder: str
    windows: int = 32
    incidents: int = 100
    megabytes: int = 64
    text: bool = False

    def __post_init__(self) -> None:
        if not self.folder:
            raise StageError("structured_commit.record: folder is empty; say where traces are to be written")
        for name, low, high in (("windows", 4, 4_096), ("incidents", 1, 100_000), ("megabytes", 1, 1_000_000)):
            if not low <= getattr(self, name) <= high:
                raise StageError(
                    f"structured_commit.record: {name} is {getattr(self, name)}; it must be {low} to {high}"
                )


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the stage in a server.

    Attributes:
        policy: see `Policy`.
        format: a built-in format's name, a path to a format file, or `auto` (from the checkpoint's model type).
        max_repairs, repair_rows, seed, check, backend, align: see `CommitConfig`.
        report_every: log the counters every so many steps; 0 = never.
        rank_check_every: a debug switch: tensor-parallel ranks compare what they committed once in so many steps, and
            all stop where it differs; 0 = never.
        recover_text: where a reply ends before its turn is complete, give the client as content what the parser drops.
        report_field: say so in the reply too, in the field `structured_commit` of the choice.
        align_deltas: cut deltas at structural boundaries before a streaming tool parser sees them.
        record: the flight recorder, a folder or `RecordSettings`; None = off.
        cache_dir: where compiled tables are kept; None = a folder under the user's cache folder.
        checkpoint: folder of the checkpoint, if the one the server was given is not a local folder.
    """

    policy: str = Policy.REPAIR.value
    format: str = AUTO
    max_repairs: int = 64
    repair_rows: int = 8
    seed: int = 0
    check: bool = False
    backend: str = AUTO
    align: bool = False
    report_every: int = 10_000
    rank_check_every: int = 0
    recover_text: bool = True
    report_field: bool = False
    align_deltas: bool = True
    record: RecordSettings | None = None
    cache_dir: str | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", _parse_record(self.record))

    @property
    def commit_config(self) -> CommitConfig:
        """The part that the stage itself reads."""
        return CommitConfig(**{f.name: getattr(self, f.name) for f in fields(CommitConfig)})


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
    _check_fields("structured_commit", Settings, value)
    settings = Settings(**value)
    if settings.report_every < 0:
        raise StageError(f"structured_commit: report_every is {settings.report_every}; it must be 0 or more")
    if not 0 <= settings.rank_check_every <= MAX_RANK_CHECK_EVERY:
        raise StageError(
            f"structured_commit: rank_check_every is {settings.rank_check_every}; it must be 0 (never) to "
            f"{MAX_RANK_CHECK_EVERY}"
        )
    config = settings.commit_config  # refuses an unknown policy or backend and values out of range
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


def _parse_record(value: object) -> RecordSettings | None:
    if value is None or isinstance(value, RecordSettings):
        return value
    value = {"folder": value} if isinstance(value, str) else value
    _check_fields("structured_commit.record", RecordSettings, value)
    if "folder" not in value:
        raise StageError("structured_commit.record: field 'folder' is missing; say where traces are to be written")
    return RecordSettings(**value)


def _check_fields(where: str, kind: type, value: Mapping) -> None:
    """Refuse a field that the dataclass `kind` does not have, or a value of a wrong type."""
    kinds = {f.name: f.type for f in fields(kind)}
    for key, given in value.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StageError(f"{where}: unknown field {key!r}{hint} Fields: {', '.join(kinds)}")
        if not _fits(given, kinds[key]):
            raise StageError(f"{where}: field {key!r} must be {kinds[key]}, not {given!r}")


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("RecordSettings"):
        return value is None or isinstance(value, (str, Mapping, RecordSettings))
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (value is None and "None" in kind)
