"""Recipes in YAML and JSON files, read as data by the rules of YAML 1.2, with errors that name the line; and pipelines
as recipes and back: the result is equal, or an error names what a recipe cannot express."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recipe_factories
import torch
import torchvision
import yaml
from drivetrain import RECIPES, Pipeline, RecipeError, strategies
from drivetrain.pipeline.describe.plan import Plan
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.recipes.core_yaml import dump
from drivetrain.pipeline.recipes.files import read_recipe
from drivetrain.pipeline.recipes.presets import completed
from drivetrain.pipeline.runs.folder import RECIPE as FILE
from drivetrain.pipeline.runs.folder import with_trained
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.transforms import EMA, BlurPool, LabelSmoothing, RandAugment
from pipeline_data import Toy, plain_model
from process_state import output_of

BOMB = "a0: &a0 lol\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
"""Without a limit, it takes the memory of 10^10 words."""

RECIPE = """\
# What a person writes.
model: cifar_resnet
model_options: {num_classes: 4, width: 4}
train: {train}
batch_size: 32
image_size: 16
optimizer:
  name: sgd
  lr: 1e-2        # text, to PyYAML
  momentum: 0.9
transforms:
  - name: BlurPool
  - {name: LabelSmoothing, smoothing: .1}
epochs: 1
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_a_yaml_file_is_a_recipe(toy: Toy, tmp_path: Path) -> None:
    file = written(tmp_path, RECIPE.replace("{train}", toy.train))
    for recipe in (file, str(file)):
        pipeline = Pipeline.from_recipe(recipe, workers=1, **{"optimizer.momentum": 0.5})
        assert pipeline.optimization.options == {"lr": 0.01, "momentum": 0.5}
        assert pipeline.transforms[1].smoothing == 0.1  # type: ignore[attr-defined]
        assert (pipeline.recipe, pipeline.epochs) == ("mine.yaml", 1)
    assert pipeline.fit(progress=False).history.facts["recipe"] == "mine.yaml"


def test_json_and_yaml_of_a_recipe_are_the_same(tmp_path: Path) -> None:
    full = completed("resnet50-hot").values
    as_json = written(tmp_path, json.dumps(full, indent="\t"), "hot.json")
    as_yaml = written(tmp_path, yaml.safe_dump(full, allow_unicode=True), "hot.yml")
    assert completed(as_json).values == completed(as_yaml).values == full


SCALARS: dict[str, Any] = {
    "1e-4": 1e-4, "1E5": 1e5, "-.5": -0.5, "5.": 5.0, "+3": 3, "010": 10, "1_000": "1_000", "0x10": "0x10",
    "no": "no", "on": "on", "yes": "yes", "true": True, "False": False, "null": None, "~": None, "": None,
    "1:30": "1:30", "2026-11-20": "2026-11-20", "'1e-4'": "1e-4", "[1, 2.5]": [1, 2.5], "<<": "<<", ".inf": ".inf",
}  # fmt: skip


def test_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "".join(f"key{number}: {written}\n" for number, written in enumerate(SCALARS))
    found = read_recipe(written(tmp_path, text))[0]
    for number, (text, value) in enumerate(SCALARS.items()):
        assert found[f"key{number}"] == value, text
        assert type(found[f"key{number}"]) is type(value), text


def test_a_run_writes_texts_that_stay_texts(tmp_path: Path) -> None:
    """Folders of classes, and runs, may be named 08 or 1e-3, which are texts to YAML 1.1 and numbers to 1.2."""
    texts = [*SCALARS, "08", "-09", "0189", "1e3", "1.5e3", "2E-4"]
    recipe = {"init_from": "1e-3", "groups": {"08": {"lr": 0.1}}, "values": [8, -3, 1e-5, 2e20, True, None, *texts]}
    trained = with_trained({FILE: dump(recipe)}, {"task": "MultiLabel()", "inputs": {"classes": texts}})
    found = read_recipe(written(tmp_path, trained[FILE]))[0]
    assert found == recipe | {"trained": {"task": "MultiLabel()", "classes": texts}}
    assert yaml.safe_load(trained[FILE]) == found  # as YAML 1.1


BROKEN: dict[str, tuple[str, str]] = {
    "key": (
        "model: resnet18\nbach_size: 3\n", r"mine.yaml, line 2: .*'bach_size'.*Did you mean 'batch_size'",
    ),
    "number in quotes": (
        "model: resnet18\nimage_size: '32'\n",
        r"mine.yaml, line 2: image_size='32' must be .* Write the number without quotes: 32",
    ),
    "twice": (
        "model: a\nseed: 1\nmodel: b\n", r"mine.yaml, line 3: the key 'model' appears twice. Remove one",
    ),
    "twice inside": ("optimizer:\n  lr: 1\n  lr: 2\n", r"mine.yaml, line 3: the key 'lr' appears twice"),
    "syntax": ("model: [1,\nseed: 3\n", r"mine.yaml, line \d: .*Write plain YAML"),
    "code": (
        "model: !!python/object/apply:os.getcwd []\n", r"mine.yaml, line 1: .*constructor.*Write plain YAML",
    ),
    "own tag": ("model: !mine 3\n", r"mine.yaml, line 1: .*Write plain YAML"),
    "wrong tag": ("seed: !!float x\n", r"mine.yaml, line 1: 'x' is not a valid float"),
    "wrong truth": ("seed: 1\ncompile: !!bool maybe\n", r"mine.yaml, line 2: 'maybe' is not a valid bool"),
    "something that is said to be nothing": (
        "val: !!null a.beton\n", r"mine.yaml, line 1: 'a.beton' is not a valid null",
    ),
    "number of thousands of digits": ("seed: " + "9" * 5000, r"mine.yaml: Exceeds the limit"),
    "merge": (
        "loading: &all {padding: 4}\nmodel_options:\n  <<: *all\n",
        r"mine.yaml, line 3: YAML 1.2 has no merge key .*write its values out",
    ),
    "alias of nothing": ("model: *mine\n", r"mine.yaml, line 1: .*undefined alias 'mine'"),
    "not a number": (
        "model: resnet18\nwarmup: .nan\n",
        r"mine.yaml, line 2: warmup='.nan' .*Numbers in a recipe must be finite",
    ),
    "number that is too large": ("warmup: 1e999\n", r"mine.yaml: its values must be valid in JSON"),
    "date": (
        "model: resnet18\nseed: 2026-11-20\n", r"mine.yaml, line 2: seed='2026-11-20' must be an integer",
    ),
    "comments alone": ("# model: resnet18\n", r"mine.yaml: it contains None"),
    "no mapping": ("- model\n", r"mine.yaml: it contains \['model'\]"),
    "empty": ("", r"mine.yaml: it contains None"),
    "two documents": ("model: a\n---\nmodel: b\n", r"mine.yaml, line 2"),
    "key that is not a string": ("1: 2\n", r"mine.yaml, line 1: the key 1 is not a string"),
    "bomb": (BOMB, r"mine.yaml, line 7: .*with its aliases written out, it has more than 10,000,000 characters"),
    "loop": ("loading: &all [*all]\n", r"mine.yaml, line 1: .*recursive"),
    "depth": ("[" * 1000, r"mine.yaml: it is nested too deeply"),
    "control character": ("model: \0\n", r"mine.yaml: .*special characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_recipe(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        Pipeline.from_recipe(written(tmp_path, text))


def test_an_anchor_is_its_value(tmp_path: Path) -> None:
    text = "model: resnet18\ntrain: &here a.beton\nval: *here\nbatch_size: 8\nimage_size: 8\n"
    data = Pipeline.from_recipe(written(tmp_path, text)).data
    assert data is not None
    assert (data.train, data.val) == ("a.beton", "a.beton")


def test_a_line_is_not_blamed_for_an_override(tmp_path: Path) -> None:
    file = written(tmp_path, "model: resnet18\nseed: 1\n")
    with pytest.raises(RecipeError, match=r"mine.yaml: seed=-1 must be"):
        Pipeline.from_recipe(file, seed=-1)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none.yaml does not exist"):
        Pipeline.from_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(RecipeError, match=r"a recipe file ends in .yaml, .yml, .json"):
        Pipeline.from_recipe(tmp_path / "recipe.txt")
    with pytest.raises(RecipeError, match=r"Recipe 'a\\x00.yaml' is not a file name"):
        Pipeline.from_recipe("a\0.yaml")
    with pytest.raises(RecipeError, match="No recipe is named 'model: resnet18"):
        Pipeline.from_recipe("model: resnet18\n" * 100)  # the text, not the file
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"cannot be read: Is a directory"):
        Pipeline.from_recipe(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes("model: Grün".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"is not UTF-8 text"):
        Pipeline.from_recipe(tmp_path / "latin.yaml")
    for text, message in {
        '{"model": 1, "model": 2}': "the key 'model' appears twice",
        '{"model":\n nul}': "line 2: .*Write plain JSON",
        '{"seed": NaN}': "must be valid in JSON",
    }.items():
        with pytest.raises(RecipeError, match=message):
            Pipeline.from_recipe(written(tmp_path, text, "mine.json"))


CPU = {"strategy_options.device": "cpu"}


def assert_equal(one: Pipeline, other: Pipeline) -> None:
    """Every field is the same, and so is the plan."""
    for field in dataclasses.fields(Pipeline):
        assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one == other
    assert Plan(resolve(one, files=False).steps).to_dict() == Plan(resolve(other, files=False).steps).to_dict()


def round_trip(pipeline: Pipeline) -> dict[str, Any]:
    recipe = pipeline.to_recipe()
    assert json.loads(json.dumps(recipe, allow_nan=False)) == recipe
    assert Pipeline.from_recipe(recipe).to_recipe() == recipe
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back(name: str) -> None:
    if RECIPES[name].get("strategy", "single") not in STRATEGIES:
        pytest.skip(f"unknown strategy {RECIPES[name]['strategy']}")
    pipeline = Pipeline.from_recipe(name, **CPU)
    assert_equal(Pipeline.from_recipe(round_trip(pipeline)), pipeline)


def start(model: Any = recipe_factories.small, **options: Any) -> Pipeline:
    return Pipeline(model, **options).load("train.beton", batch_size=8, image_size=16)


PIPELINES: dict[str, Callable[[], Pipeline]] = {
    "least": start,
    "all stages": lambda: (
        Pipeline(torchvision.models.resnet18, seed=3, num_classes=4)
        .load(
            "a.beton", "b.beton", batch_size=8, image_size=16, eval_image_size=32, loader="torch", workers=0,
            mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), flip=False, scale=(0.5, 1.0),
        )
        .transform(LabelSmoothing(0.2), BlurPool(min_channels=8), EMA(None, 0.9), RandAugment(1, 4))
        .optimize("adamw", lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup=0.5)
        .distribute("ddp", devices=2, precision="bf16", accumulate=2, clip_norm=1, device="cpu", compile="default",
                    activation_checkpointing=["BasicBlock"])
    ),
    "asked for what is the default": lambda: start().optimize("sgd", lr=0.1, momentum=0.9).distribute("single"),
    "a class": lambda: start(recipe_factories.Small, classes=4),
    "a class in a class": lambda: start(recipe_factories.Small.Inner),
    "own by name": lambda: start("cifar_resnet", num_classes=4),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_comes_back(name: str) -> None:
    pipeline = PIPELINES[name]()
    recipe = round_trip(pipeline)
    assert_equal(Pipeline.from_recipe(recipe), pipeline)
    assert ("optimizer" in recipe) == (pipeline.optimization is not None)
    assert ("strategy" in recipe) == (pipeline.distribution is not None)


def test_models_have_the_names_that_people_know() -> None:
    for model, name in {
        torchvision.models.resnet18: "resnet18",
        "resnet18": "resnet18",
        recipe_factories.small: "recipe_factories:small",
        recipe_factories.Small.Inner: "recipe_factories:Small.Inner",
        "vit_s16": "vit_s16",
    }.items():
        assert start(model).to_recipe()["model"] == name
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    recipe = start(torchvision.models.resnet18, weights=weights).to_recipe()
    assert recipe["model_options"] == {"weights": "IMAGENET1K_V1"}


def test_a_strategy_object_goes_by_its_name() -> None:
    recipe = round_trip(start().distribute(strategies.get("ddp", device="cpu", find_unused_parameters=True)))
    assert recipe["strategy"] == "ddp"
    assert recipe["strategy_options"] == {"device": "cpu", "find_unused_parameters": True}


@dataclasses.dataclass(frozen=True)
class OwnStrategy:
    name = "mine"
    summary = "a strategy that no registry knows"

    def check(self, devices: int) -> None: ...

    def prepare(self, *_: Any, **__: Any) -> Any: ...


def own_transform() -> LabelSmoothing:
    @dataclasses.dataclass(frozen=True)
    class OwnTransform(LabelSmoothing):
        pass

    return OwnTransform()


IMPOSSIBLE: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "no data": (lambda: Pipeline("resnet18"), "has no data.*Add .load"),
    "module": (lambda: start(plain_model()), "a Sequential that is already built.*factory"),
    "lambda": (lambda: start(lambda: plain_model()), "cannot be imported by name.*package.module:factory"),
    "lambda of a module": (lambda: start(recipe_factories.anonymous), "cannot be imported by name"),
    "made inside": (lambda: start(recipe_factories.made_inside()), "cannot be imported by name"),
    "model's option": (
        lambda: start(norm_layer=torch.nn.BatchNorm2d),
        "model_options.norm_layer is .*a type",
    ),
    "option inside": (lambda: start(sizes=[1, {2}]), r"model_options.sizes\[1\] is \{2\}, a set"),
    "not finite": (lambda: start(scale=float("inf")), "model_options.scale is inf"),
    "transform": (lambda: start().transform(own_transform()), "cannot be imported by name"),
    "optimizer": (
        lambda: start().optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        "cannot be imported by name. It is a lambda.*Or pass .optimize.. the name",
    ),
    "optimizer's option": (
        lambda: start().optimize("sgd", lr=torch.tensor(0.1)),
        "optimizer.lr is tensor.*which a recipe cannot contain",
    ),
    "strategy": (lambda: start().distribute(OwnStrategy()), r"cannot create the strategy OwnStrategy\(\)"),
    "policy": (
        lambda: start().distribute("single", activation_checkpointing=lambda name, _: name == "0"),
        "activation_checkpointing=…. is a function",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_recipe_can_hold(name: str) -> None:
    make, message = IMPOSSIBLE[name]
    pipeline = make()
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        pipeline.to_recipe()


OWN_NET = "from torch import nn\n\n\nclass Net(nn.Identity):\n    pass\n"
SCRIPT = """
import net
from drivetrain import Pipeline, RecipeError

for factory in (Net, net.Net):
    try:
        print(Pipeline(factory).load("train.beton", batch_size=8, image_size=16).to_recipe()["model"])
    except RecipeError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_a_factory_of_the_running_script(tmp_path: Path) -> None:
    """The error names the remedy, and the remedy is one."""
    (tmp_path / "net.py").write_text(OWN_NET)
    (tmp_path / "train.py").write_text(OWN_NET + SCRIPT)
    error, name = output_of(sys.executable, "train.py", cwd=tmp_path, timeout=60).splitlines()
    assert "Net cannot be imported by name. It is defined in the script or notebook that is running" in error
    assert "such as net.py, and write from net import Net; its name in a recipe is then net:Net." in error
    assert name == "net:Net"
