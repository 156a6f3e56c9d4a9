"""Learning rate schedules. torch is not imported: `config.py`, which a printed table needs, imports this."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from ...common.checks import check_fields, is_number, plain
from ...common.errors import PlanError, suggest
from ...common.names import imported

ScheduleFunction = Callable[..., Any]
"""A function of the progress (0 to 1) that returns the learning rate's factor; or a factory of one of torch's
schedulers, whose first parameter is named `optimizer` or annotated as one."""

CHECKED_AT = 11  # points of the progress at which a function is checked before training: 0, 0.1, …, 1
_CLOSE = 1e-9  # relative: a milestone at 0.6 of 5 steps is at step 3, although 3 / 5 and 0.6 may differ in the last bit


@dataclass(frozen=True)
class NamedSchedule:
    """Base of the schedules by name; the fields are the options."""

    whole_run: ClassVar[bool] = False  # whether fractions are of the full run; otherwise warm-up is excluded
    intervals: ClassVar[Mapping[str, str]] = {}  # of the options that are numbers

    def __post_init__(self) -> None:
        for option, interval in self.intervals.items():
            value = getattr(self, option)
            if not is_number(value, interval):
                raise PlanError(f"schedule_options: {option}={value!r:.80} must be a number in {interval}.")

    def factor(self, progress: float, steps: float) -> float:
        """Return the factor, 1 at the peak; `progress` is 0 at the first of the `steps` and 1 after the last."""
        raise NotImplementedError

    @property
    def first_decay(self) -> float:
        """The fraction of the run, if `whole_run`, after which the factor is below 1: warm-up must end by then."""
        return 1.0


@dataclass(frozen=True)
class Constant(NamedSchedule):
    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        return 1.0


@dataclass(frozen=True)
class Linear(NamedSchedule):
    """A straight line from the peak to `end` times the peak (default 0)."""

    end: float = 0.0
    intervals: ClassVar[Mapping[str, str]] = {"end": "[0, 1]"}

    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        return self.end + (1 - self.end) * (1.0 - progress)


@dataclass(frozen=True)
class Cosine(NamedSchedule):
    """Half a cosine from the peak to `end` times the peak (default 0). Loshchilov and Hutter 2017, arXiv:1608.03983."""

    end: float = 0.0
    intervals: ClassVar[Mapping[str, str]] = {"end": "[0, 1]"}

    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        return _cosine(1.0, self.end, progress)


@dataclass(frozen=True)
class StepDecay(NamedSchedule):
    """Multiply by `gamma` after each fraction `every` of the run. Defaults: 0.1 after each third, as ResNet was trained
    on ImageNet (He et al. 2016, arXiv:1512.03385, 30 of 90 epochs in PyTorch's reference)."""

    every: float = 1 / 3
    gamma: float = 0.1
    whole_run: ClassVar[bool] = True
    intervals: ClassVar[Mapping[str, str]] = {"every": "(0, 1]", "gamma": "[0, 1]"}

    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        return float(self.gamma ** math.floor(progress / self.every * (1 + _CLOSE)))

    @property
    def first_decay(self) -> float:
        return self.every


@dataclass(frozen=True)
class MultiStep(NamedSchedule):
    """Multiply by `gamma` at each of `milestones`. Defaults: as Wide ResNets were trained on CIFAR (Zagoruyko and
    Komodakis 2016, arXiv:1605.07146: epochs 60, 120 and 160 of 200)."""

    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)
    gamma: float = 0.2
    whole_run: ClassVar[bool] = True
    intervals: ClassVar[Mapping[str, str]] = {"gamma": "[0, 1]"}

    def __post_init__(self) -> None:
        given = self.milestones
        fits = isinstance(given, tuple) and given and all(is_number(each, "(0, 1)") for each in given)
        if not fits or any(later <= earlier for earlier, later in pairwise(given)):
            raise PlanError(
                f"schedule_options: milestones={given!r:.80} must be increasing fractions of the run in (0, 1), such "
                "as (0.3, 0.6, 0.8)."
            )
        super().__post_init__()

    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        return float(self.gamma ** sum(progress * (1 + _CLOSE) >= each for each in self.milestones))

    @property
    def first_decay(self) -> float:
        return self.milestones[0]


@dataclass(frozen=True)
class OneCycle(NamedSchedule):
    """Rise from `start` to the peak in the fraction `rise`, then fall to `end`, both along half a cosine, as torch's
    OneCycleLR with its defaults; momentum is not cycled. Smith and Topin 2017, arXiv:1708.07120."""

    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1 / 250_000
    whole_run: ClassVar[bool] = True
    intervals: ClassVar[Mapping[str, str]] = {"rise": "(0, 1)", "start": "[0, 1]", "end": "[0, 1]"}

    def factor(self, progress: float, steps: float) -> float:
        # Like torch's, it reaches the peak and the end exactly at a step, one step earlier than the fractions.
        step, top, last = progress * steps, max(self.rise * steps - 1, 0.0), max(steps - 1, 1.0)
        if step <= top and top:
            return _cosine(self.start, 1.0, step / top)
        return _cosine(1.0, self.end, min((step - top) / (last - top), 1.0)) if last > top else self.end

    @property
    def first_decay(self) -> float:
        return 0.0


WSD_SHAPES: dict[str, Callable[[float], float]] = {  # the factor, by the share of the decay that is done
    "1-sqrt": lambda share: 1 - math.sqrt(share),
    "linear": lambda share: 1 - share,
    "cosine": lambda share: _cosine(1.0, 0.0, share),
}


@dataclass(frozen=True)
class WSD(NamedSchedule):
    """The peak until the last fraction `decay`, then down to `end`. Default: 0.2, along `"1-sqrt"`, the best in Hägele
    et al. 2024, arXiv:2405.18392, where 20 % reached the loss of a cosine."""

    decay: float = 0.2
    shape: str = "1-sqrt"
    end: float = 0.0
    whole_run: ClassVar[bool] = True
    intervals: ClassVar[Mapping[str, str]] = {"decay": "(0, 1]", "end": "[0, 1]"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in WSD_SHAPES:
            raise PlanError(
                f"schedule_options: shape={self.shape!r:.80} is unknown.{suggest(str(self.shape), WSD_SHAPES)}"
            )

    def factor(self, progress: float, steps: float) -> float:  # noqa: ARG002
        share = min(max((progress - self.first_decay) / self.decay, 0.0), 1.0)
        return self.end + (1 - self.end) * WSD_SHAPES[self.shape](share)

    @property
    def first_decay(self) -> float:
        return 1 - self.decay


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


SCHEDULES: dict[str, type[NamedSchedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "step": StepDecay,
    "multistep": MultiStep,
    "onecycle": OneCycle,
    "wsd": WSD,
}


def named(name: str, options: Mapping[str, Any]) -> NamedSchedule:
    check_fields(f"schedule_options: schedule={name!r}", SCHEDULES[name], options, PlanError)
    return SCHEDULES[name](**options)


def find_schedule(schedule: object) -> str | ScheduleFunction:
    if isinstance(schedule, str):
        if ":" in schedule:
            function: Any = imported("schedule", schedule)
            if not callable(function):
                raise PlanError(f"The schedule {schedule!r} is {function!r:.80}, not a function or a class.")
            return function  # type: ignore[no-any-return]
        if schedule not in SCHEDULES:
            raise PlanError(
                f"No schedule is named {schedule!r}. Write a custom one as package.module:function."
                f"{suggest(schedule, SCHEDULES)}"
            )
        return schedule
    if not callable(schedule):
        why = " It belongs to an optimizer that surgery or sharding would replace."
        raise PlanError(
            f"schedule={schedule!r:.80} must be a name, a function of the progress, or a factory of a torch scheduler: "
            f"lambda optimizer: StepLR(optimizer, 30).{why if hasattr(schedule, 'get_last_lr') else ''}"
        )
    return schedule


def is_factory(schedule: str | ScheduleFunction) -> bool:
    """Whether the first parameter is named `optimizer`, or annotated as one, as in torch's scheduler classes."""
    if isinstance(schedule, str):
        return False
    try:
        parameters = [*inspect.signature(schedule).parameters.values()]
    except (TypeError, ValueError):  # written in C, like math.cos
        return False
    if not parameters:
        return False
    annotation = parameters[0].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return parameters[0].name == "optimizer" or text.endswith("Optimizer")


def check_schedule(schedule: str | ScheduleFunction, options: Mapping[str, Any], warmup: float) -> None:
    """A function of the progress is called at `CHECKED_AT` points."""
    if isinstance(schedule, str):
        _check_warmup(schedule, named(schedule, options), warmup)
        return
    refuse_plateau(getattr(schedule, "func", schedule))
    try:
        inspect.signature(schedule).bind(None, **options)
    except TypeError as error:
        raise PlanError(
            f"schedule={label(schedule)} cannot be called with schedule_options={dict(options)}: {error}."
        ) from None
    except ValueError:  # written in C
        pass
    if not is_factory(schedule):
        for point in range(CHECKED_AT):
            factor_at(schedule, options, point / (CHECKED_AT - 1))


def _check_warmup(name: str, schedule: NamedSchedule, warmup: float) -> None:
    if not warmup or warmup <= schedule.first_decay + _CLOSE:
        return
    if isinstance(schedule, OneCycle):
        raise PlanError(
            f"schedule='onecycle' begins with its own warm-up, but warmup={warmup} is set. Set its length with "
            "schedule_options={'rise': …} instead."
        )
    raise PlanError(
        f"schedule={name!r} lowers the learning rate after {schedule.first_decay:.4g} of the run, before warmup="
        f"{warmup} ends. Shorten the warm-up, or set schedule_options={{…}}: fractions are of the full run."
    )


def factor_at(schedule: ScheduleFunction, options: Mapping[str, Any], progress: float) -> float:
    try:
        factor = plain(schedule(progress, **options))
    except Exception as error:
        raise PlanError(
            f"schedule={label(schedule)}, called with the progress {progress:g}, raised {type(error).__name__}: "
            f"{error}. It must map the progress, 0 to 1, to the learning rate's factor. A factory of a torch scheduler "
            "must name its parameter optimizer: lambda optimizer: StepLR(optimizer, 30)."
        ) from error
    if not is_number(factor, "[0, inf)"):
        raise PlanError(
            f"schedule={label(schedule)} returns {factor!r:.80} at the progress {progress:g}, but the learning rate's "
            "factor must be a finite number, 0 or more."
        )
    return float(factor)


def refuse_plateau(scheduler: object) -> None:
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    if any(base.__name__ == "ReduceLROnPlateau" for base in kind.__mro__):
        raise PlanError(
            "schedule: ReduceLROnPlateau depends on a metric, and its position could not be restored on resume. Use "
            "'wsd', whose decay can begin late, or 'multistep'."
        )


def label(schedule: str | ScheduleFunction) -> str:
    if isinstance(schedule, str):
        return schedule
    inner = getattr(schedule, "func", schedule)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def describe_schedule(schedule: str | ScheduleFunction, options: Mapping[str, Any]) -> str:
    """Return a phrase: `cosine`, `step (every=0.25)`, `StepLR (torch scheduler)`."""
    given = [f"{name}={value}" for name, value in options.items()]
    if not isinstance(schedule, str):
        given.insert(0, "torch scheduler" if is_factory(schedule) else "function of the progress")
    return label(schedule) + (f" ({', '.join(given)})" if given else "")
