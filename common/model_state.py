"""All tensors of a model: training changes buffers that its `state_dict()` leaves out, too, so code that keeps,
restores or compares a model's state takes its tensors from here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from .errors import first_of


@dataclass(frozen=True)
class ModelState:
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what `load_state_dict` takes
    unlisted: Mapping[str, torch.Tensor] = field(default_factory=dict)  # such as non-persistent buffers

    def __bool__(self) -> bool:
        return bool(self.weights)

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.weights, **self.unlisted}


def in_memory(state: ModelState) -> ModelState:
    """Return the tensors, each read once, if they are read on access."""
    return ModelState(dict(state.weights), dict(state.unlisted))


def on_meta(model: nn.Module) -> bool:
    """Return whether the model has tensors on the meta device, which have shapes but no values."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def forward_is_replaced(module: nn.Module) -> bool:
    """Return whether the instance has a forward of its own, so that another class would have no effect."""
    return "forward" in vars(module)


def has_mean(value: torch.Tensor) -> bool:
    """Return whether a mean of several such tensors makes sense."""
    return value.is_floating_point() or value.is_complex()


def unlisted_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that the model's `state_dict()` leaves out, by name, not copied."""
    listed = model.state_dict(keep_vars=True)
    own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in own if name not in listed}


def vacant_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that are registered as None. A forward may set them."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, buffer in module._buffers.items()
        if buffer is None
    }


def split_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> ModelState:
    unlisted = unlisted_tensors(model).keys()
    weights = {name: value for name, value in state.items() if name not in unlisted}
    return ModelState(weights, {name: value for name, value in state.items() if name in unlisted})


def load_state(model: nn.Module, state: ModelState) -> None:
    """Load all tensors into a model on the CPU. Unlisted tensors that `state` lacks keep their values."""
    vacant = {name: state.weights[name] for name in vacant_buffers(model) & state.weights.keys()}
    for name, value in {**state.unlisted, **vacant}.items():
        set_buffer(model, name, value)
    model.load_state_dict(state.weights)


@torch.no_grad()
def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set a buffer, or another tensor that the state dict leaves out: in place if possible; else one that a forward has
    grown is replaced, and one that a forward registers is registered."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        own = getattr(module, leaf, None)
        if isinstance(own, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        elif leaf in module._buffers:
            setattr(module, leaf, value.to("cpu" if own is None else own.device, copy=True))
        else:
            module.register_buffer(leaf, value.clone(), persistent=False)
    except (AttributeError, KeyError) as error:
        raise RuntimeError(f"the model cannot take the buffer {name!r}: {error}") from error


def train_mode(model: nn.Module) -> None:
    """Set training mode, but not for frozen BatchNorm layers. Every loop calls this instead of `model.train()`."""
    model.train()
    keep_frozen_statistics(model)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Set frozen BatchNorm layers to evaluation: their running statistics must not drift from their weights."""
    for norm in frozen_norms(model):
        norm.eval()


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers without a trained parameter; of those without parameters (`affine=False`), the ones
    in a module that has parameters, none of them trained."""
    found: list[nn.Module] = []

    def walk(module: nn.Module, around: bool) -> None:
        own = list(module.parameters())
        frozen = not any(each.requires_grad for each in own) if own else around
        if isinstance(module, _BatchNorm) and frozen:
            found.append(module)
        for child in module.children():
            walk(child, frozen)

    walk(model, around=False)
    return list(dict.fromkeys(found))


def describe_frozen(model: nn.Module, most: int = 8) -> str:
    """Return the names of what is frozen, for a sentence: of modules without a trained parameter, only the outermost.
    Empty if all parameters are trained."""
    names = _frozen_names(model, "")
    if not names:
        return ""
    norms = len(frozen_norms(model))
    kept = f" ({norms} BatchNorm layer{'s' * (norms > 1)} in evaluation mode)" if norms else ""
    return first_of(names, most) + kept


def _frozen_names(module: nn.Module, name: str) -> list[str]:
    parameters = list(module.parameters())
    if parameters and not any(each.requires_grad for each in parameters):
        return [name or "all parameters"]
    dot = f"{name}." if name else ""
    own = [f"{dot}{leaf}" for leaf, each in module.named_parameters(recurse=False) if not each.requires_grad]
    return [
        *own,
        *(each for leaf, child in module.named_children() for each in _frozen_names(child, f"{dot}{leaf}")),
    ]


class BufferCopies:
    """Copies of a model's buffers, also of those that a forward replaces; lazy ones without a shape are left out."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [(module, dict(module._buffers)) for module in model.modules()]
        buffers = (b for _, own in self._owners for b in own.values() if b is not None and not is_lazy(b))
        self._copies = [(buffer, buffer.detach().clone()) for buffer in dict.fromkeys(buffers)]

    @torch.no_grad()
    def restore(self) -> None:
        """Give every module the buffers that it had, with their values. Those registered since then stay."""
        for copied, value in self._copies:
            # Through `data`, which autograd does not track: a backward about to run may have saved the buffer.
            copied.data.copy_(value)
        for module, own in self._owners:
            for name, buffer in own.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Return a context in which forwards may change buffers; exit restores them. For forwards that process the images
    of a step a second time (SelectiveBackprop, SAM), so that BatchNorm's statistics do not count them twice."""
    copies = BufferCopies(model)
    try:
        yield
    finally:
        copies.restore()
