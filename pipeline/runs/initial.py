"""Weights for a model before training or evaluation: of a run, a checkpoint, a file, or a state dict."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ...common.errors import CheckpointError, PlanError, first_of
from ...common.model_state import ModelState, on_meta, set_buffer, unlisted_tensors, vacant_buffers
from ...common.storage.tensors import Tensors, part_of, shape_of
from ...transforms import Transform
from ..describe.resolve import ResolvedPlan
from ..models.weights import SOURCES, SUFFIXES
from ..models.weights import read_weights as read_file
from ..tasks.target_scale import BUFFERS, carried_scale
from .checkpoints.directory import find
from .checkpoints.format import Checkpoint
from .checkpoints.remote import STATE, opened
from .checkpoints.state import evaluated_state
from .checkpoints.weights import open_model, open_unlisted
from .folder import MODEL, UNLISTED

State = Mapping[str, torch.Tensor]
WeightsArg = str | Path | State
"""The folder of a run or of a checkpoint, a file of weights (`.safetensors`, `.pth`, `.pt`, `.bin`), the address of one
of them, or a state dict. Files are read as `models.weights.read_weights` does."""


@dataclass(frozen=True)
class Matched:
    source: str  # where they are from
    loaded: tuple[str, ...]
    missing: tuple[str, ...]  # not in the source; they keep the model's values
    unexpected: tuple[str, ...]  # not in the model
    reshaped: tuple[str, ...]  # of another shape in the source, such as a last layer for other classes
    caution: str = ""

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.missing) + len(self.reshaped)}"]
        kinds = {
            "with another shape there": self.reshaped, "not there": self.missing,
            "there, but not in the model": self.unexpected,
        }  # fmt: skip
        parts += [f"{first_of(names, 3)} {what}" for what, names in kinds.items() if names]
        return f"Weights from {self.source}: {'; '.join(parts)}.{self.caution}"

    def to_dict(self) -> dict[str, Any]:
        names = {name: list(getattr(self, name)) for name in ("missing", "unexpected", "reshaped")}
        return {"source": self.source, "loaded": len(self.loaded), **names}


class InitialWeights:
    """Loads weights into a model after surgery, under its names, or those before it (`Transform.from_plain`); with
    `strict`, all must match. Of a run, these are the evaluated ones: averages with EMA or SWA."""

    def __init__(self, weights: WeightsArg, transforms: Sequence[Transform], *, strict: bool = False) -> None:
        self._weights, self._transforms, self._strict = weights, transforms, strict
        self.matched: Matched | None = None

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> State:
        """Load what has values, and return the weights for what is on the meta device. Those of a file are read on
        access, or by rows, unless a transform translates them."""
        source = str(self._weights) if isinstance(self._weights, str | Path) else "the state dict"
        state = read_weights(self._weights, model.state_dict().keys())
        for transform in self._transforms:
            if type(transform).from_plain is not Transform.from_plain:
                state = transform.from_plain(dict(state), model)
        unlisted = unlisted_tensors(model)
        own: State = {**model.state_dict(), **unlisted}
        caution = ""
        if not self._strict and carried_scale(model) is not None:  # that of the new run's targets
            if BUFFERS[0] not in state and own.keys() - {*BUFFERS} <= state.keys():
                caution = (
                    " They have the last layer, but not target_mean: if its outputs were in the units of the targets, "
                    "remove its weights, since scale_targets=True needs others."
                )
            own, state = (part_of(each, each.keys() - {*BUFFERS}) for each in (own, state))
        shared = [name for name in own if name in state]
        # What is evaluated is all of a trained model; a new run keeps constants that fit its own options.
        other = unlisted.keys() if self._strict else set()
        same = tuple(name for name in shared if tuple(own[name].shape) == shape_of(state, name) or name in other)
        vacant = vacant_buffers(model) & state.keys()
        matched = Matched(
            source, same, tuple(name for name in own if name not in state and name not in unlisted),
            tuple(name for name in state if name not in own and name not in vacant),
            tuple(name for name in shared if name not in same), caution,
        )  # fmt: skip
        required = ((own.keys() - unlisted.keys()) | state.keys()) - vacant
        if not same or (self._strict and not required <= set(same)):
            raise PlanError(
                f"{'These are not weights of this model' if self._strict else 'Nothing to begin with'}. {matched} Pass "
                "weights of the same model, under its names before or after the transforms."
            )
        later = {name for name in same if own[name].is_meta} | (vacant if on_meta(model) else set())
        # What a surgery adds, it takes from the model, which has no values yet.
        later -= {name for name in later if isinstance(state, dict) and state[name].is_meta}
        for name in same:
            if name not in unlisted and name not in later:
                own[name].copy_(state[name])
        for name in (vacant | (unlisted.keys() & set(same))) - later:
            set_buffer(model, name, state[name])
        self.matched = matched
        return part_of(state, later)


def initial_weights(plan: ResolvedPlan) -> InitialWeights | None:
    """Return what loads the weights of the recipe's `init_from`; None if its runs begin with the model's own."""
    source = plan.spec.fit_defaults().get("init_from")
    return None if source is None else InitialWeights(source, plan.transforms)


def check_source(weights: WeightsArg) -> Path:
    """Raise PlanError unless `weights` can be read, which is not done here. Return their path; of a dict, Path()."""
    if isinstance(weights, Mapping):
        odd = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
        if odd or not weights:
            what = f"{odd[0]!r} in the state dict is not a tensor" if odd else "The state dict is empty"
            raise PlanError(f"{what}. Pass model.state_dict().")
        return Path()
    if not isinstance(weights, str | Path) or weights == "":
        raise PlanError(
            f"{weights!r:.80} is not a source of weights. Pass the folder of a run or of a checkpoint, "
            f"{SOURCES}, or a state dict."
        )
    place = opened(weights, MODEL, UNLISTED)
    if not place.exists():
        raise PlanError(f"{weights} does not exist. Pass the folder of a run or of a checkpoint, or {SOURCES}.")
    if place.is_file() and place.suffix not in SUFFIXES:
        raise PlanError(f"{place} is not a file of weights: its name ends in none of {', '.join(SUFFIXES)}.")
    return place


def read_weights(weights: WeightsArg, own: Collection[str]) -> State:
    """`own`: the names of the weights of the model that takes them."""
    place = check_source(weights)
    if isinstance(weights, Mapping):
        return weights
    if place.is_file():
        state = read_file(place, "this pipeline's model", own)
        return state | open_unlisted(place) if place.suffix == ".safetensors" else state
    if (place / STATE).exists():
        checkpoint = Checkpoint(place)
        checkpoint.verify()
        return _joined(evaluated_state(checkpoint))
    if (place / MODEL).exists():
        return open_model(place / MODEL).all()
    try:
        return _joined(evaluated_state(find(place)))
    except CheckpointError as error:
        raise CheckpointError(f"{weights} has no {MODEL}. {error}") from None


def _joined(state: ModelState) -> State:
    """Return all tensors, which are read on access."""
    return Tensors({**cast(Tensors, state.weights).readers, **cast(Tensors, state.unlisted).readers})
