"""`OptunaPruning` and `RayReport` with the real libraries, and the scripts of `docs/guide/search.md` as printed."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from drivetrain import OptunaPruning, PlanError, RayReport
from drivetrain.pipeline import load_run
from pipeline_data import Toy
from places import ROOT
from process_state import output_of

OPTUNA, RAY = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/search.md").read_text(), re.DOTALL)
optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def trial_of(direction: str = "maximize", threshold: float = 2.0) -> Any:
    """A trial that is pruned below the threshold: at once, with the default."""
    pruner = optuna.pruners.ThresholdPruner(lower=threshold)
    return optuna.create_study(direction=direction, pruner=pruner).ask()


def test_a_pruned_run_is_a_stopped_run(toy: Toy, tmp_path: Path) -> None:
    trial, out = trial_of(), tmp_path / "run"
    fit = toy.pipeline(workers=1).fit
    own: dict[str, Any] = {"epochs": 3, "out": out, "progress": False}
    for resume, one in ((None, trial), ("auto", trial_of())):  # resumed, it is pruned still
        with pytest.raises(optuna.TrialPruned, match="Optuna pruned the trial after epoch 1, at top1"):
            fit(**own, resume=resume, callbacks=[OptunaPruning(one, "top1")])
    saved = load_run(out)
    assert len(saved.history.epochs) == 1
    assert saved.stopped == f"Optuna pruned the trial after epoch 1, at top1 {saved.metrics['top1']:.6g}"
    assert trial.study.trials[0].intermediate_values == {1: saved.metrics["top1"]}
    assert len(list((out / "checkpoints").glob("step-*/state.json"))) == 1
    unpruned = OptunaPruning(trial_of(threshold=0), "top1")
    more = fit(**own, resume="auto", continue_stopped=True, callbacks=[unpruned])
    assert (len(more.history.epochs), more.stopped) == (3, None)
    done = fit(epochs=1, progress=False, callbacks=[OptunaPruning(trial_of(), "top1")])
    assert done.stopped is None  # nothing was left to prune


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptunaPruning(trial_of(), "val_top1"), "no metric is named 'val_top1'. Did you mean 'top1'"),
        (lambda: OptunaPruning(trial_of("minimize"), "top1"), "is 'minimize', but of 'top1', higher is better"),
        (lambda: OptunaPruning(trial_of().study, "top1"), "is not a trial"),
        (lambda: OptunaPruning(trial_of(), 3), "monitor=3 must be the name"),  # type: ignore[arg-type]
        (lambda: OptunaPruning(None, "top1"), "trial=None on rank 0"),
        (lambda: OptunaPruning(optuna.create_study(directions=["minimize"] * 2).ask(), "loss"), "with 2 objectives"),
        (lambda: RayReport("top1"), "must be a list of names"),
        (lambda: RayReport(["top6"]), "no metric is named 'top6'"),
        (lambda: RayReport(), "this is not a trial"),
    ],
)  # fmt: skip
def test_what_cannot_report_is_refused(make: Any, words: str, toy: Toy) -> None:
    with pytest.raises(PlanError, match=words):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[make()])


def test_ranks_in_other_processes_are_refused(toy: Toy) -> None:
    pipeline = toy.pipeline().distribute("ddp", devices=2, device="cpu")
    for one in (OptunaPruning(trial_of(), "top1"), RayReport()):
        with pytest.raises(PlanError, match=r"would start the ranks in others\. .*distribute\('single'\)"):
            pipeline.fit(epochs=1, progress=False, callbacks=[one])


@pytest.fixture
def here(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.beton").symlink_to(toy.train)
    Path("val.beton").symlink_to(toy.val)
    return tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_the_script_for_optuna() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    with redirect_stdout(StringIO()) as printed:
        exec(compile(OPTUNA, "guide", "exec"), names)
    assert "best top1" in printed.getvalue()
    states = [trial.state.name for trial in names["study"].trials]
    assert states[:2] == ["COMPLETE"] * 2
    assert {len(load_run(f"search/{n}").history.epochs) == 4 for n, state in enumerate(states) if state == "COMPLETE"}


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """Of Ray that writes to a short path only, because its sockets are below it; its processes end with the test."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"HOME": folder, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths}
    yield os.environ | own
    for process in left(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def left(folder: str) -> list[psutil.Process]:
    processes = psutil.process_iter(["environ"])
    return [each for each in processes if (each.info["environ"] or {}).get("HOME") == folder]


@pytest.mark.process
@pytest.mark.slow
def test_the_script_for_ray_tune(here: Path, ray_environment: dict[str, str]) -> None:
    pytest.importorskip("ray.tune")
    printed = output_of(sys.executable, "-c", RAY, env=ray_environment, timeout=600)
    assert "{'lr': 0.05}" in printed
    epochs = [len(load_run(run).history.epochs) for run in (here / "search").iterdir()]
    ended, whole = sorted(epochs)
    assert ended < whole == 4  # ASHA has ended one, which may have trained on until Ray did so
    assert not left(ray_environment["HOME"])
