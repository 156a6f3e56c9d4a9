"""BatchNorm's statistics of several ranks as those of one process on whole batches. Ranks are simulated: each is a
model of its own, and the mean over them is taken here."""

from collections.abc import Callable

import pytest
import torch
from drivetrain.strategies.engine import pool_buffers
from drivetrain.transforms import GhostBatchNorm
from torch import nn

RANKS, STEPS, SHARD = 4, 80, 16


def pooled(models: list[nn.Module], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What every rank would get: one message of float64."""
    sent: list[torch.Tensor] = []
    buffers = [dict(model.named_buffers()) for model in models]
    if dtype is not None:
        buffers = [{name: value.to(dtype) for name, value in each.items()} for each in buffers]
    for model, own in zip(models, buffers, strict=True):
        pool_buffers(own, model, lambda value: sent.append(value) or value)  # type: ignore[func-returns-value]
    assert len(sent) == len(models)
    assert all(value.dtype == torch.float64 for value in sent)
    return pool_buffers(buffers[0], models[0], lambda _: torch.stack(sent).mean(0))


def trained(factory: Callable[[], nn.Module], apart: float, middle: float = 0.0) -> tuple[list[nn.Module], nn.Module]:
    """The ranks' models and that of one process, after the same batches; the ranks' data lie `apart`."""
    ranks, one = [factory() for _ in range(RANKS)], factory()
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        shards = [torch.randn(SHARD, 3, 8, 8, generator=generator) + middle + apart * r for r in range(RANKS)]
        for model, shard in zip(ranks, shards, strict=True):
            model(shard)
        one(torch.cat(shards))
    return ranks, one


@pytest.mark.parametrize("middle", [0.0, 300.0])
@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_ranks_pool_to_the_statistics_of_one_process(apart: float, middle: float) -> None:
    """To 1 / n, n = 16 · 64 values of a channel on a rank (unbiased for n, not for 4 · n), and 0.9^80 of the start.

    Also where the means are far from 0, against which the differences are small.
    """
    ranks, one = trained(lambda: nn.Sequential(nn.BatchNorm2d(3)), apart, middle)
    found, expected = pooled(ranks), dict(one.named_buffers())
    assert set(found) == {"0.running_mean", "0.running_var"}
    torch.testing.assert_close(found["0.running_mean"], expected["0.running_mean"], rtol=1e-5, atol=1e-5)
    # Of the mean a share of 0.9^80 = 2e-4 is the start's, in the ranks' means once and in the difference twice.
    torch.testing.assert_close(found["0.running_var"], expected["0.running_var"], rtol=2e-3, atol=0)
    alone = sum(model[0].running_var for model in ranks) / RANKS
    if apart:  # the mean of the variances alone is less than half of it
        assert (alone < 0.6 * expected["0.running_var"]).all()


def test_pooling_twice_changes_nothing() -> None:
    ranks, _ = trained(lambda: nn.BatchNorm2d(3), 1.0)
    once = pooled(ranks)
    for model in ranks:
        model.load_state_dict({**model.state_dict(), **once})
    for name, value in pooled(ranks).items():
        torch.testing.assert_close(value, once[name], rtol=1e-6, atol=1e-7)


def test_layers_that_average_variances_in_one_process_do_so_among_ranks() -> None:
    """GhostBatchNorm of groups that are the ranks' shards, and InstanceNorm: the same numbers as one process."""

    def ghost() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm2d(3))
        GhostBatchNorm(SHARD).apply(model)
        return model

    for factory in (ghost, lambda: nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True))):
        ranks, one = trained(factory, 1.0)
        torch.testing.assert_close(pooled(ranks)["0.running_var"], one[0].running_var, rtol=5e-2, atol=0)


def test_other_buffers_are_averaged_and_counters_left_out() -> None:
    def model(value: float) -> nn.Module:
        made = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Identity())
        made[1].register_buffer("running_var", torch.tensor([value]))  # of no BatchNorm
        made[1].register_buffer("running_mean", torch.tensor([value]))
        made[1].register_buffer("count", torch.tensor(3))
        return made

    models = [model(1.0), model(2.0)]
    assert pooled(models) == {"1.running_var": torch.tensor([1.5]), "1.running_mean": torch.tensor([1.5])}
    halves = pooled(models, torch.bfloat16)
    assert {value.dtype for value in halves.values()} == {torch.bfloat16}
    assert pool_buffers({}, models[0], lambda value: 1 / 0) == {}  # type: ignore[return-value]  # noqa: ARG005
