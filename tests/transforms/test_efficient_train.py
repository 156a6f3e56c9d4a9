"""EfficientTrain: images of the paper's formula, its schedule, and a run equal to a plain loop's, also on ranks."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import Contrastive, Pipeline, PlanError
from drivetrain import transforms as t
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader
from drivetrain.pipeline import Checkpoints, Segmentation
from drivetrain.transforms.efficient_train import low_frequencies
from pipeline_data import CLASSES, SIDE, TRAIN, AllBut, Toy, evaluated, numbers, plain_model
from torch import Tensor, nn

EPOCHS, BATCH, LR = 5, 32, 0.1
STEPS = TRAIN // BATCH
METHOD = t.EfficientTrain(size_increment=2)
LABELS = torch.tensor([0, 1])


def reference(images: Tensor, height: int, width: int) -> Tensor:
    """The paper's formula, with the centered spectrum, in float64."""
    spectrum = torch.fft.fftshift(torch.fft.fft2(images.double()), dim=(-2, -1))
    top, left = images.shape[-2] // 2 - height // 2, images.shape[-1] // 2 - width // 2
    crop = torch.fft.ifftshift(spectrum[..., top : top + height, left : left + width], dim=(-2, -1))
    return torch.fft.ifft2(crop).real * (height * width / (images.shape[-2] * images.shape[-1]))


def of_the_authors(images: Tensor, bandwidth: int) -> Tensor:
    """As their code has it, which selects the four corners of the spectrum; for an even bandwidth."""
    half, spectrum = bandwidth // 2, torch.fft.fft2(images)
    rows = torch.cat([spectrum[..., :half, :], spectrum[..., -half:, :]], -2)
    corners = torch.cat([rows[..., :half], rows[..., -half:]], -1)
    return torch.fft.ifft2(corners * (bandwidth / images.shape[-1]) ** 2).real


def random_images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 21), (17, 20), (17, 21)])
def test_it_is_the_papers_formula(rows: int, columns: int) -> None:
    """With even and odd sides and bandwidths, of which even ones have an unpaired frequency."""
    images = random_images(2, 3, rows, columns)
    for height, width in product((1, 2, 8, 9, rows - 1, rows), (7, 10, columns - 1, columns)):
        expected = reference(images, height, width)
        torch.testing.assert_close(low_frequencies(images, height, width), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bandwidth", [96, 160])
def test_it_is_the_authors_code_at_the_papers_sizes(bandwidth: int) -> None:
    images = random_images(2, 3, 224, 224)
    expected = of_the_authors(images, bandwidth)
    torch.testing.assert_close(low_frequencies(images, bandwidth, bandwidth), expected, rtol=0, atol=1e-11)
    single = low_frequencies(images.float(), bandwidth, bandwidth)
    torch.testing.assert_close(single, expected.float(), rtol=0, atol=5e-5)


def test_low_frequencies_are_kept_and_others_removed() -> None:
    """A wave below half of the bandwidth is the same wave, of fewer pixels; one above it is gone."""
    for wave, kept in ((0, True), (1, True), (3, True), (5, False), (7, False)):
        long, short = (torch.arange(side, dtype=torch.float64) / side for side in (16, 8))
        images = torch.cos(2 * torch.pi * wave * long + 0.3).expand(1, 1, 16, 16)
        expected = torch.cos(2 * torch.pi * wave * short + 0.3).expand(1, 1, 8, 8) * kept
        torch.testing.assert_close(low_frequencies(images, 8, 8), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_dtype_and_memory_format_are_kept(dtype: torch.dtype, form: torch.memory_format) -> None:
    images = (random_images(2, 3, 16, 16).abs() * 90).clamp(0, 255).to(dtype).contiguous(memory_format=form)
    before = images.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # in which batch transforms run
        small, labels = METHOD.batch(images, LABELS, t.BatchContext(torch.Generator(), progress=0.0))
    assert labels is LABELS
    assert torch.equal(images, before)
    assert (small.shape, small.dtype) == ((2, 3, 6, 6), dtype)
    assert small.is_contiguous(memory_format=form)
    expected = reference(images, 6, 6)
    if dtype == torch.uint8:
        expected = expected.round().clamp(0, 255)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 1e-6)
    torch.testing.assert_close(small.double(), expected, rtol=tolerance, atol=1e-4)
    full, _ = METHOD.batch(images, LABELS, t.BatchContext(torch.Generator(), progress=1.0))
    assert full is images


def test_the_schedule_is_the_papers() -> None:
    """Ten stages of equal computation: two at 96 pixels, four at 160 and four at 224, with RandAugment's magnitudes
    0 to 9. An epoch of small images costs less, so that a stage has more of them."""
    sides = [96] * 2 + [160] * 4 + [224] * 4
    epochs = [(224 / side) ** 2 for side in sides]
    method, done = t.EfficientTrain(), 0.0
    for stage, (side, own) in enumerate(zip(sides, epochs, strict=True)):
        for within in (1e-6, 0.5, 1 - 1e-6):
            progress = (done + within * own) / sum(epochs)
            assert method.bandwidth(224, progress) == side
            assert method.compute_at(progress) == pytest.approx((stage + within) / 10)
            assert method.magnitude(9, progress) == stage
        done += own
    assert sum(epochs) / 10 == pytest.approx(2.27, abs=0.005), "as the documentation has it"
    assert "48% of the steps at 0.43 of the side, 34% of" in method.caution
    assert "18% of the steps at 1 of the side; below 1, in multiples of 16 pixels; RandAugment" in method.caution
    assert "multiples" not in t.EfficientTrain(size_increment=1).caution
    assert [method.compute_at(each) for each in (0, 1)] == [0, 1]
    assert [method.magnitude(30, each) for each in (0, 1)] == [0, 30]


def test_sides_are_multiples_and_the_last_is_full() -> None:
    method = t.EfficientTrain()
    assert [method.bandwidth(side, 0.0) for side in (8, 32, 100, 128, 224, 256)] == [8, 16, 48, 48, 96, 112]
    assert [method.bandwidth(side, 1.0) for side in (8, 100, 225)] == [8, 100, 225]
    assert method.bandwidth((224, 448), 0.6) == (160, 320)
    assert t.EfficientTrain(size_increment=1).bandwidth(100, 0.0) == 43
    four = t.EfficientTrain((96, 160, 192, 224), (0.2, 0.4, 0.2, 0.2))  # the paper's, for DeiT
    assert [four.bandwidth(224, each) for each in (0.1, 0.6, 0.9, 0.95)] == [96, 160, 192, 224]


def pipeline_of(toy: Toy, **load: Any) -> Pipeline:
    return toy.pipeline(plain_model, batch_size=BATCH, crop="random", **load).transform(METHOD)


def fit(pipeline: Pipeline, **arguments: Any) -> Any:
    return pipeline.fit(**({"epochs": EPOCHS, "progress": False} | arguments))


def test_a_run_is_that_of_a_plain_loop(toy: Toy) -> None:
    pipeline = pipeline_of(toy)
    with pipeline.build() as built:
        model = copy.deepcopy(built.engine.plain_model).train()
    optimizer, losses, sides = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), [], []
    options: Any = {"batch_size": BATCH, "image_size": SIDE, "crop": "random", "flip": False, "workers": 1}
    with FFCVLoader(toy.train, **options) as loader:
        for epoch in range(EPOCHS):
            total = 0.0
            for step, (images, labels) in enumerate(loader):
                cost = METHOD.compute_at((epoch * STEPS + step) / (EPOCHS * STEPS))
                side = 6 if cost < 0.2 else 12 if cost < 0.6 else SIDE  # the multiple of 2 next to 6.9 and 11.4
                small = images if side == SIDE else reference(images, side, side).float()
                loss = F.cross_entropy(model(small), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() / STEPS
                sides.append(side)
            losses.append(total)
    result = fit(pipeline)
    assert len(set(sides)) == 3
    assert [epoch.loss for epoch in result.history.epochs] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(result.model.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


def test_randaugment_becomes_stronger(toy: Toy) -> None:
    """From epoch to epoch, the loader has the magnitude of the epoch's middle, and its images; also if it resumes."""
    pipeline = toy.pipeline(plain_model).transform(METHOD, t.RandAugment(magnitude=9))
    for own in (
        pipeline,
        pipeline.load(toy.train, batch_size=BATCH, image_size=SIDE, loader="torch", workers=0),
    ):
        magnitudes = []
        with own.build() as built:
            for first in (0, 3):  # a run, and one that resumes in its epoch 3
                built.hooks.begin(built.engine, EPOCHS * STEPS, built.train)
                built.hooks.state.step, built.hooks.state.epoch = first * STEPS, first
                for epoch in range(first, EPOCHS):
                    built.hooks.begin_epoch(built.train, SIDE)
                    magnitudes.append(built.train.settings.policy["magnitude"])
                    assert magnitudes[-1] == METHOD.magnitude(9, (epoch + 0.5) / EPOCHS)
                    built.hooks.state.step += STEPS
        assert magnitudes == [0, 1, 2, 4, 7, 4, 7]


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_loader_changes_its_policy(toy: Toy, kind: Any) -> None:
    options: Any = {"batch_size": 8, "image_size": SIDE, "workers": int(kind is FFCVLoader), "flip": False}
    weak, strong = ({"name": "rand_augment", "magnitude": each} for each in (0, 30))

    def first(loader: Any) -> Tensor:
        loader.set_epoch(3)
        torch.manual_seed(0)
        return next(iter(loader))[0].clone()

    with (
        kind(toy.train, policy=weak, **options) as changed,
        kind(toy.train, policy=strong, **options) as other,
    ):
        before = first(changed)
        changed.set_policy(strong)
        assert torch.equal(first(changed), first(other))
        assert not torch.equal(before, first(other))
        changed.set_policy(weak)
        assert torch.equal(first(changed), before)
        with pytest.raises(DataError, match="'strong' is unknown"):
            changed.set_policy({"name": "strong"})
        assert changed.settings.policy == weak


@pytest.mark.slow  # FFCV compiles
def test_ffcvs_own_loader_has_no_policy(toy: Toy) -> None:
    pytest.importorskip("ffcv")
    with (
        StockFFCVLoader(toy.train, batch_size=8, image_size=SIDE, workers=1) as loader,
        pytest.raises(DataError, match=r"policy=.* is not available in FFCV's own loader"),
    ):
        loader.set_policy({"name": "rand_augment"})


def test_resumed_anywhere_it_is_the_same_run(toy: Toy, tmp_path: Path) -> None:
    """In the middle of epochs, before a bandwidth ends, at its end, and after it."""
    pipeline = pipeline_of(toy).transform(t.RandAugment(), t.MixUp(0.2))
    whole = fit(pipeline, out=tmp_path, checkpoints=Checkpoints(every_steps=1, keep=1000))
    for step in (1, 9, 10, 17):
        resumed = fit(pipeline, resume=tmp_path / "checkpoints" / f"step-{step:08d}")
        assert numbers(resumed) == numbers(whole), step
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("how", [
    {"strategy": "single", "accumulate": 2},
    pytest.param({"strategy": "ddp", "devices": 2}, marks=pytest.mark.slow),  # test_fit_ddp.py has a shorter run
    pytest.param({"strategy": "fsdp", "devices": 2}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_on_ranks_and_with_microbatches(toy: Toy, how: dict[str, Any]) -> None:
    pipeline = pipeline_of(toy).transform(t.RandAugment())
    one, split = fit(pipeline), fit(pipeline.distribute(**how))
    assert [e.loss for e in split.history.epochs] == pytest.approx([e.loss for e in one.history.epochs], rel=1e-5)
    torch.testing.assert_close(split.model.state_dict(), one.model.state_dict(), rtol=1e-4, atol=1e-5)


def test_it_comes_before_other_methods(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model).transform(t.CutMix(), t.ColOut(), t.CutOut(), METHOD, t.MixUp())
    order = [step.what.partition("(")[0] for step in pipeline.plan().steps]
    names = ["EfficientTrain", "CutMix", "ColOut", "CutOut", "MixUp"]
    assert [name for name in order if name in names] == names


def test_evaluation_is_at_full_size(toy: Toy) -> None:
    small = fit(pipeline_of(toy), epochs=1)
    assert evaluated(small.model, toy.val)[0] == pytest.approx(small.history.epochs[0].val_loss, abs=1e-5)


class OneSize(nn.Module):
    """As a vision transformer of torchvision: its first layer has the number of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIDE * SIDE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


def test_what_has_no_meaning_is_refused(toy: Toy) -> None:
    plain = toy.pipeline(plain_model)
    with pytest.raises(
        PlanError, match=r"EfficientTrain does not work with ProgressiveResizing .* Leave one of the two"
    ):
        plain.transform(METHOD, t.ProgressiveResizing()).plan()
    views = toy.pipeline(plain_model, views=2).task(Contrastive())
    for other in (views, plain.task(Segmentation(3))):
        with pytest.raises(PlanError, match=r"EfficientTrain needs targets that are class indices .* Leave it out"):
            other.transform(METHOD).plan()
    smaller = r"does not accept images of 6 × 6 pixels.*EfficientTrain trains on images of this size: .*dynamic_img"
    with pytest.raises(PlanError, match=smaller):
        fit(toy.pipeline(OneSize).transform(METHOD))
    middle = METHOD.bandwidth(SIDE, 0.6)
    with pytest.raises(PlanError, match=rf"images of {middle} × {middle} .* EfficientTrain trains on images of this"):
        fit(toy.pipeline(lambda: AllBut(middle)).transform(METHOD))
    fit(toy.pipeline(OneSize).transform(t.EfficientTrain()), epochs=1)  # whose multiple of 16 is the full size
    for options, message in (
        ({"bandwidths": (224, 96, 160)}, r"bandwidths=\(224, 96, 160\)\): they must rise"),
        (
            {"compute": (0.5, 0.5)},
            r"compute=\(0.5, 0.5\)\): pass a fraction for each of the 3 bandwidths, with a sum",
        ),
        ({"bandwidths": (96.5, 224)}, "bandwidths=.*: pass a list of positive integers"),
    ):
        with pytest.raises(PlanError, match=message):
            t.EfficientTrain(**options)


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


@pytest.mark.slow
def test_compiled_it_is_compiled_twice(toy: Toy) -> None:
    """For the first size, and at the second for all sizes; a third one needs no further graph."""
    options: Any = {"batch_size": BATCH, "image_size": SIDE, "workers": 1}
    pipeline = Pipeline(pooled).load(toy.train, **options).transform(METHOD).optimize("sgd", lr=LR)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = fit(pipeline.distribute("single", compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    losses, expected = ([epoch.loss for epoch in run.history.epochs] for run in (compiled, fit(pipeline)))
    assert losses == pytest.approx(expected, rel=1e-5)
