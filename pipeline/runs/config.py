"""The validated options of `Pipeline.fit`, one field each. torch is not imported until one is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...common.checks import check_fields, plain
from ...common.errors import PlanError, suggest
from ...common.names import imported
from ...common.options.config import Check, Kind, options_of
from ...common.storage.addresses import is_address
from ..describe.config import CALLBACKS, FitOptions

if TYPE_CHECKING:
    from ..callbacks.callback import Callback
    from .checkpoints.directory import Checkpoints

STOPPING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Signals that can ask a run to stop. Ctrl-C, SIGINT, has a meaning of its own."""


def _make_callbacks(given: Sequence[Any]) -> tuple[Callback, ...]:
    from ..callbacks.callback import Callback

    made: dict[str, Callback] = {}
    for one in given:
        callback = _by_name(one) if isinstance(one, Mapping) else one
        if not isinstance(callback, Callback):
            hint = f" Did you mean {one.__name__}()?" if isinstance(one, type) else ""
            raise PlanError(
                f"callbacks: {one!r:.80} is not a callback, an object of a subclass of drivetrain.Callback.{hint}"
            )
        if isinstance(one, Mapping):
            vars(callback)["_recipe_entry"] = {key: plain(value) for key, value in one.items()}
        name = type(callback).__name__
        _check_moments(callback)
        if name in made:
            raise PlanError(
                f"callbacks has two callbacks of the class {name}, by whose name checkpoints keep their states. Leave "
                f"one out, or give the second a class of its own: class Second({name}): …"
            )
        made[name] = callback
    return tuple(made.values())


def _check_moments(callback: Callback) -> None:
    from ..callbacks.callback import Callback

    moments = {name for name in vars(Callback) if name.startswith("on_")}
    own = (name for kind in type(callback).__mro__ if issubclass(kind, Callback) for name in vars(kind))
    unknown = sorted(name for name in own if name.startswith("on_") and name not in moments)
    if unknown:
        raise PlanError(
            f"callbacks: {type(callback).__name__} has a method {unknown[0]}, which nothing calls."
            f"{suggest(unknown[0], moments)} Let the names of other methods begin without on_."
        )


def known_callbacks() -> dict[str, Any]:
    from ..callbacks.early_stopping import EarlyStopping
    from ..callbacks.gradient_norms import GradientNorms
    from ..callbacks.profile import Profile

    return {kind.__name__: kind for kind in (EarlyStopping, GradientNorms, Profile)}


def _by_name(entry: Mapping[str, Any]) -> object:
    known, options = known_callbacks(), dict(entry)
    name = options.pop("name", None)
    kind = imported("callback", name) if isinstance(name, str) and ":" in name else known.get(str(name))
    if kind is None:
        raise PlanError(
            f"No callback is named {name!r}. A custom one is named package.module:Class.{suggest(str(name), known)}"
        )
    check_fields(f"callbacks: {name}", kind, options, PlanError)
    try:
        return kind(**options)
    except TypeError as error:
        raise PlanError(f"callbacks: {name} cannot be created: {error}.") from error


def recorded(config: FitOptions) -> FitOptions | None:
    """Return the options of a run that its recipe can name; None if they are the defaults. They are without `out`:
    who trains the recipe again shall not replace the run. A custom callback is named if it was given by its name."""
    known, callbacks = known_callbacks(), list[Any]()
    for one in config.callbacks:
        name = type(one).__name__
        if type(one) is known.get(name):
            options = {
                key: plain(getattr(one, key))
                for key, parameter in signature(known[name]).parameters.items()
                if getattr(one, key) != parameter.default
            }
            callbacks.append({"name": name, **options})
        elif (entry := getattr(one, "_recipe_entry", None)) is not None:
            callbacks.append(entry)
    logger = config.logger
    if not isinstance(logger, str):
        several = logger if isinstance(logger, list | tuple) else ()
        logger = [each for each in several if isinstance(each, str)] or None
    values = {name: getattr(config, name) for name in options_of(FitOptions)}
    made = FitOptions(**values | {"out": None, "logger": logger, "callbacks": callbacks})
    return made if made.changed() else None


def _check_signals(name: str, value: Sequence[Any]) -> None:
    for one in value:
        if one not in STOPPING:
            raise PlanError(f"{name}: {one!r:.80} is not known.{suggest(str(one), STOPPING)}")


def _checkpoints() -> type[Checkpoints]:
    from .checkpoints.directory import Checkpoints

    return Checkpoints


@dataclass(frozen=True, kw_only=True)
class FitConfig(FitOptions):
    """The options of `Pipeline.fit`. Raises PlanError, naming the invalid value."""

    epochs: int | None = None
    """Passes over the training data; None: the recipe's."""
    callbacks: Annotated[Sequence[Callback], CALLBACKS] = ()
    progress: bool = True
    """Whether to show a progress bar, and print a line per epoch."""
    resume: Annotated[
        str | Path | bool | None,
        Kind(
            lambda value: value is None or isinstance(value, str | Path | bool),
            "'auto', the path of a checkpoint or of a run",
        ),
    ] = None
    """Where to resume: `"auto"` or True: from the newest complete checkpoint in `out`, or from scratch if there is
    none; a path: from this checkpoint, or the newest one in this folder of a run; None or False: from scratch. A
    checkpoint in `out` that is not the newest one is rejected, because the newer ones would be lost. Without `resume`,
    a new run in `out` starts from scratch and prints that it overwrites the old results: they are removed when it
    begins, their checkpoints once its first one is complete."""
    checkpoints: Annotated[
        Checkpoints | None,
        Kind(
            lambda value: value is None or isinstance(value, _checkpoints()),
            "a drivetrain.pipeline.Checkpoints(keep=2, …), or None",
            json=False,
        ),
    ] = field(default_factory=lambda: _checkpoints()())
    """When to save checkpoints, and which to keep; None: no checkpoints. Requires `out`."""
    continue_stopped: bool = False
    """Whether resuming a run that a callback stopped continues it; False: it returns the run's result, like resuming a
    finished run."""
    changed_model: bool = False
    """Whether a run may resume with a model whose settings or code differ from those of its checkpoint. Comments and
    blank lines in the code make no difference. Names and shapes of the weights must be the same in any case."""
    stop_on: Annotated[
        Sequence[str],
        Kind(lambda value: isinstance(value, list | tuple), "a list of names of signals, such as ['SIGTERM']"),
        Check(_check_signals),
    ] = ()
    """Names of signals, such as `"SIGTERM"`, at which all ranks save after the next step and leave by
    `TrainingPreempted`. Default: none, because a library should not replace signal handlers; the command line sets
    SIGTERM and SIGUSR1, which job schedulers send before they end a job. Signals are noted in the main thread only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "callbacks", _make_callbacks(self.callbacks))
        if isinstance(self.resume, bool):
            object.__setattr__(self, "resume", "auto" if self.resume else None)
        self._check_resume()
        if self.init_from is not None and self.resume not in (None, "auto"):
            raise PlanError(
                f"init_from={str(self.init_from)!r} begins a new run, and resume={str(self.resume)!r} continues one. "
                "Pass only one of them, or resume='auto', which begins with init_from if out has no checkpoint."
            )
        if self.init_from is not None and self.out is not None and _is_inside(self.init_from, self.out):
            raise PlanError(
                f"init_from={str(self.init_from)!r} is in out={str(self.out)!r}, which the new run would overwrite. "
                "Pass another out; or, to continue the run in it, pass resume='auto' (--resume) without init_from."
            )

    def _check_resume(self) -> None:
        if self.resume == "auto" and self.out is None:
            raise PlanError(
                "resume='auto' searches out for checkpoints. Pass fit(out=…) (--out), or the checkpoint's path."
            )
        for name, what in (
            ("continue_stopped", "continues a stopped run that is resumed"),
            ("changed_model", "lets a run resume with a changed model"),
        ):
            if getattr(self, name) and self.resume is None:
                raise PlanError(f"{name}=True {what}. Pass resume='auto' or its path, too.")

    @property
    def command_to_continue(self) -> str:
        """What continues the run, for messages: with `resume="auto"`, the command as it is."""
        return "the same command again" if self.resume == "auto" else "the same command with --resume (resume='auto')"

    @property
    def folder(self) -> Path | None:
        """`out` as a path; of an address, the folder of this machine whose files are uploaded."""
        from .checkpoints.remote import working_folder

        if self.out is None:
            return None
        return working_folder(str(self.out)) if is_address(self.out) else Path(self.out)


def _is_inside(place: str | Path, out: str | Path) -> bool:
    if is_address(place) or is_address(out):
        return f"{str(place).rstrip('/')}/".startswith(f"{str(out).rstrip('/')}/")
    return Path(place).resolve().is_relative_to(Path(out).resolve())
