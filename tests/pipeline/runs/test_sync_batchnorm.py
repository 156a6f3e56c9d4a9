"""`distribute(sync_batchnorm=True)` in runs: two ranks train a model with BatchNorm to the numbers of one device.

They keep a plain model. The plan says where BatchNorm meets a split batch."""

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import Pipeline, PlanError, StrategyError
from drivetrain.pipeline.describe.pipeline_spec import PipelineSpec
from drivetrain.transforms import EMA, SAM, GhostBatchNorm, SelectiveBackprop
from pipeline_data import BATCH, SIDE, Toy, batch_norm_model, numbers, plain_model
from torch import nn


def wrapped(pipeline: PipelineSpec) -> str:
    """The caution of the step that wraps the model."""
    return next(step.caution for step in pipeline.plan().steps if step.what.startswith("wrap with"))  # type: ignore[attr-defined]


def on_ranks(pipeline: Pipeline, **options: Any) -> Pipeline:
    return pipeline.distribute("ddp", devices=2, device="cpu", **{"sync_batchnorm": True, **options})


def same(found: Any, expected: Any) -> None:
    """Losses and evaluations of each epoch, weights and running statistics."""
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.process
@pytest.mark.long
def test_two_ranks_train_like_one_device_and_leave_a_plain_model(toy: Toy, tmp_path: Path) -> None:
    """Interrupted and resumed as well; the model that is kept, loaded and predicts has torch's own layers."""
    pipeline = toy.pipeline(batch_norm_model)
    expected = pipeline.fit(epochs=2, progress=False)
    out = tmp_path / "run"
    found = on_ranks(pipeline).fit(epochs=2, progress=False, out=out)
    same(found, expected)
    assert "BatchNorm" not in found.history.facts
    assert type(found.model[1]) is nn.BatchNorm2d
    images = torch.randn(3, 3, SIDE, SIDE)
    torch.testing.assert_close(found.model(images), expected.model(images), rtol=1e-5, atol=1e-5)
    # On one device from the middle of it: what two ranks have saved are the statistics of one.
    steps = len(list((out / "checkpoints").glob("step-*")))
    assert steps
    first = sorted((out / "checkpoints").glob("step-*"))[0]
    same(pipeline.fit(epochs=2, progress=False, resume=first), expected)


@pytest.mark.slow
@pytest.mark.process
def test_methods_that_run_a_batch_twice_work_with_it(toy: Toy) -> None:
    """SelectiveBackprop's and SAM's further forwards exchange statistics, too, and leave the buffers as they were."""
    pipeline = toy.pipeline(batch_norm_model).transform(SAM(interval=2), EMA(half_life=3))
    same(on_ranks(pipeline).fit(epochs=1, progress=False), pipeline.fit(epochs=1, progress=False))
    selecting = on_ranks(toy.pipeline(batch_norm_model).transform(SelectiveBackprop(start=0.0, end=1.0)))
    assert isfinite(selecting.fit(epochs=1, progress=False).history.epochs[0].loss)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_a_run_notes_that_batch_norm_saw_parts_of_the_batch(toy: Toy) -> None:
    with_norm, without = (
        on_ranks(toy.pipeline(model), sync_batchnorm=False).fit(epochs=1, progress=False).history.facts
        for model in (batch_norm_model, plain_model)
    )
    words = f"BatchNorm (1 layers) uses the statistics of each microbatch of {BATCH // 2} images, not of"
    assert with_norm["BatchNorm"].startswith(words)
    assert with_norm["BatchNorm"].endswith("sync_batchnorm=True makes them equal")
    assert "BatchNorm" not in without


def test_the_plan_cautions_where_batch_norm_meets_a_split_batch(toy: Toy) -> None:
    """A factory may build any model; of a model that exists the layers are counted."""
    factory, built = toy.pipeline(batch_norm_model), toy.pipeline(batch_norm_model())
    split = {"sync_batchnorm": False}
    assert "BatchNorm, if the model has any, uses the statistics of" in wrapped(on_ranks(factory, **split))
    assert "BatchNorm (1 layers) uses the statistics of each microbatch of 16 images" in wrapped(
        on_ranks(built, **split)
    )
    text = wrapped(factory.distribute("single", device="cpu", accumulate=4))
    assert "microbatch of 8 images" in text
    assert "GroupNorm does not depend on the split; nor does accumulate=1" in text
    for quiet in (on_ranks(factory), factory, on_ranks(toy.pipeline(plain_model()), **split)):
        assert "BatchNorm" not in wrapped(quiet)
    assert "synchronize BatchNorm" in [step.what for step in on_ranks(factory).plan().steps]


def test_what_contradicts_it_is_refused_with_the_remedy(toy: Toy) -> None:
    with pytest.raises(
        StrategyError,
        match=r"sync_batchnorm=True .* accumulate=2: .* memory that accumulate saves.*activation",
    ):
        on_ranks(toy.pipeline(), accumulate=2)
    with pytest.raises(StrategyError, match=r"sync_batchnorm='yes' must be True or False"):
        on_ranks(toy.pipeline(), sync_batchnorm="yes")
    with pytest.raises(PlanError, match=r"GhostBatchNorm\(.*sync_batchnorm=True.*Leave one of the two out"):
        on_ranks(toy.pipeline().transform(GhostBatchNorm())).plan()
