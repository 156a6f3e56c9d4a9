"""Loop and optimizer methods under FSDP2 and DDP on two real ranks, compared with one device."""

from typing import Any

import pytest
import torch
from drivetrain.strategies import launch
from drivetrain.transforms import SAM, Transform
from shard_jobs import LOOPS, clip, drop_step, dropping, everything, net, train

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Both ranks' results of every case, from one launch."""
    return launch(everything, devices=2, timeout=120)


@pytest.mark.parametrize("method", [*LOOPS, SAM(rho=0.5, interval=2)], ids=repr)
def test_two_ranks_do_what_one_does(ranks: list[dict[str, Any]], method: Transform) -> None:
    """The logits after an evaluation show that FSDP2 computes with the training's weights again."""
    expected = train(net(), method)
    for rank in ranks:
        found = rank[repr(method)]
        assert found.keys() == expected.keys()
        for part, values in expected.items():
            for name, value in values.items():
                torch.testing.assert_close(found[part][name], value, rtol=0, atol=2e-6, msg=f"{part} {name}")


def test_ddp_does_too(ranks: list[dict[str, Any]]) -> None:
    expected = train(net(), LOOPS[0])["end"]
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["ddp"]["end"][name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("way", ["ddp", "blocks", "layers"])
def test_ranks_may_drop_different_branches(ranks: list[dict[str, Any]], way: str) -> None:
    """Gradients are the mean of both ranks' own, 0 for what both dropped; statistics are each rank's own."""
    alone = [drop_step(dropping(), rank) for rank in (0, 1)]
    dropped = [{name for name, g in gradients.items() if not g.any()} for gradients, _ in alone]
    assert dropped[0] != dropped[1]
    assert dropped[0] | dropped[1]
    for rank, (_, statistics) in zip(ranks, alone, strict=True):
        gradients, buffers = rank["drops"][way]
        assert gradients.keys() == alone[0][0].keys()
        for name, value in gradients.items():
            mean = (alone[0][0][name] + alone[1][0][name]) / 2
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(buffers, statistics)


def test_clipping_is_by_the_norm_of_all_shards(ranks: list[dict[str, Any]]) -> None:
    expected = clip(net())
    for rank in ranks:
        assert rank["clip"]["norm"] == pytest.approx(expected["norm"], abs=1e-6)
        for ours, theirs in zip(rank["clip"]["gradients"], expected["gradients"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_adaptive_clipping_refuses_shards(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "needs full weights, but these are sharded" in rank["adaptive"]


def test_whole_averages_are_divided_on_loading(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all((value == 2).all() for value in rank["checkpoint"].values())
