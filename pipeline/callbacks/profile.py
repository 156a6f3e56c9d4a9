"""`Profile`: a trace of some steps by torch.profiler."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ...common.checks import check_flag, check_whole
from ...common.errors import PlanError, require_suffix
from ...common.storage.addresses import local_path
from ...common.storage.files import atomic_file, make_folder
from .callback import Callback, RunView


class Profile(Callback):
    """Write a Chrome trace of some steps, for `chrome://tracing` or https://ui.perfetto.dev.

    Each step, with the loading of its batch, is a range named `step N`. Steps take longer while they are profiled.

    Args:
        out: the `.json` file to write.
        start: steps of this process before the first one in the trace, 0 or more. Default 10, after warm-up.
        steps: number of steps in the trace. Positive integer. Default 5.
        all_ranks: profile every rank, not only rank 0 (default); rank N > 0 writes `NAME-rank-N.json`.

    Raises:
        PlanError: for an invalid value.

    Example::

        >>> profile = Profile("trace.json", start=0, steps=1)
        >>> result = pipeline.fit(epochs=1, callbacks=[profile], progress=False)
    """

    only_looks = True

    def __init__(self, out: str | Path, start: int = 10, steps: int = 5, *, all_ranks: bool = False) -> None:
        if not isinstance(out, str | Path):
            raise PlanError(f"Profile: out={out!r:.60} must be the path of a file.")
        require_suffix(Path(out), ".json", PlanError)
        check_whole("Profile: start", start, PlanError, 0, also=" of steps")
        check_whole("Profile: steps", steps, PlanError, 1)
        check_flag("Profile: all_ranks", all_ranks, PlanError)
        self.out = local_path(out, "Profile: out", PlanError)
        self.start, self.steps, self.all_ranks = start, steps, all_ranks
        self._profiler: Any = None
        self._range = ExitStack()
        self._first = 0

    def on_fit_start(self, view: RunView) -> None:
        self._profiler, self._first = None, view.step + self.start
        if self._writes(view):
            make_folder(self.out.parent)
        if self.start == 0:
            self._begin(view)

    def on_step_end(self, view: RunView) -> None:
        self._range.close()
        if view.step == self._first:
            self._begin(view)
        elif self._profiler is not None and view.step == self._first + self.steps:
            self._end(view)
        elif self._profiler is not None:
            self._enter(view)

    def on_fit_end(self, view: RunView) -> None:
        self._range.close()
        if view.step <= self._first and not view.failed:  # none of the steps to profile
            if self._profiler is not None:
                self._profiler.stop()
                self._profiler = None
            view.echo(f"Profile: the run ended before step {self._first + 1}; there is no {self.out}.")
        elif self._profiler is not None:
            self._end(view)

    def _writes(self, view: RunView) -> bool:
        return view.rank == 0 or self.all_ranks

    def _begin(self, view: RunView) -> None:
        if not self._writes(view):
            return
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._enter(view)

    def _enter(self, view: RunView) -> None:
        self._range.enter_context(torch.profiler.record_function(f"step {view.step + 1}"))

    def _end(self, view: RunView) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        out = self.out if view.rank == 0 else self.out.with_stem(f"{self.out.stem}-rank-{view.rank}")
        with tempfile.TemporaryDirectory() as folder, atomic_file(out) as file:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            file.write(trace.read_bytes())
        view.echo(f"Profile: wrote {out}.")
