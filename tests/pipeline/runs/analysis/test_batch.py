"""A shown batch: the images and targets that a real training gets in that step, recorded by its model and loss."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_jobs as jobs
import torch
import torch.nn.functional as F
from command_line import call, toy_values
from drivetrain import Classification, Contrastive, DataError, Pipeline, PlanError, Segmentation, Task
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline.describe.config import FitOptions
from drivetrain.pipeline.runs.analysis.batch import ShownBatch
from drivetrain.transforms import CutMix, InfoBatch, MixUp, ProgressiveResizing, SelectiveBackprop
from PIL import Image
from pipeline_data import BATCH, SIDE, TRAIN, Layered, Toy
from torch import nn

SEEN: dict[str, list[torch.Tensor]] = {"images": [], "targets": []}


class Spy(Layered):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) > 2:  # two images try it before training
            SEEN["images"].append(images.detach().clone())
        result: torch.Tensor = self.layers(images)
        return result


def spy_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.requires_grad and len(outputs) > 2:
        SEEN["targets"].append(targets.clone())
    return F.cross_entropy(outputs, targets)


@pytest.fixture(autouse=True)
def _forget() -> None:
    for each in SEEN.values():
        each.clear()


def pixels(images: torch.Tensor, side: int) -> Any:
    """Normalized images as bytes, `(B, H, W, 3)`."""
    assert images.shape[-2:] == (side, side)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((images * std + mean) * 255).permute(0, 2, 3, 1).numpy()


def agree(batch: ShownBatch, images: torch.Tensor, side: int = SIDE) -> None:
    expected = pixels(images, side)
    assert len(batch.pictures) == len(batch.texts) == len(images)
    for (picture,), own in zip(batch.pictures, expected, strict=True):
        assert picture.dtype == np.uint8
        assert np.abs(picture - own.clip(0, 255)).max() <= 0.51


def test_it_is_what_the_step_gets(toy: Toy) -> None:
    """In the first epoch and in the last, which has full size; MixUp and CutMix draw other shares in each."""
    pipeline = (
        toy.pipeline(Spy, flip=True).task(Classification(loss=spy_loss))
        .transform(MixUp(0.8), CutMix(1.0), ProgressiveResizing(0.5, delay=0.3, finetune=0.3))
    )  # fmt: skip
    pipeline.fit(epochs=3, progress=False)
    trained = {name: list(each) for name, each in SEEN.items()}
    steps = TRAIN // BATCH
    sizes = []
    for epoch in (0, 2):
        images, targets = trained["images"][epoch * steps], trained["targets"][epoch * steps]
        sizes.append(images.shape[-1])
        batch = pipeline.show_batch(epoch, samples=BATCH, epochs=3)
        agree(batch, images, sizes[-1])
        for text, shares in zip(batch.texts, targets, strict=True):
            named = dict(part.split() for part in text.split(", ")) if "%" in text else {text: "100%"}
            for name, share in named.items():
                assert float(share.rstrip("%")) / 100 == pytest.approx(float(shares["abcd".index(name)]), abs=0.0051)
        assert batch.title == (
            f"epoch {epoch} of 3, step {epoch * steps}: {BATCH} of {BATCH} images, {sizes[-1]}×{sizes[-1]} pixels"
        )
    assert sizes == [SIDE // 2, SIDE]
    assert any("%" in text for text in batch.texts)


def test_microbatches_of_ranks_are_those_of_one(toy: Toy) -> None:
    pipeline = toy.pipeline(Spy).transform(MixUp(0.8)).distribute("single", accumulate=2)
    pipeline.fit(epochs=1, progress=False)
    first = torch.cat(SEEN["images"][:2])
    agree(pipeline.show_batch(samples=BATCH), first)
    agree(pipeline.distribute("ddp", devices=2, device="cpu").show_batch(samples=BATCH), first)


def test_samples_are_selected_by_the_weights_that_training_begins_with(toy: Toy, tmp_path: Path) -> None:
    """Those of `init_from`, here with the opposite logits, for which other losses are the highest."""
    own = toy.pipeline(Spy).transform(SelectiveBackprop(0.0, 1.0, interrupt=0))
    with own.build() as built:
        state = built.engine.export_state()
    opposite = {name: -value if name.startswith("layers.4.") else value for name, value in state.items()}
    torch.save(opposite, tmp_path / "opposite.pt")
    begun = own.replace(fit_options=FitOptions(init_from=tmp_path / "opposite.pt"))
    for pipeline in (own, begun):
        SEEN["images"].clear()
        pipeline.fit(epochs=1, progress=False)
        whole, selected = SEEN["images"][:2]
        assert (len(whole), len(selected)) == (BATCH, BATCH // 2)
        agree(pipeline.show_batch(), selected)


def test_nothing_of_the_process_changes(toy: Toy) -> None:
    state, pipeline = torch.get_rng_state(), toy.pipeline()
    batch = pipeline.show_batch(1, samples=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(each) for each in (batch.pictures, batch.texts)] == [3, 3]
    assert set(batch.texts) <= set("abcd")


def test_without_a_number_of_epochs_none_is_too_short(toy: Toy) -> None:
    """As of most pipelines in Python, which `fit` gives one. A training of one epoch is refused with these methods."""
    for method, side in ((ProgressiveResizing(), SIDE // 2), (InfoBatch(), SIDE)):
        pipeline = toy.pipeline().transform(method)
        assert pipeline.show_batch(samples=2).pictures[0][0].shape == (side, side, 3)
        with pytest.raises(PlanError, match="with epochs=1 none"):
            pipeline.show_batch(epochs=1)


def test_views_stand_beside_each_other(toy: Toy) -> None:
    model = Pipeline("cifar_resnet", num_classes=4, width=4).task(Contrastive())
    pipeline = model.load(toy.train, batch_size=BATCH, image_size=SIDE, views=2, workers=1)
    batch = pipeline.show_batch(samples=4)
    with FFCVLoader(toy.train, batch_size=BATCH, image_size=SIDE, views=2, workers=1) as loader:
        images, labels = next(iter(loader))
    for sample, pictures in enumerate(batch.pictures):
        for view, picture in enumerate(pictures):
            own = pixels(images[sample : sample + 1, view], SIDE)[0]
            assert np.abs(picture - own.clip(0, 255)).max() <= 0.51
    assert batch.texts == tuple("abcd"[label] for label in labels[:4])
    assert len(batch.show().axes) == 8


def test_views_of_several_ranks_are_one_batch(toy: Toy) -> None:
    """Contrastive learning refuses microbatches, which it would compare by themselves, and takes several ranks."""
    model = Pipeline("cifar_resnet", num_classes=4, width=4).task(Contrastive())
    pipeline = model.load(toy.train, batch_size=BATCH, image_size=SIDE, views=2, workers=1)
    alone, several = (
        pipeline.distribute(strategy, devices=devices, device="cpu").show_batch(samples=3)
        for strategy, devices in (("single", 1), ("ddp", 2))
    )
    assert several.texts == alone.texts
    assert [len(views) for views in several.pictures] == [2] * 3
    assert all(np.array_equal(one, other) for one, other in zip(several.pictures, alone.pictures, strict=True))


def test_masks_are_those_of_the_loader(tmp_path: Path) -> None:
    images = jobs.images(16, 0)
    masks = [np.where(image[..., 0] > 127, 1, 0).astype(np.uint8) for image in images]
    for mask in masks:
        mask[:2] = 255
    file = tmp_path / "train.beton"
    convert([*zip(images, masks, strict=True)], file, progress=False)
    pipeline = Pipeline(nn.Conv2d, in_channels=3, out_channels=3, kernel_size=1).load(
        str(file), batch_size=8, image_size=SIDE, workers=1
    ).task(Segmentation(classes=3, ignore_index=1))  # fmt: skip
    batch = pipeline.show_batch(samples=5)
    with FFCVLoader(file, batch_size=8, image_size=SIDE, workers=1) as loader:
        _, own = next(iter(loader))
    assert (np.stack(batch.masks) == own[:5].masked_fill(own[:5] == 1, 255).numpy()).all()
    assert [name for name, _, _ in batch._legend()] == ["0", "not counted"]
    at = next(number for number, mask in enumerate(batch.masks) if (mask == 255).any())
    (drawn,), _ = batch._drawn()[at]
    assert set(drawn[batch.masks[at] == 255].ravel()) == {120, 225}  # hatched
    assert batch.texts == ("",) * 5
    assert len(batch.show().axes) == 5


class Foreground(Task):
    """Has targets of its own for its metrics."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - (targets == 1).float()).square().mean()

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets == 1).flatten(1)


def test_masks_of_a_custom_task_are_those_of_the_loader(tmp_path: Path) -> None:
    images, file = jobs.images(16, 0), tmp_path / "train.beton"
    convert([(image, (image[..., 0] // 90).astype(np.uint8)) for image in images], file, progress=False)
    start = Pipeline(nn.Conv2d, in_channels=3, out_channels=1, kernel_size=1).task(Foreground())
    batch = start.load(str(file), batch_size=8, image_size=SIDE, workers=1).show_batch(samples=5)
    with FFCVLoader(file, batch_size=8, image_size=SIDE, workers=1) as loader:
        _, own = next(iter(loader))
    assert (np.stack(batch.masks) == own[:5].numpy()).all()


def test_labels_and_values_are_written(tmp_path: Path) -> None:
    for name in ("MultiLabel", "Regression", "Regression of vectors"):
        folder = tmp_path / name
        folder.mkdir()
        files = jobs.write(folder, jobs.TASKS[name][1])
        batch = jobs.pipeline_of(name, files).show_batch(samples=6)
        with FFCVLoader(files[0], batch_size=32, image_size=jobs.SIDE, flip=False, workers=1) as loader:
            _, targets = next(iter(loader))
        for text, target in zip(batch.texts, targets, strict=False):
            if name == "MultiLabel":
                expected = ", ".join(str(at) for at in target.nonzero().flatten().tolist()) or "none"
            else:
                expected = ", ".join(f"{value:.3g}" for value in target.reshape(-1).tolist())
            assert text == expected, name


def test_a_text_shows_that_there_are_more_values_and_labels(tmp_path: Path) -> None:
    for name, rows, commas in (
        ("MultiLabel", np.ones((8, 5)), 3), ("Regression of vectors", np.linspace(0, 1, 48).reshape(8, 6), 4),
    ):  # fmt: skip
        file = str(tmp_path / f"{name}.beton")
        convert((jobs.images(8, 0), rows.astype(np.float32)), file, progress=False)
        pipeline = Pipeline(jobs.Outputs, num_classes=rows.shape[1]).task(jobs.TASKS[name][0])
        batch = pipeline.load(file, batch_size=8, image_size=SIDE, workers=1).show_batch(samples=8)
        for text in batch.texts:
            assert (text.count(","), text.endswith(", …")) == (commas, True), text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epoch": -1}, "epoch"), ({"epoch": 1.5}, "epoch"), ({"samples": 0}, "samples"), ({"epochs": 0}, "epochs"),
        ({"epoch": 3, "epochs": 3}, "epoch=3 is not one of the pipeline's 3 epochs, counted from 0"),
    ],
)  # fmt: skip
def test_wrong_arguments(toy: Toy, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        toy.pipeline().show_batch(**wrong)


def test_it_is_saved_and_shown_in_notebooks(toy: Toy, tmp_path: Path) -> None:
    batch = toy.pipeline().show_batch(samples=4)
    for name in ("b.png", "b.svg", "b.pdf"):
        assert batch.save(tmp_path / name).stat().st_size > 1000
    with pytest.raises(DataError, match=r"b\.jpg must end in \.png, \.svg or \.pdf"):
        batch.save(tmp_path / "b.jpg")
    page = batch._repr_html_()
    assert page.startswith("<p>epoch 0 of 1, step 0")
    assert page.count("<img") == 4
    with Image.open(io.BytesIO((tmp_path / "b.png").read_bytes())) as drawn:
        assert drawn.size[0] > 100


def test_the_command(toy: Toy, tmp_path: Path) -> None:
    command = ["show", "cifar10-quickstart", *toy_values(toy), "--out"]
    end = call(*command, str(tmp_path / "b.png"), "--epoch", "1")
    assert (end.code, end.err) == (0, "")
    assert "epoch 1 of 2" in end.out
    assert (tmp_path / "b.png").exists()
    wrong = call(*command, str(tmp_path / "c.png"), "--epoch", "2")
    assert "epoch=2 is not one of the pipeline's 2 epochs" in wrong.line
    assert "c.txt must end in .png" in call(*command, str(tmp_path / "c.txt")).line
