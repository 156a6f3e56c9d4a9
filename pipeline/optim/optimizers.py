"""The optimizers, by name or class, and the validation of their options; SGDW."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from ...common.checks import is_number
from ...common.errors import PlanError, suggest
from ...common.names import imported
from .muon import AdaMuon, Muon, loss_of
from .schedule_free import ScheduleFree, ScheduleFreeAdamW, ScheduleFreeSGD

OptimizerClass = Callable[..., Optimizer]


class SGDW(torch.optim.SGD):
    """SGD with decoupled weight decay, as in Composer's ResNet recipes: each step multiplies the weights by
    1 - weight_decay · lr / peak_lr, and then performs SGD's update. The peak is the learning rate that it is created
    with, whichever a scheduler begins with.

    So `weight_decay` is the fraction that a weight loses per step at the peak learning rate, independently of that peak
    and of the momentum; it follows the schedule. (In SGD it is multiplied by the learning rate and accumulates in the
    momentum: at the peak, lr · weight_decay / (1 - momentum) per step.) Weights without a gradient are not decayed.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv:1711.05101, algorithm 1;
    the updates equal those of Composer's `DecoupledSGDW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Its current learning rate is its peak, stored as `peak_lr`: `initial_lr` is torch's schedulers'. A tensor is
        copied, because these write into it."""
        super().add_param_group(param_group)
        lr = self.param_groups[-1]["lr"]
        self.param_groups[-1].setdefault("peak_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = loss_of(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            peak = group.get("peak_lr", group.get("initial_lr"))  # which older states have
            share = group["lr"] / peak if peak else float(group["lr"] > 0)
            if weights and group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["weight_decay"] * share)
            group["weight_decay"] = 0.0  # SGD would add it to the gradient
        try:
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss


OPTIMIZERS: dict[str, OptimizerClass] = {
    "sgd": SGD, "sgdw": SGDW, "adam": Adam, "adamw": AdamW, "muon": Muon, "adamuon": AdaMuon,
    "schedulefree_sgd": ScheduleFreeSGD, "schedulefree_adamw": ScheduleFreeAdamW,
}  # fmt: skip

SCALING: dict[Any, str] = dict.fromkeys((SGD, SGDW), "linear") | dict.fromkeys(
    (Adam, AdamW, NAdam, RAdam, RMSprop), "square root"
)
"""How the learning rate scales with the batch size, by class: linearly with a step proportional to the gradient (Goyal
et al. 2017, arXiv:1706.02677), by the square root if the step is divided by the root of the mean squared gradient
(Malladi et al. 2022, arXiv:2205.10287). For other optimizers no rule is known."""

WHOLE_MATRICES = (Muon, torch.optim.Adafactor)
"""Classes whose update of an element depends on the others of its matrix: a flat shard of it is not enough."""


def find_optimizer(optimizer: Any) -> Any:
    """A class that has a name in `OPTIMIZERS` becomes that name, and `"package.module:Class"` is imported."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            "optimize() got an optimizer that is already built; surgery or sharding would leave it with "
            "stale parameters. Pass its name, or a function: lambda params: SGD(params, lr=0.1)."
        )
    if isinstance(optimizer, str) and ":" in optimizer:
        optimizer = imported("optimizer", optimizer)
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise PlanError(
                f"No optimizer is named {optimizer!r}. Write others as package.module:Class, e.g. torch.optim:NAdam."
                f"{suggest(optimizer, OPTIMIZERS)}"
            )
        return optimizer
    if not callable(optimizer):
        raise PlanError(f"optimize() takes the name of an optimizer, a class or a function, not {optimizer!r:.80}.")
    refuse_unusable(optimizer)
    return next((name for name, own in OPTIMIZERS.items() if own is optimizer), optimizer)


def refuse_unusable(optimizer: Callable[..., Any]) -> None:
    """A class whose `step` needs what the training loop does not have."""
    if not isinstance(optimizer, type):
        return
    name = optimizer.__name__
    if not issubclass(optimizer, Optimizer):
        raise PlanError(
            f"optimize() got the class {name}, which is not a torch.optim.Optimizer. Pass a subclass of it, or a "
            "function that returns one."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(f"{name} computes the loss several times per step, which the training loop does not.")
    if {"train", "eval"} <= set(dir(optimizer)):
        raise PlanError(
            f"{name} must be switched between training and evaluation, which the training loop does not. Use "
            "'schedulefree_sgd' or 'schedulefree_adamw'."
        )
    if optimizer is torch.optim.SparseAdam:
        raise PlanError("SparseAdam needs sparse gradients, which image models do not have. Use 'adam'.")


def class_of(optimizer: Any) -> OptimizerClass | None:
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer]
    return optimizer if isinstance(optimizer, type) else None


def needs_whole_matrices(optimizer: Any) -> bool:
    kind = class_of(optimizer)
    return isinstance(kind, type) and issubclass(kind, WHOLE_MATRICES)


def gathers(optimizer: Any) -> bool:
    """Whether it needs whole matrices, but gathers them itself if FSDP2 has sharded them."""
    kind = class_of(optimizer)
    return isinstance(kind, type) and issubclass(kind, Muon)


def is_schedule_free(optimizer: Any) -> bool:
    kind = class_of(optimizer)
    return isinstance(kind, type) and issubclass(kind, ScheduleFree)


def label(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return optimizer.__name__ if isinstance(optimizer, type) else "your factory"


def default_lr(optimizer: Any) -> float:
    kind = class_of(optimizer)
    parameter = None if kind is None else inspect.signature(kind).parameters.get("lr")
    if parameter is None or not is_number(parameter.default):
        raise PlanError(f"optimize({label(optimizer)}) has no default learning rate. Pass lr=….")
    return float(parameter.default)


def check_options(optimizer: Any, options: Mapping[str, Any], where: str = "") -> None:
    """`where` is the place in the builder's call, for messages."""
    kind = class_of(optimizer)
    assert kind is not None
    place = f"optimize({optimizer!r})" if isinstance(optimizer, str) else f"optimize({label(optimizer)})"
    place += f", {where}" if where else ""
    known = dict([*inspect.signature(kind).parameters.items()][1:])
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option, value in options.items():
        if option not in known and not takes_any:
            near = {"learning_rate": "lr", "wd": "weight_decay"}.get(option, option)  # in other libraries
            raise PlanError(f"{place} has no option {option!r}.{suggest(near, known)}")
        numbers = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(each, float) and not math.isfinite(each) for each in numbers):  # torch accepts them
            raise PlanError(f"{place}: {option}={value!r} must be finite.")
        allowed = _wrong_kind(value, known[option]) if option in known else ""
        if option in ("foreach", "fused") and not (value is None or isinstance(value, bool)):
            allowed = "True, False or None"  # None: torch's choice
        if allowed:
            raise PlanError(f"{place}: {option}={value!r} must be {allowed}.")
    try:
        kind([torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, 1))], **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        remedy = f"See the documentation of {getattr(kind, '__name__', kind)}."
        if kind is torch.optim.Muon:
            remedy = "Use 'muon', which trains other parameters with AdamW."
        raise PlanError(f"{place} cannot use {dict(options)}: {error}. {remedy}") from None


def _wrong_kind(value: object, parameter: inspect.Parameter) -> str:
    """Return what an option must be, derived from its default, if `value` is not; else ""."""
    if value is None and type(None) in get_args(parameter.annotation):
        return ""
    return _unlike(value, parameter.default)


def _unlike(value: object, usual: object) -> str:
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(usual, int | float):
        return "" if is_number(value) or isinstance(value, torch.Tensor) else "a number"
    if isinstance(usual, tuple):
        fits = isinstance(value, tuple | list) and len(value) == len(usual)
        fits = fits and not any(map(_unlike, value, usual))  # type: ignore[call-overload]
        return "" if fits else f"{len(usual)} numbers"
    return ""
