"""Each silent failure known of Composer and of the sharding backends: sorted, adapted, or refused. One test a row.

Where the row is about one transform alone, its own tests hold it as well; here it is seen from a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from drivetrain import Pipeline, PlanError, StrategyError
from drivetrain.strategies import launch
from drivetrain.transforms import (
    EMA,
    SAM,
    BlurPool,
    ChannelsLast,
    CutMix,
    Factorize,
    GhostBatchNorm,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    SelectiveBackprop,
    SqueezeExcite,
    StochasticDepth,
    Transform,
    WeightStandardization,
)
from loader_pictures import run_python
from pipeline_data import CLASSES, Toy, batch_norm_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def resnet() -> nn.Module:
    """A narrow ResNet of BasicBlocks."""
    return torchvision.models.ResNet(
        torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=64
    )


def built_reports(pipeline: Pipeline) -> dict[str, int]:
    """How many modules each surgery changed."""
    with pipeline.build() as built:
        return {report.transform: len(report.changed) for report in built.reports}


def either_order(toy: Toy, *transforms: Transform) -> dict[str, int]:
    """The same, and it is the same in whatever order the user writes them."""
    forwards = built_reports(toy.pipeline(resnet, image_size=32).transform(*transforms))
    backwards = built_reports(toy.pipeline(resnet, image_size=32).transform(*transforms[::-1]))
    assert forwards == backwards
    return forwards


# facts of Composer: what changes the design


def test_channels_last_comes_after_blurpool(toy: Toy) -> None:
    """Reversed, 3 convolution weights return to NCHW, silently."""
    pipeline = toy.pipeline(resnet, image_size=32).transform(ChannelsLast(), BlurPool())
    with pipeline.build() as built:
        weights = [p for p in built.engine.plain_model.parameters() if p.dim() == 4]
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_importing_and_applying_leaves_signal_handlers_alone() -> None:
    """Composer replaces two; nothing of ours imports it."""
    done = run_python(
        "import signal, sys\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]\n"
        "import torch, torchvision, drivetrain.transforms as t\n"
        "for name in ('BlurPool', 'SqueezeExcite', 'GhostBatchNorm', 'WeightStandardization', 'StochasticDepth'):\n"
        "    t.get(name).apply(torchvision.models.resnet18())\n"
        "print(before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], 'composer' in sys.modules)"
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_smoothing_comes_after_mixing(toy: Toy) -> None:
    """Before it, half of the mixture stays unsmoothed: the smallest target is below smoothing / classes."""
    heads = [
        step.what.split("(")[0] for step in toy.pipeline().transform(LabelSmoothing(), MixUp()).plan().steps
    ]
    assert heads.index("MixUp") < heads.index("LabelSmoothing")


def test_weight_standardization_and_blurpool_keep_each_other(toy: Toy) -> None:
    """In Composer the one order drops 6 of 20 standardisations."""
    alone = built_reports(toy.pipeline(resnet, image_size=32).transform(WeightStandardization()))
    both = either_order(toy, WeightStandardization(), BlurPool())
    assert both["WeightStandardization"] == alone["WeightStandardization"] > 5
    assert both["BlurPool"] > 0


def test_an_optimizer_made_before_surgery_is_refused(toy: Toy) -> None:
    """It would keep stale parameters, silently."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(PlanError, match=r"optimizer that is already built.*Give its name, or a function"):
        toy.pipeline().optimize(optimizer)  # type: ignore[arg-type]


def test_squeeze_excite_and_factorize_find_all_they_find_alone(toy: Toy) -> None:
    """In Composer SqueezeExcite finds 13 blocks before Factorize and 6 after."""
    factorize, excite = Factorize(min_channels=64, min_features=64), SqueezeExcite(min_channels=64)
    both = either_order(toy, factorize, excite)
    for transform in (factorize, excite):
        alone = built_reports(toy.pipeline(resnet, image_size=32).transform(transform))
        assert both[type(transform).__name__] == alone[type(transform).__name__] > 0


@pytest.mark.parametrize(
    ("transform", "epochs"),
    [
        (GhostBatchNorm(8), 1),  # evaluation has a last batch below the ghost size
        (StochasticDepth(), 1),  # BasicBlocks, on which Composer's does nothing
    ],
    ids=str,
)
def test_surgeries_that_fail_in_composer_train(toy: Toy, transform: Transform, epochs: int) -> None:
    result = toy.pipeline(resnet, image_size=32).transform(transform).fit(epochs=epochs, progress=False)
    assert result.reports[0].changed
    assert result.accuracy is not None


def test_a_surgery_that_finds_nothing_warns(toy: Toy) -> None:
    with (
        pytest.warns(UserWarning, match="SqueezeExcite changed nothing"),
        toy.pipeline(batch_norm_model).transform(SqueezeExcite()).build(),
    ):
        pass


def test_two_methods_that_mix_targets_compose(toy: Toy) -> None:
    """In Composer CutMix ignores an earlier MixUp, and two that interpolate the loss only warn."""
    result = toy.pipeline().transform(CutMix(), MixUp()).fit(epochs=3, progress=False)
    assert result.history.epochs[-1].loss < result.history.epochs[0].loss


def test_selection_has_a_loss_for_each_image(toy: Toy) -> None:
    """Also with smoothing, whose loss it takes apart again."""
    pipeline = toy.pipeline().transform(SelectiveBackprop(0.0, 1.0), LabelSmoothing(0.1), MixUp())
    assert pipeline.fit(epochs=2, progress=False).accuracy is not None


# facts of the strategies: the order


def test_surgery_after_wrapping_is_refused(one_process_group: None) -> None:  # noqa: ARG001 — a fixture
    """On `.module` it is silent: the ranks' new parameters are never synchronised."""
    wrapped = DistributedDataParallel(resnet())
    for transform in (SqueezeExcite(min_channels=64), WeightStandardization(), GhostBatchNorm()):
        with pytest.raises(PlanError, match=r"DistributedDataParallel|wrapped"):
            transform.apply(wrapped)


def test_surgery_after_sharding_is_refused(one_process_group: None) -> None:  # noqa: ARG001 — a fixture
    from torch.distributed.fsdp import fully_shard

    model = resnet()
    fully_shard(model)
    for transform in (SqueezeExcite(min_channels=64), WeightStandardization()):  # BlurPool adds no parameter
        with pytest.raises(PlanError, match="shard"):
            transform.apply(model)


def sync_batch_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm_model())


def test_sync_batch_norm_on_the_cpu_is_refused(toy: Toy) -> None:
    with pytest.raises((PlanError, StrategyError), match="SyncBatchNorm"):
        toy.pipeline(sync_batch_norm).distribute("ddp", device="cpu").fit(epochs=1, progress=False)


def test_channels_last_under_fsdp_is_for_images_and_activations(toy: Toy) -> None:
    """`fully_shard` takes no other than contiguous weights. That it trains is in test_pipeline_ddp.py."""
    steps = toy.pipeline().transform(ChannelsLast()).distribute("fsdp", devices=2).plan().steps
    (why,) = [step.why for step in steps if step.what.startswith("ChannelsLast")]
    assert "the weights do not" in why


def test_adaptive_clipping_of_shards_is_refused(toy: Toy) -> None:
    """It needs the norm of each whole weight."""
    pipeline = toy.pipeline().transform(GradientClipping("adaptive")).distribute("fsdp", devices=2)
    with pytest.raises(PlanError, match=r"needs whole weights, and 'fsdp' shards them"):
        pipeline.plan()


def test_layer_freezing_under_ddp_needs_the_search(toy: Toy) -> None:
    pipeline = toy.pipeline().transform(LayerFreezing()).distribute("ddp", devices=2)
    with pytest.raises(PlanError, match=r"LayerFreezing .*'ddp' .*find_unused_parameters=True"):
        pipeline.plan()
    toy.pipeline().transform(LayerFreezing()).distribute("ddp", devices=2, find_unused_parameters=True).plan()


def both_of(rank_pipeline: Callable[[], Pipeline]) -> Any:
    """The running statistics of BatchNorm that one rank evaluates with."""
    with rank_pipeline().build() as built:
        built.methods.begin(built.engine, len(built.train))
        for images, labels in built.train:
            for part, targets in built.methods.microbatches(built.engine, images, labels, built.loss):
                built.engine.backward(built.loss(built.engine.model(part), targets))
            built.engine.step()
            built.methods.after_step()
        built.engine.sync_buffers()
        with built.methods.evaluating():
            built.engine.sync_buffers()
            return built.engine.plain_model[1].running_mean.tolist()


def test_statistics_are_the_mean_of_the_ranks_under_averages_too(toy: Toy) -> None:
    """BatchNorm's running statistics differ per rank; rank 0's alone would be evaluated."""

    def pipeline() -> Pipeline:
        return toy.pipeline(batch_norm_model).transform(EMA(half_life=2)).distribute("ddp", devices=2)

    means = launch(both_of, pipeline, devices=2, timeout=120)
    assert means[0] == means[1]


@pytest.mark.parametrize("transform", [SAM(), GradientClipping("value")], ids=str)
def test_methods_that_a_backend_cannot_take_are_declared(transform: Transform) -> None:
    assert {"deepspeed", "fairscale"} <= set(transform.unsafe_with)


def test_strategies_are_known_by_their_family() -> None:
    from drivetrain.pipeline.rules import family

    names = {
        "single": "single",
        "ddp": "ddp",
        "fsdp_grad_op": "fsdp",
        "hsdp": "fsdp",
        "deepspeed_stage_2": "deepspeed",
        "dp": "dp",
        "single_device": "single",
        "ddp_notebook": "ddp",
        "ddp_find_unused_parameters": "ddp",
        "zero_redundancy": "ddp",
        "fairscale_oss": "ddp",
        "fairscale_sharded_ddp": "fairscale",
        "fairscale_fsdp": "fairscale",
    }
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
    pipeline = toy.pipeline().transform(EMA()).distribute(strategy, devices=2, device="cpu", **options)
    if not refused:
        pipeline.plan()
        return
    with pytest.raises(PlanError, match="EMA does not work with the strategy 'deepspeed_stage_3"):
        pipeline.plan()
