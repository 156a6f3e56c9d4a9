"""Ctrl-C at any line of the main thread ends work in threads, with a KeyboardInterrupt and nothing else."""

import dis
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from drivetrain.common.signals import interrupts_held, raising
from drivetrain.common.threads import end, in_order, results, wait
from drivetrain.loaders import FFCVLoader, convert, verify
from loader_pictures import jpeg_folder
from pipeline_data import Toy

IN_TIME = 20.0  # seconds for threads to end
ABOUT_THREADS = ("threads.py", "signals.py", "threading.py", "thread.py", "_base.py", "ffcv_loader.py")


def leaves_a_block(frame: FrameType) -> bool:
    """Whether the frame is about to end a `with` or `except` block, where Python does not look for signals.

    An exception that a trace function raises at the end of an `except` block also leaves the block's exception the
    context of all that the thread raises later.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    begins = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return begins == "POP_EXCEPT" or (line.lstrip().startswith("with ") and begins == "LOAD_CONST")


def interrupted_at(step: int, work: Callable[[], object]) -> bool:
    """Do the work, with Ctrl-C at its `step`th line about threads; return whether there was one."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(ABOUT_THREADS):
            return None
        if event == "line" and not leaves_a_block(frame):
            seen += 1
            if seen == step:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen >= step


def interrupted_everywhere(work: Callable[[], object], stride: int) -> None:
    """Do the work with Ctrl-C at every `stride`th line; fail for another exception, or threads that do not end.

    A run has a few lines more or less each time, so a wide stride meets other lines from run to run.
    """
    step, before = 1, threading.active_count()
    while interrupted_at(step, work):
        step += stride
        deadline = time.monotonic() + IN_TIME
        while threading.active_count() > before:
            assert time.monotonic() < deadline, f"a thread was left by an interrupt at line {step - stride}"
            time.sleep(0.001)
    assert step > 50


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.exception() is None


@pytest.mark.long
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_results_in_order(stride: int) -> None:
    """Without `interrupts_held`, some lines of `threading` end in a RuntimeError, or leave threads that wait."""

    def double(number: int) -> int:
        time.sleep(0.0005)
        return 2 * number

    def work() -> None:
        assert list(in_order(double, range(6), 2, "doubled", ahead=1)) == [0, 2, 4, 6, 8, 10]

    interrupted_everywhere(work, stride)


@pytest.mark.long
@pytest.mark.parametrize("stride", [31, pytest.param(5, marks=pytest.mark.slow)])
def test_loading(toy: Toy, stride: int) -> None:
    def work() -> None:
        with FFCVLoader(toy.train, batch_size=32, image_size=16, workers=2, batches_ahead=1) as loader:
            assert len(list(loader)) == 4

    interrupted_everywhere(work, stride)


@pytest.mark.long
@pytest.mark.parametrize("stride", [67, pytest.param(13, marks=pytest.mark.slow)])
def test_converting_and_verifying(tmp_path: Path, stride: int) -> None:
    images, out = jpeg_folder(tmp_path / "photos", 4), tmp_path / "photos.beton"

    def work() -> None:
        convert(images, out, workers=2, progress=False)
        assert verify(out, workers=2, progress=False).bad == []

    interrupted_everywhere(work, stride)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "photos.beton", "photos.beton.json"}


@pytest.mark.long
def test_waiting_for_an_event() -> None:
    def work() -> None:
        event = threading.Event()
        timer = threading.Timer(0.01, event.set)
        with interrupts_held():
            timer.start()
        wait(event.wait)

    interrupted_everywhere(work, 1)


def test_an_exception_is_that_of_the_work() -> None:
    """Also a TimeoutError, which `Future` raises when a wait is over, too; and what has not begun is dropped."""
    done: list[int] = []

    def fail(number: int) -> int:
        done.append(number)
        if number == 3:
            raise TimeoutError("of the work")
        time.sleep(0.01)
        return number

    found = []
    with pytest.raises(TimeoutError, match="of the work"):
        found.extend(in_order(fail, range(1000), 2, "fails"))
    assert found == [0, 1, 2]
    assert len(done) < 100


def test_ctrl_c_is_heard_while_the_work_takes_long() -> None:
    release, pool = threading.Event(), ThreadPoolExecutor(1)
    future = pool.submit(release.wait, 60.0)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results([future])
    assert time.monotonic() - start < IN_TIME
    release.set()
    end(pool)


def test_a_signal_that_raises_is_held_like_ctrl_c() -> None:
    class Alarm(Exception):
        pass

    def alarm(*_: object) -> None:
        raise Alarm

    done: list[str] = []

    def both() -> None:
        with interrupts_held():
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    number = signal.SIGUSR2
    with pytest.raises(KeyboardInterrupt) as caught, raising(number, alarm):
        both()
    assert isinstance(caught.value.__context__, Alarm)  # raised at the end of the block, and before Ctrl-C
    assert done == ["whole"]
    assert signal.getsignal(number) is signal.SIG_DFL
    with interrupts_held():
        assert signal.getsignal(number) is signal.SIG_DFL  # no longer
