"""Run notebooks from top to bottom and keep their outputs in them: `make notebooks [NOTEBOOKS="a.ipynb …"]`.

Each notebook runs in its own kernel, in an empty folder, so that no output contains a path of this machine; the home
folder, where data is cached, is written as ~.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SECONDS = 600  # limit for a cell: the quickstart trains for six minutes
VIEW = "application/vnd.jupyter.widget-view+json"


def run(path: Path) -> None:
    """Run one notebook, and write it if no cell failed."""
    notebook = nbformat.read(path, as_version=4)
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
            store_widget_state=False, resources={"metadata": {"path": folder}},
        ).execute()  # fmt: skip
    for cell in notebook.cells:
        if cell.cell_type == "code":  # in a live notebook, a finished progress bar leaves nothing, either
            cell.outputs = [abbreviated(output) for output in cell.outputs if VIEW not in output.get("data", {})]
    nbformat.write(notebook, path)
    print(f"{path.name}: {perf_counter() - start:.0f} s, including the start of the kernel", flush=True)


def abbreviated(output: NotebookNode) -> NotebookNode:
    """Return an output of a cell with ~ for the home folder, in texts but not in pictures."""
    home = f"{Path.home()}/"
    if "text" in output:
        output.text = output.text.replace(home, "~/")
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = value.replace(home, "~/")
    return output


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
