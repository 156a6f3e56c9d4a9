"""One rank is slow: all ranks' steps take equally long, and the run names the one that the others wait for."""

import csv
import re
import socket
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from command_line import done
from drivetrain import Pipeline
from drivetrain.pipeline.telemetry.rank_times import FACTOR, INTERVALS
from drivetrain.strategies import launch
from pipeline_data import Sleepy, Toy
from straggler_jobs import SLOW, USUAL, SlowForward, train

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(200)]

RANK_LINE = re.compile(r'drivetrain_rank_(\w+)\{run="[^"]*",rank="(\d+)"\} (\S+)')


def made(toy: Toy, model: Any, strategy: str, ranks: int) -> Pipeline:
    return toy.pipeline(model, batch_size=8).distribute(strategy, devices=ranks, device="cpu")


Trained = Callable[[int, int], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A function of the number of ranks and the slow one: what each rank returned by case, and the runs' folder."""

    @cache
    def launched(ranks: int, slow: int) -> tuple[list[dict[str, Any]], Path]:
        usual, out = partial(Sleepy, USUAL), tmp_path_factory.mktemp("runs")
        cases = {
            "ddp, slow data": made(toy, usual, "ddp", ranks),
            "ddp, slow callback": made(toy, usual, "ddp", ranks),
            "ddp, slow forward": made(toy, partial(SlowForward, slow), "ddp", ranks),
            "fsdp, slow data": made(toy, usual, "fsdp", ranks),
            "ddp, none is": made(toy, partial(Sleepy, SLOW), "ddp", ranks),
        }
        return launch(train, cases, slow, out, devices=ranks, device="cpu", timeout=180), out

    return launched


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "slow"), [(2, 1), (2, 0), (4, 2)])
def test_a_slow_rank_is_named_once_and_a_usual_one_never(trained: Trained, ranks: int, slow: int) -> None:
    results, _ = trained(ranks, slow)
    for name in results[0]:
        stragglers, told = results[0][name]
        assert all(not warned for _, warned in (result[name] for result in results[1:])), name
        if "none" in name:
            assert (stragglers, told) == ([], [])
            continue
        assert [one["rank"] for one in stragglers] == [slow], (name, stragglers)
        (one,) = stragglers
        assert (one["host"], one["step"]) == (socket.gethostname(), INTERVALS * 10)
        assert one["own_s"] > max(SLOW, FACTOR * one["median_s"])
        assert (one["data_wait_s"] > SLOW) == ("data" in name)
        assert len(told) == 1
        assert f"Rank {slow} ({socket.gethostname()}) is slow" in told[0]
        assert ("Look at its disk" in told[0]) == ("data" in name)


@pytest.mark.slow
def test_all_ranks_are_in_the_metrics(trained: Trained) -> None:
    run = trained(2, 1)[1] / "ddp, slow data"
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["ranks/slowest"]]
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    assert {float(row["ranks/slowest"]) for row in rows} == {1.0}
    assert all(float(row["ranks/slowest_own_s"]) > SLOW for row in rows)
    text = (run / "metrics.prom").read_text()
    gauges = {(name, int(rank)): float(value) for name, rank, value in RANK_LINE.findall(text)}
    names = ("step_seconds", "own_seconds", "data_wait_seconds", "memory_bytes")
    assert [*gauges] == [(name, rank) for name in names for rank in (0, 1)]
    assert all(text.count(f"# TYPE drivetrain_rank_{name} gauge\n") == 1 for name in names)
    for rank in (0, 1):
        assert gauges["step_seconds", rank] >= SLOW + USUAL  # they wait for each other
        assert gauges["memory_bytes", rank] > 1e7
    assert gauges["data_wait_seconds", 1] > SLOW > gauges["data_wait_seconds", 0]
    assert gauges["own_seconds", 1] > SLOW + USUAL > gauges["own_seconds", 0]
    text = done("watch", str(run), "--once")
    own, data = (f"{gauges[name, 1]:.3f}" for name in ("own_seconds", "data_wait_seconds"))
    assert f", slowest rank 1 of 2: {own} s per step, {data} s of data, " in text
    rows = [line.split() for line in text.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["1", "0"]
    assert rows[0][5] == own
