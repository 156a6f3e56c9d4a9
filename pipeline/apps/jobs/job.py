"""`Job`: what a job file describes, checked before any text is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ....common.checks import check_whole
from ....common.errors import PlanError
from ....common.storage.addresses import is_address
from ....loaders.datasets.names import NAMES
from ....loaders.sources import files_of
from ...describe.config import DataConfig, DistributedConfig
from ...describe.fit import check_out
from ...describe.resolve import check_divides
from ...pipeline import Pipeline
from ...recipes.files import is_file_name, modules_of
from ...recipes.presets import parse_overrides

CHECKPOINT_MINUTES = 10
"""Minutes between two checkpoints of a job: what a kill without a warning costs at most."""

SHUTDOWN_SECONDS = 150
"""Seconds that torchrun gives its workers to save after a signal."""

WARNING_SECONDS = SHUTDOWN_SECONDS + 30
"""Seconds between a scheduler's signal and the end of a job: torchrun needs some after its workers."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
_TIME = re.compile(r"\d+|\d+(:[0-5]\d){1,2}|\d+-\d{1,2}(:[0-5]\d){0,2}", re.ASCII)
_GPU = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]*")
_IMAGE = re.compile(r"[A-Za-z0-9][-._:/@A-Za-z0-9]*")


@dataclass(frozen=True)
class Job:
    """A training on a cluster.

    Attributes:
        recipe: the recipe's name or file, as the user wrote it.
        overrides: values of the recipe to replace, `KEY=VALUE`.
        out: the run's folder, which all machines share, or its address.
        name: of letters, digits and dashes, so that every scheduler and the domain name system accept it.
        nodes: numbers of machines that the job can run on, ascending; those between that do not divide the batch are
            left out.
        processes: processes per machine, each with one GPU.
        cpus: CPU cores per process.
        on_gpus: whether it trains on GPUs; a recipe whose strategy's device is the CPU does not.
        timeout: seconds that the ranks wait for each other in a collective.
        data: the files of the training and validation data: paths, addresses, or names of data sets.
        gpu_type: the GPU's name in the words of the scheduler; None: any.
        time: time limit in the words of the scheduler; None: its default.
        image: container image; None: none.
    """

    recipe: str
    overrides: tuple[str, ...]
    out: str
    name: str
    nodes: tuple[int, ...]
    processes: int
    cpus: int
    on_gpus: bool
    timeout: float
    data: tuple[str, ...] = ()
    gpu_type: str | None = None
    time: str | None = None
    image: str | None = None

    @property
    def fewest(self) -> int:
        """The smallest number of machines."""
        return self.nodes[0]

    @property
    def most(self) -> int:
        """The largest number of machines."""
        return self.nodes[-1]

    @property
    def left_out(self) -> tuple[int, ...]:
        """Numbers of machines between the smallest and the largest that do not divide the batch."""
        return tuple(n for n in range(self.fewest, self.most) if n not in self.nodes)

    @property
    def nnodes(self) -> str:
        """The machines as torchrun's `--nnodes`."""
        return f"{self.most}" if self.fewest == self.most else f"{self.fewest}:{self.most}"

    @property
    def recipe_file(self) -> Path | None:
        """The recipe's file; None if it is a recipe of Drivetrain."""
        return Path(self.recipe) if is_file_name(self.recipe) else None

    @property
    def top_folder(self) -> str | None:
        """The first folder of the path `out`, where a cluster mounts what its machines share; of an address, None."""
        return None if is_address(self.out) else f"/{PurePosixPath(self.out).parts[1]}"

    def unmounted(self, *, copied: bool) -> list[str]:
        """Return the data at paths that machines do not have which mount only `top_folder`, or with an address nothing.

        Args:
            copied: whether the working directory is copied to them, too. Otherwise they work in `top_folder`.
        """
        top, found = self.top_folder, []
        for file in self.data:
            path = PurePosixPath(file)
            there = top is not None and path.is_relative_to(top)
            if not path.is_absolute():
                there = ".." not in path.parts and (copied or top is not None)
            if not (there or is_address(file) or file in NAMES):
                found.append(file)
        return found

    def arguments(self, recipe: str | None = None) -> list[str]:
        """Return the arguments of `drivetrain train`, not quoted; `recipe` replaces the recipe's path."""
        return [
            *(recipe or self.recipe, *self.overrides, "devices=auto"),
            *("--out", self.out, "--resume", "--every-minutes", str(CHECKPOINT_MINUTES)),
        ]


def make_job(
    recipe: str,
    overrides: Sequence[str],
    out: str | None,
    *,
    nodes: str,
    gpus: int,
    cpus: int,
    name: str | None = None,
    gpu_type: str | None = None,
    time: str | None = None,
    image: str | None = None,
) -> Job:
    """Return a job whose recipe trains on the given machines.

    Args:
        nodes: number of machines, `"4"`, or the smallest and the largest, `"1:4"`.
        out, name, and others: see `Job`. Without a name, it follows from the recipe's.

    Raises:
        PlanError, RecipeError: naming the invalid value and the remedy.
    """
    if out is None:
        raise PlanError(
            "A job resumes from its folder when it is restarted. Pass --out, a folder that all machines see, or an "
            "address."
        )
    check_out("--out", out)
    for what, value in (("The recipe", recipe), ("--out", out)):
        if value.startswith("-"):
            raise PlanError(f"{what} {value!r} begins with a dash, like an option. Write ./{value}.")
    numbers = _range(nodes)
    check_whole("gpus_per_node", gpus, PlanError, 1)
    check_whole("cpus_per_gpu", cpus, PlanError, 1)
    _check_text(
        "--name", name, _NAME, "up to 50 lowercase letters, digits and dashes, and begin with a letter"
    )
    _check_text("--gpu-type", gpu_type, _GPU, "the scheduler's name of a GPU, such as H100")
    _check_text("--time", time, _TIME, "minutes, HH:MM:SS or DAYS-HH:MM:SS")
    _check_text("--image", image, _IMAGE, "the name of a container image, such as registry/team/image:tag")
    how, data = _read(recipe, overrides)
    if how.name in ("single", "dp") and numbers[-1] * gpus > 1:
        raise PlanError(
            f"strategy={how.name} trains in one process, and the job has up to {numbers[-1] * gpus} GPUs. Pass "
            "strategy=ddp or another one for several."
        )
    if gpu_type is not None and how.device == "cpu":
        raise PlanError(f"--gpu-type {gpu_type}: the recipe trains on the CPU. Leave out one of the two.")
    sources = [data.train] if data.val is None else [data.train, data.val]
    files = tuple(file for source in sources for file in files_of(source).names)
    return Job(
        recipe, tuple(overrides), out, name or _name_of(recipe), _fitting(data.batch_size, how, numbers, gpus),
        processes=gpus, cpus=cpus, on_gpus=how.device != "cpu", timeout=how.timeout, gpu_type=gpu_type, time=time,
        image=image, data=files,
    )  # fmt: skip


def _range(nodes: str) -> range:
    """Return the numbers of machines that `N` or `MIN:MAX` describes."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", nodes, re.ASCII)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise PlanError(f"--nodes {nodes!r:.80} must be a positive integer, or MIN:MAX, such as 1:4.")
    return range(low, high + 1)


def _check_text(option: str, value: str | None, pattern: re.Pattern[str], allowed: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise PlanError(f"{option} {value!r:.80} must be {allowed}.")


def _name_of(recipe: str) -> str:
    """Return a job's name that resembles the recipe's."""
    plain = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower())[:50].strip("-")
    return plain if _NAME.fullmatch(plain) else f"train-{plain}"[:50].strip("-")


def _read(recipe: str, overrides: Sequence[str]) -> tuple[DistributedConfig, DataConfig]:
    """Return how a recipe distributes, and its data. It is read and checked as by `drivetrain train`; what only
    the machines of the cluster can answer, such as whether there are GPUs, is not checked."""
    values = parse_overrides(overrides)
    if values.pop("devices", "auto") != "auto":
        raise PlanError("devices= of a job is the number of its GPUs. Leave it out.")
    with modules_of(recipe):
        pipeline = Pipeline.from_recipe(recipe, **values, devices="auto")
    assert pipeline.data is not None  # a recipe always has data
    return pipeline.distributed, pipeline.data


def _fitting(batch_size: int, how: DistributedConfig, numbers: range, processes: int) -> tuple[int, ...]:
    """Return the numbers of machines among which a batch can be divided; the smallest and the largest must be."""
    fitting = []
    for number in numbers:
        try:
            check_divides(batch_size, number * processes, how.accumulate)
        except PlanError as error:
            if number in (numbers[0], numbers[-1]):
                raise PlanError(f"--nodes {number}: {error}") from None
        else:
            fitting.append(number)
    return tuple(fitting)
