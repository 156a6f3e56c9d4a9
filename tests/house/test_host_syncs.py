"""The instruments of `host_syncs` detect what they should."""

import torch
from host_syncs import HostSyncs, SimulatedCuda


def test_reads_are_seen_and_the_optimizers_counters_are_not() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    with HostSyncs() as none:
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert none.found == []
    with HostSyncs() as syncs:
        weight.sum().item()
        weight.detach().tolist()
        if (weight > 0).all():
            weight.detach()[weight.detach() > 0]
    names = [line.split()[0] for line in syncs.found]
    assert names[0] == "_local_scalar_dense"
    assert "index" in names
    assert len(names) >= 4
    assert all("test_host_syncs.py" in line for line in syncs.found)


def test_a_simulated_gpu() -> None:
    with SimulatedCuda() as device:
        images = torch.zeros(4, 3, device="cuda")
        draw = int(torch.randint(2, 3, ()))  # of the host, with a value
        order = torch.randperm(4).pin_memory()
        assert draw == 2
        mixed = images * 0.5 + images.roll(draw, 0) * torch.rand(()).item()
        assert device.found == []
        assert mixed.device.type == "cuda"
        assert mixed[order.to("cuda", non_blocking=True)].shape == (4, 3)
        assert device.found == []
        order.to("cuda")
        torch.tensor([0.5, 0.5], device="cuda")
        images.cpu()
        assert len(device.found) == 3, device.found
        images.sum().item()
        images.tolist()
        assert len(device.found) == 5, device.found
