"""FFCVLoader releases threads, descriptors and memory, and restores the state of the process."""

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, open_beton
from drivetrain.loaders.decode import decoder
from drivetrain.loaders.native.library import library
from held import grown, settled
from loader_pictures import run_python


def loader(path: Path, **options: object) -> FFCVLoader:
    return FFCVLoader(path, **{"batch_size": 3, "image_size": 32, "workers": 2, **options})


def warm_up(path: Path) -> None:
    with loader(path) as made:
        list(made)


def leave_early(path: Path) -> None:
    made = loader(path)
    for _ in range(8):
        for number, _ in enumerate(made):
            if number == 1:
                break
    made.close()


def leave_early_and_forget(path: Path) -> None:
    for _ in range(8):
        next(iter(loader(path)))


def two_at_once(path: Path) -> None:
    with loader(path, seed=1) as one, loader(path, seed=2) as other:
        pairs = list(zip(one, other, strict=True))
        assert len(pairs) == 6
        assert not any(torch.equal(a[0], b[0]) for a, b in pairs)


def many_epochs(path: Path) -> None:
    with loader(path) as made:
        for _ in range(20):
            assert len(list(made)) == 6


def raise_in_the_loop(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), loader(path) as made:
        _ = [1 // (len(labels) - 3) for _, labels in made]


@pytest.mark.long
@pytest.mark.parametrize("use", [leave_early, leave_early_and_forget, two_at_once, many_epochs, raise_in_the_loop])
def test_threads_and_descriptors_come_back(photos: Path, use: Callable[[Path], None]) -> None:
    warm_up(photos)
    use(photos)  # once before counting: OpenCV and torch start pools of their own at first use
    before = settled()
    use(photos)
    assert not grown(before)


def start_all_threads(made: FFCVLoader) -> None:
    """The pool starts a thread only when no other is idle, which an epoch of few chunks may not need."""
    assert made._pool is not None
    together = threading.Barrier(made.workers)
    list(made._pool.map(lambda _: together.wait(10), range(made.workers)))


@pytest.mark.long
def test_an_open_loader_does_not_grow(photos: Path) -> None:
    with loader(photos) as made:
        list(made)
        start_all_threads(made)
        before = settled()
        for _ in range(8):
            next(iter(made))
        assert not grown(before)


def test_memory_does_not_grow(photos: Path) -> None:
    process = psutil.Process()
    with loader(photos, image_size=160) as made:
        for _ in range(15):
            list(made)
        gc.collect()
        before = process.memory_info().rss
        for _ in range(20):
            list(made)
        gc.collect()
        assert process.memory_info().rss - before < 12 << 20  # one epoch alone allocates 7 MB of batches


@pytest.mark.parametrize("end", ["the loop", "the loader"])
def test_batches_in_preparation_are_freed(photos: Path, end: str) -> None:
    """Also while the loader is kept, as a pipeline keeps its own."""
    made = loader(photos)
    batches: Any = iter(made)
    next(batches)
    waiting = [weakref.ref(request) for _, request in made._ahead]
    assert waiting
    if end == "the loop":
        batches.close()
        start_all_threads(made)  # which have ended what they did before
    else:
        made.close()
    gc.collect()
    assert not any(request() for request in waiting)
    made.close()


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The native core's workspaces that are made and freed; the library does so as ever."""
    counts, core = {"made": 0, "freed": 0}, library()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        @staticmethod
        def dt_workspace_new() -> Any:
            counts["made"] += 1
            return core.dt_workspace_new()

        @staticmethod
        def dt_workspace_free(workspace: Any) -> None:
            counts["freed"] += 1
            core.dt_workspace_free(workspace)

    monkeypatch.setattr(decoder.library, "library", Counting)
    return counts


@pytest.mark.long
def test_decoders_of_forgotten_loaders_are_freed(photos: Path, workspaces: dict[str, int]) -> None:
    for number in range(4):
        made = loader(photos)
        list(made) if number % 2 else next(iter(made))
        reference = weakref.ref(made)
        del made
        gc.collect()
        assert reference() is None  # nothing keeps it alive
    deadline = time.monotonic() + 10
    while workspaces["freed"] < workspaces["made"] and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread may still have the last part of a batch
    assert workspaces["made"] >= 4
    assert workspaces["freed"] == workspaces["made"]
    made = loader(photos)
    list(made)
    made.close()
    made.close()
    assert workspaces["freed"] == workspaces["made"]


def test_close_twice_and_iterate_again(photos: Path) -> None:
    made = loader(photos, train=False)
    made.close()
    first = list(made)
    made.close()
    made.close()
    again = list(made)
    made.close()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not [t for t in threading.enumerate() if t.name.startswith("drivetrain-load")]


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_loop_that_was_overtaken_says_so(photos: Path, kind: type[FFCVLoader] | type[TorchLoader]) -> None:
    made = kind(photos, batch_size=3, image_size=32, workers=1 if kind is FFCVLoader else 0)
    old = iter(made)
    next(old)
    made.close()
    with pytest.raises(DataError, match="closed or iterated again"):
        next(old)
    old = iter(made)
    next(old)
    state = made.state_dict()
    new = iter(made)
    with pytest.raises(DataError, match="Use one loop at a time"):
        next(old)
    next(new)
    assert (state["epoch"], state["position"]) == (1, 1)
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (2, 1)
    made.close()


@pytest.mark.process
def test_thread_counts_are_left_alone_and_nothing_is_printed_or_imported(photos: Path) -> None:
    code = """
import sys, warnings
warnings.simplefilter("error")
import torch
torch.set_num_threads(2)
from drivetrain.loaders import FFCVLoader
loader = FFCVLoader(sys.argv[1], batch_size=4, image_size=32)
for images, labels in loader:
    pass
next(iter(loader))
assert torch.get_num_threads() == 2, torch.get_num_threads()
assert "numba" not in sys.modules and "ffcv" not in sys.modules
"""  # it ends with a loop left early and nothing closed
    run = run_python(code, photos, OMP_NUM_THREADS="2")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# Samples that do not decode


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> Path:
    """A copy whose samples 4 (headers) and 9 (all of it) are zeroed, and 13 cut short by its end marker."""
    path = Path(shutil.copy(photos, tmp_path / "damaged.beton"))
    beton = open_beton(photos)
    starts, sizes = beton.pointers.astype(int), beton.sizes.astype(int)
    with path.open("r+b") as file:
        for index, begin, count in ((4, 2, 100), (9, 0, sizes[9]), (13, sizes[13] // 2, 300)):
            file.seek(starts[index] + begin)
            file.write(bytes(count))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_that_does_not_decode(damaged: Path, workers: int) -> None:
    """In full: what lies outside of a crop is not decoded, and damage there not noticed."""
    whole = {"train": False, "eval_ratio": 1.0, "image_size": 64}
    with loader(damaged, batch_size=1, workers=workers, **whole) as made:
        for index, words in (
            (4, "sample 4: "),
            (9, "sample 9: "),
            (13, "sample 13: its JPEG data cannot be decoded"),
        ):
            made.set_indices([0, 1, 2, index, 3])
            begin = time.monotonic()
            with pytest.raises(BetonError, match=words) as caught:
                list(made)
            assert time.monotonic() - begin < 1
            assert str(damaged) in str(caught.value)
            assert "Exclude it with indices=" in str(caught.value)
            assert made.state_dict()["position"] == 3
        made.set_indices([i for i in range(18) if i not in (4, 9, 13)])
        assert len(list(made)) == 15
    with loader(damaged, workers=workers) as made, pytest.raises(BetonError, match=r"sample (4|9): "):
        list(made)


@pytest.mark.process
@pytest.mark.parametrize(
    ("index", "workers"),
    [(4, 0), (9, 0), pytest.param(9, 1, marks=pytest.mark.slow)],  # a process takes seconds
)
def test_torch_loader_notices_them_too(damaged: Path, index: int, workers: int) -> None:
    with (
        TorchLoader(damaged, batch_size=1, image_size=32, workers=workers, indices=[index]) as made,
        pytest.raises(BetonError, match=f"sample {index}: its JPEG data cannot be decoded"),
    ):
        list(made)


def test_torch_loader_notices_the_third_by_its_checksum(damaged: Path, photos: Path) -> None:
    """Pillow alone would give a picture whose lower half is wrong."""
    shutil.copy(f"{photos}.json", f"{damaged}.json")
    with (
        TorchLoader(damaged, batch_size=1, image_size=32, workers=0, indices=[13], verify=True) as made,
        pytest.raises(BetonError, match="sample 13: "),
    ):
        list(made)
