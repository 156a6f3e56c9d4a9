"""Recipes: plain, unmodified dicts that are completed, overridden, planned and trained, with helpful errors."""

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import RECIPES, Pipeline, PlanError, RecipeError
from drivetrain.pipeline.describe.plan import Plan
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.describe.rules import check_epochs
from drivetrain.pipeline.recipes.presets import DEFAULTS, KEYS, completed, parse_overrides
from drivetrain.pipeline.recipes.table import PROSE, recipe_table, recipes_list
from drivetrain.pipeline.training.build import build_model
from drivetrain.transforms import BlurPool, ChannelsLast, LabelSmoothing, ProgressiveResizing
from pipeline_data import CLASSES, SIDE, Toy
from places import ROOT

AT_FIRST = copy.deepcopy(RECIPES)
DEFAULTS_AT_FIRST = copy.deepcopy(DEFAULTS)


@pytest.fixture(autouse=True)
def _nothing_changes_the_tables() -> Any:
    yield
    assert RECIPES == AT_FIRST
    assert DEFAULTS == DEFAULTS_AT_FIRST


def tiny(toy: Toy, **overrides: Any) -> dict[str, Any]:
    """Overrides that bring a recipe down to the toy data."""
    own = {
        "train": toy.train, "val": toy.val, "batch_size": 32, "image_size": SIDE, "workers": 1, "devices": 1,
        "model_options.num_classes": CLASSES, "epochs": 1,
    }  # fmt: skip
    return own | overrides


def test_the_recipes_that_people_ask_for_are_there() -> None:
    """The recipes have these names, and docs/recipes.md states their number."""
    lengths = (16, 24, 32, 40, 56, 88)
    wanted = {
        "baseline", "cifar10-quickstart", "cifar10-fast", "cifar10-simclr",
        "imagenette-5", "imagenette-20", "imagenette-fast",
        "imagenette-plain", "vit-tiny-imagenette", "camvid-segmentation",
        "resnet50-mild", "resnet50-medium",
        "resnet50-hot", "vit-s16", "finetune-pretrained", "billion-fsdp", "billion-deepspeed",
        *(f"ffcv-{model}-{epochs}" for model in ("resnet18", "resnet50") for epochs in lengths),
    }  # fmt: skip
    assert wanted <= set(RECIPES)
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert f" lists {len(RECIPES)} recipes, each with its source" in page


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_shown_with_each_value_its_meaning_and_its_source(name: str) -> None:
    table, full = recipe_table(name), completed(name).values
    assert table.title.split("\n") == [
        name,
        full["description"],
        *(f"{key.capitalize()}: {full[key]}" for key in ("source", "published", "measured")),
    ]
    rows = {key: rest for key, *rest in table.rows}
    assert list(rows) == [key for key in KEYS if key not in ("notes", *PROSE)]
    for key, (value, text) in rows.items():
        meaning, _, origin = text.partition("\n")
        assert meaning == KEYS[key]
        origin = origin.removeprefix("(").removesuffix(")")
        for each in flat(full[key]):
            assert (each if isinstance(each, str) else json.dumps(each)) in value, (key, each)
        notes = [note for of, note in full["notes"].items() if of.partition(".")[0] == key]
        assert all(note in origin for note in notes), key
        assert origin or key in ("train", "val"), key
        assert (origin == "default") == (key not in RECIPES[name] and not notes), key
    assert not rows["precision"][1].endswith("(default)") or full["precision"] == DEFAULTS["precision"]


def flat(value: Any) -> list[Any]:
    """What a value holds that is neither a dict nor a list."""
    if isinstance(value, dict):
        return [*value, *flat(list(value.values()))]
    return [each for one in value for each in flat(one)] if isinstance(value, list) else [value]


def test_the_list_of_recipes_has_a_line_for_each_and_those_measured_first() -> None:
    ours, theirs = recipes_list().split("\n\n")[:2]
    for name, recipe in RECIPES.items():
        (line,) = re.findall(rf"^  {name}  +(.+)$", f"{ours}\n{theirs}", re.MULTILINE)
        assert recipe["description"].startswith(line)
        assert (name in ours) == (not recipe["measured"].startswith("not measured"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_json_and_names_every_key(name: str) -> None:
    assert json.loads(json.dumps(RECIPES[name])) == RECIPES[name]
    full = completed(name).values
    assert set(full) == {*KEYS, "name"}
    assert full["name"] == name
    for key in ("description", "source", "published", "measured"):
        assert full[key], key
    assert re.search(r"https://|arXiv:\d{4}\.\d{5}", full["source"])
    assert "%" in full["published"] or "nothing" in full["published"]  # its result, or that there is none
    assert json.loads(json.dumps(full)) == full
    assert completed(full).values == full  # written out, it is a recipe again


def test_every_value_of_a_recipe_arrives(toy: Toy) -> None:
    recipe = completed("cifar10-quickstart").values | {
        "train": toy.train, "val": toy.val, "workers": 3, "accumulate": 2, "clip_norm": 0.5, "seed": 11,
        "epochs": 7, "batch_size": 64, "image_size": SIDE, "devices": 2, "strategy": "ddp",
    }  # fmt: skip
    pipeline = Pipeline.from_recipe(recipe)
    data, how, optimization = pipeline.data, pipeline.distribution, pipeline.optimization
    assert data is not None
    assert (data.train, data.val, data.batch_size, data.image_size) == (toy.train, toy.val, 64, SIDE)
    assert (data.loader, data.workers, data.settings["mean"]) == ("ffcv", 3, (0.4914, 0.4822, 0.4465))
    assert pipeline.transforms == (BlurPool(), ChannelsLast(), LabelSmoothing(0.1))
    assert (how.strategy, how.devices, how.precision) == ("ddp", 2, "auto")
    assert (how.accumulate, how.clip_norm) == (2, 0.5)
    assert optimization.options == {"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    assert (optimization.schedule, optimization.warmup) == ("linear", 0.25)
    assert (pipeline.seed, pipeline.epochs, pipeline.model_options["width"]) == (11, 7, 16)
    assert pipeline.plan().steps


def test_composers_recipes_are_what_they_say() -> None:
    pipeline = Pipeline.from_recipe("resnet50-mild", **{"strategy_options.device": "cpu"})
    assert pipeline.optimization.options == {"lr": 2.048, "momentum": 0.875, "weight_decay": 5e-4}
    whole = json.dumps(Plan(resolve(pipeline, files=False).steps).to_dict(), ensure_ascii=False)
    for part in ("ffcv loader", "BlurPool", "EMA", "warm-up 25%", "8 device(s)", "224 px in evaluation"):
        assert part in whole
    for name in ("mild", "medium", "hot"):  # 8 epochs, however long the training
        recipe = completed(f"resnet50-{name}").values
        assert recipe["warmup"] * recipe["epochs"] == pytest.approx(8, abs=0.05)


def ffcv_size(epoch: int, start: int, end: int) -> int:
    """FFCV's get_resolution, of epochs from 0: 160 pixels, a ramp in multiples of 32, 192 pixels."""
    interpolated = np.interp(epoch, [start, end], [160, 192])
    return int(np.round(interpolated / 32)) * 32


RAMPS = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}


@pytest.mark.parametrize("epochs", RAMPS)
def test_ffcvs_recipes_have_the_sizes_and_rates_of_ffcv(epochs: int) -> None:
    for model in ("resnet18", "resnet50"):
        pipeline = Pipeline.from_recipe(f"ffcv-{model}-{epochs}", **{"strategy_options.device": "cpu"})
        (resizing,) = (t for t in pipeline.transforms if isinstance(t, ProgressiveResizing))
        check_epochs(pipeline, epochs)
        found = [resizing.size(192, (epoch + 0.5) / epochs) for epoch in range(epochs)]
        assert found == [ffcv_size(epoch, *RAMPS[epochs]) for epoch in range(epochs)]
        steps = 100 * epochs
        rates = [pipeline.optimization.lr_factor(step, steps) for step in range(steps)]
        ffcv = np.interp(np.arange(steps) / 100, [0, 2, epochs], [1e-4, 1, 0])
        np.testing.assert_allclose(rates, ffcv, atol=6e-3)
    assert pipeline.data is not None
    assert (pipeline.data.batch_size, pipeline.data.eval_size) == (4096, 256)


def test_what_was_measured_is_in_the_repository() -> None:
    """Figures of our own are those of a result's file, or there are none."""
    results = ROOT / "benchmarks" / "results"
    rows = {row["name"]: row for row in json.loads((results / "quickstart-ledger.json").read_text())["rows"]}
    figures = {"baseline": "plain PyTorch", "cifar10-quickstart": "+ bf16"}
    assert f"{rows['+ bf16']['ratio']['value']:.2f} times plain" in RECIPES["cifar10-quickstart"]["measured"]
    for name, recipe in RECIPES.items():
        measured = recipe["measured"]
        if name == "cifar10-fast":
            epochs = json.loads((results / "cifar10-fast.json").read_text())["epochs"]
            last = epochs[-1]
            assert last["epoch"] == recipe["epochs"]
            assert measured.startswith(f"{last['accuracy']:.2%}".replace("%", " %"))
            trained = 50_000 // recipe["batch_size"] * recipe["batch_size"]  # whole batches
            training = sum(trained / epoch["images_per_s"] for epoch in epochs) / 60
            evaluating = sum(epoch["seconds"] for epoch in epochs) / 60
            assert f"after {training:.1f} min of training ({evaluating:.1f} with" in measured
            assert "benchmarks/results/cifar10-fast.json" in measured
            continue
        if files := re.findall(r"\b(race-[\w-]+\.json)", measured):
            found = [json.loads((results / file).read_text()) for file in files]
            assert {each["facts"][f"{name}: epochs"] for each in found} == {recipe["epochs"]}
            runs = [run for each in found for run in each["runs"] if run["variant"] == name]
            assert not any(run["stopped"] or run["failed"] for run in runs)
            ends = [run["points"][-1] for run in runs]
            minutes = sorted(end[0] / 60 for end in ends)
            accuracy, seeds, times = f"{100 * np.mean([end[2] for end in ends]):.2f} %", "one seed", f"{minutes[0]:.1f}"
            if len(ends) > 1:
                seeds, times = f"mean of {len(ends)} seeds", f"{times} to {minutes[-1]:.1f}"
            assert measured.startswith(f"{accuracy}, {seeds}, after {times} min of training")
            continue
        if name == "cifar10-simclr":
            found = json.loads((results / "features.json").read_text())
            assert found["epochs"] == recipe["epochs"]
            one = found["on_labels"]["1"]
            features, random = (
                (f"{100 * found['linear'][start]:.1f} %", f"{100 * one[start]['median']:.1f} %")
                for start in (name, "random weights")
            )
            assert measured.startswith(f"{features[0]} with a linear classifier ({random[0]} on random weights)")
            assert f"{features[1]} instead of {random[1]} after one epoch" in measured
            continue
        if name not in figures:
            assert measured.startswith("not measured"), name
            continue
        speed = rows[figures[name]]["images_per_s"]
        assert f"{speed['value']:,.0f} images/s" in measured
        assert f"{speed['low']:,.0f} to {speed['high']:,.0f}, n = {speed['n']}" in measured
        assert "benchmarks/results/quickstart-ledger.json" in measured


def test_notes_are_of_values_that_are_there() -> None:
    for name, recipe in RECIPES.items():
        transforms = {entry["name"] for entry in recipe.get("transforms", [])}
        for note in recipe["notes"]:
            head, dot, inner = note.partition(".")
            assert head in recipe, (name, note)
            assert not dot or inner in (transforms if head == "transforms" else recipe[head]), (name, note)


def test_overrides_reach_into_dicts_and_leave_the_rest(toy: Toy) -> None:
    pipeline = Pipeline.from_recipe(
        "baseline", **tiny(toy), **{"optimizer.lr": 0.7, "loading.padding": 2, "model_options.width": 8}
    )
    assert pipeline.optimization.options["lr"] == 0.7
    assert pipeline.optimization.options["momentum"] == 0.9
    assert pipeline.data is not None
    assert (pipeline.data.settings["padding"], pipeline.data.settings["crop"]) == (2, "padded")
    assert pipeline.model_options == {"num_classes": CLASSES, "width": 8}


def test_what_is_done_with_a_completed_recipe_stays_there() -> None:
    full = completed("baseline").values
    full["loading"]["padding"] = 99
    full["transforms"].append("mine")
    assert completed("baseline").values["loading"]["padding"] == 4
    assert completed("cifar10-quickstart").values["loading"]["padding"] == 4


def test_a_completed_recipe_takes_no_further_values() -> None:
    full = completed("baseline", {"epochs": 3})
    assert Pipeline.from_recipe(full).epochs == 3
    with pytest.raises(RecipeError, match=r"baseline is completed, and takes no epochs=, seed= any more"):
        Pipeline.from_recipe(full, epochs=5, seed=2)


def test_a_dict_is_a_recipe(toy: Toy) -> None:
    recipe = {
        "model": "cifar_resnet", "model_options": {"num_classes": CLASSES, "width": 4}, "train": toy.train,
        "batch_size": 32, "image_size": SIDE, "optimizer": {"name": "adamw", "lr": 0.01}, "epochs": 1,
    }  # fmt: skip
    before = copy.deepcopy(recipe)
    result = Pipeline.from_recipe(recipe, workers=1).fit(progress=False)
    assert recipe == before
    assert result.history.to_dict()["recipe"] is None
    assert torch.isfinite(next(result.model.parameters())).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"bach_size": 3}, "no key 'bach_size'.*Did you mean 'batch_size'"),
    "key of an optimizer": ({"lr": 3}, "no key 'lr'. Did you mean 'optimizer.lr'"),
    "key of the loader": ({"scale": [0.3, 1]}, "no key 'scale'. Did you mean 'loading.scale'"),
    "dotted key": ({"bach.size": 3}, "no key 'bach'"),
    "dotted key of a number": ({"epochs.x": 3}, "'epochs.x': its epochs is not a dict"),
    "model": ({"model": "cifar_resnt"}, "'cifar_resnt'.*Did you mean 'cifar_resnet'"),
    "model of another kind": ({"model": 3}, "model=3 must be text: name of a model"),
    "no dict": ({"loading": [1]}, "loading=.1. must be a dict"),
    "transforms": ({"transforms": {"name": "BlurPool"}}, "transforms=.* must be a list"),
    "transform": ({"transforms": [{"name": "BlurPol"}]}, "baseline: .*'BlurPol'.*Did you mean 'BlurPool'"),
    "transform without a name": ({"transforms": ["BlurPool"]}, "'BlurPool' must be a dict with a name"),
    "transform's option": (
        {"transforms": [{"name": "BlurPool", "min_chanels": 3}]}, "'min_chanels'.*'min_channels'",
    ),
    "optimizer without a name": ({"optimizer": {"lr": 3}}, "optimizer=.* needs a name"),
    "optimizer": ({"optimizer.name": "sdg"}, "baseline: .*'sdg'.*Did you mean 'sgd'"),
    "optimizer's option": ({"optimizer.momentm": 1}, "baseline: .*'momentm'"),
    "strategy": ({"strategy": "dpd"}, "baseline: .*'dpd'.*Did you mean 'dp'"),
    "loader": ({"loader": "fcv"}, "baseline: .*'fcv'.*Did you mean 'ffcv'"),
    "loader setting": ({"loading.pading": 3}, "baseline: .*'pading'.*Did you mean 'padding'"),
    "argument twice": (
        {"loading.batch_size": 3}, "baseline: loading.batch_size is a key of the recipe itself. Set batch_size=…"
    ),
    "optimizer's value as text": ({"optimizer.lr": "fast"}, r"baseline: optimize\('sgd'\): lr='fast' must be a number"),
    "schedule of the optimizer": ({"optimizer.schedule": "linear"}, "baseline: optimizer.schedule .*Set schedule=…"),
    "batch size as text": ({"batch_size": "many"}, "baseline: .*batch_size='many'"),
    "epochs": ({"epochs": 0}, "epochs=0 must be a positive integer or null"),
    "epochs as text": ({"epochs": "3"}, "epochs='3' must be"),
    "epochs as a truth": ({"epochs": True}, "epochs=True must be"),
    "number as text": (
        {"image_size": "32"}, "image_size='32' must be .* Write the number without quotes: 32",
    ),
    "rate as text": (
        {"optimizer.lr": "1e-4"}, "optimizer: lr='1e-4' is text. Write the number without quotes",
    ),
    "option as text": (
        {"transforms": [{"name": "MixUp", "alpha": "0.2"}]}, "transforms: alpha='0.2' is text",
    ),
    "option as text, before another of that name": (
        {"transforms": [{"name": "MixUp", "alpha": "0.2"}, {"name": "CutMix", "alpha": 1.0}]},
        "transforms: alpha='0.2' is text",
    ),
    "number of Python's only": ({"optimizer.lr": ".5"}, r"lr='.5' is text. Write the number without quotes: 0\.5\."),
    "number with a line": ({"image_size": "1_000"}, r"Write the number without quotes: 1000\."),
    "infinity as text": ({"warmup": "1e999"}, "Numbers .* finite"),
    "not a number as text": ({"optimizer.lr": "NaN"}, "optimizer: lr='NaN' is text. Numbers .* finite"),
    "infinity as YAML has it": ({"warmup": "-.inf"}, "warmup='-.inf' must be a finite number in .* Numbers .* finite"),
    "note": ({"notes": {"bach_size": "ours"}}, "no key 'bach_size'.*Did you mean 'batch_size'"),
    "evaluated size": (
        {"eval_image_size": 0},
        "eval_image_size=0 must be a positive integer, or two: height and width or null",
    ),
    "strategy's option": (
        {"strategy_options": {"devce": "cpu"}}, "baseline: .*'devce'.*Did you mean 'device'",
    ),
    "seed": ({"seed": None}, "baseline: seed=None must be"),
    "warm-up": ({"warmup": "long"}, "baseline: warmup='long'"),
    "workers": ({"workers": "all"}, "baseline: workers='all' must be an integer or null"),
    "threads": (
        {"workers": -3, "loader": "ffcv"}, "workers=-3 must be a positive integer with loader='ffcv'",
    ),
    "processes": (
        {"workers": -3, "loader": "torch"}, "workers=-3 must be an integer, 0 or more with loader='torch'",
    ),
    "no name of data": ({"train": ""}, "baseline: train='' must be text that is not empty"),
    "no name of validation data": ({"val": ""}, "baseline: val='' must be text that is not empty or null"),
    "devices": ({"devices": 1.5}, "baseline: devices=1.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_means_nothing(name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        Pipeline.from_recipe("baseline", **overrides)


def test_a_recipe_that_is_none() -> None:
    with pytest.raises(RecipeError, match=r"'baselin'.*Did you mean 'baseline'.*Known: "):
        Pipeline.from_recipe("baselin")
    with pytest.raises(RecipeError, match="name, a file or a dict, not 3"):
        Pipeline.from_recipe(3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="the key 'model' is missing: name of a model"):
        Pipeline.from_recipe({"epochs": 3})
    for name in (["mine"], 2026):  # else the run's picture would fail, after the training
        data = {"train": "a.beton", "batch_size": 8, "image_size": 8}
        with pytest.raises(RecipeError, match="must be text: the recipe's name"):
            Pipeline.from_recipe({"name": name, "model": "resnet18", **data})


def test_overrides_of_the_command_line() -> None:
    found = parse_overrides(
        ["epochs=3", "optimizer.lr=1e-2", "val=null", "transforms=[]", "train=a=b.beton", "precision=bf16"]
    )
    assert found == {
        "epochs": 3, "optimizer.lr": 0.01, "val": None, "transforms": [], "train": "a=b.beton", "precision": "bf16"
    }  # fmt: skip
    for wrong in ("epochs", "=3"):
        with pytest.raises(RecipeError, match=f"'{wrong}' is not KEY=VALUE"):
            parse_overrides([wrong])


def test_another_model_than_the_recipes_needs_options_of_its_own(toy: Toy) -> None:
    data = {"train": toy.train, "val": toy.val, "batch_size": 32, "image_size": SIDE}
    pipeline = Pipeline.from_recipe("baseline", model="resnet18", **data)
    with pytest.raises(PlanError, match=r"'width'\. A recipe's model_options are for .*model_options=\{"):
        build_model(pipeline, ())
    build_model(Pipeline.from_recipe("baseline", model="resnet18", model_options={"num_classes": 4}, **data), ())
    with pytest.raises(PlanError, match="Did you mean 'num_classes' by 'num_clases'"):
        build_model(Pipeline.from_recipe("baseline", **data, **{"model_options.num_clases": 4}), ())


def either_way(*pairs: str) -> list[dict[str, Any]]:
    return [parse_overrides(list(order)) for order in itertools.permutations(pairs)]


@pytest.mark.parametrize(
    "overrides", either_way("optimizer.lr=0.5", 'optimizer={"name": "adamw"}', "optimizer.eps=1e-7")
)
def test_a_dict_and_values_in_it_are_both_there(overrides: dict[str, Any]) -> None:
    pipeline = Pipeline.from_recipe("baseline", **overrides)
    assert pipeline.optimization.optimizer == "adamw"
    assert pipeline.optimization.options == {"lr": 0.5, "eps": 1e-7}  # and nothing of the recipe's sgd


@pytest.mark.parametrize(
    "overrides", either_way("optimizer.lr=0.5", 'optimizer={"name": "adamw", "lr": 0.1}', "epochs=3")
)
def test_the_same_value_twice_is_an_error(overrides: dict[str, Any]) -> None:
    message = r"baseline: optimizer\.lr=0\.5 and optimizer=\{.*\} both set its lr\. Leave one of the two out"
    with pytest.raises(RecipeError, match=message):
        Pipeline.from_recipe("baseline", **overrides)


def test_so_it_is_within_a_recipe() -> None:
    values = {"model": "cifar_resnet", "train": "a.beton", "batch_size": 8, "image_size": 8}
    optimizer: dict[str, Any] = {"name": "sgd", "lr": 0.1}
    assert completed({"optimizer.momentum": 0.5, **values, "optimizer": optimizer}).values["optimizer"] == {
        **optimizer, "momentum": 0.5
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"optimizer\.lr=0\.3 and optimizer="):
        completed({"optimizer.lr": 0.3, **values, "optimizer": optimizer})
    # An override replaces what the recipe has.
    full = completed({**values, "optimizer": optimizer}, {"optimizer.lr": 0.3}).values
    assert full["optimizer"]["lr"] == 0.3


def test_an_entry_of_a_recipe_is_its_own(tmp_path: Path) -> None:
    """Also without the dict around it: the learning rate is for the batch size of the recipe."""
    file = tmp_path / "own.yaml"
    file.write_text("model: cifar_resnet\ntrain: a.beton\nbatch_size: 32\nimage_size: 8\noptimizer.lr: 0.3\n")
    assert completed(file, {"batch_size": 64}).values["base_batch_size"] == 32
    assert completed(file, {"batch_size": 64, "optimizer.lr": 0.6}).values["base_batch_size"] is None
    (text,) = (text for key, _, text in recipe_table(str(file)).rows if key == "optimizer")
    assert text.endswith("(the recipe)")


def test_a_value_of_the_command_line_has_no_key_twice() -> None:
    for text in ('{"name": "sgd", "lr": 0.1, "lr": 0.2}', '[{"name": "MixUp", "lr": 1, "lr": 2}]'):
        with pytest.raises(RecipeError, match=r"optimizer=.*the key 'lr' appears twice"):
            parse_overrides([f"optimizer={text}"])
    with pytest.raises(RecipeError, match="epochs= is given twice"):
        parse_overrides(["epochs=1", "seed=2", "epochs=1"])
