"""What the FSDP tests run inside ranks, and on one device beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import fsdp_models as models
import surgery_models
import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.strategies.memory import held_bytes
from drivetrain.transforms import TRANSFORMS, BlurPool, Transform
from strategy_jobs import make_optimizer, refusal
from surgery_cases import CASES as SURGERY_CASES
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

STEPS, BATCH = 8, 8
FAMILY = ["fsdp", "fsdp_grad_op", "fsdp_cpu_offload", "hsdp"]


@dataclass(frozen=True)
class Case:
    """One training run that every strategy of the family must repeat; `accumulate` is a rank's."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: str = "sgd"
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    steps: int = STEPS
    pixels: int = 16


CASES = [
    Case("resnet sgd", models.resnet),
    Case("resnet sgd clipped accumulated", models.resnet, clip_norm=0.5, accumulate=2),
    Case("resnet adamw", models.resnet, "adamw"),
    Case("transformer sgd accumulated", models.Transformer, accumulate=2),
    Case("transformer adamw clipped accumulated", models.Transformer, "adamw", 0.5, 2),
]
KINDS = [
    Case("tied", models.Tied, "adamw", 0.5, 2),
    Case("frozen", models.frozen, clip_norm=0.5),
    Case("one layer", models.one_layer, "adamw"),
    Case("channels last", models.channels_last),
]
BF16 = [
    Case("resnet bf16", models.resnet, precision="bf16"),
    Case("transformer bf16", models.Transformer, "adamw", 0.5, 2, "bf16"),
]


def surgeries() -> list[Case]:
    """Each surgery that FSDP takes, on the first of the models that it is tested on elsewhere."""
    firsts: dict[type[Transform], tuple[Transform, Callable[[], nn.Module]]] = {
        type(transform): (transform, factory) for transform, factory, _ in reversed(SURGERY_CASES.values())
    }
    firsts[BlurPool] = (BlurPool(), surgery_models.resnet)
    chosen = [
        kind for kind in TRANSFORMS.values() if kind.kind == "surgery" and "fsdp" not in kind.unsafe_with
    ]
    return [Case(kind.__name__, Changed(*firsts[kind]), steps=3, pixels=32) for kind in chosen]


@dataclass(frozen=True)
class Changed:
    """The factory of a model after surgery."""

    transform: Transform
    factory: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.factory()
        self.transform.apply(model)
        return model


@dataclass
class Run:
    """What came out of a training run on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: float = 0.0


def train(strategy: str, case: Case, *, seed: int = 0, parts: int = 1, **options: object) -> Run:
    """Trains on the same global batches on any number of ranks.

    Args:
        seed: of the first weights; rank 0's must win.
        parts: multiplies `case.accumulate`: one device gets as many microbatches as `parts` ranks do.
    """
    torch.manual_seed(seed)
    engine = strategies.get(strategy, device="cpu", **options).prepare(
        case.model(),
        make_optimizer(case.optimizer),
        precision=case.precision,
        clip_norm=case.clip_norm,
        accumulate=case.accumulate * parts,
    )
    run = Run()
    for step in range(case.steps):
        engine.model.train()
        images, labels = batch(step, case.pixels)
        run.losses.append(one_step(engine, step, images, labels, run))
        if step == case.steps // 2:
            run.evaluated = evaluate(engine, images)
    engine.sync_buffers()
    run.state = engine.export_state()
    return run


def batch(step: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, pixels, pixels, generator=generator)
    return images, torch.randint(5, (BATCH,), generator=generator)


def one_step(engine, step: int, images, labels, run: Run) -> float:
    total = torch.zeros(())
    part = BATCH // engine.accumulate // engine.world_size
    for i in range(engine.accumulate):
        number = i * engine.world_size + engine.rank
        own = slice(number * part, (number + 1) * part)
        torch.manual_seed(100 * step + number)  # dropout and the like: as the same part on one device
        with engine.forward_context():
            logits = engine.model(images[own]).flatten(1)
            loss = cross_entropy(logits.float(), labels[own])
        engine.backward(loss, last_microbatch=i == engine.accumulate - 1)
        total += loss.detach() / engine.accumulate
    run.norms.append(engine.step())
    return float(engine.reduce(total))


@torch.no_grad()
def evaluate(engine, images) -> float:
    """In the middle of training, after the buffers' mean: it must leave no trace in what follows."""
    engine.sync_buffers()
    engine.model.eval()
    with engine.forward_context():
        return float(engine.plain_model(images).float().square().mean())


def everything(extra: bool = True) -> dict[str, object]:
    """All that is asked of the family in one launch, because starting ranks costs seconds."""
    warnings.simplefilter("error")  # as in the tests' own process
    # Plain models give it too: the stride of a depthwise convolution's gradient.
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {"hsdp": {"shard_size": max(1, size // 2)}}
    results: dict[str, object] = {}
    for name in FAMILY:
        for case in CASES:
            # Each rank starts from weights of its own: rank 0's must become everyone's.
            results[f"{name} {case.name}"] = train(name, case, seed=rank, **groups.get(name, {}))
    if extra:
        results["ddp " + CASES[0].name] = train("ddp", CASES[0])
        results |= {f"fsdp {case.name}": train("fsdp", case) for case in (*KINDS, *BF16)}
        results |= {f"{s} {c.name}": train(s, c) for s in ("fsdp", "ddp") for c in surgeries()}
        results["gradients"] = microbatch_gradients()
        results["stale"] = evaluated_before_step()
        results["layouts"] = activation_layouts()
        results["gathered"] = {name: gathered_after_forward(name) for name in FAMILY}
        results["optimizer"] = optimizer_kinds()
        results["meta"] = from_meta()
        results["refusals"] = refusals()
    results["held"] = {name: held(name, **groups.get(name, {})) for name in ("ddp", *FAMILY)}
    return results


def microbatch_gradients() -> list[torch.Tensor | None]:
    """The gradient of one weight after each of two microbatches that differ between the ranks."""
    model = nn.Linear(2, 1, bias=False)
    engine = strategies.get("fsdp", device="cpu").prepare(model, make_optimizer("sgd"), accumulate=2)
    gradients = []
    for i in range(2):
        with engine.forward_context():
            loss = engine.model(torch.full((1, 2), float(engine.rank + 1))).sum()
        engine.backward(loss, last_microbatch=i == 1)
        gradient = engine.optimizer.param_groups[0]["params"][0].grad
        gradients.append(None if gradient is None else gradient.full_tensor())
    return gradients


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
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, __, out, name=name: found.update(
                    {name: out.is_contiguous(memory_format=torch.channels_last)}
                )
            )
    engine.model(batch(0, 16)[0])
    return found


def gathered_after_forward(strategy: str) -> tuple[bool, bool]:
    """Whether a block's parameters, and the root's, are whole between forward and backward."""
    engine = strategies.get(strategy, device="cpu").prepare(models.resnet(), make_optimizer("sgd"))
    engine.model(batch(0, 16)[0])
    block, root = engine.plain_model[4].conv1.weight, engine.plain_model[0].weight
    return not isinstance(block, DTensor), not isinstance(root, DTensor)


def optimizer_kinds() -> list[str]:
    """The types of what the optimizer factory was given."""
    seen: list[str] = []

    def factory(params):
        params = list(params)
        seen.extend(sorted({type(p.data).__name__ for p in params}))
        return torch.optim.SGD(params, lr=0.1)

    strategies.get("fsdp", device="cpu").prepare(models.resnet(), factory)
    return seen


def on_meta() -> nn.Module:
    """Its blocks, then its last layer, are reset in the order in which they are built."""
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(6, 2))


def from_meta() -> dict[str, torch.Tensor]:
    """The first weights of a model that was built on the meta device, with random numbers of its rank."""
    with torch.device("meta"):
        model = on_meta()
    torch.manual_seed(dist.get_rank())
    return strategies.get("fsdp", device="cpu").prepare(model, make_optimizer("sgd")).export_state()


def held(strategy: str, **options: object) -> tuple[float, float, float]:
    """Bytes per parameter on this rank, AdamW in fp32: parameters, gradients, optimizer."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)), nn.Linear(256, 4)
    )
    count = sum(p.numel() for p in model.parameters())
    engine = strategies.get(strategy, device="cpu", **options).prepare(model, make_optimizer("adamw"))
    for step in range(2):
        engine.backward(engine.model(torch.randn(2, 256)).square().mean())
        bytes_ = held_bytes(engine)
        if step == 0:
            engine.step()
    assert bytes_.count == count
    assert bytes_.per_parameter == (bytes_.parameters + bytes_.gradients + bytes_.optimizer) / count
    return bytes_.parameters / count, bytes_.gradients / count, bytes_.optimizer / count


def refusals() -> dict[str, str]:
    """The message of each model that cannot be sharded."""
    scalar = nn.Linear(2, 1)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    twice = nn.Linear(2, 1)
    strategies.get("fsdp", device="cpu").prepare(twice, make_optimizer("sgd"))
    assert isinstance(twice, FSDPModule)
    with torch.device("meta"):
        meta = nn.Sequential(models.Transformer())
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    return {
        "scalar": refusal("fsdp", scalar),
        "sharded twice": refusal("hsdp", twice),
        "meta": refusal("fsdp", meta),
        "wrapped": refusal("fsdp_grad_op", wrapped),
        "lazy": refusal("fsdp_cpu_offload", nn.Sequential(nn.LazyLinear(2))),
        "sync batch norm": refusal("fsdp", nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))),
        "untrainable": refusal("fsdp", nn.Linear(2, 1).requires_grad_(False)),
    }
