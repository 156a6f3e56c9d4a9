"""Our strategies in Lightning's terms, and what of Lightning's Trainer would make a handed-over training wrong."""

from __future__ import annotations

from collections.abc import Callable
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
from ...errors import PlanError, suggest
from ..spec.config import DistributedConfig
from ..spec.resolve import ResolvedPlan
from ..spec.rules import check_rules

STARTS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
"""Lightning's ways to start the ranks of DDP; each name can end in `_find_unused_parameters_true` or `_false`."""

OWN = {
    "max_epochs": "to_lightning(epochs=…): the schedule needs it",
    "accumulate_grad_batches": "distribute(accumulate=…): each batch comes in as many parts",
}
"""Arguments of the Trainer that the module and its data were made for, and where each is said."""


def trainer_arguments(how: DistributedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Strategy, devices and accelerator for Lightning's Trainer, and whatever else was `given` for it.

    Raises:
        PlanError: for a strategy that Lightning does not have, or an argument that is the pipeline's to say.
    """
    for name, place in OWN.items():
        if name in given:
            raise PlanError(f"to_lightning({name}={given[name]!r}): say it in {place}.")
    arguments: dict[str, Any] = {"devices": how.devices}
    if "strategy" in given:
        _check_name(given["strategy"])
    else:
        arguments["strategy"] = to_strategy(how)
    if how.device is not None:
        kind, _, index = how.device.partition(":")
        arguments["accelerator"] = "cpu" if kind == "cpu" else "gpu"
        if index:
            arguments["devices"] = [int(index)]
    return {**arguments, **given}


def _check_name(strategy: object) -> None:
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy.lower() not in known:
        raise PlanError(
            f"to_lightning(strategy={strategy!r}) takes Lightning's names and objects.{suggest(strategy, known)}"
        )


def to_strategy(how: DistributedConfig) -> str | Strategy:
    """What `distribute` was told in Lightning's terms: a name, or an object where no name says it.

    Raises:
        PlanError: if Lightning has nothing that does the same, naming the remedy.
    """
    ours: Any = strategies.get(how.strategy, **how.options)
    for option, usual in (("wrap", True), ("config", None)):
        if getattr(ours, option, usual) is not usual:
            raise PlanError(
                f"distribute({how.name!r}, {option}=…) is an option of our strategy. Leave it out, and say it in "
                "Lightning's terms: to_lightning(strategy=FSDPStrategy(auto_wrap_policy=…)), or "
                "DeepSpeedStrategy(config=…)."
            )
    if ours.name in _OBJECTS:
        return _OBJECTS[ours.name](ours, how.devices)
    if ours.name == "single":
        return "auto"  # with one device: that one
    if ours.name == "ddp":
        start = next((start for start in reversed(STARTS) if how.name.startswith(start)), "ddp")
        return start + ("_find_unused_parameters_true" if ours.find_unused_parameters else "")
    if ours.name in StrategyRegistry:
        return str(ours.name)
    raise PlanError(
        f"Lightning has no strategy that does what {ours.name!r} does. Train with fit(), or give one of Lightning's: "
        f"to_lightning(strategy=…).{suggest(ours.name, StrategyRegistry.available_strategies())}"
    )


def _sharded_gradients(ours: Any, devices: int) -> Strategy:  # noqa: ARG001
    return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")


def _sharded_in_groups(ours: Any, devices: int) -> Strategy:
    size = ours.shard_size or devices
    return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(devices // size, size))


def _zero_1_offloaded(ours: Any, devices: int) -> Strategy:  # noqa: ARG001
    return DeepSpeedStrategy(stage=1, offload_optimizer=True)


def _zero_3_on_disk(ours: Any, devices: int) -> Strategy:  # noqa: ARG001
    return DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_parameters=True, remote_device="nvme",
        offload_params_device="nvme", offload_optimizer_device="nvme", nvme_path=ours.nvme_path,
    )  # fmt: skip


_OBJECTS: dict[str, Callable[[Any, int], Strategy]] = {
    "fsdp_grad_op": _sharded_gradients,
    "hsdp": _sharded_in_groups,
    "deepspeed_stage_1_offload": _zero_1_offloaded,
    "deepspeed_stage_3_offload_nvme": _zero_3_on_disk,  # Lightning's name has a path of its own, /local_nvme
}


def share(trainer: pl.Trainer) -> tuple[int, int]:
    """This rank's number among those that share a batch, and theirs; with tensor parallelism fewer than all."""
    told = trainer.distributed_sampler_kwargs
    return (trainer.global_rank, trainer.world_size) if told is None else (told["rank"], told["num_replicas"])


def check_trainer(plan: ResolvedPlan, epochs: int, trainer: pl.Trainer) -> None:
    """Holds the Trainer, whatever it was told, to what the pipeline was handed over for.

    Raises:
        PlanError: if the schedule or the microbatches would be others, or a transform does not go with the strategy.
    """
    here = {"max_epochs": trainer.max_epochs, "accumulate_grad_batches": trainer.accumulate_grad_batches}
    made_for = {"max_epochs": epochs, "accumulate_grad_batches": plan.distribution.accumulate}
    for name, place in OWN.items():
        if here[name] != made_for[name] and not getattr(trainer, "fast_dev_run", False):
            raise PlanError(
                f"Trainer({name}={here[name]}), and the pipeline was handed over for {made_for[name]}; say it in "
                f"{place}."
            )
    check_rules(
        plan.spec.replace(distribution=DistributedConfig(_kind(trainer.strategy), devices=trainer.world_size))
    )


def _kind(strategy: Strategy) -> str:
    """The strategy of ours that a transform's facts are looked up for."""
    if isinstance(strategy, DeepSpeedStrategy):
        config: Any = strategy.config
        return f"deepspeed_stage_{max(config.get('zero_optimization', {}).get('stage', 1), 1)}"
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        return "fsdp"
    # Torch itself raises where DDP waits for a parameter without a gradient.
    return "ddp_find_unused_parameters" if isinstance(strategy, ParallelStrategy) else "single"
