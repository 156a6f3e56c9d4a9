"""DDP on two real CPU ranks, compared with `Single` on the same global batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ddp_jobs import BATCH_NORM, CASES, ddp_everything
from drivetrain.strategies import launch
from parity_jobs import Case, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Both ranks' results of every case, from one launch."""
    return launch(ddp_everything, devices=2, timeout=120)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_train_like_one_device(ranks: list[dict[str, Any]], case: Case) -> None:
    single = train("single", case)
    # bf16 rounds at 2^-8, and the two ranks round sums of other samples.
    tolerance = 1e-6 if case.precision == "fp32" else 2e-2
    for rank in ranks:
        assert rank[case.name].losses == pytest.approx(single.losses, abs=tolerance)
        assert difference(rank[case.name].state, single.state) < 10 * tolerance
        if case.clip_norm is None:
            assert rank[case.name].norms == single.norms
        else:
            assert min(single.norms) > case.clip_norm  # so that clipping matters
            assert rank[case.name].norms == pytest.approx(single.norms, abs=tolerance)
    assert difference(ranks[0][case.name].state, ranks[1][case.name].state) == 0


def test_batch_norm_trains_like_one_device_that_accumulates(ranks: list[dict[str, Any]]) -> None:
    """Each rank's batch is one microbatch of the single device, so they normalize by the same numbers."""
    single = train("single", replace(BATCH_NORM, accumulate=2))
    for rank in ranks:
        run = rank[BATCH_NORM.name]
        assert run.losses == pytest.approx(single.losses, abs=1e-6)
        assert run.norms == pytest.approx(single.norms, abs=1e-5)
        weights = [name for name in run.state if "running" not in name and "num_batches" not in name]
        kept = [{name: state[name] for name in weights} for state in (run.state, single.state)]
        assert difference(*kept) < 1e-5
        # A single device counts both microbatches, a rank only its own.
        assert run.state["1.num_batches_tracked"] == single.state["1.num_batches_tracked"] / 2
    assert difference(*(rank[BATCH_NORM.name].state for rank in ranks)) == 0


def test_ranks_communicate_on_the_last_microbatch_only(ranks: list[dict[str, Any]]) -> None:
    """Rank r feeds r + 1 twice, and the loss is halved: r + 1 in the end, 1.5 averaged."""
    first, last = zip(*(rank["gradients"] for rank in ranks), strict=True)
    assert [g.tolist() for g in first] == [[[0.5, 0.5]], [[1.0, 1.0]]]
    assert [g.tolist() for g in last] == [[[1.5, 1.5]], [[1.5, 1.5]]]


def test_each_rank_keeps_its_own_statistics_until_they_are_synced(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, _, alone = rank["buffers"]
        assert difference(before, alone) == 0


def test_sync_buffers_pools_the_ranks(ranks: list[dict[str, Any]]) -> None:
    """The mean of the means; of the variances the mean, and the variance between the means."""
    (before_0, after_0, _), (before_1, after_1, _) = (rank["buffers"] for rank in ranks)
    between = ((before_0["1.running_mean"] - before_1["1.running_mean"]) / 2).square()
    for name, more in (("1.running_mean", 0.0), ("1.running_var", between)):
        assert not torch.equal(before_0[name], before_1[name])
        torch.testing.assert_close(after_0[name], (before_0[name] + before_1[name]) / 2 + more)
        assert torch.equal(after_0[name], after_1[name])
    assert after_0["1.num_batches_tracked"] == 2


def test_reduce_leaves_its_argument_alone(ranks: list[dict[str, Any]]) -> None:
    assert [rank["reduced"] for rank in ranks] == [(1.5, 3.0, 1.0), (1.5, 3.0, 2.0)]


def test_barrier_waits_for_the_last_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["barrier"] > 0.4


def test_sync_batch_norm_on_the_cpu_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    assert "1.0 is a SyncBatchNorm" in ranks[0]["sync batch norm"]


def test_single_is_refused_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert "prepared on 2 ranks" in ranks[1]["single"]


def test_launch_inside_a_rank_calls_the_function_there(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nested launch"] for rank in ranks] == [[0], [1]]
