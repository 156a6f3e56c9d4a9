"""BatchNorm over several ranks computes what one device does with the batches of all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain import StrategyError
from drivetrain.strategies import launch
from drivetrain.strategies.common import sync_batch_norm
from host_syncs import OnCuda, SimulatedCuda
from sync_norm_jobs import LAYERS, SHARES, over_ranks, passed, trained, uneven

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(over_ranks, devices=request.param, timeout=120)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_over_all_ranks_what_one_device_does(ranks: list[dict[str, Any]], name: str) -> None:
    """Equal, uneven and empty shares; outputs, gradients and running statistics, in the third step."""
    layer = LAYERS[name]
    expected = passed(layer)
    near = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2}[layer.dtype]
    near *= 10 if layer.middle == 300 else 1  # float32 has 7 digits, of which 3 are those of the middle
    for shares in SHARES[len(ranks)]:
        found = [rank[f"{name} {shares}"] for rank in ranks]
        for key, value in expected.items():
            if key in ("out", "images"):
                whole = torch.cat([each[key] for each in found])
                torch.testing.assert_close(whole, value, rtol=near, atol=near)
            elif key.startswith("gradient"):
                torch.testing.assert_close(sum(each[key] for each in found), value, rtol=10 * near, atol=10 * near)
            else:
                torch.testing.assert_close(found[0][key], value, rtol=near, atol=near)
                assert all(torch.equal(each[key], found[0][key]) for each in found)


def test_what_cannot_be_computed_over_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["refused"]
        assert (
            "sync_batchnorm=True computes statistics over the global batch, but 0 is a GhostBatchNorm2d"
            in said["ghost"]
        )
        assert "the forward of Own does not call torch.nn.functional.batch_norm" in said["own"]
        assert "Expected more than 1 value per channel" in said["one value"]


def test_a_forward_on_the_instance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statistics would have stayed those of each rank."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(4))
    model[0].forward = model[0].forward
    with pytest.raises(StrategyError, match="but the forward of 0 was replaced on the instance"):
        sync_batch_norm.sync_batch_norms(model)
    assert type(model[0]) is torch.nn.BatchNorm2d


@pytest.mark.parametrize("how", ["uneven", "recomputed"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_uneven_batches_of_which_a_rank_has_nothing(ranks: list[dict[str, Any]], name: str, how: str) -> None:
    """Also where the backward runs the layers again."""
    loss, state = trained("single", uneven(len(ranks)))
    for rank in ranks:
        found = rank[how][name]
        assert found[0] == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(found[1], state, rtol=1e-5, atol=1e-5)


def test_a_share_without_samples_sends_what_the_others_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function for GPUs sends float32, but of an empty input its own dtype."""
    dtypes = []

    class Function:
        @staticmethod
        def apply(images: torch.Tensor, *rest: Any) -> torch.Tensor:  # noqa: ARG004
            dtypes.append(images.dtype)
            return images

    monkeypatch.setattr(sync_batch_norm, "TorchFunction", Function)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with SimulatedCuda():
        for count in (0, 3):
            images = OnCuda(torch.zeros(count, 4, 2, 2, dtype=torch.bfloat16))
            found = sync_batch_norm._batch_norm(images, None, None, training=True)
            assert found.dtype == torch.bfloat16
    assert dtypes == [torch.float32, torch.bfloat16]
