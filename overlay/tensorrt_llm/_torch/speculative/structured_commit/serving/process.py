"""What a process that post-processes replies knows of the stage: settings, table, vocabulary, and what it counted.

The server's process and each post-processing worker come by it on their own, when first asked: workers are spawned,
get their arguments once, and inherit only variables of a known prefix. So the server writes one such variable before
it spawns anything (`publish`). Nothing here raises into serving: where something is amiss the process stands aside and
says so once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..loading import Structure, load_structure
from ..log import log
from ..settings import SERVING_VARIABLE, VARIABLE, Settings, parse_settings
from .delivery import AlignedDelivery, Splitter
from .harmony import Controls


class Serving:
    """Process-wide state of the serving side.

    Attributes:
        settings: None while nothing is known or configured.
        structure: the compiled format, None where there is none.
        controls: ids of the tokens that frame Harmony's messages; None for other formats.
        aligned: puts a splitter before tool parsers; None where deltas are not aligned.
        incomplete: replies of this process that ended before their turn was complete, by policy, format and state.
        finished: the same of all processes, as the server's process counts them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; the configuration is read again when next asked."""
        self._asked = False
        self._said: set[str] = set()
        self.settings: Settings | None = None
        self.structure: Structure | None = None
        self.controls: Controls | None = None
        self.aligned: AlignedDelivery | None = None
        self.incomplete: Counter[tuple[str, str, str]] = Counter()
        self.finished: Counter[tuple[str, str, str]] = Counter()
        self._names: dict[int, bytes] = {}

    def ready(self, tokenizer: object = None) -> bool:
        """Whether this process watches replies; loads the table when first asked.

        Args:
            tokenizer: the server's, to find the checkpoint by where nothing was published.
        """
        if not self._asked:
            self._ask(tokenizer)
        return self.structure is not None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, control tokens by their spelling."""
        texts, names = self.structure.vocabulary.texts, self._names
        return b"".join(names.get(t) or texts.get(t, b"") for t in token_ids).decode("utf-8", "replace")

    def guarded(self, act: Callable, fallback, *args):
        """`act(*args)`, or `fallback` where it raises."""
        try:
            return act(*args)
        except Exception as error:
            kind = f"{act.__name__.lstrip('_')}: {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                log.warning(f"structured_commit stands aside in serving: {kind}: {error}; said once")
            return fallback

    def _ask(self, tokenizer: object) -> None:
        published = os.environ.get(SERVING_VARIABLE)
        if published is None and os.environ.get(VARIABLE) is None:
            self._asked = True
            return
        folder = _folder_of(tokenizer) if published is None else None
        if published is None and folder is None and not self._names_checkpoint():
            return  # asked again once there is a tokenizer
        self._asked = True
        self.guarded(self._load, None, published, folder)

    @staticmethod
    def _names_checkpoint() -> bool:
        try:
            settings = parse_settings(os.environ.get(VARIABLE))
        except ValueError:
            return True  # loading says what is wrong
        return settings is None or settings.checkpoint is not None

    def _load(self, published: str | None, folder: str | None) -> None:
        if published is not None:
            data = json.loads(published)
            settings, folder = Settings(**data["settings"]), data["checkpoint"]
        else:
            settings = parse_settings(os.environ.get(VARIABLE))
        if settings is None:
            return
        structure = load_structure(settings, folder)
        self._names = {token: name.encode() for name, token in structure.vocabulary.controls.items()}
        self.controls = Controls.of(structure.table.info.controls)
        if settings.align_deltas:
            self.aligned = AlignedDelivery(Splitter(structure.table, structure.form.cuts))
        self.settings, self.structure = settings, structure


def publish(llm_args, folder) -> None:
    """Before workers are spawned: tell every process that will post-process what is configured, and for which
    checkpoint. The server's own process loads the table now, unless workers post-process."""
    SERVING.reset()
    SERVING.guarded(_publish, None, llm_args, folder)


def _publish(llm_args, folder) -> None:
    value = getattr(getattr(llm_args, "speculative_config", None), "structured_commit", None)
    settings = parse_settings(value if value is not None else os.environ.get(VARIABLE))
    if settings is None:
        os.environ.pop(SERVING_VARIABLE, None)
        return
    checkpoint = str(folder if folder is not None else getattr(llm_args, "model", ""))
    os.environ[SERVING_VARIABLE] = json.dumps({"settings": asdict(settings), "checkpoint": checkpoint})
    if not getattr(llm_args, "num_postprocess_workers", 0):
        SERVING.ready()


def _folder_of(tokenizer: object) -> str | None:
    for holder in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        where = getattr(holder, "name_or_path", None)
        if isinstance(where, str) and Path(where).is_dir():
            return where
    return None


SERVING = Serving()
