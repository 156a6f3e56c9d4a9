"""DeepSpeed's configuration: what Drivetrain sets, and what a user's own may contain."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import StrategyError
from ..options import Options

Config = Mapping[str, Any]

NOT_YOURS = {
    "optimizer": "Drivetrain passes your factory's optimizer to DeepSpeed",
    "scheduler": "the caller sets the learning rate: .optimize(schedule=…) in a Pipeline",
    "train_batch_size": "the data determines the batch size: .load(batch_size=…) in a Pipeline",
    "train_micro_batch_size_per_gpu": "the data determines the batch size: .load(batch_size=…) in a Pipeline",
    "fp16": "precision='fp32' or 'bf16' sets the precision",
    "bf16": "precision='fp32' or 'bf16' sets the precision, with fp32 weights under autocast",
    "torch_autocast": "precision='fp32' or 'bf16' sets the precision",
    "amp": "precision='fp32' or 'bf16' sets the precision",
}
"""Keys of the configuration that only Drivetrain sets, and the option to use instead."""
SWITCHED_ON = ("fp16", "bf16", "torch_autocast", "amp")
"""Those that DeepSpeed ignores without `"enabled": true`."""


_PARTS = "offload_optimizer", "offload_param"


@dataclass(frozen=True)
class Zero:
    stage: int  # 1: the optimizer's state and fp32 copy of the weights; 2: also gradients; 3: also parameters
    optimizer: str | None = None  # where its state is: None, "cpu", or "nvme", with `nvme_path`, a folder on that disk
    parameters: str | None = None  # likewise, with stage 3
    nvme_path: str | None = None

    @property
    def offload(self) -> str | None:
        """Of two devices, `"nvme"`, which needs more."""
        return max(filter(None, (self.optimizer, self.parameters)), default=None)

    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = {
            "stage": self.stage,
            # Otherwise DeepSpeed replaces torch.nn.functional.linear for the rest of the process.
            "memory_efficient_linear": False,
        }
        for part, device in zip(_PARTS, (self.optimizer, self.parameters), strict=True):
            if device is not None:
                section[part] = {"device": device}
                if device == "nvme":
                    section[part]["nvme_path"] = str(self.nvme_path)
        return section


def read_config(config: str | Path | Config | None) -> dict[str, Any]:
    """Return a copy of the user's configuration, a dict or the path of a JSON file, without values `"auto"`."""
    if config is None or isinstance(config, Mapping):
        return _without_auto(config or {})
    try:
        read = json.loads(Path(config).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise StrategyError(
            f"strategy 'deepspeed': config={str(config)!r} cannot be read as a JSON file: {error}. Pass the path of a "
            f"DeepSpeed configuration, or a dict."
        ) from error
    if not isinstance(read, dict):
        raise StrategyError(
            f"strategy 'deepspeed': config={str(config)!r} contains a {type(read).__name__}, but a DeepSpeed "
            f"configuration must be an object: {{…}}."
        )
    return _without_auto(read)


def choose_zero(stage: int | None, offload: str | None, nvme_path: str | None, config: Config) -> Zero:
    """Return what the strategy's options and the configuration specify; stage 2 without offload if neither does."""
    section = config.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise StrategyError(f"strategy 'deepspeed': config['zero_optimization']={section!r} must be an object.")
    theirs = section.get("stage")
    if None not in (stage, theirs) and stage != theirs:
        raise _contradiction("deepspeed", "zero_optimization.stage", theirs, f"stage={stage}")
    stage = next((each for each in (stage, theirs) if each is not None), 2)
    if stage not in (1, 2, 3):
        raise StrategyError(f"strategy 'deepspeed': stage={stage!r} must be 1, 2 or 3. To shard nothing, use 'ddp'.")
    parts = _PARTS if stage == 3 else _PARTS[:1]
    given = {part: where for part in parts if (where := _offload_of(section, part))}
    for part, where in given.items():
        if offload is not None and offload != where["device"]:
            raise _contradiction("deepspeed", f"zero_optimization.{part}", where["device"], f"offload={offload!r}")
        if nvme_path is not None and str(path := where.get("nvme_path", nvme_path)) != str(nvme_path):
            argument = f"nvme_path={str(nvme_path)!r}"
            raise _contradiction("deepspeed", f"zero_optimization.{part}.nvme_path", path, argument)
    devices = {part: offload or given.get(part, {}).get("device") for part in parts}
    optimizer, parameters = map(devices.get, _PARTS)
    paths = [where["nvme_path"] for where in given.values() if "nvme_path" in where]
    zero = Zero(stage, optimizer, parameters, nvme_path or next(iter(paths), None))
    if zero.offload not in (None, "cpu", "nvme"):
        raise StrategyError(f"strategy 'deepspeed': offload={zero.offload!r} is unknown. Use 'cpu' or 'nvme'.")
    if zero.offload == "nvme" and stage != 3:
        raise StrategyError(f"strategy 'deepspeed': offload='nvme' needs stage=3, not {stage}.")
    return zero


def _offload_of(section: Config, part: str) -> Config:
    """Return the configuration of a part that is offloaded, else nothing."""
    where = section.get(part) or {}
    if not isinstance(where, Mapping):
        raise StrategyError(
            f"strategy 'deepspeed': config['zero_optimization'][{part!r}]={where!r:.80} must be an object, such as "
            "{'device': 'cpu'}."
        )
    return where if where.get("device", "none") != "none" else {}


def make_config(zero: Zero, options: Options, theirs: Config, name: str) -> dict[str, Any]:
    for key, who in NOT_YOURS.items():
        present = theirs.get(key)
        off = isinstance(present, Mapping) and not present.get("enabled", key not in SWITCHED_ON)
        if present is not None and not off:
            raise StrategyError(
                f"strategy {name!r}: config[{key!r}] cannot be set, because {who}. Remove it, or set it to 'auto'."
            )
    clip = 0.0 if options.clip_norm is None else options.clip_norm
    decided = {
        "gradient_accumulation_steps": (options.accumulate, f"accumulate={options.accumulate}"),
        # Always written, because DeepSpeed's default is to clip at 1.0.
        "gradient_clipping": (clip, f"clip_norm={options.clip_norm}"),
        # If offloaded, any optimizer may step; Adam is torch's, see `strategy.step_fused`.
        "zero_force_ds_cpu_optimizer": (False, "the optimizer, which is your factory's"),
    }
    for key, (value, argument) in decided.items():
        if theirs.get(key, value) != value:
            raise _contradiction(name, key, theirs[key], argument)
    whole = {key: value for key, value in theirs.items() if key not in NOT_YOURS}
    whole |= {key: value for key, (value, _) in decided.items()}
    # DeepSpeed requires a batch size, but uses it only in its own reports.
    whole["train_micro_batch_size_per_gpu"] = 1
    whole["zero_optimization"] = _joined(zero.section(), theirs.get("zero_optimization", {}))
    whole["zero_allow_untested_optimizer"] = True
    if options.precision == "bf16":
        # No modules: those listed there would send their gradients in bf16.
        whole["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return whole


def _joined(ours: Config, theirs: Config) -> dict[str, Any]:
    """Merge both, key by key at every depth; `choose_zero` has checked that they do not contradict each other."""
    joined = dict(ours)
    for key, value in theirs.items():
        here: Any = joined.get(key)
        both = isinstance(here, Mapping) and isinstance(value, Mapping)
        joined[key] = _joined(here, value) if both else value
    return joined


def _without_auto(config: Config) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _contradiction(name: str, key: str, value: object, argument: str) -> StrategyError:
    return StrategyError(
        f"strategy {name!r}: config {key}={value!r} contradicts {argument}. Remove it from the configuration, or set "
        f"both to the same value."
    )
