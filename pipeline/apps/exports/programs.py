"""A model as a program that runs without its Python code: torch.export and ONNX. Each is run before it is published."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ....common.errors import ExportError, require
from ....common.storage.files import atomic_file

INPUT = "images"  # name in ONNX, `(N, C, H, W)`
OUTPUT = "outputs"  # name in ONNX, of a model that returns one tensor
PURPOSE = "export to ONNX"

_SHAPES = ({0: torch.export.Dim("batch")},)

Run = Callable[[torch.Tensor], list[torch.Tensor]]  # returns the tensors of a program's output, in order


@dataclass(frozen=True)
class Difference:
    largest: float  # absolute difference
    scale: float  # largest absolute value of the model's outputs
    images: str  # what they were compared on, e.g. "8 images of val.beton"

    def __str__(self) -> str:
        return f"largest difference {self.largest:.2g} on {self.images} (outputs up to {self.scale:.3g})"


def write_program(
    kind: str, model: nn.Module, images: torch.Tensor, about: str, out: Path, metadata: Mapping[str, str],
    tolerance: float,
) -> Difference:  # fmt: skip
    """Write a model as a program with a dynamic batch size. `images`, to compare on, are `(N, C, H, W)` with N ≥ 2.
    Raise ExportError, without a file, if outputs differ by more than `tolerance`, relative to the largest, or to 1."""
    write, load = (_write_onnx, _load_onnx) if kind == "onnx" else (_write_torch_export, _load_torch_export)
    if kind == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, "onnx", PURPOSE)
    with torch.no_grad(), warnings.catch_warnings(), atomic_file(out) as file:
        warnings.simplefilter("ignore")  # the exporters' are about their own code
        with _failures(f"The model cannot be exported as {kind}", "A model's code must not depend on the batch size."):
            # An example of one image would be taken for a constant batch size.
            program = torch.export.export(model, (images[:2],), dynamic_shapes=_SHAPES)
            write(program, images, file, metadata)
        file.flush()
        with _failures(f"The exported {kind} program does not run", "Its operations may be newer than the runtime."):
            run = load(Path(file.name))
            pairs = [(_tensors(model(some)), run(some)) for some in (images, images[:1])]  # of any batch size
        difference = _compare(pairs, about)
        if not difference.largest <= tolerance * max(1.0, difference.scale):  # NaN is refused, too
            raise ExportError(
                f"The exported {kind} program computes something else: {difference}, more than tolerance={tolerance:g} "
                f"(--tolerance) allows. {out} was not written."
            )
    return difference


@contextmanager
def _failures(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ExportError(f"{what}: {type(error).__name__}: {reason:.300} {remedy}") from error


def _write_torch_export(
    program: torch.export.ExportedProgram, _: torch.Tensor, file: BinaryIO, metadata: Mapping[str, str]
) -> None:
    torch.export.save(program, file, extra_files=dict(metadata))


def _load_torch_export(path: Path) -> Run:
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    return lambda images: _tensors(loaded(images))


def _write_onnx(
    program: torch.export.ExportedProgram, images: torch.Tensor, file: BinaryIO, metadata: Mapping[str, str]
) -> None:
    single = len(program.graph_signature.user_outputs) == 1
    converted = torch.onnx.export(
        program, (images[:2],), input_names=[INPUT], output_names=[OUTPUT] if single else None,
        dynamic_shapes=_SHAPES, dynamo=True, verbose=False,
    )  # fmt: skip
    assert converted is not None
    converted.model.metadata_props.update(metadata)
    file.write(converted.model_proto.SerializeToString())


def _load_onnx(path: Path) -> Run:
    runtime = require("onnxruntime", "onnx", PURPOSE)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(one) for one in session.run(None, {INPUT: images.numpy()})]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]


def _compare(pairs: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]], about: str) -> Difference:
    largest = scale = 0.0
    for expected, found in pairs:
        if [tuple(one.shape) for one in expected] != [tuple(one.shape) for one in found]:
            shapes = [[tuple(one.shape) for one in ones] for ones in (expected, found)]
            raise ExportError(f"The exported program returns tensors of {shapes[1]}, and the model {shapes[0]}.")
        for one, other in zip(expected, found, strict=True):
            if one.numel():
                gap = float((one.double() - other.double()).abs().max())
                largest = gap if gap != gap else max(largest, gap)
                scale = max(scale, float(one.double().abs().max()))
    return Difference(largest, scale, about)
