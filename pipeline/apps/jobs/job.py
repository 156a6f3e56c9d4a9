"""`Job`: what a job file describes, checked before text is written; and pieces of text that schedulers share."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from ....common.checks import check_whole
from ....common.errors import PlanError
from ....common.storage.addresses import is_address
from ....loaders.datasets.names import NAMES
from ....loaders.sources import files_of
from ...describe.config import DataConfig, DistributedConfig, check_out
from ...describe.resolve import check_divides
from ...pipeline import Pipeline
from ...recipes.files import is_file_name, modules_of
from ...recipes.presets import parse_overrides

CHECKPOINT_MINUTES = 10  # between two checkpoints of a job: what a kill without a warning costs at most
# That torchrun gives its workers to save after a signal to itself; when a machine joins, it gives them 30.
SHUTDOWN_SECONDS = 150
WARNING_SECONDS = SHUTDOWN_SECONDS + 30  # from a signal to the end of a job: torchrun needs some, too
# Port of the rendezvous where each job has machines, or pods, of its own; torchrun's default.
TORCHRUN_PORT = 29400
# Options of torchrun, so that it forwards signals and waits while the ranks save.
SIGNALS = f"--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout {SHUTDOWN_SECONDS}"

# Not a word that YAML reads as a truth value, or as nothing.
_NAME = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n)\Z)[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
_LONG = 44  # characters of a name from a recipe, so that it suits JobSet with any number of pods
_TIME = re.compile(r"\d+|\d+(:[0-5]\d){1,2}|\d+-\d{1,2}(:[0-5]\d){0,2}", re.ASCII)
_GPU = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]*")
_IMAGE = re.compile(r"[A-Za-z0-9][-._:/@#A-Za-z0-9]*")


@dataclass(frozen=True)
class Job:
    recipe: str  # its name or file, as the user wrote it
    overrides: tuple[str, ...]  # KEY=VALUE
    out: str  # the run's folder, which all machines share, or its address
    name: str  # of letters, digits and dashes, so that every scheduler and the domain name system accept it
    nodes: tuple[int, ...]  # numbers of machines that it can run on, ascending: those that divide the batch
    processes: int  # per machine, each with one GPU
    cpus: int  # cores per process
    on_gpus: bool
    timeout: float  # seconds that the ranks wait for each other in a collective
    data: tuple[str, ...] = ()  # training and validation data: paths, addresses, or names of data sets
    gpu_type: str | None = None  # in the words of the scheduler
    time: str | None = None  # limit, in the words of the scheduler
    image: str | None = None  # of the container

    @property
    def fewest(self) -> int:
        return self.nodes[0]

    @property
    def most(self) -> int:
        return self.nodes[-1]

    @property
    def left_out(self) -> tuple[int, ...]:
        """Numbers of machines between the smallest and the largest that do not divide the batch."""
        return tuple(n for n in range(self.fewest, self.most) if n not in self.nodes)

    @property
    def nnodes(self) -> str:
        return f"{self.most}" if self.fewest == self.most else f"{self.fewest}:{self.most}"

    @property
    def recipe_file(self) -> Path | None:
        return Path(self.recipe) if is_file_name(self.recipe) else None

    @property
    def top_folder(self) -> str | None:
        """The first folder of the absolute path `out`, where a cluster mounts what its machines share; else None."""
        root, *folders = PurePosixPath(self.out).parts or ("",)
        return f"/{folders[0]}" if root == "/" and folders else None

    def unmounted(self, *, copied: bool) -> list[str]:
        """Return the data that machines lack which mount only `top_folder`; `copied`: with the working directory."""
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
        saving = ("--out", self.out, "--resume", "--every-minutes", str(CHECKPOINT_MINUTES))
        return [recipe or self.recipe, *self.overrides, "devices=auto", *saving]


def make_job(
    recipe: str, overrides: Sequence[str], out: str | None, *, nodes: str, gpus: int, cpus: int,
    name: str | None = None, gpu_type: str | None = None, time: str | None = None, image: str | None = None,
) -> Job:  # fmt: skip
    if out is None:
        raise PlanError(
            "A job resumes from its folder when it is restarted. Pass --out, a folder that all machines see, or an "
            "address."
        )
    check_out("--out", out)
    if recipe.startswith("-"):
        raise PlanError(f"The recipe {recipe!r} begins with a dash, like an option. Write ./{recipe}.")
    if out.startswith("-"):
        out = f"./{out}"  # which paths of the command line lose
    numbers = _range(nodes)
    check_whole("gpus_per_node", gpus, PlanError, 1)
    check_whole("cpus_per_gpu", cpus, PlanError, 1)
    named = "up to 50 lowercase letters, digits and dashes, begin with a letter, and be no word of YAML, such as no"
    _check_text("--name", name, _NAME, named)
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
    kept = tuple(pair for pair in overrides if not pair.startswith("devices="))  # each file sets them
    return Job(
        recipe, kept, out, name or _name_of(recipe), _fitting(data.batch_size, how, numbers, gpus),
        processes=gpus, cpus=cpus, on_gpus=how.device != "cpu", timeout=how.timeout, gpu_type=gpu_type, time=time,
        image=image, data=files,
    )  # fmt: skip


def _range(nodes: str) -> range:
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", nodes, re.ASCII)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise PlanError(f"--nodes {nodes!r:.80} must be a positive integer, or MIN:MAX, such as 1:4.")
    return range(low, high + 1)


def _check_text(option: str, value: str | None, pattern: re.Pattern[str], allowed: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise PlanError(f"{option} {value!r:.80} must be {allowed}.")


def _name_of(recipe: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower())[:_LONG].strip("-")
    return plain if _NAME.fullmatch(plain) else f"train-{plain}"[:_LONG].strip("-")


def _read(recipe: str, overrides: Sequence[str]) -> tuple[DistributedConfig, DataConfig]:
    """Return how a recipe distributes, and its data. What only the cluster knows, e.g. its GPUs, is not checked."""
    values = parse_overrides(overrides)
    if values.pop("devices", "auto") != "auto":
        raise PlanError("devices= of a job is the number of its GPUs. Leave it out.")
    with modules_of(recipe):
        pipeline = Pipeline.from_recipe(recipe, **values, devices="auto")
    if pipeline.epochs is None:
        raise PlanError(f"Number of epochs not set by {recipe}. Pass epochs=….")
    assert pipeline.data is not None  # a recipe always has data
    return pipeline.distributed, pipeline.data


def _fitting(batch_size: int, how: DistributedConfig, numbers: range, processes: int) -> tuple[int, ...]:
    fitting = []
    for number in numbers:
        try:
            check_divides(batch_size, number * processes, how.accumulate)
            _check_groups(how, number * processes)
        except PlanError as error:
            if number in (numbers[0], numbers[-1]):
                raise PlanError(f"--nodes {number}: {error}") from None
        else:
            fitting.append(number)
    return tuple(fitting)


def _check_groups(how: DistributedConfig, devices: int) -> None:
    size = how.options.get("shard_size")  # of hsdp; by default the ranks of a machine
    if isinstance(size, int) and (size < 1 or devices % size):
        raise PlanError(f"shard_size={size} must be a positive integer that divides the {devices} devices.")


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit in SLURM's words: minutes, MM:SS, HH:MM:SS, or DAYS-HH and perhaps more."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def fill(template: str, **values: object) -> str:
    """Replace each `@name@` by a value; one with a line to itself may have several, indented alike, or none: the line
    goes."""

    def replace(match: re.Match[str]) -> str:
        indent, block, within = match.groups()
        text = f"{values[within or block]}"
        if block and text:
            text = textwrap.indent(text.rstrip("\n") + "\n", indent)
        return text

    return re.sub(r"^( *)@(\w+)@\n|@(\w+)@", replace, template, flags=re.MULTILINE)


def scalar(value: str) -> str:
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).strip()


def literal(key: str, text: str) -> str:
    return yaml.safe_dump({key: text}, default_style="|", allow_unicode=True, width=float("inf")).rstrip("\n")


_STOPPABLE = """\
stopped=""
trap 'stopped=yes; kill -@signal@ "$@process@" 2>/dev/null' @signal@@note@
@command@ &
@process@=$!
# A signal that came before has not reached it, and one that is sent at once could be lost while it begins.
if [ -n "$stopped" ]; then sleep 1; kill -@signal@ "$@process@" 2>/dev/null; fi
wait "$@process@"; status=$?
while kill -0 "$@process@" 2>/dev/null; do wait "$@process@"; status=$?; done  # a signal ends "wait" early
# Drivetrain has saved and left with 75; torchrun makes a 1 of it.
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then status=75; fi"""


def stoppable(command: str, process: str, signal: str, note: str = "") -> str:
    """Return shell commands that run `command`, torchrun or what starts it, and forward `signal` to it. Then `$status`
    is 75 if the signal has stopped it, because torchrun ends with 1. `process` is the variable of its id."""
    return fill(_STOPPABLE, command=command, process=process, signal=signal, note=note and f"  # {note}")
