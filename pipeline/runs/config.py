"""The validated options of `Pipeline.fit`, one field each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...common.checks import check_flag
from ...common.errors import PlanError, suggest
from ...common.options.option import Config, option, whole
from ...common.storage.addresses import is_address
from ..callbacks.callback import Callback
from ..checkpoints.directory import Checkpoints
from ..checkpoints.remote import working_folder
from ..telemetry.loggers import LOG_EVERY, LoggerArg
from ..training.guard import OnNonFinite, check_choice


def _kind(kinds: Any, allowed: str) -> Callable[[str, Any], None]:
    """Return a check that the value is an instance of `kinds`; `allowed` completes "must …" in the message."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kinds):
            raise PlanError(f"{name}={value!r:.80} must {allowed}.")

    return check


def check_out(name: str, value: Any) -> None:
    """Raise PlanError unless the value is a path, None, or an address that can be written."""
    _kind(str | Path | None, "be the path of a folder, an address, or None for no files")(name, value)
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


def check_callbacks(name: str, value: Any) -> None:
    """Raise PlanError unless the value is a list of callbacks of different classes."""
    if not isinstance(value, list | tuple):
        raise PlanError(
            f"{name}={value!r:.80} must be a list of callbacks, such as [EarlyStopping('val_loss')]."
        )
    classes: set[str] = set()
    for one in value:
        if not isinstance(one, Callback):
            hint = f" Did you mean {one.__name__}()?" if isinstance(one, type) else ""
            raise PlanError(
                f"{name}: {one!r:.80} is not a callback, an object of a subclass of drivetrain.Callback.{hint}"
            )
        if type(one).__name__ in classes:
            raise PlanError(
                f"{name} has two callbacks of the class {type(one).__name__}, by whose name checkpoints keep their "
                f"states. Leave one out, or give the second a class of its own: class Second({type(one).__name__}): …"
            )
        classes.add(type(one).__name__)


STOPPING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals that can ask a run to stop. Ctrl-C, SIGINT, has a meaning of its own."""


def check_signals(name: str, value: Any) -> None:
    """Raise PlanError unless the value is a list of names in `STOPPING`."""
    if not isinstance(value, list | tuple):
        raise PlanError(f"{name}={value!r:.80} must be a list of names of signals, such as ['SIGTERM'].")
    for one in value:
        if one not in STOPPING:
            raise PlanError(f"{name}: {one!r:.80} is not known.{suggest(str(one), STOPPING)}")


@dataclass(frozen=True)
class FitConfig(Config):
    """The options of `Pipeline.fit`.

    Raises:
        PlanError: naming the invalid value.
    """

    _: KW_ONLY
    epochs: int | None = field(
        default=None, metadata=option("passes over the training data; None: the recipe's")
    )
    out: str | Path | None = field(
        default=None,
        metadata=option(
            "folder for the results, or its address, such as `s3://bucket/run`; None: no files",
            more="It contains `plan.txt` and `recipe.yaml`; `history.json` and `model.safetensors`, written after each "
            "epoch; `curves.png`, drawn at the end; and `checkpoints/`. With several machines, it must be shared. "
            "Files of an address are written to a local folder and uploaded in the background (extra `remote`).",
            check=check_out,
        ),
    )
    progress: bool = field(default=True, metadata=option("show a progress bar, and print a line per epoch"))
    resume: str | Path | bool | None = field(
        default=None,
        metadata=option(
            '`"auto"` or True: from the newest complete checkpoint in `out`, or from scratch if there is none; a path: '
            "from this checkpoint, or the newest one in this folder of a run; None or False: from scratch",
            more="A checkpoint in `out` that is not the newest one is rejected, because the newer ones would be lost. "
            "Without `resume`, a new run in `out` starts from scratch and prints that it overwrites the old results: "
            "they are removed when it begins, their checkpoints once its first one is complete.",
            check=_kind(str | Path | bool | None, "be 'auto', the path of a checkpoint or of a run, or None"),
        ),
    )
    init_from: str | Path | None = field(
        default=None,
        metadata=option(
            "weights to begin with: the folder of a run or of a checkpoint, or a `.safetensors` file; None: the "
            "model's own",
            more="Of a run or a checkpoint, they are the evaluated ones: averages with EMA or SWA. Names may be those "
            "before or after the transforms. What does not match, such as a last layer for other classes, keeps the "
            "model's own values and is reported (`History.facts['init_from']`). Optimizer, schedule and position begin "
            "from scratch, unlike with `resume`.",
            check=_kind(
                str | Path | None, "be the path of a run, a checkpoint or a .safetensors file, or None"
            ),
        ),
    )
    checkpoints: Checkpoints | None = field(
        default_factory=Checkpoints,
        metadata=option(
            "when to save checkpoints, and which to keep; None: no checkpoints",
            more="Requires `out`.",
            check=_kind(
                Checkpoints | None,
                "be a drivetrain.pipeline.Checkpoints(keep=2, …), or None for no checkpoints",
            ),
        ),
    )
    on_nonfinite: OnNonFinite = field(
        default="raise",
        metadata=option(
            '`"raise"`: a non-finite loss raises an error with step, rank and the last good checkpoint; `"skip"`: all '
            "ranks skip the steps whose loss or gradients are not finite",
            more="Non-finite weights raise before they are evaluated, saved or returned. A skipped step still advances "
            "the learning rate, and the history counts it. On a GPU, `'skip'` makes every step wait for its loss and "
            "gradients.",
            check=lambda _, value: check_choice(value),
        ),
    )
    logger: LoggerArg = field(
        default=None,
        metadata=option(
            '`"csv"` (`out/metrics.csv`), `"tensorboard"` (`out/tensorboard/`), an object with `log(dict, step=)` or '
            "`log_metrics(dict, step=)`, such as `wandb.init(…)` or the module `mlflow`, or a list of them",
            more="It receives the metrics of each epoch, and those of every `log_every`-th step under names that begin "
            "with `step/`, where the loss is that of rank 0's share of the batch. Only rank 0 logs; if this call "
            "starts the ranks, an object is copied to it. A logger that fails is disabled, with a `LoggerWarning`. A "
            "resumed run continues the same files.",
        ),
    )
    log_every: int = field(
        default=LOG_EVERY,
        metadata=option(
            "optimizer steps between two entries",
            more="The default costs next to nothing. Logging never waits for the device.",
        ),
    )

    callbacks: Sequence[Callback] = field(
        default=(),
        metadata=option(
            "what to run at steps, evaluations and epochs: objects of subclasses of `drivetrain.Callback`, such as "
            '`EarlyStopping("val_loss")`, each class at most once',
            more="They see a read-only view of the run and can stop it. Checkpoints contain their state.",
            check=check_callbacks,
        ),
    )
    eval_every: int = field(
        default=1,
        metadata=option(
            "epochs between two evaluations on the validation data",
            more="The last epoch is always evaluated. In the history, epochs without an evaluation have None.",
            check=whole(1),
        ),
    )
    eval_every_steps: int | None = field(
        default=None,
        metadata=option(
            "also evaluate after every so many optimizer steps of the run; None: only at the end of epochs",
            more="Such evaluations are logged, are in `History.evaluations`, and do not change the training.",
            check=whole(1, none="only at the end of epochs"),
        ),
    )
    continue_stopped: bool = field(
        default=False,
        metadata=option(
            "whether resuming a run that a callback stopped continues it; False: it returns the run's result, like "
            "resuming a finished run",
            check=lambda name, value: check_flag(name, value, PlanError),
        ),
    )
    changed_model: bool = field(
        default=False,
        metadata=option(
            "whether a run may resume with a model whose settings or code differ from those of its checkpoint",
            more="Comments and blank lines in the code make no difference. Names and shapes of the weights must be the "
            "same in any case.",
            check=lambda name, value: check_flag(name, value, PlanError),
        ),
    )

    stop_on: Sequence[str] = field(
        default=(),
        metadata=option(
            'names of signals, such as `"SIGTERM"`, at which all ranks save after the next step and leave by '
            "`TrainingPreempted`",
            more="Default: none, because a library should not replace signal handlers; the command line sets SIGTERM "
            "and SIGUSR1, which job schedulers send before they end a job. Signals are noted in the main thread only.",
            check=check_signals,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        object.__setattr__(self, "stop_on", tuple(self.stop_on))
        if isinstance(self.resume, bool):
            object.__setattr__(self, "resume", "auto" if self.resume else None)
        if self.resume == "auto" and self.out is None:
            raise PlanError(
                "resume='auto' searches out for checkpoints. Pass fit(out=…) (--out), or the checkpoint's path."
            )
        if self.continue_stopped and self.resume is None:
            raise PlanError(
                "continue_stopped=True continues a stopped run that is resumed. Pass resume='auto' or its path, too."
            )
        if self.changed_model and self.resume is None:
            raise PlanError(
                "changed_model=True lets a run resume with a changed model. Pass resume='auto' or its path, too."
            )
        if self.init_from is not None and self.resume is not None:
            raise PlanError(
                f"init_from={str(self.init_from)!r} begins a new run, and resume={str(self.resume)!r} continues one. "
                "Pass only one of them."
            )
        if self.init_from is not None and self.out is not None and _is_inside(self.init_from, self.out):
            raise PlanError(
                f"init_from={str(self.init_from)!r} is in out={str(self.out)!r}, which the new run would overwrite. "
                "Pass another out, or resume='auto' to continue the run."
            )
        if self.out == "":
            raise PlanError(
                "out='' is not a folder. Pass the path of a folder ('.' for this one), or None for no files."
            )

    @property
    def folder(self) -> Path | None:
        """`out` as a path; of an address, the folder of this machine whose files are uploaded."""
        if self.out is None:
            return None
        return working_folder(str(self.out)) if is_address(self.out) else Path(self.out)


def _is_inside(place: str | Path, out: str | Path) -> bool:
    if is_address(place) or is_address(out):
        return f"{str(place).rstrip('/')}/".startswith(f"{str(out).rstrip('/')}/")
    return Path(place).resolve().is_relative_to(Path(out).resolve())
