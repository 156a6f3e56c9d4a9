"""Arenas with known speeds: what training, loading and the model take follows from the pipeline's options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from drivetrain.common.budget import OutOfTime
from drivetrain.pipeline.describe.pipeline_spec import PipelineSpec
from drivetrain.pipeline.measuring.runner import Failed
from drivetrain.transforms import ChannelsLast

Cost = Callable[[PipelineSpec], Mapping[str, float]]
"""Seconds per image of a pipeline's `"loader"`, `"model"` and `"communication"`."""


@dataclass
class Entry:
    name: str
    spec: PipelineSpec
    variables: Mapping[str, str] | None = None
    closed: bool = False
    memory = None

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Simulated:
    """An arena in which a step waits for the slower of loader and model, and then communicates."""

    def __init__(
        self,
        cost: Cost,
        *,
        seed: int = 0,
        noise: float = 0.02,  # standard deviation of the logarithm of a trial's speed
        drift: float = 0.1,  # of the machine's speed, from round to round, shared by a round's trials
        rounds: float = float("inf"),  # before the time is over
        fits: Callable[[PipelineSpec], bool] = lambda _: True,  # into memory
        # Each seed adds noise that all pipelines share, and each training 0.02 points besides.
        accuracies: Callable[[PipelineSpec], float] = lambda _: 0.7,
        kept: float = 1.0,  # speed with environment variables, over that without
    ) -> None:
        self.accuracies, self.kept = accuracies, kept
        self.trained: list[tuple[PipelineSpec, int]] = []
        self.cost, self.noise, self.drift, self.left, self.fits = cost, noise, drift, rounds, fits
        self.random = np.random.default_rng(seed)
        self.opened: list[Entry] = []

    def open(self, name: str, spec: PipelineSpec, variables: Mapping[str, str] | None = None) -> Entry:
        if not self.fits(spec):
            raise Failed("out of memory (OutOfMemoryError): 1 GB")
        self.opened.append(Entry(name, spec, variables))
        return self.opened[-1]

    def round(self, number: int, contenders: Sequence[Any]) -> list[float]:  # noqa: ARG002
        self.left -= 1
        if self.left < 0:
            raise OutOfTime
        drift = self.random.normal(0, self.drift)
        noise = [np.exp(drift + self.random.normal(0, self.noise)) for _ in contenders]
        kept = [self.kept if one.variables else 1 for one in contenders]
        return [self.speed(one.spec) * a * b for one, a, b in zip(contenders, kept, noise, strict=True)]

    def speed(self, spec: PipelineSpec) -> float:
        cost = self.cost(spec)
        return 1 / (max(cost["loader"], cost["model"]) + cost.get("communication", 0.0))

    def limits(self, contender: Any) -> dict[str, float]:
        cost = self.cost(contender.spec)
        model = 1 / (cost["model"] + cost.get("communication", 0.0))
        found = {"training": self.speed(contender.spec), "loader": 1 / cost["loader"], "model": model}
        return found | ({"communication": 1 / cost["communication"]} if "communication" in cost else {})

    def accuracy(self, spec: PipelineSpec, seed: int) -> float:
        self.trained.append((spec, seed))
        shared = np.random.default_rng(seed).normal(0, 0.02)
        return float(self.accuracies(spec) + shared + self.random.normal(0, 0.0002))


def slow_decode(spec: PipelineSpec) -> Mapping[str, float]:
    """Two workers load as fast as four; one takes twice as long."""
    workers = 2 if spec.data is None or spec.data.workers is None else spec.data.workers
    return {"loader": 4.0 / min(workers, 2), "model": 1.0}


def slow_disk(spec: PipelineSpec) -> Mapping[str, float]:
    """Samples arrive in bursts, which more batches ahead even out."""
    return {"loader": 3.0 if spec.data.batches_ahead < 6 else 2.0, "model": 1.0}


def slow_step(spec: PipelineSpec) -> Mapping[str, float]:
    """Channels last makes the convolutions faster, compiling makes nothing faster."""
    last = any(isinstance(one, ChannelsLast) for one in spec.transforms)
    return {"loader": 1.0, "model": 2.0 if last else 3.0}


def slow_collective(spec: PipelineSpec) -> Mapping[str, float]:
    """Sharded gradients are exchanged while the step computes."""
    return {"loader": 1.0, "model": 2.0, "communication": 0.3 if spec.distributed.name == "fsdp" else 3.0}


def the_same(_: PipelineSpec) -> Mapping[str, float]:
    return {"loader": 1.0, "model": 1.0}
