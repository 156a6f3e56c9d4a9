"""precision="auto": bf16 where the device computes it natively, else fp32. Decided once, when a plan is resolved."""

from __future__ import annotations

import dataclasses

import torch

from ... import strategies
from ...common import machine
from .config import DistributedConfig
from .cuda_settings import uses_gpu

NATIVE = (8, 0)
"""The compute capability of the first GPUs from NVIDIA with bf16 units: Ampere. Older ones emulate it, slowly."""


def take_precision(
    how: DistributedConfig, kept: strategies.Precision | None = None
) -> tuple[DistributedConfig, str]:
    """Return the options with fp32 or bf16 in the place of "auto", and the reason; "" if they do not have "auto".

    Args:
        how: the options of `distribute`.
        kept: the precision of the checkpoint that the run resumes from; it stays the same on any device.
    """
    if how.precision != "auto":
        return how, ""
    precision, why = choose(how) if kept is None else (kept, "as in the checkpoint")
    return dataclasses.replace(how, precision=precision), f"precision auto: {why}"


def choose(how: DistributedConfig) -> tuple[strategies.Precision, str]:
    """Return the precision for this machine, and the reason.

    A GPU counts if it has bf16 units, and so must all others that this process sees; a CPU if it has bf16 instructions
    that oneDNN, which computes the layers, may use (`ONEDNN_MAX_CPU_ISA`).
    """
    if uses_gpu(how):
        return _choose_on_gpus()
    name = machine.bf16_instructions()
    if name is None:
        return "fp32", "this system does not list the CPU's instructions"
    return (
        ("bf16", f"the CPU has {name}") if name else ("fp32", "no bf16 instructions of the CPU can be used")
    )


def _choose_on_gpus() -> tuple[strategies.Precision, str]:
    """As `choose`; AMD's GPUs, whose numbers of versions are others, count as torch reports them."""
    if torch.version.hip is not None:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU computes it") if native else ("fp32", "the GPU does not compute bf16")
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(number) < NATIVE:
            return "fp32", f"{torch.cuda.get_device_name(number)} has no bf16 units"
    return "bf16", f"{torch.cuda.get_device_name()} has bf16 units"
