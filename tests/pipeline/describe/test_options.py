"""One owner per option: each is one field of a config, from which everything else derives."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import recipe_factories
from drivetrain import Pipeline
from drivetrain.common.errors import PlanError
from drivetrain.common.options.option import Config, options_of
from drivetrain.pipeline.describe.config import DataConfig, DistributedConfig, OptimizerConfig
from drivetrain.pipeline.recipes.schema import DEFAULTS, KEYS, keys_of
from drivetrain.pipeline.runs.config import FitConfig
from places import ROOT

METHODS: dict[str, type[Config]] = {
    "load": DataConfig,
    "optimize": OptimizerConfig,
    "distribute": DistributedConfig,
}


def run(program: str, folder: Path | None = None) -> Any:
    """What a program prints as JSON on its last line, in a process of its own; the package may lie in `folder`."""
    paths = [str(folder)] if folder else [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", METHODS)
def test_the_method_names_every_option_for_type_checkers(name: str) -> None:
    """With the type and the default of its field: a keyword that it does not name would be `Any` there."""
    method, config = getattr(Pipeline, name), METHODS[name]
    # The signature as written, without the one that is derived.
    written = inspect.signature(FunctionType(method.__code__, {}, name, method.__defaults__))
    parameters = {parameter.name: parameter for parameter in written.parameters.values()}
    options = options_of(config)
    assert parameters.keys() - {"self"} == options.keys()
    defaults = {**(method.__kwdefaults__ or {})}
    for field in dataclasses.fields(config):
        if field.name == config.EXTRA:
            assert parameters[field.name].kind is inspect.Parameter.VAR_KEYWORD
            continue
        if parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY:
            assert defaults.get(field.name, inspect.Parameter.empty) == options[field.name].default
            assert method.__annotations__[field.name] == field.type


@pytest.mark.parametrize("name", [*METHODS, "fit"])
def test_every_option_has_help_and_is_documented(name: str) -> None:
    method, config = getattr(Pipeline, name), METHODS.get(name, FitConfig)
    text, parameters = " ".join((method.__doc__ or "").split()), inspect.signature(method).parameters
    for option in options_of(config).values():
        assert option.name in parameters
        assert f"{option.name}: {option.help}." in text
        assert not option.help.endswith("."), "a phrase, which other text continues"


@pytest.mark.parametrize(
    ("option", "nearest"), [("epoch", "epochs"), ("resume_from", "resume"), ("callback", "callbacks")]
)
def test_fit_names_an_unknown_option_and_the_nearest_one(option: str, nearest: str) -> None:
    given: Any = {option: 1}
    with pytest.raises(
        PlanError, match=rf"^fit\(\) has no option '{option}'\. Did you mean '{nearest}'\? Known: callbacks, "
    ):
        Pipeline("resnet18").fit(**given)


def test_fit_takes_options_by_name() -> None:
    fit: Any = Pipeline("resnet18").fit
    with pytest.raises(PlanError, match=r"^fit\(\) takes options by name, such as epochs=…, not 3\.$"):
        fit(3)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_a_key_of_recipes(name: str) -> None:
    config = METHODS[name]
    for key, option in keys_of(config).items():
        assert option.help
        assert option.kinds, key
        assert key in KEYS
        assert (key in DEFAULTS) == (option.default is not inspect.Parameter.empty)
    covered = {option.name for option in keys_of(config).values()}
    assert options_of(config).keys() - covered <= {
        "optimizer"
    }  # which is in the key of its options, as `name`
    pipeline = (
        Pipeline(recipe_factories.small)
        .load("a.beton", batch_size=8, image_size=16)
        .optimize("sgd", lr=0.1)
        .distribute("single")
    )
    recipe = pipeline.to_recipe()
    assert keys_of(config).keys() <= recipe.keys()
    assert list(recipe) == [key for key in KEYS if key in recipe]


NEW = '    {name}: int = field(default=3, metadata=option("number of {name}s", POSITIVE, check=whole(1)))\n'
ADDED = {"loader: str": "lantern", "warmup: float": "oriole", "accumulate: int": "daisy"}
"""Fields of the three configs, and an option to add before each."""

FOUND = """
import contextlib, inspect, io, json, sys
import drivetrain
from drivetrain import Pipeline, PlanError, RecipeError, pipeline
from drivetrain.pipeline.apps.cli.app import main
from drivetrain.pipeline.describe.resolve import resolve

names = {"load": "lantern", "optimize": "oriole", "distribute": "daisy"}
def make(**values):
    return (Pipeline("cifar_resnet")
            .load("a.beton", batch_size=8, image_size=16, **{k: v for k, v in values.items() if k == "lantern"})
            .optimize("sgd", lr=0.1, **{k: v for k, v in values.items() if k == "oriole"})
            .distribute("single", device="cpu", **{k: v for k, v in values.items() if k == "daisy"}))
made, found = make(lantern=5, oriole=6, daisy=7), {"file": drivetrain.__file__}
configs = {"load": made.data, "optimize": made.optimization, "distribute": made.distribution}
found["values"] = [getattr(configs[m], n) for m, n in names.items()]
found["signatures"] = [inspect.signature(getattr(Pipeline, m)).parameters[n].default for m, n in names.items()]
found["documented"] = [f"{n}: number of {n}s." in getattr(Pipeline, m).__doc__ for m, n in names.items()]
found["repr"] = [f"{n}={v}" in repr(made) for n, v in zip(names.values(), (5, 6, 7))]
recipe = made.to_recipe()
found["recipe"] = [recipe[n] for n in names.values()]
found["comes back"] = Pipeline.from_recipe(recipe) == made
found["default"] = Pipeline.from_recipe({k: v for k, v in recipe.items() if k not in names.values()}) == make()
steps = " ".join(step.why for step in resolve(made, files=False).steps)
found["plan"] = [f"{n}={v}" in steps for n, v in zip(names.values(), (5, 6, 7))]
def error(call):
    try:
        call()
    except (PlanError, RecipeError) as error:
        return str(error)
found["refused"] = [error(lambda: make(**{n: 0})) for n in names.values()]
found["recipe refused"] = [error(lambda: Pipeline.from_recipe(recipe, **{n: "x"})) for n in names.values()]
def command(*arguments):
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return out.getvalue()
listed, shown = command("recipes", "--keys"), command("recipes", "baseline")
found["command line"] = [f"number of {n}s" in listed and f"number of {n}s" in shown for n in names.values()]
print(json.dumps(found))
"""


@pytest.mark.process
@pytest.mark.process
def test_an_option_that_is_added_in_one_line_is_found_everywhere(tmp_path: Path) -> None:
    copy = tmp_path / "drivetrain"
    for path in (
        *ROOT.glob("*.py"),
        *(ROOT / each for each in ("loaders", "strategies", "transforms", "pipeline")),
    ):
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(path, copy)
    file = copy / "pipeline" / "spec" / "config.py"
    text = file.read_text()
    for before, name in ADDED.items():
        assert text.count(f"\n    {before} = ") == 1
        text = text.replace(f"    {before} = ", f"{NEW.format(name=name)}    {before} = ")
    file.write_text(text)
    found = run(FOUND, tmp_path)
    names = ADDED.values()
    assert Path(found.pop("file")) == copy / "__init__.py"
    assert found.pop("values") == [5, 6, 7]
    assert found.pop("signatures") == [3, 3, 3]
    assert found.pop("recipe") == [5, 6, 7]
    assert found.pop("refused") == [f"{name}=0 must be a positive integer." for name in names]
    for name, message in zip(names, found.pop("recipe refused"), strict=True):
        assert f"{name}='x' must be a positive integer: number of {name}s." in message
    for place in ("documented", "repr", "plan", "command line"):
        assert found.pop(place) == [True, True, True], place
    assert found == {"comes back": True, "default": True}


@pytest.mark.process
@pytest.mark.process
def test_options_are_printed_and_checked_without_torch() -> None:
    """`drivetrain recipes`, and an unknown recipe's error, start at once."""
    program = (
        "import contextlib, io, json, sys\n"
        "from drivetrain.pipeline.apps.cli.app import main\n"
        "codes = []\n"
        "for command in (['recipes'], ['recipes', '--keys'], ['recipes', 'baseline'], ['train', 'baselin'],\n"
        "                ['train', 'baseline', 'epoch=3'], ['train', 'baseline', 'devices=many']):\n"
        "    sys.argv[1:] = command\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit as end:\n"
        "            codes.append(end.code or 0)\n"
        "print(json.dumps([codes, [name for name in ('torch', 'torchvision', 'PIL') if name in sys.modules]]))"
    )
    assert run(program) == [[0, 0, 0, 1, 1, 1], []]
