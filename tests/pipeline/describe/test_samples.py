"""Which samples a pipeline trains on and evaluates: hold-out, folds, few-shot and balance."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain import DataError, Pipeline, PlanError, RecipeError
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.loaders.sample_options import SampleOptions
from drivetrain.pipeline.recipes.presets import parse_overrides
from PIL import Image
from pipeline_data import CLASSES, SIDE, TRAIN, Toy, plain_model, toy_arrays
from places import ROOT
from same_runs import assert_same_run


def loaded(toy: Toy, epochs: int = 1, **options: Any) -> tuple[Any, Any]:
    """The samples of the epochs, by epoch, and those that are evaluated; each once if none is held out."""
    held_out = "val_split" in options or "folds" in options
    pipeline = toy.pipeline().load(toy.train, None if held_out else toy.val, batch_size=8, image_size=SIDE, **options)
    with pipeline.build() as built:
        train = [np.concatenate(built.train.shares(epoch)) for epoch in range(epochs)]
        return train, np.concatenate(built.val.shares(0))


def classes(samples: Any) -> Counter[int]:
    return Counter((samples % TRAIN % CLASSES).tolist())


@pytest.mark.parametrize("loader", ["ffcv", "torch", pytest.param("ffcv_stock", marks=pytest.mark.slow)])
def test_a_part_is_held_out(toy: Toy, loader: str) -> None:
    (train,), val = loaded(toy, val_split=0.25, loader=loader)
    assert sorted([*train, *val]) == [*range(TRAIN)]
    assert classes(val) == dict.fromkeys(range(CLASSES), 8)
    (other,), _ = loaded(toy, val_split=0.25, split_seed=1)
    assert set(other) != set(train)


def test_the_same_is_held_out_with_any_seed_of_training(toy: Toy) -> None:
    one = toy.pipeline().load(toy.train, batch_size=8, image_size=SIDE, val_split=0.1)
    with one.build() as first, one.replace(seed=5).build() as second:
        assert set(first.train.indices) == set(second.train.indices)
        assert (first.val.indices == second.val.indices).all()


def test_a_seed_without_a_selection_is_refused(toy: Toy) -> None:
    pipeline = toy.pipeline().load(toy.train, toy.val, batch_size=8, image_size=SIDE, split_seed=1)
    calls: tuple[Callable[[], object], ...] = (pipeline.build, pipeline.tune, lambda: pipeline.fit(epochs=1))
    for call in calls:
        with pytest.raises(PlanError, match=r"split_seed=1 is the seed of val_split.* which are missing"):
            call()


def test_folds_are_a_partition(toy: Toy) -> None:
    parts = [loaded(toy, folds=4, fold=fold) for fold in range(4)]
    assert sorted(np.concatenate([val for _, val in parts])) == [*range(TRAIN)]
    assert all(not set(train) & set(val) for (train,), val in parts)


@pytest.mark.parametrize(
    ("options", "count", "each"),
    [
        pytest.param({"per_class": 3}, 12, 3, id="few-shot"),
        pytest.param({"limit": 16}, 16, 4, id="limit"),
        pytest.param({"val_split": 0.5, "per_class": 5}, 20, 5, id="few-shot, of those not held out"),
        pytest.param({"indices": [*range(8, 24)]}, 16, 4, id="indices"),
        pytest.param({"indices": np.arange(TRAIN) < 12}, 12, 3, id="mask"),
    ],
)
def test_a_part_is_trained_on(toy: Toy, options: dict[str, Any], count: int, each: int) -> None:
    (train,), _ = loaded(toy, **options)
    assert len(set(train)) == len(train) == count // 8 * 8
    assert max(classes(train).values()) <= each


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".json"])
def test_indices_in_a_file(toy: Toy, tmp_path: Path, suffix: str) -> None:
    path, chosen = tmp_path / f"chosen{suffix}", [5, 3, 8, 120, 1, 2, 4, 6]
    if suffix == ".npy":
        np.save(path, np.array(chosen))
    else:
        path.write_text(json.dumps(chosen) if suffix == ".json" else "\n".join(map(str, chosen)))
    (train,), _ = loaded(toy, indices=path)
    assert sorted(train) == sorted(chosen)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of class 0 three quarters."""
    images, labels = toy_arrays(64, seed=3)
    path = tmp_path_factory.mktemp("unequal") / "unequal.beton"
    convert((images, np.where(np.arange(64) % 4, 0, labels + (np.arange(64) // 4) % 4)), path, progress=False)
    return str(path)


def made(source: str, **options: Any) -> Pipeline:
    options = {"batch_size": 16, "image_size": SIDE, "workers": 1, "flip": False} | options
    return Pipeline(plain_model).load(source, **options).optimize("sgd", lr=0.1, schedule="constant")


@pytest.mark.parametrize(
    ("loader", "by"),
    [("ffcv", "class"), ("ffcv", "weights"), ("torch", "weights"),
     pytest.param("torch", "class", marks=pytest.mark.slow)],
)  # fmt: skip
def test_balanced_classes_have_equal_shares_of_every_epoch(unequal: str, loader: str, by: str) -> None:
    with FFCVLoader(unequal, batch_size=8, image_size=SIDE, workers=1) as plain:
        labels = plain.labels
    weights = 1 / np.bincount(labels)[labels]
    options = {"balance": "class" if by == "class" else weights, "loader": loader}
    with made(unequal, workers=int(loader == "ffcv"), **options).build() as built:
        for epoch in range(3):
            drawn = np.concatenate(built.train.shares(epoch))
            assert len(drawn) == len(set(drawn)) == 64  # a repetition has a number of its own
            counts = np.bincount(labels[drawn % 64])
            assert abs(counts - 16).max() <= (0 if by == "class" else 1)
        seen = Counter(torch_labels for _, batch in built.train for torch_labels in batch.tolist())
        assert max(seen.values()) - min(seen.values()) <= (0 if by == "class" else 2)


def test_ranks_share_a_balanced_epoch(unequal: str) -> None:
    orders = []
    for ranks in (1, 2):
        batches = []
        for rank in range(ranks):
            with FFCVLoader(unequal, batch_size=16, image_size=SIDE, workers=1, rank=rank, world_size=ranks) as loader:
                loader.select(loader.selection(SampleOptions(balance="class")))
                batches.append(loader.shares(2))
        orders.append([np.concatenate(batch).tolist() for batch in zip(*batches, strict=True)])
    assert orders[0] == orders[1]


def test_a_balanced_run_resumes_bit_for_bit_and_only_with_its_balance(unequal: str, tmp_path: Path) -> None:
    pipeline = made(unequal, balance="class", val_split=0.25)
    whole = pipeline.fit(epochs=3, progress=False)
    pipeline.fit(epochs=1, progress=False, out=tmp_path / "run")
    resumed = pipeline.fit(epochs=3, progress=False, out=tmp_path / "run", resume="auto")
    assert_same_run(resumed, whole)
    with pytest.raises(Exception, match=r"selected samples \(CRC-32\)"):
        made(unequal, val_split=0.25).fit(epochs=3, progress=False, out=tmp_path / "run", resume="auto")


def test_a_recipe_has_it(toy: Toy) -> None:
    pipeline = toy.pipeline().load(
        toy.train, batch_size=8, image_size=SIDE, folds=3, fold=1, indices=np.arange(60), balance="class"
    )
    recipe = json.loads(json.dumps(pipeline.to_recipe() | {"model": "resnet18"}))
    assert (recipe["val"], recipe["folds"], recipe["fold"], len(recipe["indices"])) == (None, 3, 1, 60)
    assert Pipeline.from_recipe(recipe).data == pipeline.data


def test_the_plan_says_which_samples_go_where(toy: Toy) -> None:
    pipeline = toy.pipeline().load(toy.train, batch_size=8, image_size=SIDE, val_split=0.1, balance="class")
    text = pipeline.plan().steps[0].why
    assert "0.1 of them held out and evaluated" in text
    assert "same share of every epoch (115 of 128 samples trained on, 13 evaluated)" in text
    assert "CAUTION" not in text


def test_a_result_is_evaluated_on_what_is_held_out(toy: Toy) -> None:
    pipeline = toy.pipeline().load(toy.train, batch_size=8, image_size=SIDE, val_split=0.25)
    result = pipeline.fit(epochs=1, progress=False)
    assert result.evaluate() == pytest.approx(result.metrics)
    assert len(result.errors()) == TRAIN // 4
    assert len(result.errors(toy.train)) == TRAIN  # all of a file that is named


def test_the_command_of_the_guide_holds_out_a_part_of_a_recipes_training_data() -> None:
    (words,) = re.findall(r"`drivetrain train RECIPE (.*val_split=.*?)`", (ROOT / "docs" / "data.md").read_text())
    pipeline = Pipeline.from_recipe("cifar10-quickstart", **parse_overrides(words.split()))
    assert pipeline.data is not None
    assert pipeline.data.held_out
    assert pipeline.data.balance == "class"
    with pytest.raises(RecipeError, match=r"both data to evaluate on.*: val=null, or val_split=null"):
        Pipeline.from_recipe("cifar10-quickstart", val_split=0.1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "val, too": ({"val": True, "val_split": 0.1}, r"val=.* and val_split=0\.1 are both data to evaluate on"),
    "split and folds": ({"val_split": 0.1, "folds": 3}, "both hold out data"),
    "all held out": ({"val_split": 1.0}, "must be"),
    "none held out": ({"val_split": 0.001}, "holds out none of 128 samples"),
    "one fold": ({"folds": 1}, "must be"),
    "fold without folds": ({"fold": 2}, r"fold=2 is one of folds="),
    "no such fold": ({"folds": 3, "fold": 3}, "from 0 to folds - 1 = 2"),
    "more folds than samples": ({"folds": 500}, "more than the 128 samples"),
    "out of range": ({"indices": [1, 128]}, "contains 128, but the data set has samples 0 to 127"),
    "doubled": ({"indices": [1, 2, 1]}, "contains 1 more than once"),
    "floats": ({"indices": [0.5]}, "must be"),
    "short mask": ({"indices": [True] * 5}, "a mask of 5 samples, but the data set has 128"),
    "empty mask": ({"indices": [False] * 128}, "selects no sample"),
    "missing file": ({"indices": "missing.npy"}, "cannot be read: No such file"),
    "a file of another kind": ({"indices": "chosen.csv"}, r"must be a file that ends in \.npy, \.json, \.txt"),
    "too few of a class": ({"per_class": 40}, "class 0 has only 32 samples"),
    "too few for a batch": ({"limit": 5}, "larger than the data set of 5 samples"),
    "weights of others": ({"balance": [1.0] * 3}, "3 weights, but the data set has 128 samples"),
    "negative weight": ({"balance": [-1.0] + [1.0] * 127}, r"the weight of sample 0 is -1\.0"),
    "no weight": ({"balance": [0.0] * 128}, "all weights are 0"),
    "unknown balance": ({"balance": "classes"}, r"must be a file that ends in"),
    "FFCV's own loader": ({"balance": "class", "loader": "ffcv_stock"}, "not available with loader='ffcv_stock'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_before_any_work(toy: Toy, case: str) -> None:
    options, message = WRONG[case]
    options = dict(options)
    val = toy.val if options.pop("val", False) else None
    with pytest.raises((PlanError, DataError), match=message):
        toy.pipeline().load(toy.train, val, batch_size=8, image_size=SIDE, workers=1, **options).build()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00\x04\x00{'a'"])
def test_a_damaged_file_of_indices_is_refused(toy: Toy, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "damaged.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.npy' does not contain a list of numbers"):
        toy.pipeline().load(toy.train, batch_size=8, image_size=SIDE, indices=tmp_path / "damaged.npy").build()


def test_a_mix_has_shares_of_its_own(toy: Toy) -> None:
    mix = {toy.train: 1, toy.val: 2}
    with pytest.raises(DataError, match="weights of a mix both determine"):
        toy.pipeline().load(mix, batch_size=8, image_size=SIDE, balance="class").build()
    with toy.pipeline().load(mix, batch_size=8, image_size=SIDE, val_split=0.2).build() as built:
        assert not set(built.train.indices) & set(built.val.indices)
        assert len(built.train.indices) + len(built.val.indices) == TRAIN + 50


@pytest.mark.parametrize("options", [{"val_split": 0.25}, {"folds": 4, "fold": 1}], ids=str)
def test_a_part_of_a_folder_is_held_out(options: dict[str, Any], tmp_path: Path) -> None:
    """Plain PyTorch loads a folder as it is."""
    images, labels = toy_arrays(40, seed=4)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "abcd"[label]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    pipeline = made(str(tmp_path), batch_size=10, loader="torch", workers=0, **options)
    assert "held out and evaluated" in pipeline.plan().steps[0].why
    with pipeline.build() as built:
        assert built.val is not None
        assert sorted([*built.train.indices, *built.val.indices]) == [*range(40)]
        assert sum(len(targets) for _, targets in built.val) == len(built.val.indices) == 10
