"""DeepSpeed's compiled CPU Adam, which replaces torch's if ZeRO offloads the optimizer."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

from ...common.errors import DrivetrainError, StrategyError
from . import build as deepspeed_build

OFF = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
"""Options of torch's Adam that DeepSpeed's lacks; with fused, torch's is already compiled."""
DECOUPLED = "decoupled_weight_decay"
_log = logging.getLogger(__name__)


def faster(
    optimizer: torch.optim.Optimizer, deepspeed: Any, device: torch.device
) -> tuple[torch.optim.Optimizer, str]:
    """Return DeepSpeedCPUAdam with the groups of `optimizer` if it computes the same, else `optimizer` itself.

    Every rank must call it, because all must use the same one. The first call on a machine compiles it, which takes up
    to `build.SECONDS`; if that fails, training continues with torch's.

    Args:
        optimizer: not stepped yet. It can be replaced if it is exactly torch's Adam or AdamW with plain numbers as
            hyperparameters; DeepSpeed has no SGD for the CPU.
        deepspeed: the package.
        device: of this rank, for communication between the ranks.

    Returns:
        The optimizer, and a sentence with the reason if DeepSpeed's could not be compiled, else an empty string.
    """
    if not replaceable(optimizer):
        return optimizer, ""
    reason = _load(deepspeed)
    made: torch.optim.Optimizer | None = None
    if not reason:
        try:
            made = _made(optimizer, deepspeed)
        except (RuntimeError, ImportError, OSError) as error:  # it queries the system about the CPU
            reason = deepspeed_build.short(error)
    here = torch.tensor(float(made is not None), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(here, op=dist.ReduceOp.MIN)
    if made is not None and here.item() == 1:
        return made, ""
    name, reason = type(optimizer).__name__, reason or "another rank does not have it"
    note = f"The CPU steps with torch's {name}, which is slower than DeepSpeed's DeepSpeedCPUAdam: {reason}."
    _log.info(note)
    return optimizer, note


def replaceable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether DeepSpeedCPUAdam computes the same as `optimizer`, and nothing else refers to that object."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return False
    # A learning-rate scheduler of the factory replaces `step`.
    hooks: Any = optimizer
    if "step" in vars(optimizer) or hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks:
        return False
    decoupled = _decoupled(optimizer)
    for group in optimizer.param_groups:
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        if not all(isinstance(number, int | float) for number in numbers):
            return False
        if any(group.get(option) for option in OFF) or group.get(DECOUPLED, decoupled) != decoupled:
            return False
    return True


def is_deepspeeds(optimizer: torch.optim.Optimizer, deepspeed: Any) -> bool:
    """Whether `optimizer` is DeepSpeedCPUAdam."""
    return isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam)


def like_torch(key: str, value: object) -> object:
    """Convert a value of DeepSpeedCPUAdam's state to torch's Adam, which counts steps in a fp32 tensor `()`."""
    return torch.tensor(float(value)) if key == "step" and isinstance(value, int) else value


def like_deepspeed(key: str, value: torch.Tensor | float) -> torch.Tensor | float:
    """Convert a value of torch's Adam's state to DeepSpeedCPUAdam, which counts steps in an int."""
    return int(value) if key == "step" else value


def without_its_own(group: dict[str, Any]) -> dict[str, Any]:
    """Return an exported group without DeepSpeedCPUAdam's own options; it always corrects the bias."""
    return {key: value for key, value in group.items() if key != "bias_correction" or value is not True}


def refuse_other_options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise `StrategyError` if the saved groups have options with which DeepSpeedCPUAdam cannot continue."""
    decoupled = bool(cast(Any, optimizer).adam_w_mode)
    for group in groups:
        expected = {"amsgrad": False, "maximize": False, DECOUPLED: decoupled}
        for key, value in expected.items():
            if bool(group.get(key, value)) != value:
                raise StrategyError(
                    f"import_optimizer: the saved optimizer has {key}={group[key]!r}, but this one {value!r}. Build it "
                    f"with the same options."
                )


def _decoupled(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get(DECOUPLED, type(optimizer) is torch.optim.AdamW))


def _made(optimizer: torch.optim.Optimizer, deepspeed: Any) -> torch.optim.Optimizer:
    first = optimizer.param_groups[0]
    numbers = {key: first[key] for key in ("lr", "betas", "eps", "weight_decay")}
    groups = [dict(group) for group in optimizer.param_groups]
    made = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=_decoupled(optimizer), **numbers)
    return cast(torch.optim.Optimizer, made)


def _load(deepspeed: Any) -> str:
    """Load the compiled part of DeepSpeedCPUAdam into this process; return why it cannot be loaded, or "".

    It is stored where DeepSpeed keeps its loaded extensions. DeepSpeed's own loader waits without a limit for another
    process that compiles; in older versions of torch also for a dead one that left a lock file.
    """
    name = deepspeed_build.NAME
    builders = importlib.import_module("deepspeed.ops.op_builder.builder")
    loaded: dict[str, ModuleType] | None = getattr(builders.OpBuilder, "_loaded_ops", None)
    if loaded is None:
        return "this version of DeepSpeed is too old"
    if name in loaded:
        return ""
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder()
        if not builder.is_compatible(verbose=False):
            return "DeepSpeed reports that it is incompatible with this machine"
        if _is_installed(deepspeed):
            builder.load(verbose=False)
        else:
            loaded[name] = deepspeed_build.load(deepspeed_build.compiled(deepspeed.__version__))
    except (RuntimeError, ImportError, OSError, DrivetrainError) as error:
        return deepspeed_build.short(error)
    return ""


def _is_installed(deepspeed: Any) -> bool:
    """Whether DeepSpeed was installed with its compiled Adam, for the accelerator it selected."""
    version: Mapping[str, Any] = vars(importlib.import_module("deepspeed.git_version_info"))
    chosen = deepspeed.accelerator.get_accelerator()._name
    return bool(
        version["installed_ops"].get(deepspeed_build.NAME) and version.get("accelerator_name") == chosen
    )
