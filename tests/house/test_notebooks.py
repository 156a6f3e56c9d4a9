"""Every notebook runs from top to bottom without a network; training behaves well in notebook cells."""

import ast
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from pipeline_data import Toy
from places import ROOT, import_ours
from process_state import wait_until_ended

pytestmark = pytest.mark.process

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    """All that the README and the gallery walk through."""
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/gallery.md"))
    assert {*re.findall(r"notebooks/([\w-]+)\.ipynb", pages)} == {path.stem for path in NOTEBOOKS}


@each_notebook
def test_notebook_imports_what_there_is(path: Path) -> None:
    """Those that are run by `make test-all` alone must not wait for it to find a module that has moved."""
    lines = [line for cell in code_cells(path) for line in cell.source.splitlines()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    assert import_ours(ast.walk(ast.parse(text)))


def test_the_notebook_of_strategies_trains_with_each_that_runs_here(toy: Toy, tmp_path: Path) -> None:
    """On toy data and in one process, without waiting for `make test-all`, and as if this machine could run all."""
    cells = code_cells(ROOT / "notebooks" / "from-one-process-to-sharded.ipynb")
    (code,) = (cell.source for cell in cells if "Checkpoints(" in cell.source)
    strategies = ("ddp", "fsdp", "deepspeed_stage_3")
    rows = [SimpleNamespace(name=name, runs_here=True) for name in strategies]
    names: dict[str, Any] = {
        "strategies": SimpleNamespace(available=lambda: rows),
        "pipeline": SimpleNamespace(distribute=lambda *_, **__: toy.pipeline()),
        "folder": tmp_path, "EPOCHS": 1, "results": {},
    }  # fmt: skip
    exec(code, names)
    assert tuple(names["results"]) == strategies
    assert [path.name for path in tmp_path.iterdir()] == ["fsdp"]
    assert [*(tmp_path / "fsdp" / "checkpoints").iterdir()]


def kinds(cell: Any) -> set[str]:
    """What a code cell shows, bars left out: those of a live notebook end, and are not committed."""
    shown = [output for output in cell.outputs if BAR not in output.get("data", {})]
    return {str(output.output_type) for output in shown if output.get("name") != "stderr"}


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.slow
@pytest.mark.alone
@each_notebook
def test_notebook_runs(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No cache, no npm and no way out: data sets are replaced by generated pictures, which train in seconds.
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    committed = [kinds(cell) for cell in notebook.cells if cell.cell_type == "code"]
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=dict(os.environ))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert [kinds(cell) for cell in cells] == committed
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not list(tmp_path.iterdir()), "it leaves files behind"


@each_notebook
def test_notebook_is_committed_with_the_outputs_of_a_run_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each_notebook
def test_notebook_says_first_how_long_it_takes_and_names_no_place_of_a_machine(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert re.search(r"\b(second|minute)s?\b.* two CPU cores", " ".join(first.source.split()))
    written = re.sub(r'"image/png": "[^"]*"', "", path.read_text())  # base64 has any short word by chance
    for place in (Path.home(), Path(tempfile.gettempdir()), ROOT):
        assert len(place.parts) == 1 or str(place) not in written


class Kernel:
    """A Jupyter kernel, driven as a front end does."""

    def __init__(self, folder: Path) -> None:
        self._manager, self._client = start_new_kernel(kernel_name="python3", cwd=str(folder))
        self._process = psutil.Process(self._manager.provisioner.pid)

    def run(self, code: str, meanwhile: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Run a cell and return its outputs, each as Jupyter's message has it, with the `kind`."""
        sent = self._client.execute(code, allow_stdin=False)
        meanwhile()
        outputs: list[dict[str, Any]] = []
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("stream", "display_data", "execute_result", "error"):
                outputs.append({"kind": kind, **content})
            elif kind == "status" and content["execution_state"] == "idle":
                return outputs

    def printed(self, code: str) -> str:
        """What a cell prints, which is all that it does."""
        (output,) = self.run(code)
        assert output["kind"] == "stream", output
        return str(output["text"])

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def end(self) -> list[psutil.Process]:
        """End it, and return those of its processes that do not end with it."""
        family = [self._process, *self._process.children(recursive=True)]
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        left = wait_until_ended(family, 15)
        for process in left:
            process.kill()
        return left


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path)
    yield started
    assert not started.end()


START = """
import threading, time
import psutil
from torch import nn
from drivetrain import Pipeline
from drivetrain.transforms import BlurPool, LabelSmoothing

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model()

    def forward(self, images):
        time.sleep(0.05)
        return self.layers(images)

def left():
    "The threads and processes of this kernel; multiprocessing's tracker stays as long as it."
    threads = sorted(thread.name for thread in threading.enumerate())
    children = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    return threads, [command for command in children if "resource_tracker" not in str(command)]

data = dict(batch_size=32, image_size=16, workers=1)
pipeline = Pipeline(model).load(TRAIN, VAL, **data).transform(BlurPool(), LabelSmoothing(0.1))
endless = Pipeline(Slow).load(TRAIN, VAL, **data, loader="torch")
"""
FIT = "result = pipeline.fit(epochs=2, out='run', logger='csv', log_every=2)\nresult"
LEDGER = """
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, Trial, in_turn
Ledger([dict.fromkeys((PLAIN, in_turn("a"), LOADER, MODEL), Trial(64, 1.0, 0.1))])
"""
BAR = "application/vnd.jupyter.widget-view+json"


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_cells_show_themselves_can_be_run_again_and_interrupted(toy: Toy, tmp_path: Path, kernel: Kernel) -> None:
    assert kernel.run(f"TRAIN, VAL = {toy.train!r}, {toy.val!r}\n{START}") == []

    # Each shows itself once, as HTML, and has a text for front ends without.
    for code, page, text in (
        ("pipeline", ">transforms</td>", "Pipeline("),
        ("pipeline.plan()", ">why here</th>", "why here"),
        ("BlurPool().apply(model())", "<td", "BlurPool"),
        ("from drivetrain.transforms import catalogue\ncatalogue()", ">transform</th>", "┃ transform"),
        (LEDGER, "plain PyTorch</td>", "plain"),
        (f"from drivetrain.loaders import inspect\ninspect({toy.train!r})", "<pre>", "Inspection("),
    ):
        (output,) = kernel.run(code)
        assert output["kind"] == "execute_result", output
        assert page in output["data"]["text/html"]
        assert text in output["data"]["text/plain"]

    outputs = kernel.run(FIT)
    assert [output["kind"] for output in outputs].count("execute_result") == 1
    assert "the plan" in outputs[-1]["data"]["text/html"]
    assert len([output for output in outputs if BAR in output.get("data", {})]) == 2  # a bar for each epoch
    assert "why here" in (tmp_path / "run" / "plan.txt").read_text()
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 7  # the columns' names, two steps and an epoch, twice
    losses = kernel.printed("print([epoch.loss for epoch in result.history.epochs])")
    before = kernel.printed("print(left())")

    replaced, *again = kernel.run(FIT)
    assert "run held a run of 2 epochs; it is replaced" in replaced["text"]
    # What is printed is left out: the kernel sends it when it has time, in one message or several.
    first, second = ([each for each in some if each["kind"] != "stream"] for some in (outputs, again))
    assert [output["kind"] for output in second] == [output["kind"] for output in first]
    assert [BAR in output.get("data", {}) for output in second] == [BAR in output.get("data", {}) for output in first]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == len(rows)
    assert kernel.printed("print([epoch.loss for epoch in result.history.epochs])") == losses
    assert kernel.printed("print(left())") == before

    def interrupt() -> None:
        while not (tmp_path / "endless" / "history.json").exists():
            time.sleep(0.05)
        kernel.interrupt()

    (*_, error) = kernel.run("endless.fit(epochs=1000, out='endless')", meanwhile=interrupt)
    assert (error["kind"], error["ename"]) == ("error", "TrainingInterrupted")
    assert kernel.printed("print(left())") == before
    kernel.run(FIT)
    assert kernel.printed("print([epoch.loss for epoch in result.history.epochs])") == losses
