"""What the tests of sharded models run inside ranks. A module, because ranks import it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drivetrain import transforms as t
from pipeline_data import attempt
from surgery_models import resnet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchvision.models.resnet import BasicBlock

STEPS, BATCH = 6, 8
DROPS = t.StochasticDepth("block", 0.5, "uniform")
LOOPS = [t.EMA(half_life=3), t.SWA(start=0.3, end=0.7), t.SWA(start=0.3, end=1.0), t.Lookahead(2)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 7), nn.GELU())  # 7 rows do not divide by two ranks
    return nn.Sequential(block, nn.LayerNorm(7), nn.Linear(7, 3))


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def cloned(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values, gathered; without the prefix of DDP's."""
    return {name.removeprefix("module."): full(value).detach().clone() for name, value in values.items()}


def share(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = samples(step)
    return images.chunk(ranks)[rank], labels.chunk(ranks)[rank]


def train(model: nn.Module, method: t.Transform, rank: int = 0, ranks: int = 1) -> dict[str, dict]:
    """Train with a loop method or SAM; gives the values seen in an evaluation, after it, and at the end."""
    factory = t.NoWeightDecay().optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
    optimizer, session, seen = factory(model.parameters()), method.session(model), {}

    def gradients(step: int) -> None:
        images, labels = share(step, rank, ranks)
        F.cross_entropy(model(images), labels).backward()

    for step in range(STEPS):
        gradients(step)
        if isinstance(method, t.SAM) and method.applies(step):
            restore = method.perturb(model.parameters())
            optimizer.zero_grad()
            gradients(step)
            restore()
        optimizer.step()
        optimizer.zero_grad()
        session.after_step((step + 1) / STEPS)
        if step == 3:
            with session.evaluating(), torch.no_grad():
                model.eval()
                images, _ = samples(100)
                seen["inside"] = cloned(model.state_dict())
                # Last, for a state dict would free the whole parameters that FSDP2 keeps after a forward.
                seen["logits"] = {"": model(images)}
            model.train()
            with torch.no_grad():
                seen["logits after"] = {"": model(images)}
    session.finish()
    seen["end"] = cloned(model.state_dict())
    return seen


def sharded() -> nn.Module:
    model = net()
    for layer in (model[0], model):
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def clip(model: nn.Module, rank: int = 0, ranks: int = 1) -> dict[str, object]:
    """Clip by norm, then by value: the norm and the gradients, gathered."""
    images, labels = share(0, rank, ranks)
    F.cross_entropy(model(images), labels).backward()
    norm = t.GradientClipping("norm", 0.1).clip(model.parameters())
    t.GradientClipping("value", 0.01).clip(model.parameters())
    return {"norm": norm.item(), "gradients": [full(p.grad) for p in model.parameters()]}


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """Averages that are whole tensors, loaded onto shards, and gathered again."""
    session = t.EMA(half_life=3).session(model)
    averages = {name: torch.full(value.shape, 2.0) for name, value in net().named_parameters()}
    session.load_state_dict({"steps": 0, "averages": averages})
    state = session.state_dict()["averages"]
    assert all(isinstance(value, DTensor) for value in state.values())
    session.load_state_dict({"steps": 0, "averages": state})
    session.finish()
    return cloned(model.state_dict())


def drop_step(model: nn.Module, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole gradients and buffers after a forward and backward of a rank's images with the rank's own draws."""
    torch.manual_seed(100 + rank)  # at the drop rate of DROPS, ranks 0 and 1 drop different branches
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
    model(images).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return cloned(gradients), cloned(dict(model.named_buffers()))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    model = resnet()
    DROPS.apply(model)
    return model


def drops(rank: int) -> dict[str, object]:
    results: dict[str, object] = {}
    model = dropping()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.broadcast_buffers = False  # so that each rank's own statistics can be seen
    results["ddp"] = drop_step(ddp, rank)
    ddp(torch.zeros(2, 3, 32, 32))  # raises if the reducer still waits for a gradient of the step before
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for name, kinds in {"blocks": BasicBlock, "layers": (nn.Conv2d, nn.Linear)}.items():
        model = dropping()
        for module in model.modules():
            if isinstance(module, kinds):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results[name] = drop_step(model, rank)
    return results


def everything() -> dict[str, object]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, object] = {
        repr(method): train(sharded(), method, rank, ranks) for method in (*LOOPS, t.SAM(rho=0.5, interval=2))
    }
    results["ddp"] = train(nn.parallel.DistributedDataParallel(net()), LOOPS[0], rank, ranks)
    results["drops"] = drops(rank)
    results["clip"] = clip(sharded(), rank, ranks)
    results["checkpoint"] = checkpoint(sharded())
    refused = sharded()
    F.cross_entropy(refused(samples(0)[0]), samples(0)[1]).backward()
    results["adaptive"] = attempt(lambda: t.GradientClipping("adaptive", 0.01).clip(refused.parameters()))
    return results
