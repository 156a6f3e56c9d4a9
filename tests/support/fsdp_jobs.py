"""What the FSDP tests run inside ranks, and on one device for comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsdp_models as models
import surgery_models
import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.transforms import TRANSFORMS, BlurPool, Transform
from parity_jobs import CASES, SHARDED, Case, batch, evaluate, microbatch_gradients, quiet, train
from strategy_jobs import make_optimizer, refusal
from surgery_cases import CASES as SURGERY_CASES
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

FAMILY = SHARDED


def surgeries() -> list[Case]:
    """Each surgery that FSDP takes, on the first of the models that it is tested on elsewhere."""
    firsts: dict[type[Transform], tuple[Transform, Callable[[], nn.Module]]] = {
        type(transform): (transform, factory) for transform, factory, _ in reversed(SURGERY_CASES.values())
    }
    firsts[BlurPool] = (BlurPool(), surgery_models.resnet)
    chosen = [k for k in TRANSFORMS.values() if k.kind == "surgery" and "fsdp" not in k.unsafe_with]
    return [Case(kind.__name__, Changed(*firsts[kind]), pixels=32) for kind in chosen]


@dataclass(frozen=True)
class Changed:
    transform: Transform
    factory: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.factory()
        self.transform.apply(model)
        return model


def everything() -> dict[str, object]:
    """All that is asked of the family alone in one launch, because starting ranks costs seconds."""
    quiet()
    results: dict[str, object] = {**changed("fsdp"), **changed("ddp", every=5)}
    results["gradients"] = microbatch_gradients("fsdp")
    results["stale"] = evaluated_before_step()
    results["layouts"] = activation_layouts()
    results["gathered"] = {name: gathered_after_forward(name) for name in FAMILY}
    results["optimizer"] = optimizer_kinds()
    results["meta"] = from_meta()
    results["units"] = {name: names_of_units(model(), wrap) for name, (model, wrap, _) in WRAPS.items()}
    results["nested"] = train("fsdp", CASES[1], seed=dist.get_rank(), wrap=nested)
    results["refusals"] = refusals()
    results["gathered to each"] = gather_to_each_rank()
    return results


def changed(strategy: str, every: int = 1) -> dict[str, object]:
    """Trainings of changed models. GyroDropout draws its masks when it is made: from the same seed on each rank."""
    quiet()
    return {f"{strategy} {case.name}": train(strategy, case) for case in surgeries()[every - 1 :: every]}


def nested(name: str, module: nn.Module) -> bool:
    """A block, a convolution inside it, and what has no parameters."""
    return name in ("4", "4.conv1") or isinstance(module, nn.ReLU)


WRAPS: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "blocks": (models.resnet, True, ["", "4", "5"]),
    "none": (models.resnet, False, [""]),
    "classes": (models.resnet, ["BasicBlock", "BatchNorm2d"], [
        "", "1", "4", "4.bn1", "4.bn2", "5", "5.bn1", "5.bn2", "5.downsample.1",
    ]),
    "function": (models.resnet, nested, ["", "4", "4.conv1"]),
    "tied": (models.Tied, ["Sequential", "Tied"], ["", "blocks.1", "blocks.2"]),
}  # fmt: skip
"""A model, what is chosen of it, and the names of the modules that are then gathered by themselves."""


def names_of_units(model: nn.Module, wrap: Any) -> list[str]:
    strategies.get("fsdp", device="cpu", wrap=wrap).prepare(model, make_optimizer("sgd"))
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def evaluated_before_step() -> list[torch.Tensor]:
    """Outputs after a step that an evaluation preceded, and of the exported weights: they must be equal."""
    torch.manual_seed(0)
    engine = strategies.get("fsdp_grad_op", device="cpu").prepare(models.resnet(), make_optimizer("sgd"))
    images, labels = batch(0, 16)
    engine.backward(cross_entropy(engine.model(images), labels))
    evaluate(engine, images)
    engine.step()
    with torch.no_grad():
        found = engine.model(images)
    plain = models.resnet().eval()
    plain.load_state_dict(engine.export_state())
    return [found, plain(images).detach()]


def activation_layouts() -> dict[str, bool]:
    """Whether each convolution's output is channels-last, of a model whose weights were."""
    model = models.channels_last()
    engine = strategies.get("fsdp", device="cpu").prepare(model, make_optimizer("sgd"))
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
    engine.model(batch(0, 16)[0])
    return {name: out.is_contiguous(memory_format=torch.channels_last) for name, out in outputs.items()}


def gathered_after_forward(strategy: str) -> tuple[bool, bool]:
    """Whether a block's parameters, and the root's, are whole between forward and backward."""
    engine = strategies.get(strategy, device="cpu").prepare(models.resnet(), make_optimizer("sgd"))
    engine.model(batch(0, 16)[0])
    block, root = engine.plain_model[4].conv1.weight, engine.plain_model[0].weight
    return not isinstance(block, DTensor), not isinstance(root, DTensor)


def optimizer_kinds() -> list[str]:
    engine = strategies.get("fsdp", device="cpu").prepare(models.resnet(), make_optimizer("sgd"))
    return sorted({type(p.data).__name__ for group in engine.optimizer.param_groups for p in group["params"]})


def on_meta() -> nn.Module:
    """Its blocks, then its last layer, are reset in the order in which they are built."""
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(6, 2))


class Forgetful(nn.Linear):
    """Its `reset_parameters`, a linear layer's, does not know of its buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))


def from_meta() -> dict[str, torch.Tensor]:
    """The first weights of a model that was built on the meta device, with random numbers of its rank."""
    with torch.device("meta"):
        model = on_meta()
    torch.manual_seed(dist.get_rank())
    return strategies.get("fsdp", device="cpu").prepare(model, make_optimizer("sgd")).export_state()


def refusals() -> dict[str, str]:
    scalar = nn.Linear(2, 1)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    twice = nn.Linear(2, 1)
    strategies.get("fsdp", device="cpu").prepare(twice, make_optimizer("sgd"))
    assert isinstance(twice, FSDPModule)
    with torch.device("meta"):
        meta = nn.Sequential(models.Transformer())
        forgetful = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Forgetful()), nn.Sequential(nn.Linear(2, 2)))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    return {
        "scalar": refusal("fsdp", scalar),
        "sharded twice": refusal("hsdp", twice),
        "meta": refusal("fsdp", meta),
        "forgetful": refusal("fsdp", forgetful),
        "wrapped": refusal("fsdp_grad_op", wrapped),
        "lazy": refusal("fsdp_cpu_offload", nn.Sequential(nn.LazyLinear(2))),
        "sync batch norm": refusal("fsdp", nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))),
        "untrainable": refusal("fsdp", nn.Linear(2, 1).requires_grad_(False)),
    }


def gather_to_each_rank() -> list[tuple[int, bool]]:
    """On each rank: of tensors whose rows are not a multiple of the ranks, and each home: the number of values that
    arrive here, and whether they are those of a gathering on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    engine = strategies.get("fsdp", device="cpu").prepare(model, torch.optim.SGD)
    found = []
    for value in model.state_dict().values():
        whole = engine.gather(value)
        for home in range(engine.world_size):
            here = engine.gather(value, home)
            found.append((here.numel(), torch.equal(here, whole)))
    return found
