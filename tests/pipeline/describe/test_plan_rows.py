"""Each silent failure known of Composer and of the sharding backends: sorted, adapted, or refused. One test a row.

Where the row is about one transform alone, its own tests hold it as well; here it is seen from a pipeline. Rows
that no pipeline can meet are held elsewhere only:

| failure | test |
|---|---|
| hooks skipped by BlurPool, FSDP2 around a layer; graph breaks | test_blurpool.py: hooks, compiled; test_surgery.py |
| BlurPool loses padding, dtype, frozen weights, eval mode | test_blurpool.py: test_dtype_device_grad_mode… |
| `apply` tells nothing; twice is not once; saving the model fails | test_surgery.py |
| StochasticDepth breaks graphs, leaves gradients out | test_stochastic_depth.py, …_sharded.py |
| norms in low precision stay fp32 on the CPU | test_surgery_numbers.py: test_low_precision_under_autocast |
| what torch.compile cannot take | test_surgery.py: test_compiles_whole, by `compile_safe` |
| a target of -100 is smoothed | test_losses.py: test_ignored_rows_drop_out_of_the_mean |
| resizing by the nearest pixel | test_image_methods.py: test_resizing_is_bilinear… |
| selection without a loss for each image | test_selection.py: test_losses_that_cannot |
| EMA's counters, SWA that never ends | test_averaging.py |
| EMA of shards, SAM of shards, adaptive clipping of shards | test_sharded.py |
| ChannelsLast on shards | test_channels_last.py: test_sharded_parameters_are_refused |
| an optimizer made before sharding | test_fsdp.py: test_the_optimizer_is_made_of_shards |
| accumulation, clipping, zeroing, bf16 logits | test_strategies.py, …_ddp.py, …_fsdp.py |
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from drivetrain import Pipeline, PlanError, StrategyError
from drivetrain import transforms as t
from drivetrain.pipeline.describe.config import DistributedConfig
from drivetrain.pipeline.describe.plan import _ghost_caution
from drivetrain.pipeline.telemetry.observer import Observer
from drivetrain.pipeline.telemetry.state import TrainState
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies import launch
from pipeline_data import Toy, batch_norm_model, plain_model
from small_recipes import half_resnet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def built_reports(pipeline: Pipeline) -> dict[str, int]:
    """How many modules each surgery changed."""
    with pipeline.build() as built:
        return {report.transform: len(report.changed) for report in built.reports}


def either_order(toy: Toy, *transforms: t.Transform) -> dict[str, int]:
    """The same, and it is the same in whatever order the user writes them."""
    forwards = built_reports(toy.pipeline(half_resnet, image_size=32).transform(*transforms))
    backwards = built_reports(toy.pipeline(half_resnet, image_size=32).transform(*transforms[::-1]))
    assert forwards == backwards
    return forwards


# facts of Composer: what changes the design


def after_surgery() -> tuple[Any, Any, bool]:
    for name in ("BlurPool", "SqueezeExcite", "GhostBatchNorm", "WeightStandardization", "StochasticDepth"):
        t.get(name).apply(half_resnet())
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), "composer" in sys.modules


@pytest.mark.process
def test_importing_and_applying_leaves_signal_handlers_alone() -> None:
    """Composer replaces two; nothing of ours imports it."""
    untouched = signal.default_int_handler, signal.SIG_DFL, False
    assert launch(after_surgery, devices=2, device="cpu", timeout=120) == [untouched] * 2


@pytest.mark.parametrize(
    ("transforms", "first", "later"),
    [
        # Before it, half of the mixture stays unsmoothed: the smallest target is below smoothing / classes.
        ((t.LabelSmoothing(), t.MixUp()), ["MixUp"], ["LabelSmoothing"]),
        # Of a mixture it would choose by a loss that belongs to two images.
        ((t.CutMix(), t.MixUp(), t.SelectiveBackprop()), ["SelectiveBackprop"], ["MixUp", "CutMix"]),
    ],
)
def test_the_order_of_methods(
    transforms: tuple[t.Transform, ...], first: list[str], later: list[str], toy: Toy
) -> None:
    heads = [step.what.split("(")[0] for step in toy.pipeline().transform(*transforms).plan().steps]
    assert max(map(heads.index, first)) < min(map(heads.index, later))


@pytest.mark.parametrize(
    ("one", "other", "least"),
    [
        # In Composer the one order drops 6 of 20 standardizations, and SqueezeExcite finds 6 blocks instead of 13.
        (t.WeightStandardization(), t.BlurPool(), 6),
        (t.Factorize(min_channels=64, min_features=64), t.SqueezeExcite(min_channels=64), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_surgeries_find_together_all_they_find_alone(
    one: t.Transform, other: t.Transform, least: int, toy: Toy
) -> None:
    both = either_order(toy, one, other)
    for transform in (one, other):
        alone = built_reports(toy.pipeline(half_resnet, image_size=32).transform(transform))
        assert both[type(transform).__name__] == alone[type(transform).__name__] > 0
    assert both[type(one).__name__] >= least


@pytest.mark.parametrize("transform", [t.GhostBatchNorm(8), t.StochasticDepth()], ids=str)
def test_surgeries_that_fail_in_composer_train(toy: Toy, transform: t.Transform) -> None:
    """With a last batch below the ghost size; on BasicBlocks, with which Composer's does nothing."""
    result = toy.pipeline(half_resnet, image_size=32).transform(transform).fit(epochs=1, progress=False)
    assert result.reports[0].changed
    assert result.accuracy is not None


def test_two_methods_that_mix_targets_compose(toy: Toy) -> None:
    """In Composer CutMix ignores an earlier MixUp, and two that interpolate the loss only warn."""
    result = toy.pipeline().transform(t.CutMix(), t.MixUp()).fit(epochs=3, progress=False)
    assert result.history.epochs[-1].loss < result.history.epochs[0].loss


def test_selection_has_a_loss_for_each_image(toy: Toy) -> None:
    """Also with smoothing, whose loss it takes apart again."""
    pipeline = toy.pipeline().transform(t.SelectiveBackprop(0.0, 1.0), t.LabelSmoothing(0.1), t.MixUp())
    assert pipeline.fit(epochs=2, progress=False).accuracy is not None


def test_the_plan_has_a_caution_if_freezing_changes_a_compiled_model_often(toy: Toy) -> None:
    def cautions(freezing: t.Transform, epochs: int | None, **how: Any) -> list[str]:
        return toy.pipeline().transform(freezing).replace(epochs=epochs).distribute("single", **how).plan().cautions

    for epochs in (15, None):
        (caution,) = cautions(t.LayerFreezing(0.5), epochs, compile=True)
        assert "LayerFreezing changes the model at the start of epochs, and torch compiles 8 versions" in caution
        assert cautions(t.LayerFreezing(0.5), epochs) == []
        assert cautions(t.LayerFreezing(0.5, freeze_level=0.0), epochs, compile=True) == []
    assert cautions(t.LayerFreezing(0.5), 13, compile=True) == []  # six times, after the first version


def test_the_caution_about_a_split_batch_is_not_of_ghost_batch_norm(toy: Toy) -> None:
    """Its groups are small in any case, and the remedy sync_batchnorm=True is refused with it."""
    for model in (batch_norm_model, batch_norm_model()):
        split = toy.pipeline(model).distribute("single", accumulate=2)
        assert "uses the statistics of each microbatch" in " ".join(split.plan().cautions)
        assert "statistics" not in " ".join(split.transform(t.GhostBatchNorm(8)).plan().cautions)


def test_the_plan_has_a_caution_if_ghost_batches_depend_on_the_split(toy: Toy) -> None:
    """Of a batch of 32; where they are as many as without the split, there is none."""

    def cautions(size: int, accumulate: int, model: Any = batch_norm_model) -> str:
        split = toy.pipeline(model).distribute("single", accumulate=accumulate)
        return " ".join(split.transform(t.GhostBatchNorm(size)).plan().cautions)

    assert "each microbatch of 16 images by itself, so that a batch of 32 has 2 groups instead of 1" in cautions(32, 2)
    assert "a batch of 32 has 4 groups instead of 3" in cautions(12, 2)
    assert "groups instead" in cautions(32, 2, batch_norm_model())
    for size, accumulate in ((8, 2), (16, 2), (20, 2), (32, 1), (64, 1)):
        assert "groups instead" not in cautions(size, accumulate)
    assert "groups instead" not in cautions(32, 2, plain_model())


def test_ghost_batches_on_the_gpus_of_one_process_are_named() -> None:
    """Those of a plan: there need be no GPU here."""
    ghost = [t.GhostBatchNorm(8)]
    how = DistributedConfig("dp", options={"device": "cuda"})
    assert "evaluation uses the statistics of the first one's alone" in _ghost_caution(ghost, how, 32, None)
    assert _ghost_caution(ghost, how, 32, plain_model()) == ""
    assert _ghost_caution(ghost, DistributedConfig("dp", options={"device": "cpu"}), 32, None) == ""


def test_gyro_dropout_is_told_how_long_the_run_is(toy: Toy) -> None:
    """Composer's fails in a run of fewer steps than it has subnetworks."""

    def dropping() -> nn.Module:
        return nn.Sequential(*batch_norm_model()[:-1], nn.Dropout(0.2), batch_norm_model()[-1])

    pipeline = toy.pipeline(dropping).transform(t.GyroDropout(sigma=2, tau=3))
    with pipeline.build() as built:
        layer = built.engine.plain_model[-2]
        assert layer.hold == len(built.train) // 2 * 3
        built.hooks.begin(built.engine, 100)
        assert layer.hold == 150
    assert pipeline.fit(epochs=1, progress=False).accuracy is not None


def test_gyro_dropout_keeps_a_selection_for_steps_however_many_forwards_they_have(toy: Toy) -> None:
    class Watched(nn.Identity):
        """After the dropout of ones: the masks of each forward."""

        def forward(self, masks: torch.Tensor) -> torch.Tensor:
            seen.append(masks[0].detach().clone())
            return masks

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks, self.layers = nn.Sequential(nn.Dropout(0.5), Watched()), batch_norm_model()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.masks(images.new_ones(len(images), 64))
            return self.layers(images)

    class Skips(Observer):
        def should_step(self, loop: TrainState) -> bool:
            return loop.step != 1

    gyro, found = t.GyroDropout(sigma=64, tau=1, total_steps=192), []
    for accumulate, transforms, observer in (
        (1, (), None), (2, (), None), (1, (t.SAM(interval=1),), None), (1, (), Skips()),
    ):  # fmt: skip
        seen: list[torch.Tensor] = []
        pipeline = toy.pipeline(Model).transform(gyro, *transforms).distribute("single", accumulate=accumulate)
        with pipeline.build() as built:
            schedule = built.begin(1)
            seen.clear()  # of the check of the output
            train_epoch(built.engine, built.train, built.loss, built.hooks, schedule, observer)
        found.append(torch.stack(seen))
    plain, split, twice, skipped = found
    assert all(torch.equal(plain[n], plain[n - 1]) == (n % 3 != 0) for n in range(1, len(plain)))
    for each in (split, twice):
        assert torch.equal(each[::2], plain)
        assert torch.equal(each[1::2], plain)
    assert torch.equal(skipped, plain)


# facts of the strategies: the order


@pytest.mark.parametrize(("wrap", "words"), [(DistributedDataParallel, "wrapped"), (fully_shard, "shard")])
def test_surgery_after_wrapping_or_sharding_is_refused(
    one_process_group: None,  # noqa: ARG001 — a fixture
    wrap: Callable[[nn.Module], nn.Module],
    words: str,
) -> None:
    """On `.module` it is silent: the ranks' new parameters are never synchronized."""
    wrapped = wrap(half_resnet())
    for transform in (t.SqueezeExcite(min_channels=64), t.WeightStandardization()):
        with pytest.raises(PlanError, match=words):
            transform.apply(wrapped)


def test_the_wrapper_of_torch_compile_is_refused(toy: Toy) -> None:
    """Every name of the weights that are kept would begin with "_orig_mod."."""
    compiled = torch.compile(batch_norm_model(), backend="eager")
    for model in (compiled, lambda: compiled):
        with pytest.raises(PlanError, match=r"torch\.compile.*_orig_mod.*model\.compile\(\)"):
            toy.pipeline(model).build()


def sync_batch_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm_model())


def test_sync_batch_norm_on_the_cpu_is_refused(toy: Toy) -> None:
    with pytest.raises((PlanError, StrategyError), match="SyncBatchNorm"):
        toy.pipeline(sync_batch_norm).distribute("ddp", device="cpu").fit(epochs=1, progress=False)


def test_channels_last_under_fsdp_is_for_images_and_activations(toy: Toy) -> None:
    """`fully_shard` takes no other than contiguous weights. That it trains is in test_fit_ddp.py."""
    steps = toy.pipeline().transform(t.ChannelsLast()).distribute("fsdp", devices=2).plan().steps
    (why,) = [step.why for step in steps if step.what.startswith("ChannelsLast")]
    assert "the weights do not" in why


def test_adaptive_clipping_of_shards_is_refused(toy: Toy) -> None:
    """It needs the norm of each whole weight."""
    pipeline = toy.pipeline().transform(t.GradientClipping("adaptive")).distribute("fsdp", devices=2)
    with pytest.raises(PlanError, match=r"needs unsharded weights, but 'fsdp' shards them"):
        pipeline.plan()


def test_layer_freezing_under_ddp_needs_the_search(toy: Toy) -> None:
    pipeline = toy.pipeline().transform(t.LayerFreezing()).distribute("ddp", devices=2)
    with pytest.raises(PlanError, match=r"LayerFreezing .*'ddp' .*find_unused_parameters=True"):
        pipeline.plan()
    toy.pipeline().transform(t.LayerFreezing()).distribute("ddp", devices=2, find_unused_parameters=True).plan()


def both_of(rank_pipeline: Callable[[], Pipeline]) -> Any:
    """The running statistics of BatchNorm that one rank evaluates with."""
    with rank_pipeline().build() as built:
        built.hooks.begin(built.engine, len(built.train))
        for images, labels in built.train:
            for part, targets in built.hooks.microbatches(built.engine, images, labels, built.loss):
                built.engine.backward(built.loss(built.engine.model(part), targets))
            built.engine.step()
            built.hooks.after_step()
        built.engine.sync_buffers()
        with built.hooks.evaluating():
            built.engine.sync_buffers()
            return built.engine.plain_model[1].running_mean.tolist()


@pytest.mark.process
def test_statistics_are_the_mean_of_the_ranks_under_averages_too(toy: Toy) -> None:
    """BatchNorm's running statistics differ per rank; rank 0's alone would be evaluated."""

    def pipeline() -> Pipeline:
        return toy.pipeline(batch_norm_model).transform(t.EMA(half_life=2)).distribute("ddp", devices=2)

    means = launch(both_of, pipeline, devices=2, timeout=120)
    assert means[0] == means[1]


@pytest.mark.parametrize("transform", [t.SAM(), t.GradientClipping("value")], ids=str)
def test_methods_that_a_backend_cannot_take_are_declared(transform: t.Transform) -> None:
    assert {"deepspeed", "fairscale"} <= set(transform.unsafe_with)


@dataclass(frozen=True)
class AloneOnly(t.Transform):
    """One that no rank may use."""

    kind: ClassVar[Any] = "loop"
    source: ClassVar[str] = "none"
    unsafe_with: ClassVar[tuple[str, ...]] = ("ddp", "fsdp")

    def session(self, model: nn.Module) -> t.Session:  # noqa: ARG002
        return t.Session()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_grad_op", "hsdp"])
def test_methods_that_a_strategy_cannot_take_are_refused(toy: Toy, strategy: str) -> None:
    devices, options = (4, {"shard_size": 2}) if strategy == "hsdp" else (2, {})
    with pytest.raises(PlanError, match=rf"AloneOnly does not work with the strategy '{strategy}'"):
        toy.pipeline().transform(AloneOnly()).distribute(strategy, devices=devices, **options).plan()
    toy.pipeline().transform(AloneOnly()).plan()


def test_methods_that_a_strategy_of_auto_cannot_take_are_refused(toy: Toy) -> None:
    pipeline = toy.pipeline().transform(AloneOnly())
    with pytest.raises(PlanError, match=r"the strategy 'ddp', which 'auto' might choose, \(see .*with 'single'"):
        pipeline.distribute("auto", devices=2, device="cpu").plan()
    pipeline.distribute("auto", device="cpu").plan()


def test_strategies_are_known_by_their_family() -> None:
    from drivetrain.pipeline.describe.rules import family

    names = {
        "single": "single", "ddp": "ddp", "fsdp_grad_op": "fsdp", "hsdp": "fsdp",
        "deepspeed_stage_2": "deepspeed", "dp": "dp", "single_device": "single", "ddp_notebook": "ddp",
        "ddp_find_unused_parameters": "ddp", "zero_redundancy": "ddp", "fairscale_oss": "ddp",
        "fairscale_sharded_ddp": "fairscale", "fairscale_fsdp": "fairscale",
    }  # fmt: skip
    assert {name: family(name) for name in names} == names


@pytest.mark.parametrize(
    ("strategy", "options", "refused"),
    [
        ("deepspeed_stage_2", {}, False),
        ("deepspeed", {}, False),
        ("deepspeed", {"stage": 3}, True),
        ("deepspeed", {"config": {"zero_optimization": {"stage": 3}}}, True),
        ("deepspeed_stage_3_offload", {}, True),
        ("ddp", {}, False),
    ],
)
def test_a_finer_family_is_known_by_what_the_strategy_does(
    toy: Toy, strategy: str, options: dict[str, Any], refused: bool
) -> None:
    pipeline = toy.pipeline().transform(t.EMA()).distribute(strategy, devices=2, device="cpu", **options)
    if not refused:
        pipeline.plan()
        return
    with pytest.raises(PlanError, match="EMA does not work with the strategy 'deepspeed_stage_3"):
        pipeline.plan()
