"""`Regression(scale_targets=True)`: as a plain loop that scales by hand, resumed, loaded, exported, and refused."""

import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import task_jobs as jobs
import torch
import torch.nn.functional as F
from drivetrain import CheckpointError, Pipeline, PlanError, Regression
from drivetrain.loaders.beton import data_set
from drivetrain.pipeline import load_run
from drivetrain.pipeline.apps.exports.export import export
from drivetrain.pipeline.tasks import standard
from drivetrain.pipeline.tasks.target_scale import BUFFERS, TargetScale, attach_scale, carried_scale, fit_scale
from same_runs import assert_same_weights
from torch import nn

Files = tuple[str, str]


def several(pictures: Any) -> Any:
    """Three numbers of very different sizes, the last the same for all."""
    value = jobs.numbers_of(pictures)
    return np.stack([value * 75_000 + 180_000, value / 1000, value * 0 + 7], 1).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return jobs.write(tmp_path_factory.mktemp("scaled"), several)


def pipeline_of(files: Files, *, scaled: bool = True, **load: Any) -> Pipeline:
    start = Pipeline(jobs.Outputs, num_classes=3).task(Regression(scale_targets=scaled))
    start = start.load(files[0], files[1], **{"batch_size": 32, "image_size": jobs.SIDE, "flip": False, **load})
    return start.optimize("sgd", lr=0.05 if scaled else 1e-12, momentum=0.9, schedule="constant")


def test_of_large_data_one_process_of_a_machine_reads_the_targets(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 16, "image_size": jobs.SIDE, "limit": 50}
    pipeline = pipeline_of(files).load(files[0], val_split=0.3, **options)
    weighted = pipeline.load(files[0], balance=(1.0,) * 10 + (2.0,) * (jobs.TRAIN - 10), **options)

    def scales() -> list[Any]:
        found = []
        for each in (pipeline, weighted):
            with each.build() as built:
                found.append(carried_scale(built.engine.plain_model))
        return found

    expected, note = scales(), str(pipeline.plan())
    assert not torch.equal(expected[0].mean, expected[1].mean)
    monkeypatch.setattr(data_set, "CHECKED", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = scales()
    with monkeypatch.context() as patch:
        patch.setattr(standard, "fit_scale", None)  # not called again, nor are all labels read
        patch.setattr(data_set.BetonFiles, "labels", None)
        again = scales()
        assert str(pipeline.plan()) == note
    for one, other, third in zip(expected, found, again, strict=True):
        torch.testing.assert_close(tuple(one), tuple(other), rtol=0, atol=0)
        torch.testing.assert_close(tuple(one), tuple(third), rtol=0, atol=0)


def test_it_is_a_plain_loop_that_scales_by_hand(files: Files) -> None:
    pipeline = pipeline_of(files).load(files[0], batch_size=16, image_size=jobs.SIDE, limit=50, val_split=0.3)
    with pipeline.replace(goal=Regression()).build() as built:
        targets = torch.from_numpy(built.train.labels[built.train.indices])
        mean, std = targets.double().mean(0).float(), targets.double().std(0, correction=0).float()
        std[2] = 1
        model, losses = built.engine.plain_model, list[torch.Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(2):
            for images, labels in built.train:
                loss = F.mse_loss(model(images), (labels - mean) / std)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    result = pipeline.fit(epochs=2, progress=False)
    assert len(targets) == 50
    scale = carried_scale(result.model)
    assert scale is not None
    torch.testing.assert_close(tuple(scale), (mean, std))
    steps = len(losses) // 2
    expected = [torch.stack(each).mean().item() for each in (losses[:steps], losses[steps:])]
    assert [epoch.loss for epoch in result.history.epochs] == pytest.approx(expected, rel=1e-4)
    images = torch.randn(4, 3, jobs.SIDE, jobs.SIDE)
    with torch.no_grad():
        torch.testing.assert_close(result.model(images), model(images) * std + mean, rtol=1e-4, atol=1e-5)


def test_resumed_loaded_exported_and_begun_from(files: Files, tmp_path: Path) -> None:
    pipeline, pictures = pipeline_of(files), list(jobs.images(3, 9))
    assert "Targets scaled: mean " in pipeline.plan().to_dict()["steps"][-1]["why"]
    whole = pipeline.fit(epochs=2, progress=False)
    pipeline.fit(epochs=1, out=tmp_path, progress=False)
    result = pipeline.fit(epochs=2, out=tmp_path, progress=False, resume=True)
    assert_same_weights(result, whole)
    loaded = load_run(tmp_path)
    assert loaded.predict(pictures) == result.predict(pictures) == whole.predict(pictures)
    assert 100_000 < loaded.predict(pictures)[0]["value"][0] < 400_000
    assert loaded.evaluate() == result.metrics
    residuals = loaded.errors().residuals  # type: ignore[attr-defined]
    assert np.abs(residuals).mean() == pytest.approx(result.metrics["mae"], rel=1e-4)
    exported = export(tmp_path, tmp_path / "model.pt2", model=jobs.Outputs)
    assert exported.difference is not None
    assert exported.difference.scale > 100_000
    # Of other targets, a new run has its own scale, and an evaluation that of the weights.
    fewer = pipeline_of(files, limit=40)
    begun = fewer.fit(epochs=1, init_from=tmp_path, progress=False).model.state_dict()
    assert not torch.equal(begun["target_mean"], result.model.state_dict()["target_mean"])
    assert fewer.evaluate(tmp_path) == result.metrics
    with pytest.raises(CheckpointError, match="training samples"):
        fewer.fit(epochs=3, out=tmp_path, progress=False, resume=True)


@pytest.mark.parametrize("names", ["plain", "trained"])
def test_the_code_of_the_model_card_gives_the_units_of_the_targets(files: Files, tmp_path: Path, names: Any) -> None:
    result = pipeline_of(files).fit(epochs=1, out=tmp_path / "run", progress=False)
    model = jobs.Outputs if names == "plain" else None
    card = export(tmp_path / "run", tmp_path / "own.safetensors", names=names, model=model).card.read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"own', f'"{tmp_path}/own')
    values: dict[str, Any] = {"model": jobs.Outputs(num_classes=3)}
    exec(code, values)
    with torch.no_grad():
        torch.testing.assert_close(values["outputs"], result.model(values["images"]))
    assert values["outputs"][0, 0] > 100_000


def test_a_run_without_a_scale_is_as_before(files: Files, tmp_path: Path) -> None:
    pipeline = pipeline_of(files, scaled=False)
    assert "Regression(scale_targets=True)" in pipeline.plan().to_dict()["steps"][-1]["why"]
    result, pictures = pipeline.fit(epochs=1, out=tmp_path, progress=False), list(jobs.images(2, 9))
    assert "scale_targets" not in (tmp_path / "recipe.yaml").read_text()
    assert not {*BUFFERS} & result.model.state_dict().keys()
    assert load_run(tmp_path).predict(pictures) == result.predict(pictures)
    with pytest.raises(PlanError, match=r"These are not weights of this model.* target_mean"):
        pipeline_of(files).evaluate(tmp_path)


def fitted(values: Any, weights: Any = None) -> Any:
    values = np.asarray(values)
    often = np.ones(len(values)) if weights is None else np.asarray(weights)
    return fit_scale(values, np.arange(len(values)), often, "some.beton")


def test_the_fit() -> None:
    assert fitted([5]) == (5, 1)  # a single sample, a constant
    assert fitted([0.1, 0.1, 0.1]) == (pytest.approx(0.1), 1)
    assert fitted([1, 3]) == (2, 1)
    assert fitted([0.0, 4.0, np.nan], [1, 3, 0]) == (3, pytest.approx(3**0.5))  # the last is never drawn
    for bad in (np.nan, -np.inf, 1e300):
        with pytest.raises(PlanError, match=r"some.beton has the target .* in sample 1, .* float32"):
            fitted([1.0, bad])


@pytest.mark.parametrize(("mean", "std", "needed"), [
    (0.0, 1.0, False), (10.0, 10.0, False), (0.0, 0.11, False), (11.0, 1.0, True), (-11.0, 1.0, True),
    (0.0, 11.0, True), (0.0, 0.09, True),
])  # fmt: skip
def test_which_targets_are_far_from_the_outputs_of_a_new_model(mean: float, std: float, needed: bool) -> None:
    """One of several is enough."""
    assert TargetScale(torch.tensor([0.0, mean]), torch.tensor([1.0, std])).needed is needed


Pair = namedtuple("Pair", "main other")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda main: main, lambda main: (main, 1), lambda main: Pair(main, 1), lambda main: [main, 1],
        lambda main: {"x": 1, "logits": main}, lambda main: SimpleNamespace(logits=main),
    ],
    ids=["tensor", "tuple", "named", "list", "dict", "object"],
)  # fmt: skip
def test_what_models_return_keeps_its_form(wrap: Callable[[Any], Any]) -> None:
    class Returns(nn.Module):
        def forward(self, main: torch.Tensor) -> Any:
            return wrap(main)

    model, main = Returns(), torch.tensor([[0.0], [2.0]], dtype=torch.bfloat16)
    attach_scale(model, fitted([1.0, 5.0]))
    outputs = model(main)
    assert type(outputs) is type(wrap(main))
    assert Regression().outputs(outputs).tolist() == [3, 7]
    assert Regression().outputs(outputs).dtype == torch.float32
    attach_scale(model, fitted([1.0, 3.0]))  # a trained model that is trained again
    assert Regression().outputs(model(main)).tolist() == [2, 4]


def test_refused(files: Files) -> None:
    class Taken(jobs.Outputs):
        target_std = 3

    for make, words in (
        (lambda: Regression(scale_targets=True, loss="model"), "loss='model'"),
        (lambda: Regression(scale_targets="yes"), "scale_targets='yes' must be True or False"),  # type: ignore[arg-type]
        (lambda: pipeline_of(files).replace(model=Taken).fit(epochs=1), "has 'target_std' already"),
    ):
        with pytest.raises(PlanError, match=words):
            make()


def test_another_default_device_of_the_caller(files: Files) -> None:
    for scaled in (True, False):
        pipeline = pipeline_of(files, scaled=scaled)
        note = str(pipeline.plan())
        with torch.device("meta"):
            assert str(pipeline.plan()) == note
            with pipeline.build() as built:
                assert built.train.device.type == "cpu"
