"""Hand a pipeline over to Lightning: data and model as a LightningDataModule and a LightningModule, the rest as
arguments of the Trainer.

Requires the extra `lightning`. Lightning starts the ranks, wraps the model after surgery with any of its strategies,
and accumulates gradients; each rank gets its share of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from inspect import signature
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from ... import strategies
from ...common.errors import PlanError, suggest
from ...common.model_state import keep_frozen_statistics, on_meta
from ...loaders.epochs import EpochLoader
from ...loaders.sources import Source
from ...strategies.common.sharding import give_channels_last_inputs, make_contiguous
from ...transforms import Report, Transform
from ...transforms.no_weight_decay import note_shape
from ..callbacks.callback import Callback, RunOptions
from ..callbacks.early_stopping import EarlyStopping
from ..describe.config import DistributedConfig
from ..describe.cuda_settings import choose_benchmark, cuda_settings, uses_gpu
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan, resolve
from ..describe.rules import check_rules, check_split_seed
from ..optim.optimizers import is_schedule_free, label, needs_whole_matrices
from ..runs.callbacks import check_measured, run_options
from ..runs.config import FitConfig
from ..runs.initial import initial_weights
from ..tasks.means import Mean, mean_of
from ..tasks.nests import pair, to_float
from ..tasks.task import model_inputs
from ..training.build import (
    Parts,
    draw_apart,
    fork_rng,
    make_loader,
    make_loaders,
    make_parts,
    optimizer_factory,
    plain_torch,
    resolve_data,
    training_loss,
)
from ..training.hooks import Microbatch, TrainingHooks, split_microbatches
from ..training.loop import EvaluationSums, StepLoss, forward
from ..training.schedule import torch_scheduler

STARTS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
"""Lightning's names of DDP by launcher; each can end in `_find_unused_parameters_true` or `_false`."""
OWN = {  # arguments of the Trainer that the pipeline determines, and where to set each
    "max_epochs": "to_lightning(epochs=…), because the schedule needs it",
    "accumulate_grad_batches": "distribute(accumulate=…), because each batch is split into as many microbatches",
}
REMEDIES = {  # what to use instead, by class, where Lightning has no such callback
    "GradientNorms": "log them in on_before_optimizer_step of a callback of Lightning's",
    "Profile": "pass Lightning's profiler to the Trainer: to_lightning(profiler='pytorch')",
}
PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
GPUS_ONLY = (
    "sync_batchnorm=True: Lightning uses torch's SyncBatchNorm, which works on GPUs only. Train with fit(), or leave "
    "it out."
)


class HandOver(NamedTuple):
    """The result of `Pipeline.to_lightning`: `Trainer(**trainer).fit(module, data)`."""

    module: LitModule  # `module.model` is the model after surgery
    data: LitDataModule  # creates each rank's loaders on that rank
    trainer: dict[str, Any]  # use it once: the strategy may be an object
    reports: tuple[Report, ...]


@plain_torch()
def hand_over(spec: PipelineSpec, epochs: int | None, given: dict[str, Any]) -> HandOver:
    epochs = spec.epochs if epochs is None else epochs
    if epochs is None:
        raise PlanError("Number of epochs not set. Pass to_lightning(epochs=…).")
    plan = resolve(spec.replace(epochs=epochs))
    distribution = plan.distribution
    _check_methods(plan.spec.transforms)
    if is_schedule_free(plan.optimization.optimizer):
        raise PlanError(
            f"optimize({label(plan.optimization.optimizer)!r}) needs Drivetrain's loop, which evaluates its averages. "
            "Train with fit(), or use another optimizer."
        )
    arguments, of_fit = trainer_arguments(distribution, given), _of_training(plan, given)
    callbacks = [*of_fit.callbacks, *_several(arguments.get("callbacks"))]
    if callbacks:
        arguments["callbacks"] = translated(callbacks, run_options(plan, logs=False))
    if distribution.compile or distribution.activation_checkpointing:
        raise PlanError(
            "compile= and activation_checkpointing= require Drivetrain's strategies. Remove them from .distribute(), "
            "and use Lightning's: Trainer(strategy=FSDPStrategy(activation_checkpointing_policy=…)), module.compile()."
        )
    on_cpu = arguments.get("accelerator") == "cpu" or not torch.cuda.is_available()
    if distribution.sync_batchnorm and distribution.ranks > 1 and on_cpu:
        raise PlanError(GPUS_ONLY)
    plan = resolve_data(plan, progress=False)
    with ExitStack() as stack:
        loaders = make_loaders(plan, _device(arguments))
        for loader in loaders:
            if loader is not None:
                stack.enter_context(loader)
        stack.enter_context(_one_thread())
        parts, steps = make_parts(plan, *loaders), len(loaders[0])
        # Lightning's EarlyStopping would wait for a metric that evaluations lack, and never stop.
        ours = [one for one in callbacks if isinstance(one, Callback)]
        check_measured(ours, run_options(plan, logs=False), parts.metrics)
        if on_meta(parts.model):
            raise PlanError(
                f"{plan.spec.model_name} is on the meta device, which only fit() initializes. Build the model on the "
                "CPU, or train it with fit()."
            )
        if (initial := initial_weights(plan)) is not None:
            initial(parts.model)
        _check_denominators(parts, mean_of(parts.loss(_device(arguments))))
    trainer = {
        "max_epochs": epochs, "precision": PRECISION[distribution.precision],
        "accumulate_grad_batches": distribution.accumulate, "gradient_clip_val": distribution.clip_norm,
        "gradient_clip_algorithm": "norm", "sync_batchnorm": distribution.sync_batchnorm,
        "use_distributed_sampler": False, "check_val_every_n_epoch": of_fit.eval_every, "num_sanity_val_steps": 0,
        "logger": False, "enable_checkpointing": False, **_benchmark(plan, arguments), **arguments,
    }  # fmt: skip
    at_last = of_fit.eval_every > 1 and "check_val_every_n_epoch" not in given
    return HandOver(LitModule(parts, epochs, steps, at_last=at_last), LitDataModule(plan), trainer, parts.reports)


def _device(arguments: dict[str, Any]) -> torch.device:
    """Return CUDA only if it is already initialized, as by a loss on a GPU: initializing it would prevent forking."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if started and arguments.get("accelerator") != "cpu" else "cpu")


def _benchmark(plan: ResolvedPlan, arguments: dict[str, Any]) -> dict[str, bool]:
    """Return the plan's choice as an argument of the Trainer, which makes its own if it is to be deterministic."""
    if arguments.get("deterministic") or not uses_gpu(plan.distribution):
        return {}
    chosen, _ = choose_benchmark(plan.distribution, plan.transforms)
    return {"benchmark": chosen}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from starting threads, for which a process forked later (`ddp_fork`) would wait forever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_methods(transforms: tuple[Transform, ...]) -> None:
    following = [each for each in transforms if each.follows_loop]
    unsupported = [str(each) if each.kind == "algorithm" else type(each).__name__ for each in following]
    if unsupported:
        raise PlanError(
            f"{', '.join(unsupported)} works only in Drivetrain's loop. Train with fit(), or remove it and use "
            "Lightning's counterpart (StochasticWeightAveraging, gradient_clip_val, BaseFinetuning)."
        )


def _check_denominators(parts: Parts, loss: Mean) -> None:
    """Raise if microbatches may have different weights in a step's mean: Lightning passes them one at a time."""
    soft = any(transform.soft_targets for transform in parts.plan.transforms)
    accumulate = parts.plan.distribution.accumulate
    if accumulate == 1 or soft or not isinstance(loss.denominator(parts.example[1]), torch.Tensor):
        return
    raise PlanError(
        f"With accumulate={accumulate}, Lightning averages the microbatches of a step, but this loss weights or "
        "ignores targets, so that each has another weight. Set accumulate=1, or train with fit()."
    )


class _Ranks:
    def __init__(self, trainer: pl.Trainer) -> None:
        self._strategy = trainer.strategy
        self.world_size, self.device = trainer.world_size, trainer.strategy.root_device

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        total: torch.Tensor = self._strategy.reduce(value.clone(), reduce_op=op)
        return total


class LitModule(pl.LightningModule):
    """The model after surgery, with the pipeline's loss, batch transforms, optimizer and schedule. It logs `loss`,
    `val_loss` and the metrics of each epoch. Random layers depend on the pipeline's seed, as in `fit`."""

    def __init__(self, parts: Parts, epochs: int, steps: int, *, at_last: bool = False) -> None:
        """`at_last`: evaluate after the last epoch in any case, as `fit(eval_every=…)` does."""
        super().__init__()
        plan = parts.plan
        self.model = parts.model
        self._plan, self._epochs, self._steps, self._at_last = plan, epochs, epochs * steps, at_last
        self._loss = training_loss(plan, torch.device("cpu"))
        self._hooks = TrainingHooks(plan.transforms, plan.seed, parts.classes)
        self._at_end = ExitStack()
        for parameter in self.model.parameters():
            note_shape(parameter)  # FSDP1 flattens them before the optimizer is built

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images)
        return logits

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but not that of frozen BatchNorm layers, as `fit` does."""
        super().train(mode)
        if mode:
            keep_frozen_statistics(self.model)
        return self

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        ours = self._plan.data, self._plan.seed
        if isinstance(data, LitDataModule) and (data.plan.data, data.plan.seed) != ours:
            raise PlanError("The module and the data are from two pipelines. Take both from one to_lightning().")
        if stage == "fit":
            check_trainer(self._plan, self._epochs, self.trainer)
        if isinstance(self.trainer.strategy, DeepSpeedStrategy) and make_contiguous(self.model):
            give_channels_last_inputs(self.model)  # DeepSpeed cannot broadcast channels-last weights

    def on_fit_start(self) -> None:
        self._hooks.state.total_steps = self._steps
        for transform in self._plan.transforms:
            transform.begin(self.model, self._steps)
        self._loss = training_loss(self._plan, self.device)
        self._at_end.enter_context(fork_rng(self._plan.seed))
        benchmark = torch.backends.cudnn.benchmark  # the Trainer's
        how = replace(self._plan.distribution, cudnn_benchmark=benchmark)
        self._at_end.enter_context(cuda_settings(how, self._plan.transforms))
        draw_apart(self._plan.seed, share(self.trainer)[0])

    def on_train_epoch_start(self) -> None:
        """A callback may have changed the accumulation, or frozen layers; Lightning does not call `train()`."""
        check_trainer(self._plan, self._epochs, self.trainer)
        if self._at_last and self.trainer.current_epoch + 1 == self._epochs:
            every = self.trainer.check_val_every_n_epoch
            self._at_end.callback(setattr, self.trainer, "check_val_every_n_epoch", every)
            self.trainer.check_val_every_n_epoch = 1
        self.train()

    def on_fit_end(self) -> None:
        self._at_end.close()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        accumulate = self._plan.distribution.accumulate
        self._hooks.state.step = self.trainer.global_step
        number = share(self.trainer)[0] * accumulate + batch_idx % accumulate
        images, targets = self._hooks.apply_batch_transforms(batch, number, self.model, self._loss)
        # Older torch would use weights without gradients again, from a forward of a method (SelectiveBackprop).
        torch.clear_autocast_cache()
        outputs = forward(self.model, images, **model_inputs(self._loss, targets))
        equal = not self._hooks.may_change_batches  # else the ranks may have different numbers of samples
        if accumulate > 1 and not equal and len(images) != len(batch[0]):
            raise PlanError(
                f"With accumulate={accumulate}, Lightning averages the microbatches of a step, but a batch transform "
                f"has kept {len(images)} of {len(batch[0])} samples of one, so that each has another weight. Set "
                "accumulate=1, or train with fit()."
            )
        with self._full_precision():
            step = StepLoss(mean_of(self._loss), [(images, targets)], _Ranks(self.trainer), equal=equal)
            loss = step.share(1, to_float(outputs), targets)
        weight: Any = step.weight  # of all ranks, as in an epoch's mean in `fit`
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=weight)
        # Lightning divides the loss by `accumulate`, and DeepSpeed divides it again.
        return loss * accumulate if isinstance(self.trainer.strategy, DeepSpeedStrategy) else loss

    def on_validation_epoch_start(self) -> None:
        def predict(images: torch.Tensor, labels: Any) -> tuple[Any, Any]:
            with self.trainer.precision_plugin.forward_context():
                return self._hooks.predict(self.model, images, labels, self._plan.task)

        self._sums = EvaluationSums(self._plan.task, _Ranks(self.trainer), predict)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        with self._full_precision():
            self._sums.add(*batch)

    def _full_precision(self) -> torch.autocast:
        """For losses and metrics, as in `fit`: Lightning calls the steps under autocast."""
        return torch.autocast(self.device.type, enabled=False)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self._sums.result())

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients as Lightning does; with FSDP1, where Lightning rejects it, by the norm over all shards."""
        wrapped = self.trainer.model
        if not isinstance(wrapped, FullyShardedDataParallel) or gradient_clip_algorithm != "norm":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            wrapped.clip_grad_norm_(gradient_clip_val)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_factory(self._plan, self.model)(self.parameters())
        strategy = self.trainer.strategy  # what a factory returns is known only now
        if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy) and needs_whole_matrices(type(optimizer)):
            raise _flattened(type(optimizer).__name__, strategy)
        how = self._plan.optimization
        scale = how.scheduled_scale(self._plan.data.batch_size)
        schedule = torch_scheduler(how, optimizer, self._steps, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LitDataModule(pl.LightningDataModule):
    """Loaders that yield each rank's share of every global batch, created on the rank."""

    def __init__(self, plan: ResolvedPlan) -> None:
        super().__init__()
        self.plan = plan
        self._loaders: list[EpochLoader] = []

    def train_dataloader(self) -> Microbatches:
        return self._create_loader(self.plan.data.train, True, self.plan.distribution.accumulate)

    def val_dataloader(self) -> Microbatches | list[Any]:
        source = self.plan.data.val
        return [] if source is None else self._create_loader(source, False, 1)

    def _create_loader(self, source: Source, train: bool, accumulate: int) -> Microbatches:
        trainer, data = self.trainer, self.plan.data
        assert trainer is not None
        ranks = share(trainer)
        if train and data.batch_size % (ranks[1] * accumulate):
            raise PlanError(
                f"batch_size={data.batch_size} is global and must be divisible by {ranks[1]} Lightning ranks × "
                f"accumulate={accumulate}."
            )
        root = trainer.strategy.root_device
        # Lightning moves batches to devices other than CUDA.
        device = root if root.type == "cuda" else torch.device("cpu")
        loader = make_loader(self.plan, source, train=train, device=device, ranks=ranks)
        self._loaders.append(loader)
        return Microbatches(loader, accumulate)

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        while self._loaders:
            self._loaders.pop().close()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        """Lightning calls neither `teardown` nor the module's `on_fit_end` after an exception."""
        self.teardown("fit")
        module = None if self.trainer is None else self.trainer.lightning_module
        if isinstance(module, LitModule):
            module.on_fit_end()  # else torch's random state and settings would stay those of the run


class Microbatches:
    def __init__(self, loader: EpochLoader, number: int) -> None:
        self._loader, self._number = loader, number
        size = loader.settings.batch_size // (loader.settings.world_size * number)
        # Lightning calls `set_epoch` of the sampler, and its DeepSpeedStrategy reads the size.
        self.batch_sampler = SimpleNamespace(sampler=loader, batch_size=size)

    def __len__(self) -> int:
        return len(self._loader) * self._number

    def __iter__(self) -> Iterator[Microbatch]:
        for images, targets in map(pair, self._loader):
            yield from split_microbatches(images, targets, self._number)


def trainer_arguments(options: DistributedConfig, given: dict[str, Any]) -> dict[str, Any]:
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
        given = {**given, "strategy": _limited(named, options)}
    if options.device is not None:
        kind, _, index = options.device.partition(":")
        arguments["accelerator"] = "cpu" if kind == "cpu" else "gpu"
        if index:
            arguments["devices"] = [int(index)]
    return {**arguments, **given}


def to_strategy(options: DistributedConfig) -> str | Strategy:
    ours: Any = strategies.get(options.strategy, **options.options)
    for option, usual in (("wrap", True), ("config", None)):
        if getattr(ours, option, usual) is not usual:
            raise PlanError(
                f"distribute({options.name!r}, {option}=…) is an option of Drivetrain's strategy. Remove it, and pass "
                "Lightning's strategy: to_lightning(strategy=FSDPStrategy(auto_wrap_policy=…)), or "
                "DeepSpeedStrategy(config=…)."
            )
    if (made := _as_object(ours, options.ranks, _limit(options))) is not None:
        return made
    if ours.name == "single":
        return "auto"  # with one device, Lightning's SingleDeviceStrategy
    if ours.name == "ddp":
        start = next((start for start in reversed(STARTS) if options.name.startswith(start)), "ddp")
        return _limited(start + ("_find_unused_parameters_true" if ours.find_unused_parameters else ""), options)
    if ours.name in StrategyRegistry:
        return _limited(str(ours.name), options)
    raise PlanError(
        f"Lightning has no equivalent of the strategy {ours.name!r}. Train with fit(), or pass one of Lightning's: "
        f"to_lightning(strategy=…).{suggest(ours.name, StrategyRegistry.available_strategies())}"
    )


def _as_object(ours: Any, devices: int, limit: dict[str, Any]) -> Strategy | None:
    match ours.name:
        case "fsdp_grad_op":
            return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", **limit)
        case "hsdp":
            size = ours.shard_size or devices
            return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(devices // size, size), **limit)
        case "deepspeed_stage_1_offload":
            return DeepSpeedStrategy(stage=1, offload_optimizer=True, **limit)
        case "deepspeed_stage_3_offload_nvme":  # Lightning's name has a fixed path, /local_nvme
            return DeepSpeedStrategy(
                stage=3, offload_optimizer=True, offload_parameters=True, remote_device="nvme",
                offload_params_device="nvme", offload_optimizer_device="nvme", nvme_path=ours.nvme_path, **limit,
            )  # fmt: skip
    return None


def _limit(options: DistributedConfig) -> dict[str, Any]:
    """Return the time limit of collectives as an argument of a strategy; none without one of the pipeline's own."""
    return {"timeout": timedelta(seconds=options.timeout)} if "timeout" in options.changed() else {}


def _limited(name: str, options: DistributedConfig) -> str | Strategy:
    """Return one of Lightning's strategies: its name, unless the pipeline limits the time of collectives, which a name
    cannot have: Lightning's own limit is half an hour."""
    limit, key = _limit(options), name.lower()
    entry: Any = StrategyRegistry[key] if limit and key in StrategyRegistry else None
    if entry is None or "timeout" not in signature(entry["strategy"]).parameters:
        return name
    made: Strategy = entry["strategy"](**entry["init_params"], **limit)
    return made


def share(trainer: pl.Trainer) -> tuple[int, int]:
    """Return this rank's index among those that share a batch, and their number: fewer with tensor parallelism."""
    sampler = trainer.distributed_sampler_kwargs
    if sampler is None:
        return trainer.global_rank, trainer.world_size
    return sampler["rank"], sampler["num_replicas"]


def check_trainer(plan: ResolvedPlan, epochs: int, trainer: pl.Trainer) -> None:
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
        raise _flattened(label(optimizer), trainer.strategy)
    # Perhaps only the Trainer has several ranks. Of strategies with one process, it is not set.
    synchronized = getattr(trainer.strategy, "_layer_sync", None) is not None
    if synchronized and trainer.strategy.root_device.type == "cpu":
        raise PlanError(GPUS_ONLY)
    ours = DistributedConfig(_kind(trainer.strategy), devices=trainer.world_size)
    check_rules(plan.spec.replace(distribution=ours))


def _flattened(optimizer: str, strategy: Strategy) -> PlanError:
    return PlanError(
        f"The optimizer {optimizer!r} needs whole matrices, but Lightning's {type(strategy).__name__} flattens "
        "parameters. Use Lightning's DDP, or fit() with 'fsdp'."
    )


def _kind(strategy: Strategy) -> str:
    if isinstance(strategy, DeepSpeedStrategy):
        config: Any = strategy.config
        return f"deepspeed_stage_{max(config.get('zero_optimization', {}).get('stage', 1), 1)}"
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        return "fsdp"
    # torch itself raises if DDP waits for a parameter without a gradient.
    return "ddp_find_unused_parameters" if isinstance(strategy, ParallelStrategy) else "single"


def _of_training(plan: ResolvedPlan, trainer: Mapping[str, Any]) -> FitConfig:
    """Return the recipe's options of `fit` that Lightning's loop has a place for; raise if it would train or evaluate
    otherwise. `trainer`: the arguments of the Trainer that are given."""
    check_split_seed(plan.data)
    given = plan.spec.fit_defaults()
    if "eval_every" in given and "check_val_every_n_epoch" not in trainer and plan.data.val is None:
        raise PlanError(
            f"eval_every={given['eval_every']} of the recipe needs validation data. Pass a second file to load(), or "
            "remove it."
        )
    if given.get("eval_every_steps") is not None and "val_check_interval" not in trainer:
        raise PlanError(
            f"eval_every_steps={given['eval_every_steps']} of the recipe needs Drivetrain's loop: Lightning evaluates "
            "by microbatches, not steps. Pass to_lightning(val_check_interval=…), which replaces it, or remove it."
        )
    if given.get("on_nonfinite") == "skip":
        raise PlanError(
            "on_nonfinite='skip' of the recipe needs Drivetrain's loop: Lightning's does not skip steps. Train with "
            "fit(), or remove it."
        )
    return FitConfig(**{name: given[name] for name in ("callbacks", "eval_every") if name in given})


def _several(callbacks: Any) -> list[Any]:
    """Return the Trainer's `callbacks` (one, a list or None) as a list."""
    return [*callbacks] if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]


def translated(callbacks: list[Any], run: RunOptions) -> list[Any]:
    """Return the callbacks, with Drivetrain's as Lightning's."""
    return [_translated(one, run) if isinstance(one, Callback) else one for one in callbacks]


def _translated(one: Callback, run: RunOptions) -> pl.Callback:
    name = type(one).__name__
    if type(one) is not EarlyStopping:
        remedy = REMEDIES.get(name, "write it as a callback of Lightning's")
        raise PlanError(
            f"callbacks: {name} is a callback of Drivetrain, which only runs in fit(). Leave it out, and {remedy}."
        )
    one.check(run)
    # An undefined metric is not logged, and is no improvement, as in fit(); Lightning would stop at once.
    return pl.callbacks.EarlyStopping(
        one.monitor, min_delta=one.min_delta, patience=one.patience, mode="min" if one.lower_is_better else "max",
        strict=False, check_finite=False, check_on_train_epoch_end=one.monitor == "loss",
    )  # fmt: skip
