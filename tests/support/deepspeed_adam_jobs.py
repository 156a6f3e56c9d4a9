"""What the tests of DeepSpeed's Adam for the CPU run inside ranks."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any

import torch
from deepspeed_jobs import FEW, moved
from deepspeed_methods import DIVIDED, OFFLOAD, attempt, options_of, prepare
from drivetrain import strategies
from parity_jobs import Case, train
from strategy_jobs import make_optimizer
from torch import nn

ADAMS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "decoupled Adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
}


class Formula:
    """Stands for the compiled operation, which takes a minute to build: the same calls, computed by torch."""

    def __init__(self) -> None:
        self.decoupled: dict[int, bool] = {}

    def create_adam(self, number: int, *numbers: Any) -> None:
        self.decoupled[number] = numbers[5]

    def destroy_adam(self, number: int) -> None:
        del self.decoupled[number]

    def adam_update(self, number: int, step: int, *given: Any) -> None:
        assert type(step) is int
        lr, beta1, beta2, eps, decay, _, weights, gradient, mean, square = given
        if self.decoupled[number]:
            weights.mul_(1 - lr * decay)
        else:
            gradient = gradient + decay * weights
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt() + eps
        weights.sub_(lr / (1 - beta1**step) * mean / scale)


def trained(names: list[str], case: Case, real: bool) -> dict[str, Any]:
    """Trainings that offload, each of which gives its optimizer to `ddp` and takes that of `ddp`.

    Args:
        names: of the strategies.
        case: to move in its middle.
        real: with the compiled operation.
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    torch.set_num_threads(1)
    del DIVIDED["zero_force_ds_cpu_optimizer"]
    if not real:
        builders: Any = importlib.import_module("deepspeed.ops.op_builder.builder")
        builders.OpBuilder._loaded_ops["cpu_adam"] = Formula()
    results: dict[str, Any] = {}
    gc.freeze()
    for name in names:
        engine = prepare(name, nn.Linear(2, 1), "adamw")
        results[f"{name} optimizer"] = type(engine.optimizer).__name__, engine.note
        engine.backward(engine.model(torch.ones(1, 2)).sum())
        engine.step()
        state = engine.export_optimizer()
        results[f"{name} state"] = state
        state.groups[0]["amsgrad"] = True
        results[f"{name} refusal"] = attempt(
            lambda engine=engine, state=state: engine.import_optimizer(state)
        )
        results[f"to {name}"] = moved("ddp", name, case)
        results[f"from {name}"] = moved(name, "ddp", case)
    sgd = prepare(OFFLOAD[1], nn.Linear(2, 1), "sgd")
    results["sgd"] = type(sgd.optimizer).__name__, sgd.note
    kept = strategies.get(OFFLOAD[1], device="cpu", config={"zero_force_ds_cpu_optimizer": False})
    engine = kept.prepare(nn.Linear(2, 1), make_optimizer("adamw"))
    results["kept"] = type(engine.optimizer).__name__, engine.note
    if real:
        results |= {name: train(name, FEW[1], **options_of(name)) for name in names}
        results["numbers"] = {name: numbers(name) for name in ADAMS}
    gc.unfreeze()
    return results


def numbers(name: str) -> list[torch.Tensor]:
    """The same weights and gradients through torch's and DeepSpeed's optimizer, ten steps."""
    deepspeed: Any = importlib.import_module("deepspeed")
    adam: Any = importlib.import_module("drivetrain.strategies.deepspeed.adam")
    ends = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (7, 1001)]
        optimizer = ADAMS[name](weights)
        if fused:
            optimizer, _ = adam.faster(optimizer, deepspeed, torch.device("cpu"))
            assert adam.is_deepspeeds(optimizer, deepspeed)
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 3e-3 / (1 + step)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        ends.append(torch.cat([weight.detach() for weight in weights]))
    return ends
