"""DeepSpeed's configuration: what Drivetrain writes into it, and what a user's own may say beside that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import StrategyError
from ..options import Options

Config = Mapping[str, Any]

NOT_YOURS = {
    "optimizer": "Drivetrain gives DeepSpeed the optimizer of your factory",
    "scheduler": "the learning rate is set by whoever calls the engine: .optimize(schedule=…) in a Pipeline",
    "train_batch_size": "the batch size is the data's: .load(batch_size=…) in a Pipeline",
    "train_micro_batch_size_per_gpu": "the batch size is the data's: .load(batch_size=…) in a Pipeline",
    "fp16": "precision is chosen with precision='fp32' or 'bf16'",
    "bf16": "precision is chosen with precision='fp32' or 'bf16', which keeps the weights in fp32 under autocast",
    "torch_autocast": "precision is chosen with precision='fp32' or 'bf16'",
    "amp": "precision is chosen with precision='fp32' or 'bf16'",
}
"""Keys of the configuration that Drivetrain decides alone, and how it is told."""


@dataclass(frozen=True)
class Zero:
    """What is divided among the ranks, and where it is kept.

    Attributes:
        stage: 1: the optimizer's state and fp32 copy of the weights; 2: gradients, too; 3: parameters, too.
        offload: None; `"cpu"`; or `"nvme"`, for which `nvme_path` is a folder on that disk.
    """

    stage: int
    offload: str | None
    nvme_path: str | None = None

    def section(self) -> dict[str, Any]:
        """The part of the configuration that says so."""
        section: dict[str, Any] = {
            "stage": self.stage,
            # Else DeepSpeed replaces torch.nn.functional.linear for the whole process, and leaves it so.
            "memory_efficient_linear": False,
        }
        if self.offload is not None:
            where = {"device": self.offload}
            if self.offload == "nvme":
                where["nvme_path"] = str(self.nvme_path)
            section["offload_optimizer"] = where
            if self.stage == 3:
                section["offload_param"] = dict(where)
        return section


def read_config(config: str | Path | Config | None) -> dict[str, Any]:
    """A user's configuration as a dict of its own, without what is left to be filled in (`"auto"`).

    Args:
        config: a dict, or the path of a JSON file as DeepSpeed reads it; None for an empty one.

    Raises:
        StrategyError: if it cannot be read, or is no mapping.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return _without_auto(config)
    try:
        read = json.loads(Path(config).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise StrategyError(
            f"strategy 'deepspeed': config={str(config)!r} cannot be read as a JSON file: {error}. Give the path of "
            f"a DeepSpeed configuration, or a dict."
        ) from error
    if not isinstance(read, dict):
        raise StrategyError(
            f"strategy 'deepspeed': config={str(config)!r} holds a {type(read).__name__}, and a DeepSpeed "
            f"configuration is an object: {{…}}."
        )
    return _without_auto(read)


def choose_zero(stage: int | None, offload: str | None, nvme_path: str | None, config: Config) -> Zero:
    """What the strategy's options and the configuration say together; stage 2 without offload if neither does.

    Raises:
        StrategyError: if they contradict each other, or mean nothing.
    """
    name = "deepspeed"
    section = config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise StrategyError(f"strategy {name!r}: config['zero_optimization']={section!r} must be an object.")
    theirs = section.get("stage")
    if None not in (stage, theirs) and stage != theirs:
        raise _contradiction(name, "zero_optimization.stage", theirs, f"stage={stage}")
    stage = theirs if stage is None else stage
    stage = 2 if stage is None else stage
    if stage not in (1, 2, 3):
        raise StrategyError(
            f"strategy {name!r}: stage={stage!r} must be 1, 2 or 3; without dividing anything, use 'ddp'."
        )
    device, path = _offload_of(section, stage)
    if None not in (offload, device) and offload != device:
        raise _contradiction(name, "zero_optimization.offload_optimizer", device, f"offload={offload!r}")
    zero = Zero(stage, offload or device, nvme_path or path)
    if zero.offload not in (None, "cpu", "nvme"):
        raise StrategyError(f"strategy {name!r}: offload={zero.offload!r} is not known; use 'cpu' or 'nvme'.")
    if zero.offload == "nvme" and stage != 3:
        raise StrategyError(f"strategy {name!r}: offload='nvme' needs stage=3, not {stage}.")
    return zero


def _offload_of(section: Config, stage: int) -> tuple[str | None, str | None]:
    """Device and path of the optimizer's offload in a configuration."""
    keys = ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer",)
    for key in keys:
        where = section.get(key) or {}
        device = where.get("device", "none")
        if device != "none":
            return device, where.get("nvme_path")
    return None, None


def make_config(zero: Zero, options: Options, theirs: Config, name: str) -> dict[str, Any]:
    """The whole configuration: the user's, with all that Drivetrain decides.

    Raises:
        StrategyError: for a key of the user's that contradicts that.
    """
    for key, who in NOT_YOURS.items():
        present = theirs.get(key)
        off = isinstance(present, Mapping) and present.get("enabled") is False
        if present is not None and not off:
            raise StrategyError(
                f"strategy {name!r}: config[{key!r}] cannot be set, because {who}. Remove it, or set it to 'auto'."
            )
    clip = 0.0 if options.clip_norm is None else options.clip_norm
    decided = {
        "gradient_accumulation_steps": (options.accumulate, f"accumulate={options.accumulate}"),
        # Its default is 1.0: always written, or DeepSpeed clips without being asked.
        "gradient_clipping": (clip, f"clip_norm={options.clip_norm}"),
    }
    for key, (value, argument) in decided.items():
        if theirs.get(key, value) != value:
            raise _contradiction(name, key, theirs[key], argument)
    whole = {key: value for key, value in theirs.items() if key not in NOT_YOURS}
    whole |= {key: value for key, (value, _) in decided.items()}
    # DeepSpeed wants a batch size, which it uses for its own reports only.
    whole["train_micro_batch_size_per_gpu"] = 1
    whole["zero_optimization"] = _joined(zero.section(), theirs.get("zero_optimization", {}))
    whole["zero_allow_untested_optimizer"] = True
    # Offloaded, any optimizer of the factory's may step; `takes_cpu_adam` is where DeepSpeed's replaces torch's.
    whole.setdefault("zero_force_ds_cpu_optimizer", False)
    if options.precision == "bf16":
        # No modules: what is listed there would send its gradients in bf16.
        whole["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return whole


def takes_cpu_adam(whole: Config, theirs: Config) -> bool:
    """Whether DeepSpeed's Adam for the CPU may take the place of torch's: the whole optimizer is on the CPU.

    Args:
        whole: what `make_config` gave.
        theirs: the user's part of it, in which `zero_force_ds_cpu_optimizer: false` keeps torch's.
    """
    section = whole["zero_optimization"]
    where = section.get("offload_optimizer") or {}
    # These step parts of the optimizer elsewhere, or at another time, with state that no engine exports.
    otherwise = section.get("zenflow") or where.get("super_offload") or where.get("ratio", 1) != 1
    return (
        where.get("device") == "cpu"
        and not otherwise
        and theirs.get("zero_force_ds_cpu_optimizer") is not False
    )


def _joined(ours: Config, theirs: Config) -> dict[str, Any]:
    """Both, key by key at every depth; `choose_zero` has seen to it that they do not contradict each other."""
    joined = dict(ours)
    for key, value in theirs.items():
        here = joined.get(key)
        joined[key] = (
            _joined(here, value) if isinstance(here, Mapping) and isinstance(value, Mapping) else value
        )
    return joined


def _without_auto(config: Config) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _contradiction(name: str, key: str, value: object, argument: str) -> StrategyError:
    return StrategyError(
        f"strategy {name!r}: config {key}={value!r} contradicts {argument}. Remove it from the configuration, or give "
        f"both the same value."
    )
