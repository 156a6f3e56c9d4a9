"""`Pipeline.to_lightning`: Lightning's Trainer reaches the losses of our own loop."""

from __future__ import annotations

import logging
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_schedules
import pytest
import torch
from drivetrain import Classification, DrivetrainError, EarlyStopping, Pipeline, PlanError, Profile
from drivetrain.loaders import convert
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.options import LoaderOptions
from drivetrain.pipeline.describe.config import DistributedConfig
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.transforms import (
    EMA,
    SAM,
    BlurPool,
    ChannelsLast,
    GyroDropout,
    LabelSmoothing,
    MixUp,
    NoWeightDecay,
)
from loader_pictures import jpeg_bytes, picture
from own_transforms import Own, by_image, hard
from pipeline_data import Toy, batch_norm_model, plain_model, write_toy
from torch import nn

# Lightning's own: too few workers (our loaders have threads of their own), and its use of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def dropping_model() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), plain_model())


def trained(pipeline: Any, epochs: int, *callbacks: Any) -> tuple[Any, list[dict[str, float]]]:
    """The module after Lightning's training, and what it logged of each epoch."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: list[dict[str, float]] = []

    class Keeps(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module, data, arguments, _ = pipeline.to_lightning(
        epochs=epochs, callbacks=[Keeps(), *callbacks], **QUIET
    )
    pl.Trainer(**arguments).fit(module, data)
    return module, found


@pytest.mark.parametrize("case", ["plain", "everything", "dropout", "letterbox"])
def test_the_losses_of_our_own_loop(toy: Toy, case: str) -> None:
    model = dropping_model if case == "dropout" else batch_norm_model
    load = {"image_size": (20, 24), "crop": "fit", "eval_crop": "fit"} if case == "letterbox" else {}
    pipeline = toy.pipeline(model, flip=True, **load).optimize(
        "sgd", lr=0.1, momentum=0.9, weight_decay=1e-3, schedule="cosine", warmup=0.3
    )
    if case == "everything":
        pipeline = pipeline.transform(ChannelsLast(), LabelSmoothing(0.1), MixUp(0.2), NoWeightDecay())
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


@pytest.mark.parametrize("loader", ["ffcv", "torch"])
def test_validation_takes_the_runs_pixels(tmp_path: Path, loader: str) -> None:
    """Bit for bit what `Evaluation` makes of the original files, which training decodes at a part of their size."""
    import lightning.pytorch as pl

    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
    for number, (height, width) in enumerate(
        [(261, 335), (500, 375), (90, 160), (64, 64), (33, 20), (300, 301)]
    ):
        way = {"subsampling": number % 3, "progressive": number == 2}
        (tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg").write_bytes(
            jpeg_bytes(picture(number, height, width), **way)
        )
    convert(tmp_path / "images", tmp_path / "own.beton", progress=False)
    own = str(tmp_path / "own.beton")
    options: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "eval_ratio": 0.81}
    workers = 1 if loader == "ffcv" else 0
    pipeline = Pipeline(plain_model, classes=2).load(
        own,
        own,
        loader=loader,
        batch_size=4,
        image_size=16,
        eval_image_size=(40, 24),
        workers=workers,
        **options,
    )
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
    torch.testing.assert_close(module.model.state_dict(), result.model.state_dict(), rtol=0, atol=1e-6)
    with pytest.raises(PlanError, match="With accumulate=2, Lightning averages the microbatches of a step"):
        pipeline.distribute("single", accumulate=2).to_lightning(epochs=1)


@pytest.mark.parametrize("schedule", [own_schedules.dip, own_schedules.one_cycle])
def test_any_schedule(toy: Toy, schedule: Any) -> None:
    groups = {"4.*": {"lr": 0.05}}
    pipeline = toy.pipeline(plain_model).optimize(
        "sgd", lr=0.1, momentum=0.9, schedule=schedule, groups=groups
    )
    _, found = trained(pipeline, 2)
    own = [epoch.loss for epoch in pipeline.fit(epochs=2, progress=False).history.epochs]
    assert [values["loss"] for values in found] == pytest.approx(own, abs=1e-5)
    with pytest.raises(PlanError, match=r"combine the torch scheduler steps with warmup=0.5.*SequentialLR"):
        trained(pipeline.optimize("sgd", lr=0.1, schedule=own_schedules.steps, warmup=0.5), 1)


def test_an_optimizer_of_matrices_is_refused_where_lightning_flattens_them(toy: Toy) -> None:
    from drivetrain.pipeline.lightning.strategies import check_trainer
    from lightning.pytorch.strategies import FSDPStrategy

    plan = resolve(toy.pipeline(plain_model).optimize("muon", lr=0.05))
    trainer: Any = SimpleNamespace(
        max_epochs=1, accumulate_grad_batches=1, world_size=2, strategy=FSDPStrategy()
    )
    with pytest.raises(PlanError, match="'muon' needs whole matrices, but Lightning's FSDPStrategy flattens"):
        check_trainer(plan, 1, trainer)


def test_what_needs_our_own_loop_is_refused(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model)
    with pytest.raises(PlanError, match="EMA, SAM works only in Drivetrain's loop"):
        pipeline.transform(EMA(), SAM(), BlurPool()).to_lightning(epochs=1)
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
    from drivetrain.pipeline.lightning.strategies import to_strategy

    how = DistributedConfig(name, devices=1 if name == "single" else 2, options=options)
    assert to_strategy(how) == expected


def test_our_strategies_that_have_no_name_there() -> None:
    from drivetrain.pipeline.lightning.strategies import to_strategy
    from torch.distributed.fsdp import ShardingStrategy

    gradients: Any = to_strategy(DistributedConfig("fsdp_grad_op", devices=2))
    assert gradients.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    groups: Any = to_strategy(DistributedConfig("hsdp", devices=8, options={"shard_size": 4}))
    assert groups.sharding_strategy == ShardingStrategy.HYBRID_SHARD
    assert groups.kwargs["device_mesh"] == (2, 4)
    for name in ("zero_redundancy", "fairscale_oss", "auto", "dp"):
        with pytest.raises(PlanError, match=rf"no equivalent of the strategy '{name}'.*to_lightning\(strat"):
            to_strategy(DistributedConfig(name, devices=2))
    with pytest.raises(
        PlanError, match=r"distribute\('fsdp', wrap=…\) is an option of Drivetrain's strategy"
    ):
        to_strategy(DistributedConfig("fsdp", devices=2, options={"wrap": False}))


def test_what_the_trainer_is_told(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model).distribute("single", device="cpu", precision="bf16")
    arguments = pipeline.to_lightning(epochs=3).trainer
    wanted = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "max_epochs": 3,
        "strategy": "auto",
    }
    assert arguments | wanted == arguments
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


def test_early_stopping_is_lightnings(toy: Toy) -> None:
    """It stops after the same epoch as in our loop, by a metric whose direction its class declares."""
    pipeline = toy.pipeline().optimize("sgd", lr=1e-9, schedule="constant")  # nothing improves
    stopping = EarlyStopping("top1", patience=2)
    _, found = trained(pipeline, 9, stopping)
    result = pipeline.fit(epochs=9, progress=False, callbacks=[stopping])
    assert len(found) == len(result.history.epochs) == 3


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
    with pytest.raises(
        PlanError, match=r"accumulate_grad_batches=4\), but the pipeline was handed over with 1"
    ):
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
        "mixed targets": plain.transform(Own(hard), MixUp()),
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

    module, found = trained(toy.pipeline(dropping).transform(GyroDropout()), 1)
    assert module.trainer.global_step == 4
    assert math.isfinite(found[0]["loss"])
