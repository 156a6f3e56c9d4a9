"""Translate strategies and callbacks to Lightning's, and check the Trainer of a handed-over pipeline."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)

from ... import strategies
from ...common.errors import PlanError, suggest
from ..callbacks.callback import Callback, RunOptions
from ..callbacks.early_stopping import EarlyStopping
from ..describe.config import DistributedConfig
from ..describe.resolve import ResolvedPlan
from ..describe.rules import check_rules
from ..optim.optimizers import label, needs_whole_matrices

STARTS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
"""Lightning's names of DDP by launcher; each can end in `_find_unused_parameters_true` or `_false`."""

OWN = {
    "max_epochs": "to_lightning(epochs=…), because the schedule needs it",
    "accumulate_grad_batches": "distribute(accumulate=…), because each batch is split into as many microbatches",
}
"""Arguments of the Trainer that the pipeline determines, and where to set each."""

REMEDIES = {
    "GradientNorms": "log them in on_before_optimizer_step of a callback of Lightning's",
    "Profile": "pass Lightning's profiler to the Trainer: to_lightning(profiler='pytorch')",
}
"""What to use instead, by class, where Lightning has no such callback."""


def trainer_arguments(options: DistributedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return strategy, devices and accelerator for Lightning's Trainer, and the other arguments `given`."""
    for name, place in OWN.items():
        if name in given:
            raise PlanError(f"to_lightning({name}={given[name]!r}): set it in {place}.")
    arguments: dict[str, Any] = {"devices": options.ranks}
    if "strategy" not in given:
        arguments["strategy"] = to_strategy(options)
    elif isinstance(named := given["strategy"], str):
        known = ["auto", *StrategyRegistry.available_strategies()]
        if named.lower() not in known:
            raise PlanError(
                f"to_lightning(strategy={named!r}) takes Lightning's names and objects.{suggest(named, known)}"
            )
    if options.device is not None:
        kind, _, index = options.device.partition(":")
        arguments["accelerator"] = "cpu" if kind == "cpu" else "gpu"
        if index:
            arguments["devices"] = [int(index)]
    return {**arguments, **given}


def to_strategy(options: DistributedConfig) -> str | Strategy:
    """Return Lightning's strategy: a name, or an object if there is no name."""
    ours: Any = strategies.get(options.strategy, **options.options)
    for option, usual in (("wrap", True), ("config", None)):
        if getattr(ours, option, usual) is not usual:
            raise PlanError(
                f"distribute({options.name!r}, {option}=…) is an option of Drivetrain's strategy. Remove it, and pass "
                "Lightning's strategy: to_lightning(strategy=FSDPStrategy(auto_wrap_policy=…)), or "
                "DeepSpeedStrategy(config=…)."
            )
    if (made := _as_object(ours, options.ranks)) is not None:
        return made
    if ours.name == "single":
        return "auto"  # with one device, Lightning's SingleDeviceStrategy
    if ours.name == "ddp":
        start = next((start for start in reversed(STARTS) if options.name.startswith(start)), "ddp")
        return start + ("_find_unused_parameters_true" if ours.find_unused_parameters else "")
    if ours.name in StrategyRegistry:
        return str(ours.name)
    raise PlanError(
        f"Lightning has no equivalent of the strategy {ours.name!r}. Train with fit(), or pass one of Lightning's: "
        f"to_lightning(strategy=…).{suggest(ours.name, StrategyRegistry.available_strategies())}"
    )


def _as_object(ours: Any, devices: int) -> Strategy | None:
    match ours.name:
        case "fsdp_grad_op":
            return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
        case "hsdp":
            size = ours.shard_size or devices
            return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(devices // size, size))
        case "deepspeed_stage_1_offload":
            return DeepSpeedStrategy(stage=1, offload_optimizer=True)
        case "deepspeed_stage_3_offload_nvme":  # Lightning's name has a fixed path, /local_nvme
            return DeepSpeedStrategy(
                stage=3, offload_optimizer=True, offload_parameters=True, remote_device="nvme",
                offload_params_device="nvme", offload_optimizer_device="nvme", nvme_path=ours.nvme_path,
            )  # fmt: skip
    return None


def share(trainer: pl.Trainer) -> tuple[int, int]:
    """Return this rank's index among the ranks that share a batch, and their number; with tensor parallelism, fewer
    than the world size."""
    sampler = trainer.distributed_sampler_kwargs
    if sampler is None:
        return trainer.global_rank, trainer.world_size
    return sampler["rank"], sampler["num_replicas"]


def check_trainer(plan: ResolvedPlan, epochs: int, trainer: pl.Trainer) -> None:
    """Check the Trainer against the pipeline: schedule, microbatches, and what transforms and optimizer support."""
    actual = {"max_epochs": trainer.max_epochs, "accumulate_grad_batches": trainer.accumulate_grad_batches}
    expected = {"max_epochs": epochs, "accumulate_grad_batches": plan.distribution.accumulate}
    for name, place in OWN.items():
        if actual[name] != expected[name] and not getattr(trainer, "fast_dev_run", False):
            raise PlanError(
                f"Trainer({name}={actual[name]}), but the pipeline was handed over with {expected[name]}. Set it in "
                f"{place}."
            )
    optimizer = plan.optimization.optimizer
    if isinstance(trainer.strategy, FSDPStrategy) and needs_whole_matrices(optimizer):
        raise PlanError(
            f"The optimizer {label(optimizer)!r} needs whole matrices, but Lightning's FSDPStrategy flattens "
            "parameters. Use Lightning's DDP, or fit() with 'fsdp'."
        )
    check_rules(
        plan.spec.replace(distribution=DistributedConfig(_kind(trainer.strategy), devices=trainer.world_size))
    )


def _kind(strategy: Strategy) -> str:
    if isinstance(strategy, DeepSpeedStrategy):
        config: Any = strategy.config
        return f"deepspeed_stage_{max(config.get('zero_optimization', {}).get('stage', 1), 1)}"
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        return "fsdp"
    # torch itself raises if DDP waits for a parameter without a gradient.
    return "ddp_find_unused_parameters" if isinstance(strategy, ParallelStrategy) else "single"


def translated(callbacks: Any, run: RunOptions) -> Any:
    """Return the Trainer's `callbacks` (one, a list or None), with those of Drivetrain that Lightning has, too, as
    Lightning's."""
    if not isinstance(callbacks, list | tuple):
        return translated([callbacks], run)[0]
    return [_translated(one, run) if isinstance(one, Callback) else one for one in callbacks]


def _translated(one: Callback, run: RunOptions) -> pl.Callback:
    name = type(one).__name__
    if type(one) is not EarlyStopping:
        remedy = REMEDIES.get(name, "write it as a callback of Lightning's")
        raise PlanError(
            f"to_lightning(callbacks=…): {name} is a callback of Drivetrain, which only runs in fit(). Leave it out, "
            f"and {remedy}."
        )
    one.check(run)
    # An undefined metric is not logged, and is no improvement, as in fit(); Lightning would stop at once.
    return pl.callbacks.EarlyStopping(
        one.monitor, min_delta=one.min_delta, patience=one.patience, mode="min" if one.lower_is_better else "max",
        strict=False, check_finite=False, check_on_train_epoch_end=one.monitor == "loss",
    )  # fmt: skip
