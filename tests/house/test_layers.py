"""The package structure: no import cycles, imports follow the layers, and the layers list every folder."""

import ast
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from places import ROOT
from process_state import output_of


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
    packages = {"drivetrain", "drivetrain.pipeline", "drivetrain.__main__", "drivetrain.setup"}
    for module in modules().keys() - packages:
        parents = {".".join(module.split(".")[: n + 1]) for n in range(module.count(".") + 1)}
        assert parents & named, module


def test_imports_go_down() -> None:
    output_of(Path(sys.executable).parent / "lint-imports", "--no-cache", cwd=ROOT)


def test_the_package_itself_is_imported_relatively() -> None:
    """Absolute imports would find another installation of Drivetrain than the file's own."""
    for stage in ("common", "loaders", "pipeline", "strategies", "transforms"):
        for path in (ROOT / stage).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
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
