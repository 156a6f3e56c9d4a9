"""One owner per option: each is one field of a config, from which everything else derives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import recipe_factories
from drivetrain import Pipeline
from drivetrain.common.errors import PlanError
from drivetrain.common.options.config import Config, Option, options_of
from drivetrain.common.options.signatures import outdated
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader
from drivetrain.loaders.options import ImageOptions, LoaderOptions
from drivetrain.pipeline.describe.config import DataConfig, DistributedConfig
from drivetrain.pipeline.describe.fit import FitOptions
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.recipes.schema import DEFAULTS, KEYS, keys_of
from drivetrain.pipeline.runs.config import FitConfig
from places import ROOT
from process_state import run_json

METHODS: dict[str, tuple[type[Config], ...]] = {
    "load": (DataConfig, ImageOptions),
    "optimize": (OptimizerConfig,),
    "distribute": (DistributedConfig,),
    "fit": (FitConfig,),
}
LOADERS = (FFCVLoader, TorchLoader, StockFFCVLoader)


def options_by_name(configs: tuple[type[Config], ...]) -> dict[str, Option]:
    return {name: option for config in configs for name, option in options_of(config).items()}


def test_type_checkers_read_what_the_options_say() -> None:
    """To repair it: python -m drivetrain.common.options.signatures."""
    assert not outdated(ROOT, "drivetrain")


@pytest.mark.parametrize("name", METHODS)
def test_every_option_has_help_and_is_documented(name: str) -> None:
    method, configs = getattr(Pipeline, name), METHODS[name]
    text, parameters = " ".join((method.__doc__ or "").split()), inspect.signature(method).parameters
    for option in options_by_name(configs).values():
        if name == "load" and option.name == "settings":  # its entries are options of ImageOptions
            continue
        assert option.name in parameters
        assert option.help
        assert f"{option.name}: {option.help}. {option.details}".strip() in text
        assert not option.help.endswith("."), "a phrase, which other text continues"


@pytest.mark.parametrize("kind", LOADERS)
def test_help_of_a_loader_shows_every_option(kind: Any) -> None:
    parameters, text = inspect.signature(kind).parameters, " ".join(kind.__doc__.split())
    for name, option in options_of(LoaderOptions).items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{name}: {option.help}." in text
    assert "options" not in parameters


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


@pytest.mark.parametrize("config", [DataConfig, OptimizerConfig, DistributedConfig, FitOptions])
def test_every_option_is_a_key_of_recipes(config: type[Config]) -> None:
    for key, option in keys_of(config).items():
        assert any(kind.json for kind in option.kinds), key
        assert key in KEYS
        assert (key in DEFAULTS) == (not option.required)
    covered = {option.name for option in keys_of(config).values()}
    # The optimizer is in the key of its options, as `name`.
    assert options_of(config).keys() - covered <= {"optimizer"}
    pipeline = (
        Pipeline(recipe_factories.small)
        .load("a.beton", batch_size=8, image_size=16)
        .optimize("sgd", lr=0.1)
        .distribute("single")
        .replace(fit_options=FitOptions(eval_every=2))
    )
    recipe = pipeline.to_recipe()
    assert keys_of(config).keys() <= recipe.keys()
    assert list(recipe) == [key for key in KEYS if key in recipe]


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
    assert run_json(program) == [[0, 0, 0, 1, 1, 1], []]
