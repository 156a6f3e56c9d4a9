"""The options of `Pipeline.fit`, as a value that checks itself: each is one field here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import PlanError
from ..checkpoints.directory import Checkpoints
from ..spec.options import Config, option
from ..telemetry.loggers import LOG_EVERY, LoggerArg
from ..training.guard import OnNonFinite, check_choice


def _kind(kinds: Any, allowed: str) -> Callable[[str, Any], None]:
    """Return a check of the value's type."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kinds):
            raise PlanError(f"{name}={value!r:.80} must {allowed}.")

    return check


@dataclass(frozen=True)
class FitConfig(Config):
    """The options of `Pipeline.fit`.

    Raises:
        PlanError: naming the value that cannot be used.
    """

    _: KW_ONLY
    epochs: int | None = field(
        default=None, metadata=option("passes over the training data; None: the recipe's")
    )
    out: str | Path | None = field(
        default=None,
        metadata=option(
            "a folder for the results; None: no files",
            more="`plan.txt` and `recipe.yaml`; `history.json` and `model.safetensors`, written after each epoch; "
            "`curves.png`, drawn at the end; and `checkpoints/`. With several machines, one that all of them share.",
            check=_kind(str | Path | None, "be the path of a folder, or None to keep no files"),
        ),
    )
    progress: bool = field(default=True, metadata=option("show a bar and a line per epoch"))
    resume: str | Path | bool | None = field(
        default=None,
        metadata=option(
            '`"auto"`, or True: from the newest complete checkpoint in `out`, or from the start where there is none; a '
            "path: from this checkpoint, or the newest of this run's folder; None, or False: from the start",
            more="A path to a checkpoint in `out` that is not the newest one there is refused: the newer would be "
            "lost. Without `resume`, a new run in `out` starts from scratch and prints that it overwrites the old "
            "results: they are removed when it begins, their checkpoints once its first is complete.",
            check=_kind(str | Path | bool | None, "be 'auto', the path of a checkpoint or of a run, or None"),
        ),
    )
    checkpoints: Checkpoints | None = field(
        default_factory=Checkpoints,
        metadata=option(
            "when they are saved, and which are kept; None: none are",
            more="Without `out` there are none.",
            check=_kind(
                Checkpoints | None,
                "say which: Checkpoints(keep=2, …) of drivetrain.pipeline; or be None for none",
            ),
        ),
    )
    on_nonfinite: OnNonFinite = field(
        default="raise",
        metadata=option(
            '`"raise"`: a loss that is not finite ends the training, naming step, rank and the last good checkpoint; '
            '`"skip"`: no rank takes its step',
            more="The learning rate advances all the same, and the history counts the step. On a GPU every step then "
            "waits for its loss.",
            check=lambda _, value: check_choice(value),
        ),
    )
    logger: LoggerArg = field(
        default=None,
        metadata=option(
            '`"csv"` (`out/metrics.csv`), `"tensorboard"` (`out/tensorboard/`), an object with `log(dict, step=)` or '
            "`log_metrics(dict, step=)`, such as `wandb.init(…)` or the module `mlflow`, or a list of them",
            more="It gets each epoch's figures, and those of every `log_every`-th step under names that begin with "
            "`step/`, the loss being that of rank 0's share of the batch. Only rank 0 logs; where this call starts "
            "the ranks, an object is copied to it. A logger that fails is left out from then on, with a "
            "`LoggerWarning`. A run that resumes continues the same files.",
        ),
    )
    log_every: int = field(
        default=LOG_EVERY,
        metadata=option(
            "optimizer steps between two entries",
            more="The default costs next to nothing; the device is never waited for.",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.resume, bool):
            object.__setattr__(self, "resume", "auto" if self.resume else None)
        if self.resume == "auto" and self.out is None:
            raise PlanError(
                "resume='auto' looks for checkpoints in out; give fit(out=…) (--out), or the checkpoint's path."
            )
        if self.out == "":
            raise PlanError(
                "out='' names no folder; give the path of one, '.' for this, or None to keep no files."
            )

    @property
    def folder(self) -> Path | None:
        """`out` as a path."""
        return None if self.out is None else Path(self.out)
