"""The options of `fit` that a recipe can set, too: they belong to the training, not to one start of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from ...common.errors import PlanError
from ...common.options.config import NONE, TEXT, TEXTS, Check, Config, Kind, Positive
from ...common.storage.addresses import is_address

OnNonFinite = Literal["raise", "skip"]

LOG_EVERY = 50
"""Optimizer steps between two entries, chosen so that logging costs next to nothing."""

CALLBACKS = Kind(
    lambda value: isinstance(value, list | tuple), "a list of callbacks, such as [EarlyStopping('val_loss')]"
)
PATH = Kind(lambda value: isinstance(value, Path), "a path", json=False)


def place_kind(name: str) -> Kind:
    """Return the kind of a path as text; `name` completes "must be …"."""
    return Kind(lambda value: isinstance(value, str), name)


def check_out(name: str, value: Any) -> None:
    """Raise PlanError unless the value is a path, None, or an address that can be written."""
    if value == "":
        raise PlanError(
            f"{name}='' is not a folder. Pass the path of a folder ('.' for this one), or None for no files."
        )
    if isinstance(value, Path) and re.match(r"\w+:/", str(value)):
        raise PlanError(f"{name}={value!r} is the path of an address. Pass the address as text.")
    if not is_address(value):
        return
    parts = urlsplit(value)
    if parts.scheme in ("http", "https"):
        raise PlanError(
            f"{name}={value!r}: a web server cannot be written. Pass a folder, or the address of a store, such as "
            "s3://bucket/run."
        )
    if "@" in parts.netloc:  # its text is not repeated
        raise PlanError(
            f"{name} is an address with credentials, which plans and logs would show. Set them in the environment, as "
            "the store's own tools do, and pass the address without them."
        )
    if not (parts.netloc + parts.path).strip("/") or parts.query or parts.fragment:
        raise PlanError(f"{name}={value!r} is not the address of a folder. Pass one like s3://bucket/run.")


@dataclass(frozen=True, kw_only=True)
class FitOptions(Config):
    """The options of `Pipeline.fit` that a recipe can set.

    Raises:
        PlanError: naming the invalid value.
    """

    place: ClassVar[str] = "fit()"

    out: Annotated[
        str | Path | None, place_kind("the path of a folder, an address"), PATH, NONE, Check(check_out)
    ] = None
    """Folder for the results, or its address, such as `s3://bucket/run`; None: no files. It contains `plan.txt` and
    `recipe.yaml`; `history.json` and `model.safetensors`, written after each epoch; `curves.png`, drawn at the end; and
    `checkpoints/`. With several machines, it must be shared. Files of an address are written to a local folder and
    uploaded in the background (extra `remote`)."""
    init_from: Annotated[
        str | Path | None, place_kind("the path of a run, a checkpoint or a .safetensors file"), PATH, NONE
    ] = None
    """Weights to begin with: the folder of a run or of a checkpoint, or a `.safetensors` file; None: the model's own.
    From a run or a checkpoint, the weights used for evaluation are loaded: averages with EMA or SWA. Names may be those
    before or after the transforms. What does not match, such as a last layer for other classes, keeps the model's own
    values and is reported (`History.facts['init_from']`). Optimizer, schedule and position begin from scratch, unlike
    with `resume`."""
    on_nonfinite: OnNonFinite = "raise"
    """What happens at a non-finite loss: `"raise"`: an error with step, rank and the last good checkpoint; `"skip"`:
    all ranks skip the steps whose loss or gradients are not finite. Non-finite weights raise before they are evaluated,
    saved or returned. A skipped step still advances the learning rate, and the history counts it. On a GPU, `"skip"`
    makes every step wait for its loss and gradients."""
    logger: Annotated[object, TEXT, TEXTS, NONE, Kind(lambda _: True, "an object", json=False)] = None
    """Where metrics go: `"csv"` (`out/metrics.csv`), `"tensorboard"` (`out/tensorboard/`), an object with `log(dict,
    step=)` or `log_metrics(dict, step=)`, such as `wandb.init(…)` or the module `mlflow`, or a list of them. It
    receives the metrics of each epoch, and those of every `log_every`-th step under names that begin with `step/`,
    where the loss is that of rank 0's share of the batch. Only rank 0 logs; if this call starts the ranks, an object is
    copied to it. A logger that fails is disabled, with a `LoggerWarning`. A resumed run continues the same files."""
    log_every: Positive = LOG_EVERY
    """Optimizer steps between two entries of the logger. The default costs next to nothing. Logging never waits for the
    device."""
    callbacks: Annotated[Sequence[object], CALLBACKS] = ()
    """What to run at steps, evaluations and epochs: objects of subclasses of `drivetrain.Callback`, such as
    `EarlyStopping("val_loss")`, or `{name, …options}`, each class at most once. They see a read-only view of the run
    and can stop it. Checkpoints contain their state."""
    eval_every: Positive = 1
    """Epochs between two evaluations on the validation data. The last epoch is always evaluated. In the history, epochs
    without an evaluation have None."""
    eval_every_steps: Positive | None = None
    """Optimizer steps of the run between two further evaluations; None: only at the end of epochs. Such evaluations are
    logged, are in `History.evaluations`, and do not change the training."""
