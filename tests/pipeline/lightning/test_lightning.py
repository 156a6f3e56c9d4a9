"""`Pipeline.to_lightning`: Lightning's Trainer reaches the losses of our own loop, also on two ranks with each strategy
of its registry; or, where Lightning itself refuses the CPU, in so many words, it trains without that refusal."""

import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import field_jobs
import own_schedules
import pytest
import torch
from drivetrain import Classification, DrivetrainError, EarlyStopping, Pipeline, PlanError, Profile
from drivetrain import transforms as t
from drivetrain.common.matmul import matmul_precision
from drivetrain.loaders import convert
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.options import LoaderOptions
from drivetrain.pipeline.describe.config import DistributedConfig
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.muon import Muon
from loader_pictures import jpeg_bytes, picture
from own_transforms import Own, WithoutTheFirstClass, by_image, hard
from pipeline_data import Layered, Toy, batch_norm_model, numbers, plain_model, write_toy
from places import SUPPORT
from torch import nn

# Lightning's own: too few workers (our loaders have threads of their own), and its use of torch.
IGNORED = ("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
pytestmark = pytest.mark.filterwarnings(*IGNORED)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def trained(pipeline: Any, epochs: int, *callbacks: Any, **more: Any) -> tuple[Any, list[dict[str, float]]]:
    """The module after Lightning's training, and what it logged of each epoch."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: list[dict[str, float]] = []

    class Keeps(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    every = [Keeps(), *callbacks]
    module, data, arguments, _ = pipeline.to_lightning(epochs=epochs, callbacks=every, **QUIET, **more)
    pl.Trainer(**arguments).fit(module, data)
    return module, found


def test_a_frozen_batch_norm_stays(toy: Toy) -> None:
    """Also with validation within the epoch, after which Lightning restores the mode, and if a callback sets it."""
    import lightning.pytorch as pl

    class Trains(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            pl_module.train()

    def frozen() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm2d(3), batch_norm_model())
        model[0].requires_grad_(False)
        return model

    module, found = trained(toy.pipeline(frozen), 2, Trains(), val_check_interval=2)
    assert len(found) == 2
    assert module.model[0].num_batches_tracked == 0
    assert torch.equal(module.model[0].running_mean, torch.zeros(3))
    assert module.model[1][1].num_batches_tracked == 8


@pytest.mark.parametrize("case", ["plain", "everything", "dropout", "letterbox"])
def test_the_losses_of_our_own_loop(toy: Toy, case: str) -> None:
    model = (lambda: nn.Sequential(nn.Dropout(0.2), plain_model())) if case == "dropout" else batch_norm_model
    load = {"image_size": (20, 24), "crop": "fit", "eval_crop": "fit"} if case == "letterbox" else {}
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "schedule": "cosine", "warmup": 0.3}
    pipeline = toy.pipeline(model, flip=True, **load).optimize("sgd", **sgd)
    if case == "everything":
        pipeline = pipeline.transform(t.ChannelsLast(), t.LabelSmoothing(0.1), t.MixUp(0.2), t.NoWeightDecay())
        pipeline = pipeline.distribute("single", accumulate=2, clip_norm=0.5)
    before = torch.get_rng_state(), torch.get_num_threads()
    module, found = trained(pipeline, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    result = pipeline.fit(epochs=2, progress=False)
    for name in ("loss", "val_loss", "top1"):
        own = [epoch.values()[name] for epoch in result.history.epochs]
        assert [values[name] for values in found] == pytest.approx(own, abs=1e-5), name
    torch.testing.assert_close(module.model.state_dict(), result.model.state_dict(), rtol=1e-5, atol=1e-5)


def test_further_fields_are_targets(tmp_path: Path) -> None:
    pipeline = field_jobs.pipeline_of(field_jobs.write(tmp_path))
    module, found = trained(pipeline, 2)
    result = pipeline.fit(epochs=2, progress=False)
    for name in ("val_loss", "error"):
        expected = [epoch.values()[name] for epoch in result.history.epochs]
        assert [values[name] for values in found] == pytest.approx(expected, abs=1e-5), name
    torch.testing.assert_close(module.model.state_dict(), result.model.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loader", ["ffcv", "torch"])
def test_validation_takes_the_runs_pixels(tmp_path: Path, loader: str) -> None:
    """Bit for bit what `Evaluation` makes of the original files, which training decodes at a part of their size."""
    import lightning.pytorch as pl

    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
    sizes = [(261, 335), (500, 375), (90, 160), (64, 64), (33, 20), (300, 301)]
    for number, (height, width) in enumerate(sizes):
        way = {"subsampling": number % 3, "progressive": number == 2}
        image = jpeg_bytes(picture(number, height, width), **way)
        (tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg").write_bytes(image)
    convert(tmp_path / "images", tmp_path / "own.beton", progress=False)
    own = str(tmp_path / "own.beton")
    options: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "eval_ratio": 0.81}
    load = options | {"loader": loader, "workers": 1 if loader == "ffcv" else 0, "eval_image_size": (40, 24)}
    pipeline = Pipeline(plain_model, classes=2).load(own, own, batch_size=4, image_size=16, **load)
    module, data, arguments, _ = pipeline.optimize("sgd", lr=0.01).to_lightning(epochs=2, **QUIET)
    seen: list[torch.Tensor] = []

    def keep(model: nn.Module, given: tuple[torch.Tensor]) -> None:
        if not model.training:
            seen.append(given[0].clone())

    module.model.register_forward_pre_hook(keep)
    pl.Trainer(**arguments).fit(module, data)
    make = Evaluation(LoaderOptions(batch_size=1, image_size=(40, 24), **options))
    expected = torch.stack([make(file) for file in sorted(tmp_path.glob("images/*/*"))])
    assert [len(batch) for batch in seen] == [4, 2, 4, 2]
    assert torch.equal(torch.cat(seen), torch.cat([expected, expected]))


def test_class_weights(toy: Toy) -> None:
    """Each step is one weighted mean, and so is `val_loss`; microbatches, which Lightning averages, are rejected."""
    weighted = Classification(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5, 9.0])))
    pipeline = toy.pipeline(plain_model).task(weighted)
    module, found = trained(pipeline, 2)
    result = pipeline.fit(epochs=2, progress=False)
    own = [epoch.values()["val_loss"] for epoch in result.history.epochs]
    assert [values["val_loss"] for values in found] == pytest.approx(own, rel=1e-6)
    losses = [epoch.loss for epoch in result.history.epochs]
    assert [values["loss"] for values in found] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(module.model.state_dict(), result.model.state_dict(), rtol=0, atol=1e-6)
    with pytest.raises(PlanError, match="With accumulate=2, Lightning averages the microbatches of a step"):
        pipeline.distribute("single", accumulate=2).to_lightning(epochs=1)


def test_ranks_that_keep_different_numbers_of_samples_have_one_mean(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in our loop. Here, one rank after the other takes a step, and learns what the other one has kept."""
    module = toy.pipeline(plain_model).transform(WithoutTheFirstClass()).to_lightning(epochs=1, **QUIET).module
    images, classes = torch.rand(12, 3, 16, 16), torch.tensor([0, 0, 0, 0, 1, 2, 0, 1, 2, 3, 1, 2])
    kept, losses, weights = (2, 5), list[torch.Tensor](), list[int]()
    monkeypatch.setattr(module, "log", lambda *_, batch_size, **__: weights.append(int(batch_size)))
    for rank, batch in enumerate(zip(images.split(6), classes.split(6), strict=True)):
        more = kept[1 - rank]
        strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda value, more=more, **_: value + more)
        module.trainer = SimpleNamespace(
            strategy=strategy, world_size=2, global_rank=rank, global_step=0, distributed_sampler_kwargs=None
        )
        losses.append(module.training_step(batch, 0).detach())
    expected = nn.functional.cross_entropy(module.model(images[classes > 0]), classes[classes > 0])
    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
    assert weights == [7, 7]  # the epoch's mean of these losses, too
    pipeline = toy.pipeline(plain_model).transform(WithoutTheFirstClass()).distribute("single", accumulate=2)
    with pytest.raises(PlanError, match=r"a batch transform has kept \d+ of \d+ samples of one"):
        trained(pipeline, 1)


@pytest.mark.parametrize("schedule", [own_schedules.dip, own_schedules.one_cycle])
def test_any_schedule(toy: Toy, schedule: Any) -> None:
    groups = {"4.*": {"lr": 0.05}}
    plain = toy.pipeline(plain_model)
    pipeline = plain.optimize("sgd", lr=0.1, momentum=0.9, schedule=schedule, groups=groups)
    _, found = trained(pipeline, 2)
    own = [epoch.loss for epoch in pipeline.fit(epochs=2, progress=False).history.epochs]
    assert [values["loss"] for values in found] == pytest.approx(own, abs=1e-5)
    with pytest.raises(PlanError, match=r"combine the torch scheduler steps with warmup=0.5.*SequentialLR"):
        trained(pipeline.optimize("sgd", lr=0.1, schedule=own_schedules.steps, warmup=0.5), 1)


def test_an_optimizer_of_matrices_is_refused_where_lightning_flattens_them(toy: Toy) -> None:
    from drivetrain.pipeline.lightning.hand_over import check_trainer
    from lightning.pytorch.strategies import FSDPStrategy

    plan = resolve(toy.pipeline(plain_model).optimize("muon", lr=0.05))
    own = {"max_epochs": 1, "accumulate_grad_batches": 1, "world_size": 2}
    trainer: Any = SimpleNamespace(**own, strategy=FSDPStrategy())
    with pytest.raises(PlanError, match="'muon' needs whole matrices, but Lightning's FSDPStrategy flattens"):
        check_trainer(plan, 1, trainer)
    hidden = toy.pipeline(plain_model).optimize(lambda parameters: Muon(parameters, lr=0.05))
    module: Any = hidden.to_lightning(epochs=1, **QUIET).module
    module.trainer = trainer
    with pytest.raises(PlanError, match="'Muon' needs whole matrices, but Lightning's FSDPStrategy flattens"):
        module.configure_optimizers()


def test_torchs_sync_batch_norm_is_refused_on_cpus(toy: Toy) -> None:
    """Also if only the Trainer has several ranks: torch would refuse the first batch."""
    import lightning.pytorch as pl
    from drivetrain.pipeline.lightning.hand_over import check_trainer

    pipeline = toy.pipeline(batch_norm_model).distribute("single", device="cpu", sync_batchnorm=True)
    plan, words = resolve(pipeline), "Lightning uses torch's SyncBatchNorm, which works on GPUs only"
    check_trainer(plan, 1, pl.Trainer(**pipeline.to_lightning(epochs=1, **QUIET).trainer))
    several = pipeline.to_lightning(epochs=1, strategy="ddp_spawn", devices=2, **QUIET).trainer
    with pytest.raises(PlanError, match=words):
        check_trainer(plan, 1, pl.Trainer(**several))
    with pytest.raises(PlanError, match=words):
        pipeline.distribute("ddp", devices=2, device="cpu", sync_batchnorm=True).to_lightning(epochs=1)


def test_what_needs_our_own_loop_is_refused(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model)
    with pytest.raises(PlanError, match="EMA, SAM works only in Drivetrain's loop"):
        pipeline.transform(t.EMA(), t.SAM(), t.BlurPool()).to_lightning(epochs=1)
    with pytest.raises(PlanError, match=r"Pass to_lightning\(epochs=…\)"):
        pipeline.to_lightning()
    for epochs in (0, "3"):
        with pytest.raises(PlanError, match=rf"epochs={epochs!r} must be a positive integer"):
            pipeline.to_lightning(epochs=epochs)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="compile= and activation_checkpointing="):
        pipeline.distribute("single", compile=True).to_lightning(epochs=1)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("single", {}, "auto"),
        ("ddp", {}, "ddp"),
        ("ddp_spawn", {}, "ddp_spawn"),
        ("ddp_fork", {}, "ddp_fork"),
        ("ddp_find_unused_parameters", {}, "ddp_find_unused_parameters_true"),
        ("ddp_spawn", {"find_unused_parameters": True}, "ddp_spawn_find_unused_parameters_true"),
        ("ddp_notebook_find_unused_parameters_false", {}, "ddp_notebook"),
        ("fsdp", {}, "fsdp"),
        ("fsdp_cpu_offload", {}, "fsdp_cpu_offload"),
        ("deepspeed", {}, "deepspeed_stage_2"),
        ("deepspeed", {"stage": 3, "offload": "cpu"}, "deepspeed_stage_3_offload"),
    ],
)
def test_our_strategies_by_lightnings_names(name: str, options: dict[str, Any], expected: str) -> None:
    from drivetrain.pipeline.lightning.hand_over import to_strategy

    how = DistributedConfig(name, devices=1 if name == "single" else 2, options=options)
    assert to_strategy(how) == expected


def test_our_strategies_that_have_no_name_there() -> None:
    from drivetrain.pipeline.lightning.hand_over import to_strategy
    from torch.distributed.fsdp import ShardingStrategy

    gradients: Any = to_strategy(DistributedConfig("fsdp_grad_op", devices=2))
    assert gradients.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    groups: Any = to_strategy(DistributedConfig("hsdp", devices=8, options={"shard_size": 4}))
    assert groups.sharding_strategy == ShardingStrategy.HYBRID_SHARD
    assert groups.kwargs["device_mesh"] == (2, 4)
    for name in ("zero_redundancy", "fairscale_oss", "auto", "dp"):
        with pytest.raises(PlanError, match=rf"no equivalent of the strategy '{name}'.*to_lightning\(strat"):
            to_strategy(DistributedConfig(name, devices=2))
    words = r"distribute\('fsdp', wrap=…\) is an option of Drivetrain's strategy"
    with pytest.raises(PlanError, match=words):
        to_strategy(DistributedConfig("fsdp", devices=2, options={"wrap": False}))


def test_the_time_limit_of_collectives() -> None:
    """Lightning's strategies have the pipeline's, also one that is named to Lightning; else their own, half an hour."""
    from drivetrain.pipeline.lightning.hand_over import to_strategy, trainer_arguments

    limit: dict[str, Any] = {"devices": 2, "timeout": 77.0}
    found: dict[str, Any] = {
        name: to_strategy(DistributedConfig(name, **limit))
        for name in ("ddp_spawn", "ddp_find_unused_parameters", "fsdp", "fsdp_grad_op", "hsdp")
    }
    assert {name: made._timeout for name, made in found.items()} == dict.fromkeys(found, timedelta(seconds=77))
    assert found["ddp_spawn"]._start_method == "spawn"
    assert found["ddp_find_unused_parameters"]._ddp_kwargs == {"find_unused_parameters": True}
    alone = DistributedConfig("single", timeout=77.0)
    assert trainer_arguments(alone, {})["strategy"] == "auto"
    assert trainer_arguments(alone, {"strategy": "ddp", "devices": 2})["strategy"]._timeout == timedelta(seconds=77)


def test_the_loss_is_computed_in_float32(toy: Toy) -> None:
    """As in `fit`; a product is in bf16 under autocast, which the model has."""
    of_losses, of_model = set[torch.dtype](), set[torch.dtype]()

    class Model(Layered):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layers(images)
            of_model.add(found.dtype)
            return found

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        of_losses.add((outputs @ outputs.T).dtype)
        return nn.functional.cross_entropy(outputs, targets)

    pipeline = toy.pipeline(Model).task(Classification(loss=loss))
    pipeline = pipeline.distribute("single", device="cpu", precision="bf16")
    _, (epoch,) = trained(pipeline, 1)
    assert (of_losses, of_model) == ({torch.float32}, {torch.bfloat16})
    assert epoch.keys() >= {"loss", "val_loss"}


def test_what_the_trainer_is_told(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model).distribute("single", device="cpu", precision="bf16")
    arguments = pipeline.to_lightning(epochs=3).trainer
    where = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    assert arguments | where | {"precision": "bf16-mixed", "max_epochs": 3} == arguments
    changed = pipeline.to_lightning(epochs=3, strategy="ddp_spawn", devices=2, logger=True).trainer
    assert changed == {**arguments, "strategy": "ddp_spawn", "devices": 2, "logger": True}
    with pytest.raises(PlanError, match=r"'ddp_spwan'\) takes Lightning's names .* Did you mean 'ddp_spawn'"):
        pipeline.to_lightning(epochs=1, strategy="ddp_spwan")
    with pytest.raises(PlanError, match=r"max_epochs=5\): set it in to_lightning\(epochs=…\)"):
        pipeline.to_lightning(epochs=1, max_epochs=5)
    with pytest.raises(PlanError, match=r"Profile is a callback of Drivetrain.*profiler='pytorch'"):
        pipeline.to_lightning(epochs=1, callbacks=[Profile("trace.json")])
    with pytest.raises(PlanError, match="no metric is named 'top9'"):
        pipeline.to_lightning(epochs=1, callbacks=EarlyStopping("top9"))


def test_a_metric_that_evaluations_lack_is_refused(toy: Toy) -> None:
    """As in our loop: of four classes, there is no top5."""
    with pytest.raises(PlanError, match="EarlyStopping: no metric is named 'top5'"):
        toy.pipeline().to_lightning(epochs=1, callbacks=EarlyStopping("top5"), **QUIET)


def test_early_stopping_is_lightnings(toy: Toy) -> None:
    """It stops after the same epoch as in our loop, by a metric whose direction its class declares."""
    import lightning.pytorch as pl

    pipeline = toy.pipeline().optimize("sgd", lr=1e-9, schedule="constant")  # nothing improves
    stopping = EarlyStopping("top1", patience=2)
    _, found = trained(pipeline, 9, stopping)
    result = pipeline.fit(epochs=9, progress=False, callbacks=[stopping])
    assert len(found) == len(result.history.epochs) == 3
    recipe = pipeline.to_recipe() | {"callbacks": [{"name": "EarlyStopping", "monitor": "top1", "patience": 2}]}
    assert len(trained(Pipeline.from_recipe(recipe), 9)[1]) == 3
    rarely = Pipeline.from_recipe(recipe, callbacks=[], eval_every=2)
    assert ["val_loss" in epoch for epoch in trained(rarely, 2)[1]] == [False, True]

    class Validated(pl.Callback):
        epochs: ClassVar[list[int]] = []
        trainers: ClassVar[set[Any]] = set()

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            self.epochs.append(trainer.current_epoch + 1)
            self.trainers.add(trainer)

    trained(rarely, 3, Validated())
    assert Validated.epochs == [2, 3]  # the last one in any case, as in our loop
    assert [trainer.check_val_every_n_epoch for trainer in Validated.trainers] == [2]
    with pytest.raises(PlanError, match="on_nonfinite='skip' of the recipe needs Drivetrain's loop"):
        Pipeline.from_recipe(recipe, on_nonfinite="skip").to_lightning(epochs=1)
    within = Pipeline.from_recipe(recipe, eval_every_steps=2)
    with pytest.raises(PlanError, match=r"eval_every_steps=2 of the recipe needs Drivetrain's loop"):
        within.to_lightning(epochs=1)
    assert within.to_lightning(epochs=1, val_check_interval=2).trainer["val_check_interval"] == 2


def test_what_fit_refuses_of_data_and_evaluations_is_refused(toy: Toy) -> None:
    recipe = toy.named().load(toy.train, batch_size=32, image_size=16, workers=1).to_recipe()
    rarely = Pipeline.from_recipe(recipe | {"eval_every": 2})
    with pytest.raises(PlanError, match="eval_every=2 of the recipe needs validation data"):
        rarely.to_lightning(epochs=2)
    assert rarely.to_lightning(epochs=2, check_val_every_n_epoch=1).trainer["check_val_every_n_epoch"] == 1
    with pytest.raises(PlanError, match="split_seed=1 is the seed of val_split"):
        Pipeline.from_recipe(recipe | {"split_seed": 1}).to_lightning(epochs=2)


def test_torchs_settings_of_gpus_are_those_of_fit(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set for the training only. torch reports a GPU; nothing here computes on it."""
    import lightning.pytorch as pl

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    class Seen(pl.Callback):
        settings: ClassVar[list[Any]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            self.settings.append((matmul_precision(), torch.backends.cudnn.benchmark))

    before = matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and Lightning does not restore it
    pipeline = toy.pipeline().distribute("single", matmul_precision="high", cudnn_benchmark=True)
    trained(pipeline, 1, Seen())
    assert {*Seen.settings} == {("high", True)}
    assert matmul_precision() == before != "high"


def test_a_training_that_fails_leaves_torchs_random_state(toy: Toy) -> None:
    """As one that ends; Lightning calls no hook of the module then."""
    import lightning.pytorch as pl

    class Fails(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            raise ValueError("stopped here")

    module, data, arguments, _ = toy.pipeline(plain_model).to_lightning(epochs=1, callbacks=[Fails()], **QUIET)
    torch.rand(())  # so that the state is not that of a seed
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="stopped here"):
        pl.Trainer(**arguments).fit(module, data)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.trainer.global_step == 4


def test_a_trainer_that_was_told_otherwise(toy: Toy) -> None:
    """Found before the first step, as the numbers would be others."""
    import lightning.pytorch as pl

    pipeline = toy.pipeline(plain_model)
    module, data, arguments, _ = pipeline.to_lightning(epochs=2, **QUIET)
    for change in ({"max_epochs": 3}, {"accumulate_grad_batches": 2}):
        with pytest.raises(PlanError, match=r"Trainer\(.*, but the pipeline was handed over with"):
            pl.Trainer(**{**arguments, **change}).fit(module, data)
    other = toy.pipeline(plain_model, batch_size=16).to_lightning(epochs=2).data
    with pytest.raises(PlanError, match="The module and the data are from two pipelines"):
        pl.Trainer(**arguments).fit(module, other)
    changing = pl.callbacks.GradientAccumulationScheduler(scheduling={1: 4})
    words = r"accumulate_grad_batches=4\), but the pipeline was handed over with 1"
    with pytest.raises(PlanError, match=words):
        pl.Trainer(**arguments, callbacks=[changing]).fit(module, data)
    assert module.trainer.global_step == 4  # of the first epoch
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain")]


def test_what_build_refuses_is_refused_here_too(toy: Toy, tmp_path: Path) -> None:
    """By the same checks, with the same words."""
    plain = toy.pipeline(plain_model)

    def validated_with(name: str, classes: Any, samples: int = 40) -> Any:
        path = str(write_toy(tmp_path / name, samples, 0, classes))
        return Pipeline(plain_model).load(toy.train, path, batch_size=8, image_size=16, workers=1)

    refused = {
        "order": validated_with("order.beton", "abdc"),
        "number": validated_with("number.beton", "abcde"),
        "labels": validated_with("labels.beton", None).load(
            str(write_toy(tmp_path / "two.beton", 2, 0, None)), str(tmp_path / "labels.beton"),
            batch_size=2, image_size=16, workers=1,
        ),
        "missing": plain.load(toy.train, "no.beton", batch_size=8, image_size=16),
        "loss": plain.transform(Own(by_image)),
        "mixed targets": plain.transform(Own(hard), t.MixUp()),
        "output": toy.pipeline(lambda: plain_model(5)),
    }  # fmt: skip
    for name, pipeline in refused.items():
        with pytest.raises(DrivetrainError) as ours:
            pipeline.build()
        with pytest.raises(type(ours.value), match=re.escape(str(ours.value))):
            pipeline.to_lightning(epochs=1, **QUIET)
        assert name
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drivetrain")]


def test_a_surgery_that_counts_the_run_is_handed_over(toy: Toy) -> None:
    """The check of the output needs it begun, as the training does."""

    def dropping() -> nn.Module:
        return nn.Sequential(plain_model(), nn.Dropout(0.5), nn.Linear(4, 4))

    module, found = trained(toy.pipeline(dropping).transform(t.GyroDropout()), 1)
    assert module.trainer.global_step == 4
    assert math.isfinite(found[0]["loss"])


FORKS = [
    f"{start}{end}"
    for start in ("ddp_fork", "ddp_notebook")
    for end in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
]
SPAWNS = ["ddp_spawn", "ddp_spawn_find_unused_parameters_false", "ddp_spawn_find_unused_parameters_true"]
SCRIPTS = ["ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"]
DEEPSPEED = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3",
    "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme",
]  # fmt: skip
REFUSALS = {
    **dict.fromkeys(["fsdp", "fsdp_cpu_offload"], "strategy `fsdp` requires a GPU accelerator"),
    **dict.fromkeys(DEEPSPEED, "DeepSpeed strategy is only supported on CUDA GPUs"),
    **dict.fromkeys(["xla", "xla_debug"], "torch_xla"),
    # By these names it makes no strategy anywhere; on a TPU, "auto" does.
    **dict.fromkeys(["single_xla", "single_tpu"], "missing 1 required positional argument: 'device'"),
}
"""What Lightning says where it cannot train on a CPU, by the strategy's name."""
CASES = ["plain", "everything"]


class Script:
    """`lightning_jobs.py`, run to its end in a process group of its own, of which nothing may be left."""

    def __init__(self, toy: Toy, folder: Path) -> None:
        self.toy, self.folder = toy, folder

    def run(self, trainings: list[tuple[str, str]], seconds: float, ranks: int = 2, threads: int = 1) -> None:
        job = {"trainings": trainings, "ranks": ranks, "out": str(self.folder)}
        order = self.folder / "job.json"
        order.write_text(json.dumps({**job, "train": self.toy.train, "val": self.toy.val}))
        # No pipe: a rank that was left would hold it open.
        with (self.folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "lightning_jobs.py"), str(order)],
                stdout=output, stderr=output, start_new_session=True, cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert code == 0, (self.folder / "output.txt").read_text()[-3000:]

    def found(self, name: str, case: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / f"{name}.{case}.json").read_text())
        return facts


@pytest.fixture(scope="module")
def script(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(toy, tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def alone(toy: Toy, one_thread: None) -> Callable[[str], list[tuple[float, float, float]]]:  # noqa: ARG001
    """The figures of a case in our own loop, in one process."""
    from lightning_jobs import EPOCHS, pipeline_of

    @cache
    def figures(case: str) -> list[tuple[float, float, float]]:
        pipeline = pipeline_of(case, toy.train, toy.val, ranks=1)
        return numbers(pipeline.fit(epochs=EPOCHS, progress=False))

    return figures


def every(names: list[str]) -> list[tuple[str, str]]:
    return [(name, case) for name in names for case in CASES]


def check_figures(script: Script, trainings: list[tuple[str, str]], alone: Any, kind: str, ranks: int = 2) -> None:
    """Each came to the figures of our own loop."""
    for name, case in trainings:
        found = script.found(name, case)
        assert (found["ranks"], found["kind"]) == (ranks, kind), (name, case)
        for one, other in zip(found["found"], alone(case), strict=True):
            assert one == pytest.approx(other, abs=1e-5), (name, case)


def test_the_names_below_are_all_of_them() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    trained = {"single_device", *SCRIPTS, *FORKS, *SPAWNS}
    assert trained.isdisjoint(REFUSALS)
    assert sorted(trained | set(REFUSALS)) == sorted(StrategyRegistry.available_strategies())


@pytest.mark.slow  # nine trainings on two ranks; test_lightning.py trains on one
@pytest.mark.process
@pytest.mark.timeout(200)
def test_ranks_that_run_the_script_again(script: Script, alone: Any) -> None:
    """Lightning's DDP, and its FSDP made to run on the CPU, in one start."""
    sharded = every(["FSDP", "FSDP, gradients", "FSDP of units"])
    script.run([*every(SCRIPTS), *sharded, ("ddp", "kept"), ("ddp", "indivisible")], seconds=180)
    check_figures(script, [*every(SCRIPTS), ("ddp", "kept")], alone, "DDPStrategy")
    check_figures(script, sharded, alone, "FSDPOnCPU")
    refused = script.found("ddp", "indivisible")["refused"]
    assert "PlanError: batch_size=24 is global and must be divisible by 2 Lightning ranks" in refused


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("names", [FORKS[:1], FORKS[1:]])
def test_ranks_that_are_forked(script: Script, alone: Any, names: list[str]) -> None:
    """With two threads: had the hand-over started some, the ranks would hang."""
    trainings = [(name, "everything") for name in names]
    script.run(trainings, seconds=180, threads=2)
    check_figures(script, trainings, alone, "DDPStrategy")


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("name", SPAWNS)
def test_ranks_that_are_spawned(script: Script, alone: Any, name: str) -> None:
    script.run([(name, "everything")], seconds=180)
    check_figures(script, [(name, "everything")], alone, "DDPStrategy")


# Once, after other tests in the same process, "everything" in our own loop differed by 5e-4; alone it never did.
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(200)
def test_one_device_and_what_lightning_has_for_other_devices_only(script: Script, alone: Any) -> None:
    """Its own words, for the names themselves; `single_device` is the one name that means one process."""
    names = [name for name in REFUSALS if name not in DEEPSPEED]
    script.run([*every(["single_device"]), *((name, "plain") for name in names)], seconds=180, ranks=1)
    check_figures(script, every(["single_device"]), alone, "SingleDeviceStrategy", ranks=1)
    for name in names:
        assert REFUSALS[name] in script.found(name, "plain")["refused"], name


@pytest.mark.slow  # importing DeepSpeed takes long
@pytest.mark.timeout(400)
def test_deepspeed_made_to_run_on_the_cpu(script: Script, alone: Any) -> None:
    pytest.importorskip("deepspeed")
    trainings = every(["ZeRO 1", "ZeRO 2", "ZeRO 3"])
    script.run(trainings, seconds=380)
    check_figures(script, trainings, alone, "DeepSpeedOnCPU")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_lightning_has_of_deepspeed_for_gpus_only(script: Script) -> None:
    pytest.importorskip("deepspeed")
    script.run([(name, "plain") for name in DEEPSPEED], seconds=180, ranks=1)
    for name in DEEPSPEED:
        assert REFUSALS[name] in script.found(name, "plain")["refused"], name
