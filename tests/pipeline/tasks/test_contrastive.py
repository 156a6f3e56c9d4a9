"""Contrastive learning: the loss against its definition, the same on any number of ranks, and features that help."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import Classification, Contrastive, Pipeline, PlanError
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.models.factories import projected
from drivetrain.strategies import launch
from drivetrain.transforms import ChannelsLast, MixUp
from task_jobs import SIDE, Outputs, write

Files = tuple[str, str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("contrastive"), lambda p: p.mean((1, 2)).argmax(1))


def pipeline_of(files: Files, views: int = 2, **distribution: Any) -> Pipeline:
    start = Pipeline(Outputs, num_classes=6).task(Contrastive(0.3))
    start = start.load(files[0], batch_size=32, image_size=SIDE, workers=1, views=views, scale=(0.5, 1.0))
    start = start.optimize("sgd", lr=0.05, momentum=0.9)
    return start.distribute(**distribution) if distribution else start


def by_definition(embeddings: torch.Tensor, temperature: float) -> torch.Tensor:
    """NT-Xent, term by term: for each view and each of its partners, over all other views."""
    rows = [F.normalize(row, dim=0) for sample in embeddings for row in sample]
    views, terms = embeddings.shape[1], []
    for i, anchor in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        total = torch.stack([torch.exp(anchor @ rows[j] / temperature) for j in others]).sum()
        for j in others:
            if j // views == i // views:
                terms.append(-torch.log(torch.exp(anchor @ rows[j] / temperature) / total))
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("samples", "views"), [(5, 2), (4, 3), (1, 2)])
def test_the_loss_is_that_of_its_definition(samples: int, views: int) -> None:
    torch.manual_seed(samples)
    embeddings = torch.randn(samples, views, 7, requires_grad=True)
    again = embeddings.detach().clone().requires_grad_()
    ours, expected = Contrastive(0.3).loss(embeddings, torch.zeros(samples)), by_definition(again, 0.3)
    assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
    ours.backward()
    expected.backward()
    assert torch.allclose(embeddings.grad, again.grad, atol=1e-6)  # type: ignore[arg-type]


def losses(files: Files, **distribution: Any) -> list[float]:
    fitted = pipeline_of(files, **distribution).fit(epochs=2, progress=False)
    return [epoch.loss for epoch in fitted.history.epochs]


def on_two_ranks(files: Files) -> dict[str, list[float]]:
    return {strategy: losses(files, strategy=strategy, devices=2) for strategy in ("ddp", "fsdp", "zero_redundancy")}


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("one_thread")
def test_embeddings_of_all_ranks_are_compared(files: Files) -> None:
    alone = losses(files)
    assert alone[-1] < alone[0]
    for strategy, found in launch(on_two_ranks, files, devices=2)[0].items():
        assert found == pytest.approx(alone, abs=2e-6), strategy


def test_all_views_are_one_batch_of_the_model(files: Files) -> None:
    seen: list[tuple[int, ...]] = []

    class Seeing(Outputs):
        def forward(self, images: torch.Tensor) -> Any:
            seen.append(tuple(images.shape))
            return super().forward(images)

    pipeline = pipeline_of(files, views=3).replace(model=Seeing)
    pipeline.fit(epochs=1, progress=False)
    assert seen[-1] == (96, 3, SIDE, SIDE)


def test_features_learned_without_labels_are_a_start(files: Files, tmp_path: Path) -> None:
    """`init_from` takes all layers but the projection, which has other names."""
    options = {"name": "cifar_resnet", "width": 4}
    start = Pipeline(projected, dim=8, **options).task(Contrastive())
    start = start.load(files[0], batch_size=32, image_size=SIDE, workers=1, views=2).transform(ChannelsLast())
    learned = start.optimize("adamw", lr=2e-3).fit(epochs=2, out=tmp_path / "learned", progress=False)
    assert learned.model(torch.zeros(2, 3, SIDE, SIDE)).shape == (2, 8)
    fine = Pipeline("cifar_resnet", num_classes=3, width=4).task(Classification())
    fine = fine.load(*files, batch_size=32, image_size=SIDE, workers=1).optimize("sgd", lr=0.0)
    result = fine.fit(epochs=1, init_from=tmp_path / "learned", progress=False)
    for name, value in result.model.state_dict().items():
        if not name.startswith("11.") and "running" not in name and "num_batches" not in name:
            assert torch.equal(value, learned.model.state_dict()[name]), name


REFUSED: dict[str, tuple[Any, str]] = {
    "one view": (lambda p, f: p.load(f[0], batch_size=32, image_size=SIDE), "Pass views=2 to load"),
    "views of classes": (lambda p, _: p.task(Classification()), "has class indices of one. Leave views out"),
    "multi-crop": (
        lambda p, f: p.load(f[0], batch_size=32, image_size=SIDE, views=[{"count": 2}]),
        "makes images of several sizes",
    ),
    "microbatches": (lambda p, _: p.distribute("single", accumulate=2), "those of their microbatch"),
    "nothing to compare with": (
        lambda p, f: p.load(f[0], batch_size=1, image_size=SIDE, views=2), "batch_size=1 has no other image"
    ),
    "mixing": (lambda p, _: p.task(Views()).transform(MixUp(0.2)), "needs targets|changes batches"),
    "evaluation": (
        lambda p, f: p.load(*f, batch_size=32, image_size=SIDE, views=2), "no labels to evaluate on"
    ),
}  # fmt: skip


class Views(Contrastive):
    kind = "any"  # type: ignore[misc]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, files: Files) -> None:
    change, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        change(pipeline_of(files), files).fit(epochs=1, progress=False)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), "warm"])
def test_temperatures_are_positive(temperature: Any) -> None:
    with pytest.raises(PlanError, match="Contrastive: temperature="):
        Contrastive(temperature)


def test_a_model_without_embeddings_is_refused(files: Files) -> None:
    with pytest.raises(PlanError, match="needs one embedding per image"):
        pipeline_of(files).replace(model_options={"num_classes": 6, "container": "dict"}).fit(epochs=1, progress=False)


def test_prediction_returns_the_embedding(files: Files) -> None:
    result = pipeline_of(files).fit(epochs=1, progress=False)
    with FFCVLoader(files[1], batch_size=4, image_size=SIDE, train=False, workers=1) as loader:
        images, _ = next(iter(loader))
    assert result.model(images).shape == (4, 6)
    assert Contrastive().row(torch.ones(2), ()) == {"embedding": [1.0, 1.0]}
