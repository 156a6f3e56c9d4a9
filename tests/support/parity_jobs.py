"""What the parity tests run inside ranks, and on one device for comparison."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import auto, registry
from drivetrain.strategies.common.memory import held_bytes
from strategy_jobs import make_optimizer, norm_of, refusal
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

STEPS, LONG, BATCH = 2, 8, 8
"""Steps of a training, of one in `make test-all`, and the global batch."""

SHARDED = ["fsdp", "fsdp_grad_op", "fsdp_cpu_offload", "hsdp"]
"""Parameters are divided among the ranks."""
WHOLE = ["ddp", "zero_redundancy", "fairscale_oss", "fairscale_sharded_ddp"]
"""Each rank has all parameters."""
NAMES = [*WHOLE, *SHARDED]
"""Every strategy that several ranks can run on the CPU: a new one is one more word here."""
OFTEN = [name for name in NAMES if name not in ("fsdp_grad_op", "hsdp")]
"""Those two keep what `fsdp` keeps; `make test-all` has them, too."""


@dataclass(frozen=True)
class Case:
    """One training run that every strategy must repeat; `accumulate` is a rank's."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: str = "sgd"
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    steps: int = STEPS
    pixels: int = 16
    sync: bool = False
    """With `sync_batchnorm=True`: the reference has the whole batch, and no microbatches."""
    recompute: bool = False


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
    Case("groups", models.resnet, "no decay", 0.5),
]
BF16 = [
    Case("resnet bf16", models.resnet, precision="bf16"),
    Case("transformer bf16", models.Transformer, "adamw", 0.5, 2, "bf16"),
]


def longer(cases: list[Case]) -> list[Case]:
    return [replace(case, steps=LONG) for case in cases]


SYNC = [
    Case("synchronized sgd", models.resnet, clip_norm=0.5, sync=True),
    Case("synchronized channels last adamw", models.channels_last, "adamw", sync=True),
    Case("synchronized recomputed", models.resnet, sync=True, recompute=True),
]
FEW = [CASES[1], CASES[4]]
"""A ResNet with SGD and a transformer with AdamW, both clipped and accumulated."""
LATE = Case("late", models.Late, "adamw", 0.5, steps=4)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: float = 0.0


def options_of(strategy: str) -> dict[str, object]:
    """A strategy's options on as many ranks as there are now."""
    return {"shard_size": max(1, dist.get_world_size() // 2)} if strategy == "hsdp" else {}


def train(strategy: str, case: Case, *, seed: int = 0, parts: int = 1, given: Any = None, **options) -> Run:
    """Train on the same global batches on any number of ranks, with weights of `seed`, of which rank 0's must win, and
    `given` further options of `prepare`. One device gets as many microbatches as `parts` ranks do."""
    torch.manual_seed(seed)
    engine = strategies.get(strategy, device="cpu", **options).prepare(
        case.model(), make_optimizer(case.optimizer), precision=case.precision, clip_norm=case.clip_norm,
        accumulate=case.accumulate * parts, sync_batchnorm=case.sync,
        **{"activation_checkpointing": case.recompute, **(given or {})},
    )  # fmt: skip
    run = Run()
    for step in range(case.steps):
        engine.model.train()
        images, labels = batch(step, case.pixels)
        run.losses.append(one_step(engine, step, images, labels, run))
        if step == (case.steps - 1) // 2:
            run.evaluated = evaluate(engine, images)
    engine.sync_buffers()
    run.state = engine.export_state()
    return run


def batch(step: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, pixels, pixels, generator=generator)
    return images, torch.randint(5, (BATCH,), generator=generator)


def one_step(engine, step: int, images, labels, run: Run) -> float:
    """Train on this rank's part of a global batch; gives the loss of all of it."""
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
    run.norms.append(norm_of(engine.step()))
    return float(engine.reduce(total))


@torch.no_grad()
def evaluate(engine, images) -> float:
    """In the middle of training, after the buffers' mean: it must leave no trace in what follows."""
    engine.sync_buffers()
    engine.model.eval()
    with engine.forward_context():
        return float(engine.plain_model(images).float().square().mean())


def quiet() -> None:
    """Warnings are errors in ranks, as in the tests' own process; one thread per rank."""
    warnings.simplefilter("error")
    # Plain models give it too: the stride of a depthwise convolution's gradient.
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    torch.set_num_threads(1)


def parity(cases: dict[str, list[Case]]) -> dict[str, object]:
    """The cases of each strategy, and what is asked of some of them alone."""
    quiet()
    results: dict[str, object] = {}
    for name, each in cases.items():
        for case in each:
            # Each rank starts from weights of its own: rank 0's must become everyone's.
            results[f"{name} {case.name}"] = train(name, case, seed=dist.get_rank(), **options_of(name))
        results[f"{name} held"] = held(name, **options_of(name))
    results["late"] = train("fairscale_sharded_ddp", LATE)
    results["late under ddp"] = train("ddp", LATE, find_unused_parameters=True)
    results["after an error"] = after_an_error()
    results["dtypes"] = refusal("fairscale_oss", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    results["adagrad"] = {name: entries_of_adagrad(name) for name in ("zero_redundancy", "fairscale_oss")}
    results["auto"] = chosen()
    results["handlers"] = len(logging.root.handlers)
    results["registered"] = "of_the_launcher" in registry.REGISTERED
    return results


def microbatch_gradients(strategy: str) -> list[torch.Tensor | None]:
    """The gradient of one weight after each of two microbatches that differ between the ranks."""
    model = nn.Linear(2, 1, bias=False)
    engine = strategies.get(strategy, device="cpu").prepare(model, make_optimizer("sgd"), accumulate=2)
    gradients: list[torch.Tensor | None] = []
    for i in range(2):
        with engine.forward_context():
            loss = engine.model(torch.full((1, 2), float(engine.rank + 1))).sum()
        engine.backward(loss, last_microbatch=i == 1)
        gradient = engine.optimizer.param_groups[0]["params"][0].grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients.append(None if whole is None else whole.clone())
    return gradients


def after_an_error() -> list[list[float]]:
    """The gradient after a backward was refused in the middle of a step: ranks must still exchange it."""
    model = nn.Linear(2, 1, bias=False)
    engine = strategies.get("fairscale_sharded_ddp", device="cpu").prepare(model, make_optimizer("sgd"))
    images = torch.full((1, 2), float(engine.rank + 1))
    try:
        engine.backward(engine.model(images).sum(), last_microbatch=False)
    except StrategyError:
        engine.backward(engine.model(images).sum())
    return [] if model.weight.grad is None else model.weight.grad.tolist()


def entries_of_adagrad(strategy: str) -> int:
    """How many parameters this rank has state for, of an optimizer that makes it when it is built."""
    adagrad = partial(torch.optim.Adagrad, lr=0.1)
    return len(strategies.get(strategy, device="cpu").prepare(models.resnet(), adagrad).optimizer.state)


def chosen() -> tuple[str, Run]:
    """The log line of `auto`, whose ranks see unlike memory, and a training with it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("drivetrain.strategies.auto")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    # Of AdamW's 16 bytes per parameter a rank may have 1.5 times in half of this, another one 0.75 times.
    share = 3 if dist.get_rank() == 0 else 1.5
    free = int(share * 16 * sum(p.numel() for p in models.resnet().parameters()))
    with mock.patch.object(auto, "free_bytes", return_value=free):
        run = train("auto", CASES[0])
    log.removeHandler(handler)
    return "".join(lines), run


def held(strategy: str, **options: object) -> tuple[float, float, float]:
    """Bytes per parameter on this rank, AdamW in fp32: parameters, gradients, optimizer."""
    width, depth = 256, 16  # a million parameters, in layers of which the largest is a sixteenth
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
    model = nn.Sequential(*blocks, nn.Linear(width, 4))
    count = sum(p.numel() for p in model.parameters())
    engine = strategies.get(strategy, device="cpu", **options).prepare(model, make_optimizer("adamw"))
    for step in range(2):
        engine.backward(engine.model(torch.randn(2, width)).square().mean())
        bytes_ = held_bytes(engine)
        if step == 0:
            engine.step()
    assert bytes_.count == count
    return bytes_.parameters / count, bytes_.gradients / count, bytes_.optimizer / count


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Without the statistics: a device that accumulates moves them once for each microbatch."""
    return {n: t for n, t in run.state.items() if "running" not in n and "num_batches" not in n}


def same_run(found: Run, expected: Run, tolerance: float) -> None:
    """Losses, norms and final weights, to `tolerance`; the state is plain."""
    assert list(found.state) == list(expected.state)
    for name, tensor in found.state.items():
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (
            expected.state[name].shape, expected.state[name].dtype, "cpu"
        )  # fmt: skip
    assert found.losses == pytest.approx(expected.losses, abs=tolerance)
    if expected.norms[0] is None:
        assert found.norms == expected.norms
    else:
        assert found.norms == pytest.approx(expected.norms, abs=10 * tolerance)
    # Relative, too: some weights are above 100, where fp32 has steps of 1e-5.
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-6, atol=tolerance)
