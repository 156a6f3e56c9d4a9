"""Capture and restore a run's state, each rank's share on the CPU; or export its evaluated weights and its model."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ....common.errors import CheckpointError, DrivetrainError
from ....common.model_state import ModelState, buffers_kept, in_memory, split_state, unlisted_tensors
from ....common.rows import FlatShard
from ....common.storage.tensors import Tensors
from ....strategies import Engine
from ....strategies.common.optimizer_state import Keep, OptimizerState, as_held
from ....strategies.engine import copied
from ....transforms import Transform
from ...models.factories import model_factory
from ...models.weights import weights_omitted
from ...tasks.target_scale import adopt_scale
from ...telemetry.state import EpochMeter
from ...training.build import Built, rebuild_model
from ...training.hooks import TrainingHooks
from .directory import CheckpointDir, best_of, find
from .fingerprint import rebuild_spec
from .format import (
    OTHERS,
    OWN,
    TENSORS,
    UNLISTED,
    Checkpoint,
    CheckpointContent,
    Meter,
    Number,
    OptimizerContent,
    Part,
    RankContent,
    grouped,
    key_of,
)
from .shards import REMEDY, Shapes, Shards, own_share
from .weights import plain_state


def capture_state(
    built: Built, callbacks: dict[str, dict[str, Any]] | None = None, **about: Any
) -> tuple[Part, CheckpointContent]:
    """Return this rank's part of a checkpoint, and what all ranks share; every rank must call it. Buffers that differ
    between ranks (BatchNorm's, averages) are saved pooled, for any world size, and per rank, to resume bit for bit."""
    engine, hooks, position = built.engine, built.hooks, built.hooks.state
    keep, writers = _writing_plan(engine)
    own = {"random.cpu": torch.get_rng_state(), "loss": position.meter.total.detach().cpu().clone()}
    own |= {key: torch.cuda.get_rng_state(gpu) for key, gpu in _gpus(engine).items()}
    if engine.world_size > 1:
        own |= {key_of("buffer", name): copied(each) for name, each in engine.plain_model.named_buffers()}
    algorithm, words, *rest = np.random.get_state()  # noqa: NPY002 — the global state, which models may use
    of_numpy = [algorithm, np.asarray(words).tolist(), *rest]
    shared: dict[str, dict[str, torch.Tensor]] = {}
    shapes: dict[str, Shapes] = {}

    def take(kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if keep is as_held:
            tensors, shapes[kind] = own_share(engine, tensors)
        shared[kind] = dict(tensors)

    with buffers_kept(engine.plain_model):
        engine.sync_buffers()
        model = split_state(engine.plain_model, engine.export_state(keep))
        take("model", model.weights)
        flat = any(isinstance(value, FlatShard) for value in model.weights.values())
        if unlisted_tensors(engine.plain_model):
            take(UNLISTED, model.unlisted)
    optimizer = engine.export_optimizer(keep)
    averages, own_averages, values = _methods(engine, hooks, keep)
    moments: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Number]] = {}
    for name, entry in optimizer.entries.items():
        for key, value in entry.items():
            if not isinstance(value, int | float):
                moments[key_of(name, key)] = value
            elif keep is not as_held or engine.rank == 0:
                numbers.setdefault(name, {})[key] = value
    take("optimizer", moments)
    take("methods", averages)
    part = Part(
        {**(shared if engine.rank < writers else {}), OWN: own | own_averages},
        RankContent({"python": random.getstate(), "numpy": of_numpy}, numbers, callbacks or {}),
        writers,
    )
    return part, CheckpointContent(
        epoch=position.epoch,
        step=position.step,
        step_in_epoch=position.meter.steps,
        meter=cast(Meter, {**position.meter.state_dict(engine), "replaced": _replaced(built)}),
        optimizer=OptimizerContent(optimizer.groups, dict(optimizer.loss_scale)),
        methods=values,
        loader=built.train.state_dict(),
        shards=Shards(writers, shapes, flat) if writers > 1 else None,
        **about,
    )


def _replaced(built: Built) -> int:
    """Return how many samples of this epoch could not be decoded so far, over all ranks, which must call it."""
    if built.train.settings.on_error != "skip":
        return 0
    since = built.engine.reduce(torch.tensor(float(len(built.train.replaced))), "sum")
    return built.hooks.state.meter.replaced + int(since.item())


def _gpus(engine: Engine) -> dict[str, torch.device]:
    """Return the GPUs that draw for this rank, by the keys of their random states: of `dp` there are several."""
    if engine.device.type != "cuda":
        return {}
    further = list(getattr(engine.model, "device_ids", None) or ())[1:]
    return {"random.cuda": engine.device} | {f"random.cuda.{each}": torch.device("cuda", each) for each in further}


def _writing_plan(engine: Engine) -> tuple[Keep, int]:
    """Return which tensors this rank keeps, and how many ranks write: all that have a shard, if there are any."""
    if engine.shards:
        return as_held, engine.shards
    return (lambda _: engine.rank == 0), 1


def _methods(
    engine: Engine, hooks: TrainingHooks, keep: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors that this rank writes for all, its own, and the JSON values, with `TENSORS` or `OTHERS` in the
    places of tensors."""
    parameters = {name for name, _ in engine.plain_model.named_parameters()}
    whole: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for method, state in hooks.state_dict().items():
        values[method] = {}
        for key, value in state.items():
            if not isinstance(value, dict) or not value:
                values[method][key] = value
                continue
            what = f"{method}.{key}"
            values[method][key] = TENSORS if hooks.sets_weights(method) else OTHERS
            buffers = {name: tensor for name, tensor in value.items() if name not in parameters}
            pooled = engine.pool_buffers(buffers) if engine.world_size > 1 else {}
            own |= {key_of(what, name): copied(buffers[name]) for name in pooled}
            for name, held in (value | pooled).items():
                gathered = held if keep is as_held else engine.gather(held)
                if keep(name):
                    whole[key_of(what, name)] = gathered if keep is as_held else copied(gathered)
    return whole, own, values


def all_finite(part: Part, model: nn.Module) -> bool:
    saved = part.tensors.get("model", {})
    return all(_is_finite(saved[name]) for name, _ in model.named_parameters() if name in saved)


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass without another tensor: `isfinite` takes several times as long, and training waits for it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not real.is_floating_point() or not real.numel():
        return True
    if real.dtype.itemsize == 1:  # float8, for which torch has no `aminmax`
        return bool(real.isfinite().all())
    return all(bool(each.isfinite()) for each in torch.aminmax(real))  # NaN if one is


def load_engine(checkpoint: Checkpoint, engine: Engine) -> None:
    with restoring(checkpoint):
        engine.import_state(checkpoint.tensors("model", UNLISTED))
        entries = grouped(checkpoint.tensors("optimizer"))
        for rank in checkpoint.content.ranks:
            for name, numbers in rank.numbers.items():
                tensors = entries[name].readers if name in entries else {}
                entries[name] = Tensors({**tensors, **{key: lambda one=one: one for key, one in numbers.items()}})
        plain = checkpoint.content.optimizer
        engine.import_optimizer(OptimizerState(plain.groups, entries, plain.loss_scale))


def buffers_left(checkpoint: Checkpoint, engine: Engine) -> list[str]:
    """Return what a checkpoint of an older version lacks: it begins as the model's constructor left it."""
    return sorted(unlisted_tensors(engine.plain_model).keys() - checkpoint.tensors(UNLISTED).keys())


def load_hooks(checkpoint: Checkpoint, built: Built) -> None:
    """Restore the position, the methods, and this rank's buffers. Call it after `TrainingHooks.begin`."""
    engine, content, state = built.engine, checkpoint.content, built.hooks.state
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        built.hooks.load_state_dict(with_averages(checkpoint, own))
        buffers: Mapping[str, torch.Tensor] = {} if own is None else grouped(own).get("buffer", {})
        with torch.no_grad():
            for name, buffer in engine.plain_model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        total = torch.tensor(content.meter["total"]) if own is None else own["loss"]
        state.epoch, state.step = content.epoch, content.step
        # Of the last step: the epoch may have only its evaluation left.
        state.lr = float(engine.optimizer.param_groups[0]["lr"])
        state.steps_left_out = content.epoch * state.steps_per_epoch + content.step_in_epoch - content.step
        meter: dict[str, Any] = {**content.meter, "total": total.to(engine.device)}
        if meter.get("weight") is None:  # of an older version: a sum of the steps' losses
            batch = content.facts["batch_size"]
            meter |= {"total": meter["total"] * batch, "weight": float(meter["counted"] * batch)}
        state.meter = EpochMeter(**meter)


def load_randomness(checkpoint: Checkpoint, engine: Engine, seed: int) -> None:
    """Restore this rank's global random states; with another world size, seed them from (seed, step, rank)."""
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        if own is None:
            key = np.random.SeedSequence([seed, checkpoint.content.step, engine.rank])
            first, second, third = (int(word) for word in key.generate_state(3, np.uint32))
            torch.manual_seed(first)
            np.random.seed(second)  # noqa: NPY002 — the global state, which models may use
            random.seed(third)
            return
        torch.set_rng_state(own["random.cpu"])
        for name, gpu in _gpus(engine).items():
            if name in own:
                torch.cuda.set_rng_state(own[name], gpu)
        saved = checkpoint.content.ranks[engine.rank].random
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = saved["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def own_tensors(checkpoint: Checkpoint, engine: Engine) -> Tensors | None:
    if len(checkpoint.content.ranks) != engine.world_size:
        return None
    return checkpoint.tensors(OWN, rank=engine.rank)


_BUILT_IN = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, MemoryError)


@contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert errors inside the block. A missing JSON value or tensor raises one of Python's."""
    try:
        yield
    except CheckpointError:
        raise
    except DrivetrainError as error:
        raise CheckpointError(f"The checkpoint {checkpoint.place} is of another run: {error}") from error
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.place} needs more memory than a device here has free: {error} The checkpoint "
            "is not damaged: resume it on more devices, or with a strategy that shards more, such as 'fsdp'."
        ) from error
    except _BUILT_IN as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.place} is incomplete, or of another run ({type(error).__name__}: {error}). "
            f"{REMEDY}"
        ) from error


@contextmanager
def global_randomness_kept() -> Iterator[None]:
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])


def with_averages(checkpoint: Checkpoint, own: Tensors | None = None) -> dict[str, dict[str, Any]]:
    """Return the methods' states with tensors in place of `TENSORS` and `OTHERS`, those in `own` first."""
    tensors = grouped(checkpoint.tensors("methods"), *([] if own is None else [own]))
    return {
        method: {
            key: tensors[f"{method}.{key}"] if value in (TENSORS, OTHERS) else value for key, value in state.items()
        }
        for method, state in checkpoint.content.methods.items()
    }


ModelArg = str | Callable[..., nn.Module] | nn.Module | None


def chosen(place: Path, *, best: bool) -> Checkpoint:
    """Return the verified checkpoint at `place`; of a run, the newest complete one, or the one of the best metric."""
    if not best:
        return find(place)
    store = CheckpointDir(place / "checkpoints")
    # Checkpoints of an earlier run may be there until the first of this run is complete.
    checkpoint = best_of(list(store.of_run(store.run)))
    if checkpoint is None:
        raise CheckpointError(
            f"{store.folder} has no checkpoint of its run with a monitored metric. Remove best=True (--best), or pass "
            f"the path of a checkpoint."
        )
    checkpoint.verify()
    return checkpoint


def evaluated_state(checkpoint: Checkpoint) -> ModelState:
    """Return the weights used for evaluation, with averages in the model's dtypes, as `Tensors`."""
    with restoring(checkpoint):
        weights, unlisted = (dict(checkpoint.tensors(kind).readers) for kind in ("model", UNLISTED))
        for method, kept in with_averages(checkpoint).items():
            for key, averages in kept.items():
                if checkpoint.content.methods[method][key] != TENSORS:  # JSON values, or tensors of another kind
                    continue
                names = _names_of_averages({**weights, **unlisted}, averages)
                for own in (weights, unlisted):
                    both = own.keys() & names.keys()
                    own |= {name: _Average(own[name].dtype, averages.readers[names[name]]) for name in both}
        return ModelState(Tensors(weights), Tensors(unlisted))


def _names_of_averages(own: Mapping[str, Any], averages: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the name of the average of each of these tensors that has one. A tensor with several names, such as that
    of a layer that is used twice, is in a checkpoint under each of them, and its average under the first."""
    found = {name: name for name in own if name in averages}
    of_kind: dict[Any, list[str]] = {}
    for first in found:
        of_kind.setdefault((own[first].shape, own[first].dtype), []).append(first)
    alike = {name: of_kind.get((own[name].shape, own[name].dtype), []) for name in own.keys() - found.keys()}
    if 2 * (len(found) + sum(map(bool, alike.values()))) < len(own):  # averages of some tensors only
        return found
    further: dict[str, str] = {}
    for name, names in alike.items():
        same = next((first for first in names if torch.equal(own[first](), own[name]())), None)
        if same is not None:
            further[name] = same
    return found if 2 * len(found | further) < len(own) else found | further


@dataclass(frozen=True)
class _Average:
    """A stored average: calling it reads it, in the dtype of the tensor that it replaces."""

    dtype: torch.dtype
    average: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.average.shape)

    def __call__(self) -> torch.Tensor:
        average: torch.Tensor = self.average()
        return average.to(self.dtype)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        average: torch.Tensor = self.average[rows]
        return average.to(self.dtype)


def plain_names(checkpoint: Checkpoint, model: ModelArg = None) -> ModelState:
    state = in_memory(evaluated_state(checkpoint))  # whose tensors a surgery's translation tells apart
    otherwise = "use names='trained' (--names trained), or FitResult.plain_state()"
    built, transforms = rebuild(checkpoint, state.weights, model, otherwise)
    with restoring(checkpoint):
        return plain_state(state, built, transforms)


def rebuild(
    checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], model: ModelArg, otherwise: str
) -> tuple[nn.Module, tuple[Transform, ...]]:
    """Return the model after surgery, with new weights, and its transforms. `model`, before surgery, must fit `state`;
    None: the one that the checkpoint names, for which nothing is imported. `otherwise`: the remedy if it is unknown."""
    saved = checkpoint.content.description
    if saved is None:
        raise CheckpointError(
            f"{checkpoint.place} does not know how to build its model: its options, or a custom surgery, cannot be "
            f"written as JSON. {otherwise[:1].upper()}{otherwise[1:]}."
        )
    if isinstance(model, str):
        model = model_factory(model)
    with restoring(checkpoint):
        spec, transforms = rebuild_spec(saved, model, otherwise)
    with restoring(checkpoint) if model is None else nullcontext(), weights_omitted():
        built, _ = rebuild_model(spec, transforms)
        adopt_scale(built, state)
    if model is not None:
        _check_fits(built, state, spec.model_name, checkpoint.path)
    return built, transforms


def _check_fits(model: nn.Module, state: Mapping[str, torch.Tensor], name: str, where: Path) -> None:
    fresh = model.state_dict()
    own = {key: tuple(value.shape) for key, value in fresh.items() if not is_lazy(value)}
    there = {key: tuple(value.shape) for key, value in state.items() if key in own or key not in fresh}
    for key in {**there, **own}:
        if own.get(key) != there.get(key):
            ours, theirs = (f"has it as {x[key]}" if key in x else "does not have it" for x in (own, there))
            raise CheckpointError(
                f"{name} is not the model that was trained: of the weight {key!r}, {name} {ours}, and "
                f"{where} {theirs}. Pass the model of the training, before surgery."
            )
