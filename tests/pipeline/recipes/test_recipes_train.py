"""Every recipe builds, plans and takes steps, with a few images instead of its data."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain import RECIPES, Pipeline
from drivetrain.loaders import convert
from drivetrain.pipeline.recipes.presets import completed
from drivetrain.pipeline.telemetry.observer import Observer
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies.registry import STRATEGIES
from host_syncs import HostSyncs
from pipeline_data import CLASSES, toy_arrays
from small_recipes import BATCH, TINY_VIT, shrunk, stand_ins

BY_TRANSFORMS = {
    tuple(entry["name"] for entry in recipe.get("transforms", ())): name for name, recipe in RECIPES.items()
}
"""A recipe for each choice of transforms."""
CONTAINED = [name for chosen, name in BY_TRANSFORMS.items() if any(set(chosen) < set(other) for other in BY_TRANSFORMS)]
"""Those whose transforms another one has, too: for `make test-all`."""
ON_THE_HOST = (
    "at draws.py",  # draws from a generator of the host
    "at cutmix.py",  # likewise, the place of the box
    "tolist at images.py",  # class indices are checked on the CPU only
    "index at label_smoothing.py",  # rows that are ignored are left out on the CPU only
    "index_put at engine.py",  # the backward of that
)
"""Reads of values that are on the host also with a GPU, or that only the CPU's branch makes."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stand_ins(tmp_path_factory.mktemp("stand-in"), BATCH, 4)


# Of the recipes for one model that differ in little else than their epochs, all but one are for `make test-all`, and
# so are the large models: the test below trains on what makes their recipes special.
LONGER = [
    name
    for name in RECIPES
    if re.fullmatch(r"ffcv-resnet18-(24|32|40|56|88)|ffcv-resnet50-\d+|resnet50-\w+|vit-s16|imagenette-(20|fast)", name)
]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONGER else []) for name in RECIPES]
)
def test_a_recipe_takes_two_steps(name: str, stand_in: dict[str, str]) -> None:
    if RECIPES[name].get("strategy", "single") not in STRATEGIES:
        pytest.skip(f"unknown strategy {RECIPES[name]['strategy']}")
    overrides = shrunk(name, stand_in)
    if name not in LONGER and "precision" in overrides:  # bf16 for fp16: slow, and what those of LONGER have, too
        overrides["precision"] = "auto"
    pipeline = Pipeline.from_recipe(name, **overrides)
    assert pipeline.plan().steps
    result = pipeline.fit(progress=False)
    assert len(result.history.epochs) >= 2
    losses = [epoch.loss for epoch in result.history.epochs]
    if pipeline.data is not None and pipeline.data.val is not None:
        losses += [epoch.val_loss for epoch in result.history.epochs]
    assert np.isfinite(losses).all()
    assert result.history.facts["recipe"] == name
    asked = {entry["name"] for entry in RECIPES[name].get("transforms", [])}
    reports = {report.transform: report for report in result.reports}
    for surgery in asked & {"BlurPool", "StochasticDepth"}:
        assert reports[surgery].changed, surgery
    assert {type(transform).__name__ for transform in pipeline.transforms} == asked


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in CONTAINED else []) for name in BY_TRANSFORMS.values()],
)
def test_a_step_of_a_recipe_reads_nothing_from_the_device(name: str, stand_in: dict[str, str]) -> None:
    """Without the guard, which reads losses at once only where that costs nothing, on the CPU."""
    overrides = {key: value for key, value in shrunk(name, stand_in).items() if "model_options" not in key}
    if RECIPES[name]["model"] in ("vit", "vit_s16"):
        overrides |= {"model": "vit", "model_options": TINY_VIT}
    elif RECIPES[name]["model"] == "fpn":
        overrides |= {"model_options": {"num_classes": CLASSES}}
    else:
        overrides |= {"model": "small_recipes:half_resnet", "model_options": {"num_classes": CLASSES}}
    built = Pipeline.from_recipe(name, **overrides).build()
    found: list[str] = []
    with built.train:
        batches = [batch for _ in range(3) for batch in built.train]
    built.hooks.begin(built.engine, len(batches))

    class Seen(Observer):
        def on_step_end(self, *_: object) -> None:
            found.extend(syncs.found)

    with HostSyncs() as syncs:
        train_epoch(built.engine, batches, built.loss, hooks=built.hooks, observer=Seen())
    assert built.hooks.state.step == len(batches)
    # How many pixels of a mask count is read only on a CPU, where that waits for nothing.
    places = (*ON_THE_HOST, "_local_scalar_dense at loop.py") if RECIPES[name]["model"] == "fpn" else ON_THE_HOST
    assert [line for line in found if not any(place in line for place in places)] == []


@pytest.mark.slow
def test_the_billions_are_divided_among_two_ranks(stand_in: dict[str, str]) -> None:
    overrides = shrunk("billion-fsdp", stand_in) | {"devices": 2, "accumulate": 2}
    result = Pipeline.from_recipe("billion-fsdp", **overrides).fit(progress=False)
    assert np.isfinite([epoch.loss for epoch in result.history.epochs]).all()


@pytest.mark.parametrize("name", ["billion-fsdp", "billion-deepspeed"])
def test_the_billions_are_billions(name: str) -> None:
    recipe = completed(name).values
    with torch.device("meta"):  # shapes alone
        model = Pipeline(recipe["model"]).model(**recipe["model_options"])  # type: ignore[operator]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 1_844_440_680  # width 1664, 48 layers
    assert f"{count / 1e9:.2f} billion" in recipe["description"]
    assert "7.4 GB" in recipe["notes"]["model_options"]
    assert round(count * 4 / 1e9, 1) == 7.4


@pytest.mark.slow
@pytest.mark.long
def test_the_road_to_94_learns(tmp_path: Path) -> None:
    """airbench's network, optimizer and schedule, on the toy data: from chance to nearly all."""
    for seed, (name, size) in enumerate({"train": 128, "val": 64}.items()):
        convert(toy_arrays(size, seed, 32), tmp_path / f"{name}.beton", classes=list("abcd"), progress=False)
    pipeline = Pipeline.from_recipe(
        "cifar10-fast", train=tmp_path / "train.beton", val=tmp_path / "val.beton", batch_size=32, workers=1,
        **{"loading.flip": False, "optimizer.lr": 1.5 / 32, "model_options": {"num_classes": 4, "widths": [8, 16, 16]}},
        transforms=[{"name": "LabelSmoothing", "smoothing": 0.2}], precision="fp32",
    )  # fmt: skip
    result = pipeline.fit(progress=False)
    assert result.accuracy is not None
    assert result.accuracy > 0.9
