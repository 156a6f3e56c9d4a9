"""What is specific to DDP, on two real CPU ranks; test_parity.py compares training with one device."""

from typing import Any

import pytest
import torch
from ddp_jobs import ddp_everything
from drivetrain.strategies import launch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Both ranks' results of every case, from one launch."""
    return launch(ddp_everything, devices=2, timeout=120)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


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
