"""One owner per option: each is one field of a config, from which everything else derives."""

import inspect
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import recipe_factories
from drivetrain import Pipeline
from drivetrain.common.errors import PlanError
from drivetrain.common.options.config import Config, Option, options_of
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, options
from drivetrain.loaders.options import ImageOptions, LoaderOptions
from drivetrain.pipeline.describe.config import DataConfig, DistributedConfig, FitOptions
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.recipes.schema import DEFAULTS, KEYS, keys_of
from drivetrain.pipeline.runs.config import FitConfig
from places import CI, ROOT, load_script
from process_state import output_of, run_json

METHODS: dict[str, tuple[type[Config], ...]] = {
    "load": (DataConfig, ImageOptions), "optimize": (OptimizerConfig,), "distribute": (DistributedConfig,),
    "fit": (FitConfig,),
}  # fmt: skip
LOADERS = (FFCVLoader, TorchLoader, StockFFCVLoader)
WRITER = load_script("signatures")


def options_by_name(configs: tuple[type[Config], ...]) -> dict[str, Option]:
    return {name: option for config in configs for name, option in options_of(config).items()}


def test_type_checkers_read_what_the_options_say() -> None:
    """To repair it: python .ci/signatures.py."""
    assert not WRITER.outdated(ROOT, "drivetrain")
    text = Path(options.__file__).read_text()
    assert WRITER.complete_text(text, options) == text, "as ruff formats it"


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
        "for command in (['--help'], ['recipes'], ['recipes', '--keys'], ['recipes', 'baseline'],\n"
        "                ['train', 'baselin'], ['train', 'baseline', 'epoch=3'],\n"
        "                ['train', 'baseline', 'devices=many']):\n"
        "    sys.argv[1:] = command\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit as end:\n"
        "            codes.append(end.code or 0)\n"
        "print(json.dumps([codes, [name for name in ('torch', 'numpy', 'PIL') if name in sys.modules]]))"
    )
    assert run_json(program) == [[0, 0, 0, 0, 1, 1, 1], []]


NEW = '    {name}: Positive = 3\n    """Number of {name}s. Further details."""\n'
ADDED = {
    "lantern": ("loaders/options.py", "scale: Annotated"),
    "oriole": ("pipeline/optim/config.py", "warmup: Annotated"),
    "daisy": ("strategies/options.py", "clip_norm: Annotated"),
    "finch": ("pipeline/describe/config.py", "eval_every: Positive"),
}
"""The new options, of the loader, optimizer, step and `fit`: the file of each, and the field that follows it."""

FOUND = """
import contextlib, inspect, io, json, sys
import drivetrain
import numpy as np
from drivetrain import Pipeline, PlanError, RecipeError
from drivetrain.common.errors import DataError, StrategyError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert
from drivetrain.pipeline.apps.cli.app import main
from drivetrain.pipeline.runs.checkpoints.fingerprint import fingerprint
from drivetrain.pipeline.describe.config import FitOptions
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs.config import FitConfig

names = {"load": "lantern", "optimize": "oriole", "distribute": "daisy", "fit": "finch"}
def make(**values):
    def of(name):
        return {name: values[name]} if name in values else {}
    made = (Pipeline("cifar_resnet")
            .load("a.beton", batch_size=8, image_size=16, **of("lantern"))
            .optimize("sgd", lr=0.1, **of("oriole"))
            .distribute("single", device="cpu", **of("daisy")))
    return made.replace(fit_options=FitOptions(eval_every=2, **of("finch")))
made, found = make(lantern=5, oriole=6, daisy=7, finch=8), {"file": drivetrain.__file__}
found["values"] = [made.data.loading.lantern, made.optimization.oriole, made.distribution.daisy,
                   FitConfig.of(made.fit_defaults()).finch]
found["signatures"] = [inspect.signature(getattr(Pipeline, m)).parameters[n].default for m, n in names.items()]
kinds = (FFCVLoader, TorchLoader, StockFFCVLoader)
found["loaders"] = [inspect.signature(kind).parameters["lantern"].default for kind in kinds]
texts = [*(getattr(Pipeline, m).__doc__ for m in names), *(kind.__doc__ for kind in kinds)]
found["documented"] = [f"{n}: number of {n}s. Further" in t
                       for n, t in zip([*names.values(), *["lantern"] * 3], texts)]
found["repr"] = [f"{n}={v}" in repr(made) for n, v in zip(names.values(), (5, 6, 7, 8))]
recipe = made.to_recipe()
found["recipe"] = [recipe["loading"]["lantern"], *(recipe[n] for n in ("oriole", "daisy", "finch"))]
found["comes back"] = Pipeline.from_recipe(recipe) == made
plain = {k: v for k, v in recipe.items() if k not in names.values()} | {"loading": {}}
found["default"] = Pipeline.from_recipe(plain) == make()
steps = " ".join(step.why for step in resolve(made, files=False).steps)
found["plan"] = [f"{n}={v}" in steps for n, v in zip(("oriole", "daisy"), (6, 7))]
def error(call):
    try:
        call()
    except (PlanError, RecipeError, DataError, StrategyError) as error:
        return f"{type(error).__name__}: {error}"
found["refused"] = [error(lambda: make(**{n: 0})) for n in names.values()]
keys = ("oriole", "daisy", "finch")
found["recipe refused"] = [error(lambda: Pipeline.from_recipe(recipe, **{n: "x"})) for n in keys]
def command(*arguments):
    sys.argv[1:] = arguments
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        main()
    return printed.getvalue()
listed, shown = command("recipes", "--keys"), command("recipes", "baseline")
found["command line"] = [f"number of {n}s" in listed and f"number of {n}s" in shown for n in keys]
found["command line refused"] = "lantern='x'" in command("train", "baseline", "loading.lantern=x", "--train", "a.beton")
convert((np.zeros((10, 16, 16, 3), np.uint8), np.arange(10)), "a.beton", progress=False)
with made.build() as built:
    found["fingerprint"] = fingerprint(resolve(made), built, 1)["load settings"]["lantern"] == 5
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.process
def test_an_option_that_is_added_in_one_place_is_found_everywhere(tmp_path: Path) -> None:
    copy = tmp_path / "drivetrain"
    copy.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    for name in ("common", "loaders", "strategies", "transforms", "pipeline"):
        shutil.copytree(ROOT / name, copy / name)  # with what is compiled already
    for name, (file, before) in ADDED.items():
        text = (copy / file).read_text()
        assert text.count(f"\n    {before}") == 1
        (copy / file).write_text(text.replace(f"    {before}", f"{NEW.format(name=name)}    {before}"))
    # The second place is what type checkers read, which this command writes.
    done = output_of(sys.executable, CI / "signatures.py", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    written = {Path(line).relative_to(copy).as_posix() for line in done.splitlines()}
    assert written == {"loaders/options.py", "strategies/options.py", "pipeline/describe/pipeline_spec.py"}
    found = run_json(FOUND, tmp_path)
    assert Path(found.pop("file")) == copy / "__init__.py"
    assert found.pop("values") == found.pop("recipe") == [5, 6, 7, 8]
    assert found.pop("signatures") == [3, 3, 3, 3]
    assert found.pop("loaders") == [3, 3, 3]
    errors = ("DataError", "PlanError", "StrategyError", "PlanError")
    assert found.pop("refused") == [
        f"{error}: {name}=0 must be a positive integer." for error, name in zip(errors, ADDED, strict=True)
    ]
    for name, message in zip(("oriole", "daisy", "finch"), found.pop("recipe refused"), strict=True):
        assert f"{name}='x' must be a positive integer: number of {name}s." in message
    for place in ("documented", "repr", "plan", "command line"):
        assert all(found.pop(place)), place
    assert found == dict.fromkeys(("comes back", "default", "command line refused", "fingerprint"), True)
