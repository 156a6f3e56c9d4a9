"""What ranks do in the tests of checkpoints. A module, because ranks import it."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drivetrain import Pipeline
from drivetrain.pipeline import Checkpoints
from pipeline_data import attempt, batch_norm_model, numbers
from torch import nn

ALL = Checkpoints(every_steps=1, keep=1000)
FEW = Checkpoints(every_steps=3, keep=1000)
EPOCHS = 2


class Dropping(nn.Sequential):
    """Draws from torch's, numpy's and Python's global random numbers in every step."""

    def __init__(self) -> None:
        super().__init__(*batch_norm_model()[:-1], nn.Dropout(0.3), batch_norm_model()[-1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            images = images + random.random() * 0.1 + np.random.normal() * 0.1  # noqa: NPY002
        return super().forward(images)


def outcome(pipeline: Pipeline, **arguments: Any) -> Any:
    result = attempt(lambda: pipeline.fit(epochs=EPOCHS, progress=False, **arguments))
    if isinstance(result, str):
        return result
    if arguments.get("resume") is not None:
        assert result.history.facts["resumed"]  # not started from scratch, which would give the same numbers
    return numbers(result), result.model.state_dict()


def train_all(pipelines: dict[str, Pipeline], folder: Path) -> dict[str, Any]:
    with _without_garbage():
        return {name: outcome(p, out=folder / name, checkpoints=FEW) for name, p in pipelines.items()}


def resume_all(pipelines: dict[str, Pipeline], moves: list[tuple[str, str, Path]]) -> dict[Any, Any]:
    with _without_garbage():
        return {(name, label): outcome(pipelines[name], resume=place) for name, label, place in moves}


def train_and_move(
    pipelines: dict[str, Pipeline], folder: Path, moves: list[tuple[str, str, Path]]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Both, as ranks take longer to start than to train."""
    return train_all(pipelines, folder), resume_all(pipelines, moves)


@contextmanager
def _without_garbage() -> Iterator[None]:
    """DeepSpeed's third stage collects garbage for each engine, which all that is imported makes slow."""
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train_and_resume(
    pipelines: dict[str, Pipeline], sources: dict[str, Path], folder: Path, how: str
) -> dict[str, dict[str, Any]]:
    """On each rank: each pipeline trained whole, saving into `folder / name`; resumed in its own middle; and
    from each of `sources`, and from what each other pipeline has saved: in the first epoch, and at its end; that of
    `sources` only if `how` is "ends". Nothing is resumed if it is "whole"."""
    found: dict[str, dict[str, Any]] = {}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for name, pipeline in pipelines.items():
        # Python's and numpy's random numbers differ from rank to rank, as torch's do where a model draws some.
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        found[name] = {"whole": outcome(pipeline, out=folder / name, checkpoints=FEW)}
    own = {name: folder / name / "checkpoints" for name in pipelines}
    for name, pipeline in pipelines.items() if how != "whole" else ():
        for label, place in {**sources, **own}.items():
            if label.partition(" ")[0] == name.partition(" ")[0]:  # of the same model
                found[name][label] = outcome(pipeline, resume=place / "step-00000003")
                if how == "ends" or label in own:
                    found[name][f"{label}, next epoch"] = outcome(pipeline, resume=place / "step-00000004")
    return found
