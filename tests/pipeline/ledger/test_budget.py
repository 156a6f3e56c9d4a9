"""The ledger keeps its time budget by taking fewer batches, rounds and variants; Ctrl-C returns the results so far."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from command_line import call
from drivetrain import LedgerError, PlanError
from drivetrain.common import budget as ledger_budget
from drivetrain.common.budget import Budget, OutOfTime, alarm, rounded_up, until
from drivetrain.loaders import TorchLoader
from drivetrain.pipeline import Ledger, LedgerInterrupted
from drivetrain.pipeline.apps.cli.training import measure
from drivetrain.pipeline.ledger.variant import MODEL, PLAIN
from drivetrain.pipeline.measuring import ledger as ledger_module
from drivetrain.pipeline.measuring import runner as ledger_runner
from drivetrain.transforms import EMA, ChannelsLast, LabelSmoothing
from ledgers import BATCH, TRAIN, Acting, in_process, small_recipe
from pipeline_data import Toy, plain_model
from places import SUPPORT
from process_state import running_children, wait_until, wait_until_ended


class Slow(Acting):
    """A model that sleeps `seconds` in each forward of a training batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def act(self, _: torch.Tensor) -> None:
        time.sleep(self.seconds)


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each thing that cannot be stopped: a trial, or building and warming up a variant."""
    found: list[float] = []

    def timed(work: Any) -> Any:
        def run(*arguments: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **more)
            finally:
                found.append(time.perf_counter() - start)

        return run

    for name in ("run_trial", "build_variant"):
        monkeypatch.setattr(ledger_runner, name, timed(getattr(ledger_runner, name)))
    return found


def staged(toy: Toy, seconds: float, **load: Any) -> Any:
    made = in_process(toy, Slow(seconds), **load)
    return made.transform(ChannelsLast(), LabelSmoothing(0.1), EMA()).distribute("single", precision="bf16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sleep", "seconds"),
    [(0.02, 2.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.25, 12.0), (0.02, 16.0)))],
)
def test_the_time_is_kept(sleep: float, seconds: float, toy: Toy, longest: list[float]) -> None:
    """Also on a machine that is slow, because the trials are measured in this very run."""
    start = time.perf_counter()
    ledger = staged(toy, sleep).ledger(seconds=seconds, within=0.001, progress=False)
    used = time.perf_counter() - start
    assert used <= seconds + max(longest) + 0.5  # provenance, closing
    assert ledger.facts["seconds"] <= used + 0.05  # rounded
    assert ledger.facts["seconds_asked"] == seconds
    # Every row and every variant is either measured or has a reason.
    names = [row.name for row in ledger.rows]
    assert names == [str(PLAIN), "+ ChannelsLast", "+ LabelSmoothing", "+ bf16", "+ EMA"] or len(names) == 5
    for row in ledger.rows:
        assert (row.ratio is None) == bool(row.note), row
    assert not ledger.left_out.keys() & ledger.rounds[0].keys()
    assert set(ledger.left_out.values()) <= {"not enough time; increase seconds"}
    for name in ledger.left_out:
        assert str(name) in " ".join(str(ledger).split())
    assert ledger.measured(PLAIN)
    assert ledger.measured(ledger.whole)


@pytest.mark.slow
def test_slow_batches_make_shorter_turns_and_fewer_variants(toy: Toy) -> None:
    """Of 0.3 s a batch, 15 variants of three rounds of four batches would take four minutes."""
    ledger = staged(toy, 0.3).ledger(seconds=16, progress=False)
    assert ledger.facts["batches_per_trial"] < TRAIN // BATCH
    assert len(ledger.left_out) > 3
    assert ledger.ceilings[MODEL].value < BATCH / 0.3


def test_too_short_for_any_ledger_tells_how_long_would_do(toy: Toy) -> None:
    with pytest.raises(LedgerError, match=r"seconds=0\.2 is too short: after .* pass about ") as caught:
        staged(toy, 0.1).ledger(seconds=0.2, progress=False)
    assert caught.value.ledger is None

    def advised(error: LedgerError) -> float:
        return float(str(error).partition("pass about ")[2].partition(" s,")[0])

    assert advised(caught.value) > 0.2
    enough = advised(caught.value)
    for _ in range(3):  # plain PyTorch alone shows little of the full pipeline
        try:
            ledger = staged(toy, 0.1).ledger(seconds=enough, progress=False)
        except LedgerError as error:
            enough = advised(error)
        else:
            break
    assert ledger.rows[-1].ratio is not None


@pytest.mark.slow
@pytest.mark.long
def test_the_least_is_one_turn_each(toy: Toy) -> None:
    """Found by adding time until there is a ledger: it has plain PyTorch and the full pipeline."""
    seconds, ledger = 0.5, None
    while ledger is None:
        try:
            ledger = staged(toy, 0.4).ledger(seconds=seconds, progress=False)
        except LedgerError:
            seconds += 0.8
    assert [row.ratio is not None for row in ledger.rows] == [True, False, False, False, True]
    assert len(ledger.rounds) == 1
    flat = " ".join(str(ledger).split())
    assert "not resolved" in flat
    assert "No interleaved round is complete" in flat


def test_a_batch_that_would_begin_too_late_does_not() -> None:
    begun = []

    def work() -> None:
        for batch in until(time.perf_counter() + 0.2, range(1000)):
            begun.append(batch)
            time.sleep(0.05)

    with pytest.raises(OutOfTime):
        work()
    assert 1 <= len(begun) <= 5
    assert list(until(float("inf"), [1, 2])) == [1, 2]


class Stuck(Acting):
    """A model that waits for a minute when it is built, or in its first forward in training."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        time.sleep(60 * (when == "build"))

    def act(self, _: torch.Tensor) -> None:
        time.sleep(60 * (self.when == "forward"))


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


@pytest.mark.long
@pytest.mark.parametrize(
    "when", ["build", "forward in the background", pytest.param("forward", marks=pytest.mark.slow)]
)
def test_what_never_ends_is_interrupted(when: str, toy: Toy, request: pytest.FixtureRequest) -> None:
    pipeline = toy.pipeline(lambda: Stuck(when.partition(" ")[0]), loader="torch", workers=0)
    if "background" in when:  # a shell starts such jobs with SIGINT ignored
        request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    before, start = handlers(), time.monotonic()
    with pytest.raises(LedgerError, match="plain PyTorch was still in its first trial"):
        pipeline.ledger(seconds=0.2, progress=False)
    assert time.monotonic() - start < 12
    assert handlers() == before


def due(seconds: float) -> float:
    """A deadline whose alarm arrives in so many seconds."""
    return time.perf_counter() - ledger_budget.GRACE + seconds


def test_the_alarm_is_over_with_its_block() -> None:
    with pytest.raises(OutOfTime), alarm(due(0.1)):
        time.sleep(30)
    with alarm(due(0.1)):
        pass
    time.sleep(0.2)  # nothing arrives any more
    with pytest.raises(KeyboardInterrupt), alarm(time.perf_counter() + 60):
        signal.raise_signal(signal.SIGINT)
    found: list[str] = []

    def elsewhere() -> None:
        with alarm(due(0.0)):
            time.sleep(0.2)
            found.append("not interrupted")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found


def test_an_import_ends_before_the_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is broken off would leave half a package in sys.modules, and files of the import system open."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.4)\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    deadline = due(0.1)

    def imports_and_sleeps() -> None:
        with alarm(deadline):
            import_module("slow_to_import")
            time.sleep(20)

    with pytest.raises(OutOfTime):
        imports_and_sleeps()
    assert time.perf_counter() < deadline + ledger_budget.GRACE + 5
    assert sys.modules.pop("slow_to_import").DONE
    # A block that ends meanwhile is not ended by it, and nothing arrives later.
    with alarm(due(0.1)):
        import_module("slow_to_import")
    time.sleep(3 * ledger_budget.AGAIN)


def test_an_alarm_that_comes_in_a_finalizer_is_sent_again() -> None:
    """Python drops what is raised there: the budget would not be kept, and a traceback printed."""
    hook = sys.unraisablehook
    came: list[str] = []

    class Slow:
        def __del__(self) -> None:
            try:
                time.sleep(30)
            finally:
                came.append("in the finalizer")

    class Failing:
        def __del__(self) -> None:
            raise ValueError("not an alarm")

    def finalizes_and_sleeps() -> None:
        with alarm(due(0.1)):
            one: Any = Slow()
            del one
            assert came
            time.sleep(30)

    start = time.perf_counter()
    with pytest.raises(OutOfTime):
        finalizes_and_sleeps()
    assert time.perf_counter() - start < 20
    assert sys.unraisablehook is hook
    with pytest.MonkeyPatch.context() as patch, alarm(time.perf_counter() + 60):
        others: list[Any] = []
        patch.setattr(sys, "unraisablehook", others.append)
        with alarm(time.perf_counter() + 60):
            other: Any = Failing()
            del other
        assert [one.exc_type for one in others] == [ValueError]  # what is not ours is printed as ever


def test_ctrl_c_as_an_alarm_is_set_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), alarm(due(0.2)):
        pass
    time.sleep(0.3)  # nothing arrives


def test_an_alarm_that_comes_as_its_block_ends_is_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A lock that the main thread waits for, as it does while the other thread sends the signal."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is threading.main_thread():
                time.sleep(2.0)
            self.lock.acquire()

        def __exit__(self, *exception: object) -> None:
            self.lock.release()

    monkeypatch.setattr(ledger_budget, "threading", SimpleNamespace(**{**vars(threading), "Lock": Slow}))
    with pytest.raises(OutOfTime), alarm(due(0.3)):
        pass


def test_the_bar_has_the_share_of_the_time_that_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Budget(10.0, time.perf_counter(), progress=True, label="ledger"):
        pass
    assert capsys.readouterr().err == ""  # a log file, where each redrawing would be another line
    monkeypatch.setattr("drivetrain.common.terminal.is_interactive", lambda: True)
    with Budget(10.0, time.perf_counter() - 4.0, progress=True, label="ledger") as budget:
        budget.show("round 3, + bf16")
    assert "ledger: round 3, + bf16:  40% of 10 s" in capsys.readouterr().err
    assert [rounded_up(value) for value in (0.123, 12.1, 99.5, 341.0)] == [0.13, 13.0, 100.0, 350.0]


def test_what_is_refused_on_the_command_line_leaves_no_folder(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"seconds=-1 \(--seconds"):
        measure(toy.pipeline(plain_model), -1.0, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for options, why in (
        ({"accuracy": True, "epochs": 0}, "epochs=0 must be"), ({"other_loader": "fcv"}, "must be a loader other than"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=why):
            measure(toy.pipeline(plain_model), 5.0, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def interrupt_in_round(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when that round begins."""
    work, came = ledger_runner.VariantRunner.run, []

    def counted(self: Any, epoch: int, *arguments: Any) -> Any:
        if epoch == number and not came:
            came.append(epoch)
            signal.raise_signal(signal.SIGINT)
        return work(self, epoch, *arguments)

    monkeypatch.setattr(ledger_runner.VariantRunner, "run", counted)


def test_ctrl_c_on_the_command_line_writes_the_ledger_so_far(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = (
        small_recipe(tmp_path / "mine.yaml", "transforms: [{name: ChannelsLast}]\n"),
        tmp_path / "out",
    )
    interrupt_in_round(2, monkeypatch)
    done = call("ledger", str(recipe), "--train", toy.train, "--seconds", "90", "--out", str(out))
    assert done.code == 130, done
    assert f"The ledger of 1 round is in {out / 'ledger.json'}." in " ".join(done.err.split())
    assert sorted(path.name for path in out.iterdir()) == ["ledger.json", "ledger.png"]
    found = Ledger.load(out / "ledger.json")
    assert found.stopped == "Interrupted (Ctrl-C)"
    assert "Interrupted (Ctrl-C) after" in " ".join(done.out.split())


@pytest.mark.long
def test_ctrl_c_gives_the_ledger_so_far_and_keeps_no_model(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.alive.clear()
    pipeline = in_process(toy, lambda: Slow(0.0)).transform(LabelSmoothing(0.1), EMA())
    handler = signal.getsignal(signal.SIGINT)
    interrupt_in_round(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt) as caught:
        pipeline.ledger(seconds=90, within=0.001, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler
    interrupt = caught.value
    assert isinstance(interrupt, LedgerInterrupted)
    assert interrupt.ledger is not None
    assert len(interrupt.ledger.rounds) == 2  # the third was not complete
    assert "Interrupted (Ctrl-C) after" in str(interrupt.ledger)
    assert "after 2 round(s)" in str(interrupt)
    assert interrupt.ledger.facts["provenance"]["versions"]
    assert interrupt.__context__ is None
    gc.collect()
    assert not list(Slow.alive)


@pytest.mark.long
def test_ctrl_c_in_the_trainings_keeps_the_speeds_and_those_that_were_finished(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(LabelSmoothing):
        """Interrupts the second training, in its first epoch."""

        def begin(self, *arguments: Any) -> None:
            if interrupting:
                raise KeyboardInterrupt
            super().begin(*arguments)

    interrupting: list[bool] = []
    pipeline = in_process(toy).transform(Late(0.1))
    train = ledger_module._train_each

    def first_plain(*arguments: Any) -> Ledger:
        interrupting.append(True)
        return train(*arguments)

    monkeypatch.setattr(ledger_module, "_train_each", first_plain)
    with pytest.raises(LedgerInterrupted) as caught:
        pipeline.ledger(seconds=20, within=0.99, accuracy=True, epochs=1, progress=False)
    assert caught.value.ledger is not None
    assert list(caught.value.ledger.accuracy.rows) == [PLAIN]
    assert caught.value.ledger.rows[1].ratio is not None


class _Late:
    """A transform that takes longer than any test, and creates a file when it begins."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __call__(self, _: Any) -> Any:
        self.begun.touch()
        time.sleep(300)


@pytest.mark.slow
@pytest.mark.process
def test_a_loader_whose_workers_decode_closes_at_once(toy: Toy, tmp_path: Path) -> None:
    """torch waits 5 s for each."""
    loader = TorchLoader(toy.train, batch_size=BATCH, image_size=16, workers=1)
    loader.dataset.transform = _Late(tmp_path / "begun")
    batches = iter(loader)

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2
    assert not running_children("spawn_main")


SCRIPT = """
import sys, time
from drivetrain import Pipeline
from drivetrain.pipeline import LedgerInterrupted
from drivetrain.pipeline.measuring import ledger as ledger_record
from drivetrain.transforms import LabelSmoothing
from pipeline_data import Sleepy

class Rounds(list):
    def append(self, trials):
        super().append(trials)
        print("round", flush=True)

make = ledger_record.Record.__init__
def init(self, *arguments, **more):
    make(self, *arguments, **more)
    self.rounds = Rounds()
ledger_record.Record.__init__ = init
train, val = sys.argv[1:]
pipeline = Pipeline(Sleepy, seconds=0.1).load(train, val, batch_size=8, image_size=16, loader="torch", workers=1)
pipeline = pipeline.distribute("ddp", devices=2)
try:
    pipeline.ledger(seconds=400, within=0.001, progress=False)
except LedgerInterrupted as interrupt:
    print("kept", len(interrupt.ledger.rounds), [row.name for row in interrupt.ledger.rows], flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_while_ranks_run_gives_the_ledger_at_once(
    toy: Toy, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), toy.train, toy.val], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(SUPPORT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "round\n", process.communicate()
    ranks = wait_for_ranks(process)
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    kept = process.stdout.readline()
    answered = time.monotonic() - begin
    _, errors = process.communicate(timeout=30)
    assert kept == "kept 1 ['plain PyTorch', '+ ddp × 2']\n", (kept, errors)
    assert answered < 5  # a second on an idle machine: a running batch, and closing
    assert "Traceback" not in errors, errors
    assert not wait_until_ended(ranks, 10)


def wait_for_ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    wait_until(lambda: len(running_children("rank_main", process.pid)) == 2, process, seconds=120)
    return running_children("rank_main", process.pid)
