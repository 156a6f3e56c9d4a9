"""The changes that tuning tries: those that keep what a training computes, and those that must be allowed."""

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ....common import machine
from ....common.errors import PlanError, suggest
from ....loaders.beton.data_set import open_files
from ....loaders.image_size import ImageSize, height_width
from ....loaders.sources import files_of
from ....transforms import TRANSFORMS
from ...describe.cuda_settings import uses_gpu
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan
from ...describe.rules import family
from ...optim.config import OptimizerConfig
from ..variants import with_data, with_distribution, with_transform
from .result import Tried
from .storage import Storage, storages

Bottleneck = Literal["data", "step", "communication"]

EQUAL = ("ddp", "zero_redundancy", "fsdp")  # strategies with the same numbers, but for the order of sums
AHEAD = (1, 6)
# Environment variables of the allocator of a device: glibc's, and torch's.
VARIABLES = {"cpu": machine.KEEPS_MEMORY, "cuda": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
# Further names of theirs, whose values these would replace.
OTHER_NAMES: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ("PYTORCH_ALLOC_CONF",)}
SIDES = (3 / 4, 7 / 8)  # of the image size
SHARES = (3 / 4, 1 / 2)  # of the epochs
LARGER = (2, 4, 8, 16)  # times the batch size, as long as that is accepted and fits
NEAR = 1 / 8  # of a batch size that fits: the search ends when one that does not is at most so much larger
UNIT = 8  # of a batch size between two, for the GPU's tiles
MICROBATCHES = range(2, 65)


Kind = Callable[[ResolvedPlan], "list[Candidate]"]


@dataclass(frozen=True)
class Candidate:
    name: str  # that no other has, such as "workers=4"
    bottleneck: Bottleneck  # that it relieves
    change: Callable[[PipelineSpec], PipelineSpec]
    variables: Mapping[str, str] = field(default_factory=dict)  # that it is instead; read when Python starts
    numbers: bool = False  # changes what the training computes, so that its accuracy must be measured
    batch_size: int | None = None  # that it sets
    storage: Storage | None = None  # of the training data, which must be converted first


def candidates(plan: ResolvedPlan) -> list[Candidate]:
    data, own, gpu = plan.data, plan.distribution, uses_gpu(plan.distribution)
    cores = machine.rank_cores(own.ranks)  # those that each rank counts
    counts = {1, max(cores // 2, 1), max(cores - 1, 1), cores, 2 * cores}
    counts -= {cores if data.workers is None else data.workers}
    changes = [_data("workers", count) for count in sorted(counts)]
    changes += [_data("batches_ahead", count) for count in AHEAD if count != data.batches_ahead]
    changes += _storage(plan, changes_pixels=False)
    changes += _transforms(plan, "format")
    if gpu:
        modes = [mode for mode in (True, False) if mode != own.cudnn_benchmark]
        changes += [_distributed("cudnn_benchmark", mode, "step") for mode in modes]
    changes += _allocator(plan)
    if not own.compile:  # last of these, because it takes the longest to build
        changes.append(_distributed("compile", True, "step"))
    if gpu and own.compile != "reduce-overhead" and own.accumulate == 1:
        changes.append(_distributed("compile", "reduce-overhead", "step"))
    if own.ranks > 1 and family(own.name) in ("ddp", "fsdp"):
        changes += [_distributed("strategy", name, "communication") for name in EQUAL if name != own.name]
    return changes


def _allocator(plan: ResolvedPlan) -> list[Candidate]:
    device = "cuda" if uses_gpu(plan.distribution) else "cpu"
    variables = VARIABLES[device]
    unknown = device == "cpu" and platform.libc_ver()[0] != "glibc"
    if unknown or any(name in os.environ for name in (*variables, *OTHER_NAMES[device])):
        return []
    return [Candidate("allocator's variables", "step", lambda spec: spec, variables)]


def allowed(plan: ResolvedPlan, allow: Sequence[str]) -> list[Candidate]:
    """Return the changes of these kinds, which change numbers; PlanError for a kind without a change, or unknown."""
    return [dataclasses.replace(one, numbers=True) for one in _of_kinds(plan, allow, ALLOW)]


def to_target(plan: ResolvedPlan, allow: Sequence[str]) -> list[Candidate]:
    """Return the changes that may reach an accuracy sooner: of these kinds, or of all. Fewer epochs come last, because
    they are what the others' gains allow."""
    if allow:
        return _of_kinds(plan, sorted(allow, key=lambda name: name == "epochs"), TO_TARGET)
    return [change for kind in TO_TARGET.values() for change in kind(plan)]


def _of_kinds(plan: ResolvedPlan, allow: Sequence[str], kinds: Mapping[str, Kind]) -> list[Candidate]:
    changes: list[Candidate] = []
    for name in dict.fromkeys(allow):
        if name not in kinds:
            several = "," in str(name)
            hint = " Pass each as an item (--allow for each)." if several else suggest(str(name), kinds)
            raise PlanError(f"allow={name!r} is not a kind of change.{hint}")
        of_this = kinds[name](plan)
        if not of_this:
            raise PlanError(f"allow={name!r}: there is no such change to this pipeline that would be tried.")
        changes += of_this
    return changes


def _precision(plan: ResolvedPlan) -> list[Candidate]:
    own, changes = plan.distribution, []
    gpu = uses_gpu(own)
    if own.precision == "fp32":
        names = ("bf16", "fp16") if gpu else ("bf16",)
        changes += [_distributed("precision", name, "step") for name in names]
    if gpu and own.matmul_precision != "high":
        changes.append(_distributed("matmul_precision", "high", "step"))
    return changes


def _resolution(plan: ResolvedPlan) -> list[Candidate]:
    if plan.data.loading.cuts_out:  # of smaller images, its squares would hide more
        return []
    changes = _transforms(plan, "resolution")
    own = height_width(plan.data.image_size)
    for part in SIDES:
        height, width = (max(round(side * part / 2) * 2, 2) for side in own)
        if (height, width) != own:
            size: ImageSize = height if height == width else (height, width)
            smaller = partial(with_data, image_size=size, eval_image_size=plan.data.eval_size)  # in training only
            changes.append(Candidate(f"image_size={size}", "step", smaller))
    return changes


def _transforms(plan: ResolvedPlan, kind: str) -> list[Candidate]:
    used = {type(transform) for transform in plan.transforms}
    return [
        Candidate(cls.__name__, "step", partial(with_transform, transform=cls()))
        for cls in TRANSFORMS.values()
        if cls.tried_by_tune == kind and cls not in used
    ]


def _epochs(plan: ResolvedPlan) -> list[Candidate]:
    own = plan.spec.epochs or 1
    counts = dict.fromkeys(max(int(share * own), 1) for share in SHARES)
    return [
        Candidate(f"epochs={count}", "step", lambda spec, count=count: spec.replace(epochs=count))  # type: ignore[misc]
        for count in counts
        if count != own
    ]


def _batch_size(plan: ResolvedPlan, times: Sequence[float] = LARGER) -> list[Candidate]:
    own, fewest = plan.data.batch_size, plan.distribution.ranks * plan.distribution.accumulate
    sizes = (int(each * own) for each in times if each * own % fewest == 0)  # all microbatches are as large
    return [of_batch_size(plan, size) for size in sizes]


def _storage(plan: ResolvedPlan, *, changes_pixels: bool = True) -> list[Candidate]:
    return [
        Candidate(f"storage={one.name}", "data", one.change, storage=one)
        for one, changes in storages(plan)
        if changes == changes_pixels
    ]


def _order(plan: ResolvedPlan) -> list[Candidate]:
    """Return another order of the samples, if the file is read from disk in each epoch."""
    data = plan.data
    if data.loader != "ffcv" or data.order != "random" or not open_files(files_of(data.train)).exceeds_memory:
        return []
    return [_data("order", "quasi_random")]


def place(changes: Iterable[Candidate], folder: Path | None, end: float) -> None:
    """Set the folder for converted data, None for none, and the end of the time for that, in `perf_counter` time."""
    for one in changes:
        if one.storage is not None:
            one.storage.folder, one.storage.end = folder, end


def of_batch_size(plan: ResolvedPlan, size: int) -> Candidate:
    """Return another batch size, with the learning rate scaled to it if its rule is known."""
    own = plan.data.batch_size

    def change(spec: PipelineSpec) -> PipelineSpec:
        rate = OptimizerConfig() if spec.optimization is None else spec.optimization
        if not rate.is_factory and rate.scaling:
            base = rate.base_batch_size if rate.scale_lr else own
            spec = spec.replace(optimization=dataclasses.replace(rate, base_batch_size=base, scale_lr=True))
        return with_data(spec, batch_size=size)

    return Candidate(f"batch_size={size}", "step", change, batch_size=size)


def between(plan: ResolvedPlan, fits: int, too_large: int) -> Candidate | None:
    """Return the batch size in the middle of one that fits into memory and one that does not; None if they are near."""
    unit = math.lcm(UNIT, plan.distribution.ranks * plan.distribution.accumulate)
    middle = (fits + too_large) // 2 // unit * unit
    if too_large - fits <= NEAR * fits or not fits < middle < too_large:
        return None
    return dataclasses.replace(of_batch_size(plan, middle), numbers=True)


def remembered(plan: ResolvedPlan, names: Iterable[str]) -> list[Candidate]:
    """Return the batch sizes of these names: an earlier call's search has other ones than `LARGER`."""
    sizes = (name.partition("batch_size=")[2] for name in names)
    return [dataclasses.replace(of_batch_size(plan, int(size)), numbers=True) for size in sizes if size.isdecimal()]


# Kinds of changes that change numbers.
ALLOW: dict[str, Kind] = {
    "precision": _precision,
    "resolution": _resolution,
    "surgery": lambda plan: _transforms(plan, "surgery"),
    "batch_size": _batch_size,
    "storage": lambda plan: [*_storage(plan), *_order(plan)],
}


TO_TARGET: dict[str, Kind] = {
    **{name: kind for name, kind in ALLOW.items() if name != "storage"},  # each run converts nothing
    "methods": lambda plan: _transforms(plan, "methods"),
    "batch_size": partial(_batch_size, times=(1 / 2, 2)), "epochs": _epochs,
}  # fmt: skip


def fitting(plan: ResolvedPlan) -> list[Candidate]:
    """Return the changes that make a training fit into memory: every number of equal microbatches, the fewest first;
    recomputed activations after them."""
    own, share = plan.distribution, plan.data.batch_size // plan.distribution.ranks
    changes = [
        _distributed("accumulate", number, "step")
        for number in MICROBATCHES
        # sync_batchnorm needs the full batch at once
        if share % number == 0 and number > own.accumulate and not own.sync_batchnorm
    ]
    if not own.activation_checkpointing:
        changes.append(_distributed("activation_checkpointing", True, "step"))
    return changes


def untried(changes: Sequence[Candidate], trials: Sequence[Tried], reason: str = "no time was left") -> list[Tried]:
    """Return the changes that are not among the trials, with the reason."""
    names = {one.name for one in trials}
    left = (one for one in changes if one.name not in names)
    return [Tried(one.name, one.bottleneck, "not tried", reason=reason) for one in left]


def ordered(changes: list[Candidate], bottleneck: Bottleneck) -> list[Candidate]:
    """Return the changes with those for the bottleneck first; those that need short trainings last."""
    return sorted(changes, key=lambda one: (one.numbers, one.bottleneck != bottleneck))


def _data(name: str, value: Any) -> Candidate:
    return Candidate(f"{name}={value}", "data", partial(with_data, **{name: value}))


def _distributed(name: str, value: Any, bottleneck: Bottleneck) -> Candidate:
    return Candidate(f"{name}={value!r}", bottleneck, partial(with_distribution, **{name: value}))
