"""The structure: no import cycles, imports follow the layers, and the walks of docs/architecture.md happen so."""

import ast
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import drivetrain
import grimp
import pytest
from drivetrain import Pipeline
from drivetrain.loaders import FFCVLoader
from pipeline_data import Toy
from places import ROOT

STEP = re.compile(r"`([a-z_0-9/]+\.(?:py|c))`(?:\s+\(`(\w+)`\))?")
PAGE = (ROOT / "docs/architecture.md").read_text()


@dataclass(frozen=True)
class Walk:
    """A walk of the page: its title, the files and functions it passes, and the most Python files that it may pass."""

    title: str
    most: int
    steps: tuple[tuple[str, str], ...]


def test_the_page_has_every_package() -> None:
    table = PAGE.partition("## Walks")[0]
    packages = [path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")]
    assert [name for name in packages if not re.search(rf"\b{name}`", table)] == []


def walks() -> dict[str, Walk]:
    """Return the walks by title, each `- **Title**, at most N files: ...` of the page."""
    found = {}
    pattern = r"^- \*\*(.+?)\*\*, at most (\d+) files: (.+?)(?=^- |^\S|\Z)"
    for title, most, text in re.findall(pattern, PAGE, re.M | re.S):
        found[title] = Walk(title, int(most), tuple(STEP.findall(text)))
    return found


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """Note the file and the name of each function of the package that is called meanwhile, in any thread."""
    seen: list[tuple[str, str]] = []
    prefix = f"{Path(drivetrain.__file__).parent}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and not path.startswith(f"{prefix}."):
            seen.append((path.removeprefix(prefix), frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def follow(walk: Walk, seen: list[tuple[str, str]]) -> None:
    """Each function of Python that the walk names was called after the one before it."""
    at = 0
    for file, name in walk.steps:
        if not file.endswith(".py") or not name or name[0].isupper():  # C, or a class
            continue
        try:
            at = seen.index((file, name), at)
        except ValueError:
            pytest.fail(f"{walk.title}: {file} ({name}) was not called after the step before it")


def test_the_walks_are_short_and_lead_somewhere() -> None:
    """Each file is there, and defines what is named in it."""
    assert walks().keys() == ACTIONS.keys()
    for walk in walks().values():
        assert len({file for file, _ in walk.steps if file.endswith(".py")}) <= walk.most, walk.title
        for file, name in walk.steps:
            definition = rf"^ *(def|class|DT_|int|void) *.*\b{name}\b"
            assert not name or re.search(definition, (ROOT / file).read_text(), re.M), (file, name)


def load(toy: Toy, tmp_path: Path) -> None:  # noqa: ARG001
    loader = FFCVLoader(toy.train, batch_size=8, image_size=16, workers=1)
    next(iter(loader))
    loader.close()


def recipe(toy: Toy, tmp_path: Path) -> None:
    Pipeline.from_recipe(_recipe(toy)).fit(out=tmp_path, progress=False)


def resume(toy: Toy, tmp_path: Path) -> None:
    """After `recipe`, in its folder."""
    Pipeline.from_recipe(_recipe(toy)).fit(epochs=2, out=tmp_path, resume="auto", progress=False)


def _recipe(toy: Toy) -> dict[str, Any]:
    return {
        "model": "cifar_resnet", "model_options": {"num_classes": 4, "width": 4}, "train": str(toy.train),
        "batch_size": 16, "image_size": 16, "optimizer": {"name": "sgd", "lr": 0.1}, "clip_norm": 1.0,
        "schedule": "constant", "strategy": "single", "strategy_options": {"device": "cpu"}, "epochs": 1,
    }  # fmt: skip


Action = Callable[[Toy, Path], None]
ACTIONS: dict[str, list[Action]] = {
    "A batch": [load], "Training": [recipe], "A recipe": [recipe], "A checkpoint": [recipe, resume],
    "`image_size`": [recipe], "`clip_norm`": [recipe],
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[str, str]]]:
    """The calls of a walk's actions, by its title; several walks look at the same ones."""
    folder = tmp_path_factory.mktemp("walk")

    @cache
    def called_by(action: Action) -> list[tuple[str, str]]:
        with calls() as found:
            action(toy, folder)
        return found

    return lambda title: [call for action in ACTIONS[title] for call in called_by(action)]


@pytest.mark.long
@pytest.mark.parametrize("title", ACTIONS)
def test_a_walk_is_what_happens(title: str, seen: Callable[[str], list[tuple[str, str]]]) -> None:
    follow(walks()[title], seen(title))


def modules() -> dict[str, set[str]]:
    """Return what each module imports from the package, inside functions and for type checkers, too."""
    graph = grimp.build_graph("drivetrain", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_there_is_no_circle_of_imports() -> None:
    graph = modules()
    assert len(graph) > 150
    TopologicalSorter(graph).prepare()  # raises CycleError, which names a circle


def test_every_module_has_a_layer() -> None:
    """A new room or helper that the contract does not name would be free to import anything."""
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name.strip() for layer in contract["layers"] for name in layer.replace("|", ":").split(":")}
    # These import only at first use; setup.py is not part of the package.
    packages = {"drivetrain", "drivetrain.__main__", "drivetrain.setup", "drivetrain.pipeline"}
    for module in modules().keys() - packages:
        parents = {".".join(module.split(".")[: n + 1]) for n in range(module.count(".") + 1)}
        assert parents & named, module


def test_the_pipeline_has_at_most_seven_floors() -> None:
    """The longest chain of rooms that import each other, in `pipeline/`."""
    room = re.compile(r"drivetrain\.pipeline\.(\w+)")
    below: dict[str, set[str]] = {}
    for module, imported in modules().items():
        if found := room.match(module):
            others = {other[1] for other in map(room.match, imported) if other}
            below.setdefault(found[1], set()).update(others - {found[1]})
    floors: dict[str, int] = {}
    for name in TopologicalSorter(below).static_order():
        floors[name] = 1 + max((floors[other] for other in below.get(name, ())), default=0)
    assert max(floors.values()) <= 7, floors


def test_the_package_itself_is_imported_relatively() -> None:
    """Absolute imports would find another installation of Drivetrain than the file's own."""
    for stage in ("common", "loaders", "pipeline", "strategies", "transforms"):
        for path in (ROOT / stage).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"\bfrom[\s\\]+drivetrain", text):  # parsing all takes seconds; most is in docstrings
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert not (node.module or "").startswith("drivetrain"), f"{path}: {node.module}"


@pytest.mark.parametrize("folder", [".ci", ".ci/gpu", "benchmarks"])
def test_scripts_do_not_import_in_a_circle(folder: str) -> None:
    """Scripts are no package; they import those beside them by name, also inside functions."""
    scripts = {path.stem: ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")}
    imports = {
        name: {
            module
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module])
            if module in scripts
        }
        for name, tree in scripts.items()
    }
    assert any(imports.values())
    TopologicalSorter(imports).prepare()
