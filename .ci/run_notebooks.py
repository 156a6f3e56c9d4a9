"""Run notebooks from top to bottom and keep their outputs in them: `make notebooks [NOTEBOOKS="a.ipynb …"]`.

Each notebook runs in its own kernel, in an empty folder, so that no output contains a path of this machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient

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
            cell.outputs = [output for output in cell.outputs if VIEW not in output.get("data", {})]
    nbformat.write(notebook, path)
    print(f"{path.name}: {perf_counter() - start:.0f} s, including the start of the kernel", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
