"""The full weights at the end of an epoch: held once, and only on the ranks that keep them."""

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain import DrivetrainError
from drivetrain.common.storage.tensors import save_weights
from drivetrain.pipeline.runs import fit as fitting
from drivetrain.pipeline.runs import ranks as run_ranks
from drivetrain.pipeline.runs.artifacts import FitJob
from drivetrain.pipeline.runs.run import Run
from drivetrain.strategies import launch
from memory_jobs import BYTES, DEPTH, WIDTH, Wide, digests, everything, growth
from pipeline_data import Toy
from safetensors.torch import load_file

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def ranks(toy: Toy, root: Path) -> list[dict[str, Any]]:
    pipeline = toy.pipeline(Wide, batch_size=64).optimize("sgd", lr=0.001, schedule="constant")
    pipeline = pipeline.distribute("fsdp", devices=2, device="cpu", wrap=["Block"])
    return launch(everything, pipeline, root, devices=2, timeout=300)


@pytest.mark.slow
def test_no_rank_gathers_them_all_before_the_end(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 writes them to the run's folder one by one; without a folder, it holds them once."""
    for rank in ranks:
        assert rank["plain"]["exports"][:2] == [(0, 0)] * 2
        assert max(rank["plain"]["growth"][:2]) < 0.85 * BYTES, rank["plain"]["growth"]
    first, second = (rank["in memory"]["exports"] for rank in ranks)
    assert len(first) == len(second) == 3
    assert all(given >= BYTES and held == 0 for given, held in first)  # those of the epoch before are gone
    assert second[:2] == [(0, 0)] * 2


@pytest.mark.slow
def test_every_rank_of_a_group_that_was_there_has_the_result(ranks: list[dict[str, Any]], root: Path) -> None:
    """Its ranks have called `fit` themselves, and without torchrun's variables."""
    first, second = (rank["plain"] for rank in ranks)
    assert second["exports"][2][0] >= BYTES
    assert first["weights"] == second["weights"]
    saved = load_file(root / "plain" / "model.safetensors")
    assert first["weights"] == digests(saved)


@pytest.mark.usefixtures("one_process_group")
def test_whose_callers_get_the_result(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all ranks in a group that is there; else of rank 0, which this call starts."""
    jobs: list[FitJob] = []
    monkeypatch.setattr(fitting, "_fit", lambda _, job: jobs.append(job))
    pipeline = toy.pipeline(Wide)
    pipeline.fit(epochs=3, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: False)
        pipeline.fit(epochs=3, progress=False)
    assert [job.each_rank for job in jobs] == [True, False]
    second: Any = [SimpleNamespace(_lead=False, _job=job) for job in jobs]
    kept = [[Run._keeps(rank, epoch) for epoch in (1, 2, 3)] for rank in second]
    assert kept == [[False, False, True], [False] * 3]


@pytest.mark.slow
def test_the_rank_that_keeps_none_does_not_grow_by_a_copy(ranks: list[dict[str, Any]]) -> None:
    """As the system counts its memory, in which buffers of the communication are, too."""
    first, second = (rank["in memory"]["growth"] for rank in ranks)
    assert max(first) > BYTES, first  # a copy is visible here, where the allocator kept no memory for it
    assert min(second[:2]) < 0.85 * BYTES, second  # the allocator's own growth is in one of them at times


def test_nothing_of_a_finished_run_waits_for_the_garbage_collector(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, optimizer and open files are released when `fit` returns; on a GPU, the next run needs their memory."""
    engines: list[weakref.ref[Any]] = []

    def build(*arguments: Any) -> Any:
        built = real(*arguments)
        engines.append(weakref.ref(built.engine))
        return built

    real = run_ranks.build
    monkeypatch.setattr(run_ranks, "build", build)
    pipeline = toy.pipeline()
    pipeline.fit(epochs=1, progress=False)  # torchmetrics' first import leaves frames in exceptions
    gc.collect()
    gc.disable()
    try:
        pipeline.fit(epochs=1, out=tmp_path, progress=False)
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]  # noqa: PTH208
    finally:
        gc.enable()
    assert [engine() for engine in engines] == [None, None]
    assert not {toy.train, toy.val} & set(files)


def test_writing_the_weights_takes_no_copy_of_them(tmp_path: Path) -> None:
    state, grown = {str(n): torch.randn(WIDTH, WIDTH) for n in range(DEPTH)}, list[int]()
    save_weights(state, tmp_path / "warm.safetensors")
    with growth(grown):
        save_weights(state, tmp_path / "model.safetensors")
    assert grown[0] < 0.4 * BYTES
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), state, rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "warm.safetensors"]
    odd = {
        "half": torch.randn(3, 5).half(), "brain": torch.randn(7).bfloat16(), "flag": torch.tensor([True, False]),
        "number": torch.tensor(5), "empty": torch.zeros(0, 3), "byte": torch.arange(3, dtype=torch.uint8),
        "double": torch.randn(2, 2).double(), "turned": torch.randn(4, 3).t(), "ä ::\"": torch.zeros(1),
    }  # fmt: skip
    save_weights(odd, tmp_path / "odd.safetensors")
    assert {name: value.dtype for name, value in load_file(tmp_path / "odd.safetensors").items()} == {
        name: value.dtype for name, value in odd.items()
    }
    torch.testing.assert_close(load_file(tmp_path / "odd.safetensors"), odd, rtol=0, atol=0)
    save_weights({}, tmp_path / "none.safetensors")
    assert load_file(tmp_path / "none.safetensors") == {}
    with pytest.raises(DrivetrainError, match="'odd': safetensors has no"):
        save_weights({"odd": torch.zeros(1, dtype=torch.float8_e5m2fnuz)}, tmp_path / "odd.safetensors")
    with pytest.raises(DrivetrainError, match=r"gone/model\.safetensors could not be written"):
        save_weights(state, tmp_path / "gone" / "model.safetensors")


@pytest.mark.slow
def test_under_torchrun_every_rank_has_the_result_and_gathers_it_at_the_end(
    ranks: list[dict[str, Any]], root: Path
) -> None:
    first, second = (rank["torchrun"] for rank in ranks)
    assert second["exports"][0] == (0, 0)
    assert second["exports"][1][0] >= BYTES
    assert first["weights"] == second["weights"]
    saved = load_file(root / "torchrun" / "model.safetensors")
    assert first["weights"] == digests(saved)


@pytest.mark.slow
def test_a_checkpoint_is_of_shares_and_resuming_gathers_nothing_early(ranks: list[dict[str, Any]], root: Path) -> None:
    (place,) = (root / "checkpoints" / "checkpoints").glob("step-*")
    shares = [(place / f"model-0000{number}-of-00002.safetensors").stat().st_size for number in (1, 2)]
    assert 0.4 * BYTES < min(shares) <= max(shares) < 0.6 * BYTES
    for rank in ranks:
        # Of the last epoch: the weights that are kept, for every rank is a caller; then, the checkpoint.
        (kept, _), (gathered, _) = rank["checkpoints"]["exports"]
        assert kept >= BYTES
        assert gathered == 0
        assert rank["resumed"]["exports"][-1][0] >= BYTES
    first, second = (rank["resumed"] for rank in ranks)
    assert first["weights"] == second["weights"]
