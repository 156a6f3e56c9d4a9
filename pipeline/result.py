"""What training gives back: the model, the history, and both as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import DrivetrainError
from ..files import atomic_file
from ..transforms import Report, Transform
from .plan import Plan


@dataclass(frozen=True)
class Epoch:
    """One line of a history.

    Attributes:
        epoch: counted from 1.
        loss: mean training loss, of the training loss function.
        val_loss, accuracy: mean cross entropy and top-1 (0 to 1) on the validation data; None without.
        images_per_s: of training, over all ranks, evaluation left out.
        waiting: share of the training time spent waiting for data, 0 to 1.
        seconds: of the whole epoch, evaluation included.
        lr: learning rate at its end.
        skipped: steps not taken: their loss was not finite (`fit(on_nonfinite="skip")`), or their gradients
            overflowed in fp16, as a few do while the loss scale is found, and one each time it is raised too far.
    """

    epoch: int
    loss: float
    val_loss: float | None
    accuracy: float | None
    images_per_s: float
    waiting: float
    seconds: float
    lr: float
    skipped: int = 0

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"loss {self.loss:.4f}"]
        if self.accuracy is not None:
            parts += [f"val loss {self.val_loss:.4f}", f"accuracy {self.accuracy:.2%}"]
        parts += [
            f"{self.images_per_s:,.0f} images/s",
            f"waiting {self.waiting:.0%}",
            f"{self.seconds:.1f} s",
        ]
        if self.skipped:
            parts.append(f"{self.skipped} steps skipped")
        return "  ".join(parts)


COLUMNS = {
    "epoch": ("epoch", "d"),
    "loss": ("loss", ".4f"),
    "val_loss": ("val loss", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "images_per_s": ("images/s", ",.0f"),
    "waiting": ("waiting", ".0%"),
    "seconds": ("seconds", ".1f"),
    "lr": ("lr at its end", ".3g"),
    "skipped": ("steps skipped", "d"),
}
"""Each field of an `Epoch`, in the order of a log's columns, with its head and format in a notebook."""


@dataclass(repr=False)
class History:
    """The epochs so far, and the facts about the run that produced them."""

    epochs: list[Epoch] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return {"epochs": [asdict(epoch) for epoch in self.epochs], **self.facts}

    def save(self, path: str | Path) -> None:
        """Writes it as JSON; the file is whole or not there."""
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(self.to_dict(), indent=1).encode())

    @property
    def accuracy(self) -> float | None:
        """Top-1 (0 to 1) on the validation data after the last epoch; None if there is none."""
        return self.epochs[-1].accuracy if self.epochs else None

    def __repr__(self) -> str:
        return "\n".join(map(str, self.epochs)) or "no finished epoch"

    def _repr_html_(self) -> str:
        if not self.epochs:
            return "<i>no finished epoch</i>"
        measured = [n for n in COLUMNS if any(getattr(epoch, n) is not None for epoch in self.epochs)]
        head = "".join(f"<th>{COLUMNS[name][0]}</th>" for name in measured)
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(name, getattr(epoch, name))}</td>" for name in measured) + "</tr>"
            for epoch in self.epochs
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def _cell(name: str, value: Any) -> str:
    return "" if value is None else format(value, COLUMNS[name][1])


@dataclass
class FitResult:
    """What `Pipeline.fit` gives.

    Attributes:
        model: the trained model, after surgery, on the CPU, in evaluation mode.
        history: one entry per epoch.
        reports: what each transform changed.
        plan: the steps it was built by.
        transforms: of the pipeline, in the plan's order.
    """

    model: nn.Module
    history: History
    reports: tuple[Report, ...]
    plan: Plan
    transforms: tuple[Transform, ...] = ()

    def plain_state(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the model before surgery, for use without Drivetrain.

        What a surgery adds and a plain model cannot express keeps a name of its own; `Transform.to_plain` of
        each surgery says which.
        """
        return plain_state(self.model.state_dict(), self.model, self.transforms)

    @property
    def accuracy(self) -> float | None:
        """Top-1 (0 to 1) on the validation data after the last epoch; None if there is none."""
        return self.history.accuracy

    def __repr__(self) -> str:
        return f"FitResult(accuracy={self.accuracy}, epochs={len(self.history.epochs)})"

    def _repr_html_(self) -> str:
        """The history; what each transform changed, and the plan, are there to be opened."""
        parts = [("what was changed", "<br>".join(report._repr_html_() for report in self.reports))]
        parts += [("the plan", self.plan._repr_html_())]
        folded = "".join(
            f"<details><summary>{name}</summary>{body}</details>" for name, body in parts if body
        )
        return self.history._repr_html_() + folded


def plain_state(
    state: Mapping[str, torch.Tensor], model: nn.Module, transforms: Sequence[Transform]
) -> dict[str, torch.Tensor]:
    """A state dict of `model` under the names that it had before `transforms`, given in the plan's order."""
    plain = dict(state)
    for transform in reversed(transforms):
        plain = transform.to_plain(plain, model)
    return plain


def load_weights(path: Path, *, epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights that `save_weights` wrote after so many epochs; empty if there are none of that epoch."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("epochs") != str(epochs):
                return {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is not a dict
    except (OSError, SafetensorError):  # what is not whole is not a result
        return {}


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training.

    Attributes:
        epochs: how many were finished, those of a run that was resumed included.
        result: a `FitResult` of them; None if there are none, or the weights after the last one are not in this
            process: it resumed in the middle of an epoch without the folder of the run, or is not rank 0.
    """

    def __init__(self, outcome: Any = None, result: FitResult | None = None, epochs: int = 0) -> None:
        finished = "before its first epoch was finished"
        if result is not None:
            finished = f"after epoch {epochs}, up to which this exception's result goes"
        elif epochs:
            finished = f"after epoch {epochs}, whose weights are not in this process: there is no result here"
        super().__init__(f"training was interrupted {finished}")
        self.outcome, self.result, self.epochs = outcome, result, epochs

    def __reduce__(self) -> Any:
        return type(self), (self.outcome, self.result, self.epochs)


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64",
}  # fmt: skip
"""Of the types in a safetensors file."""


def save_weights(state: Mapping[str, torch.Tensor], path: str | Path, *, epochs: int | None = None) -> None:
    """Writes a state dict of CPU tensors as safetensors; the file is whole or not there.

    `epochs`, in the file's metadata, names the entry of the history that the weights belong to: a process that is
    killed between writing the two files leaves weights that are an epoch ahead.

    Tensor by tensor, as safetensors' own `save` takes the memory of all of them once more, and its `save_file`
    puts another file in the place of the one that `atomic_file` holds.

    Raises:
        DrivetrainError: for a type that such a file cannot hold, or if it cannot be written.
    """
    header: dict[str, Any] = {} if epochs is None else {"__metadata__": {"epochs": str(epochs)}}
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
