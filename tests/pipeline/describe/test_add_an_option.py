"""An option is one field: added in a copy of the package, it is found everywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from process_state import run_json

NEW = '    {name}: Positive = 3\n    """Number of {name}s. Further details."""\n'
ADDED = {
    "lantern": ("loaders/options.py", "scale: Annotated"),
    "oriole": ("pipeline/optim/config.py", "warmup: Annotated"),
    "daisy": ("strategies/options.py", "clip_norm: Annotated"),
    "finch": ("pipeline/describe/fit.py", "eval_every: Positive"),
}
"""The new options, of the loader, optimizer, step and `fit`: the file of each, and the field that follows it."""

FOUND = """
import contextlib, inspect, io, json, sys
import drivetrain
from drivetrain import Pipeline, PlanError, RecipeError
from drivetrain.common.errors import DataError, StrategyError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader
from drivetrain.pipeline.apps.cli.app import main
from drivetrain.pipeline.describe.fit import FitOptions
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
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return out.getvalue()
listed, shown = command("recipes", "--keys"), command("recipes", "baseline")
found["command line"] = [f"number of {n}s" in listed and f"number of {n}s" in shown for n in keys]
print(json.dumps(found))
"""


@pytest.mark.process
def test_an_option_that_is_added_in_one_place_is_found_everywhere(tmp_path: Path) -> None:
    copy = tmp_path / "drivetrain"
    copy.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    for name in ("common", "loaders", "strategies", "transforms", "pipeline"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (file, before) in ADDED.items():
        text = (copy / file).read_text()
        assert text.count(f"\n    {before}") == 1
        (copy / file).write_text(text.replace(f"    {before}", f"{NEW.format(name=name)}    {before}"))
    # The second place is what type checkers read, which this command writes.
    command = [sys.executable, "-m", "drivetrain.common.options.signatures"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    written = {Path(line).relative_to(copy).as_posix() for line in done.stdout.splitlines()}
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
    assert found == {"comes back": True, "default": True}
