"""What a tuning measured is saved in its `out`, and kept in the user's cache folder, for this machine. The next call
for the same is answered from there, or continues it."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from msgspec import Struct

from ....common.errors import DrivetrainError
from ....common.storage.files import cache_folder, exclusive_lock, write_file
from ....common.storage.json_files import ShapeError, parse
from ...telemetry.provenance import provenance
from .result import FORMAT, Tried, Tuned, read_trials, verdicts

FOLDER = "tuned"  # in the cache folder


class KeptWarning(UserWarning):
    """Results of an earlier tuning are not used, or those of this one not kept."""


class Kept(Struct):
    format: int
    facts: dict[str, Any]
    date: str
    seconds: float | None  # of the budget, unless (None) every change was tried; 0: interrupted
    stopped: str
    trials: list[Tried]
    limits: dict[str, float]
    before: float | None = None
    variables: dict[str, str] = {}

    def answers(self, seconds: float) -> bool:
        """Whether a call with a budget of so many seconds would find no more."""
        return self.seconds is None or seconds <= self.seconds

    @property
    def note(self) -> str:
        date = self.date[:16].replace("T", " ")
        return f"{self.stopped} Measured on this machine on {date} UTC; again=True (--again) measures again."


def lock_tuning(file: Path | None) -> AbstractContextManager[None]:
    """Let one tuning at a time use a file: two would replace each other's trials, and slow each other down."""
    if file is None:
        return nullcontext()
    refusal = f"Another tuning uses {file}. Wait until it ends, or pass another file: out=… (--out)."
    return exclusive_lock(file.with_name(f".{file.name}.tuning"), refusal)


class Results:
    """What is `known` of a tuning, which its facts name: from its `file`; without one, from what is `kept` at `path` in
    the cache folder; nothing to measure it `again`."""

    def __init__(self, file: Path | None, facts: Mapping[str, Any], *, again: bool) -> None:
        own = {**facts, "revision": provenance()["git_revision"]}
        self._facts: dict[str, Any] = json.loads(json.dumps(own, sort_keys=True))
        name = hashlib.sha256(json.dumps(self._facts).encode()).hexdigest()[:16]
        self.file, self.path = file, cache_folder() / FOLDER / f"{name}.json"
        self.kept: Kept | None = None
        self.known: list[Tried] = []
        if again:
            return
        if file is not None and file.exists():
            self.known = read_trials(file, facts)
        elif (found := self.read()) is not None:
            self.kept, self.known = found, verdicts(found.trials)

    def read(self) -> Kept | None:
        """Return what is kept; None, with a warning, if the file is damaged or of something else."""
        try:
            kept = parse(self.path.read_bytes(), Kept)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ShapeError) as error:
            self._ignored(str(error))
            return None
        if (kept.format, kept.facts) == (FORMAT, self._facts):
            return kept
        self._ignored("it is of another tuning")
        return None

    def _ignored(self, reason: str) -> None:
        warnings.warn(
            f"{self.path}, with results of an earlier tuning, is not used: {reason}. They are measured again, and the "
            "file is replaced.",
            KeptWarning,
            stacklevel=2,
        )

    def keep(self, tuned: Tuned, seconds: float | None) -> None:
        """Keep a result; `seconds` as `Kept` has them. One without a verdict is not worth keeping."""
        if not verdicts(tuned.trials):
            return
        about = {"facts": self._facts, "date": provenance()["date"], "seconds": seconds}
        text = json.dumps(tuned.to_dict() | about, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, text)
        except (OSError, DrivetrainError) as error:
            warnings.warn(f"The next call will measure again: {error}", KeptWarning, stacklevel=2)

    def write(self, tuned: Tuned) -> Tuned:
        if self.file is not None:
            tuned.save(self.file)
        return tuned

    def save(self, tuned: Tuned, seconds: float | None = 0.0) -> Tuned:
        """Write a result, and keep it; `seconds` as `Kept` has them."""
        self.keep(tuned, seconds)
        return self.write(tuned)
