"""Save and load weights, and translate them to the names that they had before surgery."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...errors import DrivetrainError
from ...files import atomic_file
from ...transforms import Transform


def plain_state(
    state: Mapping[str, torch.Tensor], model: nn.Module, transforms: Sequence[Transform]
) -> dict[str, torch.Tensor]:
    """Return a state dict of `model` under the names that it had before `transforms`, given in plan order."""
    plain = dict(state)
    for transform in reversed(transforms):
        plain = transform.to_plain(plain, model)
    return plain


def load_weights(path: Path, *, epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights that `save_weights` wrote after `epochs` epochs; an empty dict if there are none."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("epochs") != str(epochs):
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is not a dict
    except (OSError, SafetensorError):  # an incomplete file is not a result
        return {}


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64",
}  # fmt: skip
"""The names of dtypes in a safetensors file."""


def save_weights(
    state: Mapping[str, torch.Tensor],
    path: str | Path,
    *,
    epochs: int | str | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write a state dict of CPU tensors as safetensors, atomically.

    `about` is additional metadata, such as the preprocessing.

    `epochs`, stored in the file's metadata, is the epoch in the history that the weights belong to: a process that
    is killed between writing the two files leaves weights that are one epoch ahead. Weights from within an
    epoch, where a callback stopped the run, have a text that is not a number.

    Tensors are written one by one: safetensors' own `save` needs memory for a copy of all of them, and its
    `save_file` replaces the temporary file that `atomic_file` has open.

    Raises:
        DrivetrainError: for a dtype that safetensors does not have, or if the file cannot be written.
    """
    metadata = {**(about or {}), **({} if epochs is None else {"epochs": str(epochs)})}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    # Larger elements first, so that each tensor is aligned.
    ordered = sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, value in ordered:
        if value.dtype not in _NAMES:
            raise DrivetrainError(f"{path} cannot hold {name!r}: safetensors has no {value.dtype}.")
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            if value.numel():
                file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
