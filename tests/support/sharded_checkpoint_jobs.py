"""What ranks do in the tests of checkpoints by shard. A module, because ranks import it."""

import errno
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_methods import DIVIDED
from drivetrain import CheckpointError, Pipeline, strategies
from drivetrain.common.storage.tensors import Tensors, save_weights
from drivetrain.pipeline import Checkpoints, CheckpointWarning
from drivetrain.pipeline.runs.checkpoints import format as checkpoint_format
from drivetrain.pipeline.runs.checkpoints import state as states
from drivetrain.pipeline.runs.checkpoints.format import grouped, key_of
from drivetrain.pipeline.runs.checkpoints.shards import Shapes, open_shards, own_share
from drivetrain.strategies import Engine, OptimizerState
from drivetrain.strategies.common.optimizer_state import as_held
from drivetrain.strategies.deepspeed.strategy import import_deepspeed
from pipeline_data import CLASSES, numbers
from torch import nn

EVERY_STEP = Checkpoints(every_steps=1, keep=99)
FAMILY: dict[str, dict[str, Any]] = {
    "fsdp": {}, "fsdp_grad_op": {}, "fsdp_cpu_offload": {}, "hsdp in pairs": {"shard_size": 2},
    "hsdp alone": {"shard_size": 1},
}  # fmt: skip
FLAT: dict[str, dict[str, Any]] = {
    "deepspeed_stage_3": {"config": DIVIDED},
    "deepspeed_stage_3 kept whole, too": {},  # as all parameters here are small
    "deepspeed_stage_3_offload": {"config": DIVIDED},
}
"""Those that shard elements instead of rows."""


class Uneven(nn.Module):
    """Of 7, 1 and 2 rows, which four ranks share unevenly; a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 7), nn.Linear(7, 1), nn.Linear(1, 2, bias=False)
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.last(self.second(self.first(x * self.fixed)))


def stepped(name: str, seed: int) -> Engine:
    torch.manual_seed(seed)
    strategy = strategies.get(name.partition(" ")[0], device="cpu", **(FAMILY | FLAT)[name])
    engine = strategy.prepare(Uneven(), lambda p: torch.optim.AdamW(p, lr=0.1))
    engine.backward(engine.model(torch.randn(4, 3)).square().mean())
    engine.step()
    return engine


def tensors_of(engine: Engine, keep: Any) -> dict[str, torch.Tensor]:
    moments = {
        key_of(name, key): value
        for name, entry in engine.export_optimizer(keep).entries.items()
        for key, value in entry.items()
    }
    return engine.export_state(keep) | moments


def load(engine: Engine, tensors: Tensors) -> None:
    names = engine.plain_model.state_dict().keys()
    engine.import_state(Tensors({name: each for name, each in tensors.readers.items() if name in names}))
    entries = grouped(Tensors({key: each for key, each in tensors.readers.items() if "::" in key}))
    engine.import_optimizer(OptimizerState(engine.export_optimizer(as_held).groups, entries))


def files_of(engine: Engine, folder: Path) -> tuple[list[Path], Shapes]:
    """Write this rank's share; return the files of all."""
    own, shapes = own_share(engine, tensors_of(engine, as_held))
    paths = [folder / f"{rank}.safetensors" for rank in range(engine.shards)]
    if engine.rank < engine.shards:
        save_weights(own, paths[engine.rank])
    engine.barrier()
    return paths, shapes


def round_trips(folder: Path, names: list[str]) -> dict[str, Any]:
    """By strategy: the rows, or elements, of each tensor in this rank's file; whether all files together have what a
    gathering has, of any kind; and whether an engine has it after loading, without the files that have none of what it
    holds."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        flat, place = name in FLAT, folder / name
        place.mkdir(exist_ok=True)
        engine = stepped(name, seed=0)
        paths, shapes = files_of(engine, place)
        shard = engine.rank % engine.shards
        rows = {key: len(value) for key, value in open_shards([paths[shard]], {}).items() if key in shapes}
        whole, opened = tensors_of(engine, None), open_shards(paths, shapes, flat)
        together = opened.keys() == whole.keys() and all(torch.equal(opened[key], whole[key]) for key in whole)
        for key, value in tensors_of(engine, as_held).items():
            for home in (None, 1):
                gathered = engine.gather(value, home)
                together &= torch.equal(gathered.cpu(), whole[key]) or home not in (None, engine.rank)
        own = [path if number in (0, shard) else place / "gone" for number, path in enumerate(paths)]
        other = stepped(name, seed=1)
        load(other, open_shards(own, shapes, flat))
        loaded = all(torch.equal(value, whole[key]) for key, value in tensors_of(other, None).items())
        found[name] = rows, together, loaded
    return found


def train_until_killed(pipeline: Pipeline, out: Path, victim: int, step: int, moment: str) -> None:
    """Rank `victim` is killed as it writes the checkpoint of that step, before or after the file of a kind."""
    write = checkpoint_format.save_weights

    def write_and_die(state: Any, path: Path, **about: Any) -> None:
        when, kind = moment.split()
        due = torch.distributed.get_rank() == victim and f"{step:08d}" in str(path.parent) and kind in path.name
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(state, path, **about)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_format.save_weights = write_and_die  # type: ignore[assignment]
    pipeline.fit(epochs=2, out=out, progress=False, checkpoints=EVERY_STEP)


def gone_on(pipeline: Pipeline, outs: list[Path]) -> list[tuple[dict[str, Any], Any, dict[str, torch.Tensor]]]:
    """Of the run in each folder that goes on, or begins: its history's facts, the numbers, and the weights."""
    results = [pipeline.fit(epochs=2, out=out, resume="auto", progress=False) for out in outs]
    return [(result.history.facts, numbers(result), result.model.state_dict()) for result in results]


def resumed(pipeline: Pipeline, outs: list[Path]) -> list[tuple[int, list[str], list[int]]]:
    """On this rank, of the run in each folder: the step that it resumed from, its warnings, and the bytes of each file
    that it verified."""
    return [_resumed(pipeline, out) for out in outs]


def _resumed(pipeline: Pipeline, out: Path) -> tuple[int, list[str], list[int]]:
    sizes: list[int] = []
    measure = checkpoint_format._measure

    def measured(path: Path) -> Any:
        found = measure(path)
        sizes.append(found["bytes"])
        return found

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        patch.setattr(checkpoint_format, "_measure", measured)
        result = pipeline.fit(epochs=2, out=out, resume="auto", progress=False, checkpoints=None)
    warned = [str(each.message) for each in caught if issubclass(each.category, CheckpointWarning)]
    return result.history.facts["resumed"][-1]["step"], warned, sizes


def denied(pipeline: Pipeline, out: Path) -> str:
    """On this rank, the message of the resumed run, of whose files the last rank may not open its share."""

    measure = checkpoint_format._measure

    def measured(path: Path) -> Any:
        if os.environ["RANK"] == "1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return measure(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_format, "_measure", measured)
        with pytest.raises(CheckpointError) as caught:
            pipeline.fit(epochs=2, out=out, resume="auto", progress=False, checkpoints=None)
    return str(caught.value)


class Odd(nn.Module):
    """Of 189, 7, 252, 1 and 3 elements, which two ranks share unevenly, the last ones frozen; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
            nn.Linear(7 * 9, CLASSES, bias=False),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.add_(1)
            self.last.fill_(float(self.steps))
        return self.layers(images * self.fixed) * self.scale


GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "gather", "broadcast", "reduce_scatter")


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count, in two numbers, what sends tensors: outside of checkpoints, and while one is captured or loaded."""
    counts, inside = [0, 0], [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[inside[0]] += 1
            return function(*args, **kwargs)

        return call

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside[0] = 1
            try:
                return function(*args, **kwargs)
            finally:
                inside[0] = 0

        return call

    with import_deepspeed(torch.device("cpu")) as deepspeed, pytest.MonkeyPatch.context() as patch:
        for library in (dist, deepspeed.comm):
            for name in GATHERING:
                if hasattr(library, name):
                    patch.setattr(library, name, counted(getattr(library, name)))
        gathered = deepspeed.zero.GatheredParameters
        patch.setattr(gathered, "__enter__", counted(gathered.__enter__))
        for name in ("capture_state", "load_engine"):
            patch.setattr(states, name, watched(getattr(states, name)))
        yield counts


def flat_runs(pipelines: dict[str, Pipeline], out: Path, alone: Path, step: str) -> dict[str, Any]:
    """Train with DeepSpeed's third stage, and with FSDP; resume each from that step of both, and from one device's.
    What was sent in the former: outside of checkpoints, and for them; and the numbers and weights of all."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    places = {"single": alone / "checkpoints" / step}
    for name, pipeline in pipelines.items():
        with counting() as counts:
            found[name] = outcome_of(pipeline, out=out / name, checkpoints=Checkpoints(every_steps=2, keep=9))
        found[f"{name} sent"] = counts
        places[name] = out / name / "checkpoints" / step
    for name, pipeline in pipelines.items():
        for source, place in places.items():
            with counting() as counts:
                found[f"{name} from {source}"] = outcome_of(pipeline, resume=place)
            found[f"{name} from {source} sent"] = counts
    return found


def flat_jobs(
    pipelines: dict[str, Pipeline], out: Path, alone: Path, step: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`flat_runs`, and `round_trips` of what shards elements: importing DeepSpeed takes each rank seconds."""
    found, folder = flat_runs(pipelines, out, alone, step), out / "elements"
    folder.mkdir(exist_ok=True)
    return found, round_trips(folder, [*FLAT])


def outcome_of(pipeline: Pipeline, **fit: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    result = pipeline.fit(epochs=2, progress=False, **fit)
    return numbers(result), result.model.state_dict()
