"""What the ledger measures: plain PyTorch, each stage in turn, only one stage, the whole without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..errors import DrivetrainError
from ..transforms import Transform
from .builder import Pipeline
from .ledger_rounds import COPY, EXTRAS, LOADER, MODEL, PLAIN, SPLIT, only, without
from .plan import sort_transforms
from .stages import Distribution

Kind = Literal["train", "loader", "model", "copy", "split", "extras"]
"""What a turn runs: training; the loader without a model; the model on one batch in memory; the copies to the
device; training with its parts timed; training with what `fit` has beside the steps."""


@dataclass(frozen=True)
class Variant:
    """A pipeline to measure, the name of its turns, and what of it runs."""

    name: str
    pipeline: Pipeline
    kind: Kind = "train"


@dataclass(frozen=True)
class Stage:
    """One thing that the pipeline adds to plain PyTorch: its name, and a function that adds it."""

    name: str
    add: Callable[[Pipeline], Pipeline]


def plain(pipeline: Pipeline) -> Pipeline:
    """Plain PyTorch on the same model, data and optimizer: DataLoader, NCHW, fp32, one device, no extras.

    What acts in evaluation only (TestTimeFlip) stays: it is no stage of training, and accuracies compare with it.
    """
    data, how = pipeline.data, pipeline.distribution
    assert data is not None  # the plan has checked
    device = how.device
    one = Distribution(options={} if device is None else {"device": device})
    kept = tuple(t for t in pipeline.transforms if t.kind == "evaluation")
    return pipeline._with(data=dataclasses.replace(data, loader="torch"), transforms=kept, distribution=one)


def stages(pipeline: Pipeline) -> list[Stage]:
    """What the pipeline adds to plain PyTorch, in the plan's order."""
    data, how = pipeline.data, pipeline.distribution
    assert data is not None  # the plan has checked
    found = []
    if data.loader == "ffcv":
        found.append(Stage("FFCV loader", lambda p: p._with(data=data)))
    found += [
        Stage(type(transform).__name__, partial(_transformed, transform=transform))
        for transform in sort_transforms(pipeline.transforms)
        if transform.kind != "evaluation"
    ]
    one = plain(pipeline).distribution
    if how.precision != one.precision:
        found.append(Stage(how.precision, lambda p: _distributed(p, precision=how.precision)))
    if how.compile:
        found.append(Stage("compile", lambda p: _distributed(p, compile=how.compile)))
    if dataclasses.replace(how, precision=one.precision, compile=one.compile, asked=one.asked) != one:
        found.append(Stage(_distribution_name(how), lambda p: _strategy(p, how)))
    return found


def _transformed(pipeline: Pipeline, transform: Transform) -> Pipeline:
    return pipeline._with(transforms=(*pipeline.transforms, transform))


def _distributed(pipeline: Pipeline, **changes: Any) -> Pipeline:
    return pipeline._with(distribution=dataclasses.replace(pipeline.distribution, **changes))


def _strategy(pipeline: Pipeline, how: Distribution) -> Pipeline:
    """The strategy and what it was told, on top of the pipeline's own precision and compiling."""
    own = pipeline.distribution
    return pipeline._with(distribution=dataclasses.replace(how, precision=own.precision, compile=own.compile))


def _distribution_name(how: Distribution) -> str:
    parts = [f"{how.name} × {how.devices}"] if how.name != "single" else []
    parts += ["activation checkpointing"] if how.activation_checkpointing else []
    parts += [f"accumulate {how.accumulate}"] if how.accumulate > 1 else []
    parts += [f"clip_norm {how.clip_norm:g}"] if how.clip_norm is not None else []
    return ", ".join(parts) or how.name


def _with_stages(pipeline: Pipeline, chosen: Iterable[Stage]) -> Pipeline:
    for stage in chosen:
        pipeline = stage.add(pipeline)
    return pipeline


def in_turn(pipeline: Pipeline) -> list[Variant]:
    """Plain PyTorch, then each stage on top of those before it, up to the whole."""
    found = [Variant(PLAIN, plain(pipeline))]
    for stage in stages(pipeline):
        found.append(Variant(f"+ {stage.name}", stage.add(found[-1].pipeline)))
    return found


def of_the_whole(whole: Pipeline, *, copies: bool) -> list[Variant]:
    """What else the whole runs: the ceilings, where its time goes, and what `fit`'s extras cost.

    Args:
        copies: whether its batches are copied to a device.
    """
    kinds: dict[str, Kind] = {LOADER: "loader", MODEL: "model"}
    kinds |= {COPY: "copy"} if copies else {}
    kinds |= {SPLIT: "split", EXTRAS: "extras"}
    return [Variant(name, whole, kind) for name, kind in kinds.items()]


def variants(pipeline: Pipeline, *, copies: bool = False) -> list[Variant]:
    """What every ledger measures: the stages in turn, and the turns that only the whole takes."""
    found = in_turn(pipeline)
    return found + of_the_whole(found[-1].pipeline, copies=copies)


def alone_and_without(pipeline: Pipeline) -> list[Variant]:
    """Only one stage, and the whole without one; those that the stages in turn do not measure already."""
    start, found = plain(pipeline), stages(pipeline)
    one = [Variant(only(stage.name), stage.add(start)) for stage in found[1:]]
    less = [
        Variant(without(stage.name), _with_stages(start, [s for s in found if s is not stage]))
        for stage in found[:-1]
    ]
    return [*one, *less] if len(found) > 2 else one


def possible(found: Iterable[Variant]) -> list[Variant]:
    """Those that have a plan: a stage may need another one, or not go with plain PyTorch."""
    kept = []
    for variant in found:
        with suppress(DrivetrainError):
            variant.pipeline.plan()
            kept.append(variant)
    return kept
