"""The variants of a pipeline that are measured, and the results of their trials."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ...common.errors import DrivetrainError

Kind = Literal[
    "plain", "in_turn", "only", "without", "loader", "model", "copy", "split", "extras", "other", "other_alone"
]  # fmt: skip
NAMES: dict[Kind, str] = {
    "plain": "plain PyTorch",
    "in_turn": "+ {}",
    "only": "only {}",
    "without": "without {}",
    "loader": "loader alone",
    "model": "model alone",
    "copy": "copy alone",
    "split": "full pipeline, timed by part",
    "extras": "full pipeline with fit's extras",
    "other": "full pipeline, {} loader",
    "other_alone": "{} loader alone",
}
"""Display name of each kind of variant, with the stage in the braces. Names are formatted here and never parsed."""
Workload = Literal["train", "loader", "model", "copy", "split", "extras"]
"""What a trial runs: training; the loader without a model; the model on one batch in memory; the copies to the
device; training with its phases timed; training with the overhead of `fit`."""
WORKLOADS: dict[Kind, Workload] = {
    "loader": "loader", "model": "model", "copy": "copy", "split": "split", "extras": "extras",
    "other_alone": "loader",
}  # fmt: skip


@dataclass(frozen=True)
class VariantId:
    """A variant: `in_turn` has the stages up to `stage`, `only` just this one, `without` all others; `other` has the
    loader `stage`, `other_alone` is that loader. The others run the full pipeline or a part of it, see `Workload`."""

    kind: Kind
    stage: str = ""

    def __str__(self) -> str:
        return NAMES[self.kind].format(self.stage)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @property
    def is_row(self) -> bool:
        """Whether it is a row of the ledger's main table: plain PyTorch, or a stage added in turn."""
        return self.kind in ("plain", "in_turn")

    @property
    def workload(self) -> Workload:
        return WORKLOADS.get(self.kind, "train")


PLAIN, LOADER, MODEL, COPY = VariantId("plain"), VariantId("loader"), VariantId("model"), VariantId("copy")
SPLIT, EXTRAS = VariantId("split"), VariantId("extras")


def in_turn(stage: str) -> VariantId:
    return VariantId("in_turn", stage)


def only(stage: str) -> VariantId:
    return VariantId("only", stage)


def without(stage: str) -> VariantId:
    return VariantId("without", stage)


def other(loader: str) -> tuple[VariantId, VariantId]:
    return VariantId("other", loader), VariantId("other_alone", loader)


PARTS = ("transforms", "forward", "loss", "backward", "step", "hooks")  # the parts of a step that are timed


@dataclass(frozen=True)
class Trial:
    images: Annotated[int, Meta(gt=0)]  # over all ranks
    seconds: Annotated[float, Meta(gt=0, lt=1e9)]
    waited: Annotated[float, Meta(ge=0)]  # of `seconds`, for data
    samples: str = ""  # digest of the labels, in order
    parts: dict[str, float] | None = None  # seconds of `PARTS`, or of the extras; None if not timed

    @property
    def speed(self) -> float:
        return self.images / self.seconds


@dataclass(frozen=True)
class Costs:
    """The costs of a variant other than time: maxima over its ranks, None if not measured."""

    held_bytes: Mapping[str, int] | None = None  # memory of `parameters`, `gradients` and `optimizer`
    peak_bytes: int | None = None  # allocated; on a CPU, of the process
    compile_seconds: float | None = None  # before the measurement


def same_samples(trials: dict[VariantId, Trial]) -> None:
    """Raise DrivetrainError if trials of a round had different samples or batches: speeds cannot be compared."""
    first, *others = [one for one in trials if one not in (MODEL, COPY)]  # these repeat one batch
    for other in others:
        if (trials[other].samples, trials[other].images) != (trials[first].samples, trials[first].images):
            raise DrivetrainError(
                f"In one round '{first}' had {trials[first].images} images (labels {trials[first].samples}) and "
                f"'{other}' {trials[other].images} (labels {trials[other].samples}): they cannot be compared. Use a "
                "data set, seed and loader settings that give both the same samples."
            )
