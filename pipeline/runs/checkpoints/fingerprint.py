"""A run as JSON values: its fingerprint, the description of its model, and the identity of any of its values."""

import dataclasses
import enum
import functools
import inspect
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from os import fspath
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .... import transforms
from ....common.errors import CheckpointError
from ....common.options.config import options_of
from ....loaders.epochs import EpochLoader
from ....loaders.options import ImageOptions
from ....loaders.order.batches import taken
from ....loaders.selection import Selection, once
from ....loaders.sources import files_of
from ....strategies.common.optimizer_state import IMPLEMENTATION
from ....transforms import Transform, declares_length, follows_length
from ...describe.config import DataConfig
from ...describe.pipeline_spec import PipelineSpec, sort_transforms
from ...describe.resolve import ResolvedPlan
from ...models.factories import LIBRARIES, name_of_factory
from ...optim.schedules import label
from ...tasks.target_scale import TargetScale
from ...training.build import Built
from ...training.model_identity import attributes, difference, digest, is_filled

MODEL = "model"  # the entry of the fingerprint with what the model is, from `model_identity`
VALIDATION = "validation data"  # its name, for messages; and the number of its samples, and their CRC-32
_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}\b", re.IGNORECASE)
_DEEPEST = 20  # levels of containers and objects; below, only the class is named
_ATTRIBUTES = object()  # in `inside`: marks the attributes of an object without its own repr
_AT_ONCE = 1 << 18  # indices of samples hashed at a time
_SAMPLED = 1 << 24  # bytes; of a larger array, only the beginning and the end are hashed
_LOADING = "load settings"
_OF_DAMAGE = ("on_error", "verify")  # settings for damaged samples, without which a run might not be resumed at all


def fingerprint(plan: ResolvedPlan, built: Built, epochs: int) -> dict[str, Any]:
    """Return what must be equal to resume as if uninterrupted: not strategy, devices, microbatches, workers, paths."""
    data, train, distribution, optimization = plan.data, built.train, plan.distribution, plan.optimization
    facts = {
        "seed": plan.seed,
        "training samples": train.state_dict()["samples"],
        "training data (CRC-32)": _identity(train),
        "weights of the training data": list(files_of(data.train).weights or ()),
        "selected samples (CRC-32)": _selected(data, train),
        "batch_size": data.batch_size,
        "image_size": data.image_size,
        "loader": data.loader,
        "order": data.order,
        _LOADING: dict(data.settings),
        "transforms": [identity(transform) for transform in plan.transforms],
        # In a task's own `repr`, a function has an address, and a module has no weights.
        "task": _called(type(plan.task).__qualname__, plan.task.options, ()),
        # A class of an optimizer, and a function of a schedule, by its identity.
        "optimizer": "a factory" if optimization.is_factory else optimization.optimizer,
        "parameter groups": [_numbers(group) for group in built.engine.optimizer.param_groups],
        "schedule": optimization.schedule,
        "schedule_options": dict(optimization.schedule_options),
        "warmup": optimization.warmup,
        "scale_lr of the scheduler": optimization.scheduled_scale(data.batch_size),
        "precision": distribution.precision,
        "clip_norm": distribution.clip_norm,
        "epochs": epochs,
        MODEL: built.identity,
    }
    if (val := built.val) is not None:
        samples = val.state_dict()["samples"]
        name = f"{files_of(data.train if data.val is None else data.val)} ({samples:,} samples)"
        facts[VALIDATION] = [name, [samples, _identity(val)]]
    scale = getattr(built.plan.task, "scale", None)
    if isinstance(scale, TargetScale):  # of older runs there is none, and a task of your own may name anything so
        facts["scale of the targets"] = [[f"{value:.5g}" for value in each.tolist()] for each in scale]
    return dict(json.loads(json.dumps(facts, default=identity)))


def check_compatible(saved: dict[str, Any], own: dict[str, Any], where: object, tied: Sequence[str]) -> None:
    """Raise for the first difference between two fingerprints. `epochs` may differ if nothing is `tied` to it."""
    for key, value in own.items():
        if key in (MODEL, VALIDATION):
            continue  # see `check_model`, `compare_validation`
        there = saved.get(key, value if key == "scale_lr of the scheduler" else None)  # of older runs there is none
        if key == "parameter groups":
            there, value = _in_both(there, value)
        if key == _LOADING and isinstance(there, dict):
            there, value = _decisive(there), _decisive(value)
        if there == value or (key == "epochs" and not tied):
            continue
        length = f" The learning rate, or a method, depends on the length of the training: {'; '.join(tied)}."
        why = length if key == "epochs" else ""
        raise CheckpointError(
            f"The checkpoint {where} is of a run with {key} = {there!r}, and this one has {value!r}.{why} Resume "
            f"with the same value, or start from scratch with resume=None in another folder."
        )


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a loader that change what is trained on: not those that are the defaults."""
    defaults = {name: option.default for name, option in options_of(ImageOptions).items()}
    usual = json.loads(json.dumps(defaults, default=identity))
    return {name: value for name, value in settings.items() if name not in _OF_DAMAGE and value != usual.get(name, ...)}


def compare_validation(saved: dict[str, Any], own: dict[str, Any]) -> str:
    """Return a warning if the validation data are others, or ""."""
    there, here = saved.get(VALIDATION), own.get(VALIDATION)  # of older runs there is none
    if not isinstance(there, list) or here is None or len(there) != len(here) or there[1] == here[1]:
        return ""
    before, now = there[0], here[0]
    contents = ", with other contents" if before == now else ""
    return (
        f"The validation data was {before}, and is now {now}{contents}: the best checkpoint and early stopping compare "
        "metrics of both."
    )


def check_model(saved: dict[str, Any], own: dict[str, Any], where: object, *, changed: bool) -> str:
    """Compare structure, settings and code of the models. Return a note for the user, or ""."""
    if not isinstance(saved.get(MODEL), dict):
        return (
            f"{where} was written by an older version, which did not record the model: whether this run has the same "
            "settings and code is not checked."
        )
    differs = difference(saved[MODEL], own[MODEL])
    if not differs:
        return ""
    if changed:
        return f"The model has changed since {where}: {differs}."
    raise CheckpointError(
        f"The checkpoint {where} is of a run with another model: {differs}. Resume with the model and the code that it "
        "was trained with; or begin a new run with its weights, fit(init_from=…); or, if the model was changed on "
        "purpose, pass fit(changed_model=True)."
    )


def tied_to_length(plan: ResolvedPlan) -> list[str]:
    shape, tied = plan.optimization, []
    # A torch scheduler counts steps, whatever the length of the run.
    if (shape.schedule != "constant" and not shape.uses_torch_scheduler) or shape.warmup:
        tied.append(f"the learning rate (schedule={label(shape.schedule)!r}, warmup={shape.warmup})")
    for transform in plan.transforms:
        if follows_length(transform):
            hint = (
                f" ({type(transform).__name__} does not declare whether it depends on the length. If it does not, "
                "define the property depends_on_length in its class, returning False)"
            )
            tied.append(identity(transform) + hint * (not declares_length(transform)))
    return tied


def _in_both(saved: Any, own: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Return the hyperparameters that both have: a strategy's own optimizer may have more of them."""
    if not isinstance(saved, list) or len(saved) != len(own) or not all(isinstance(g, dict) for g in saved):
        return saved, own
    pairs = [(left, right, left.keys() & right.keys()) for left, right in zip(saved, own, strict=True)]
    there = [{key: left[key] for key in sorted(common)} for left, _, common in pairs]
    return there, [{key: right[key] for key in sorted(common)} for _, right, common in pairs]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    chosen = ("params", *IMPLEMENTATION, "initial_lr", "peak_lr")
    plain = {key: value for key, value in group.items() if key not in chosen}
    return {key: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for key, v in plain.items()}


def _selected(data: DataConfig, train: EpochLoader) -> int | None:
    """Return the CRC-32 of the samples trained on and their shares; None, as in older versions, if it is all once."""
    if (chosen := train.selected) is None:
        return None
    if train.beton is None:
        return _crc_of(chosen)
    found = once(data, train.beton, "CRC-32", lambda: {"crc": np.array(_crc_of(chosen), np.uint32)})
    return int(found["crc"])


def _crc_of(chosen: Selection) -> int:
    crc = zlib.crc32(np.array([len(part) for part in chosen.parts], np.int64).tobytes())
    if chosen.weights is not None:
        crc = zlib.crc32(chosen.weights.data, crc)
    for start in range(0, len(chosen.train), _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, len(chosen.train)))
        crc = zlib.crc32(taken(chosen.train, places).tobytes(), crc)
    return crc


def _identity(loader: EpochLoader) -> int:
    """Return the CRC-32 of the samples' checksums; without a manifest, of labels or, for masks, of image lengths."""
    beton = loader.beton
    if beton is not None and beton.checksum is not None:
        return beton.checksum
    return zlib.crc32((beton.sizes if beton is not None and loader.has_masks else loader.labels).tobytes())


def description(plan: ResolvedPlan) -> dict[str, Any] | None:
    """Return the model and its surgery as JSON values to rebuild it from; None if JSON cannot hold them."""
    name = None if isinstance(plan.spec.model, nn.Module) else name_of_factory(plan.spec.model)
    algorithms = [t for t in plan.transforms if t.kind == "algorithm"]
    if any(t.renames for t in algorithms):  # to rebuild the model, its code would have to be imported
        return None
    try:
        changes = [t for t in plan.transforms if t.kind in transforms.CHANGES_MODEL and t not in algorithms]
        named = [transforms.to_dict(transform) for transform in changes]
        if any(":" in entry["name"] for entry in named):  # likewise
            return None
        entries = {
            "model": name,
            "model_options": dict(plan.spec.model_options),
            "transforms": named,
            "seed": plan.seed,
        }
        return dict(json.loads(json.dumps(entries, default=_text_of_weights)))
    except (TypeError, ValueError):  # a value that JSON cannot hold, or no model of that name
        return None


def _text_of_weights(value: Any) -> str:
    """Return the name of torchvision's published weights, which its models take, too, or the path of a file. Another
    enumeration has no text: by a name in its place, a factory of the user's might build another model."""
    if isinstance(value, enum.Enum) and type(value).__module__.startswith("torchvision."):
        return value.name
    path: str = fspath(value)
    return path


def rebuild_spec(
    saved: dict[str, Any],
    model: str | Callable[..., nn.Module] | nn.Module | None = None,
    otherwise: str = "use the weights under their trained names",
) -> tuple[PipelineSpec, tuple[Transform, ...]]:
    """Return the model and the transforms, in plan order, of a `description`; `model` replaces the named one. Without
    it nothing is imported, because importing a module runs its code. `otherwise`: the remedy in the message."""
    named = saved["model"]
    if model is None and (named is None or (":" in named and not named.startswith(LIBRARIES))):
        known = "was passed as a module, or comes from a function that cannot be imported by name"
        if named is not None:
            known = f"is {named!r}, which would have to be imported: opening a checkpoint runs no code"
        raise CheckpointError(
            f"The checkpoint does not know how to build its model, which {known}. Pass "
            f"model={named or 'module:factory'!r} (--model {named or 'MODULE:FACTORY'}); or {otherwise}."
        )
    for entry in saved["transforms"]:
        if ":" in str(entry.get("name")):
            raise CheckpointError(
                f"The checkpoint names the transform {entry['name']!r}, which would have to be imported: opening a "
                "checkpoint runs no code. Drivetrain does not write such a name: do not use this file."
            )
    made = tuple(transforms.get(**entry) for entry in saved["transforms"])
    chosen = named if model is None else model
    options = {} if isinstance(model, nn.Module) else saved["model_options"]
    return PipelineSpec(chosen, seed=saved["seed"], **options).transform(*made), sort_transforms(made)


def identity(value: object) -> str:
    """Return the value as text that is the same in every process, unlike a `repr` with an address. Functions are named,
    whatever their code, so that one stays the same after a fix; of a lambda or an inner function, which has no
    importable name, a digest of its bytecode, defaults and closure is added. Tensors and modules have a digest of their
    values, and modules of their public attributes, such as a loss's `label_smoothing`. Other objects without their own
    `repr` are their class and public attributes; objects of this kind among these only their class."""
    return _text(value, ())


def _text(value: Any, inside: tuple[object, ...]) -> str:
    """`inside` lists the objects that contain the value, outermost first."""
    if any(value is each for each in inside) or len(inside) > _DEEPEST:
        return f"<{_name(type(value))}>"
    inside = (*inside, value)
    for kind, text_of in _KINDS.items():
        if isinstance(value, kind):
            return text_of(value, inside)
    if type(value) in (list, tuple):
        return _of_sequence(value, inside)
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    return _of_object(value, inside)


def _of_object(value: Any, inside: tuple[object, ...]) -> str:
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.repr}
        return _called(type(value).__qualname__, fields, inside)
    shown = _shown(value)
    if isinstance(value, nn.Module):
        return f"{shown or _name(type(value))}{_of_module(value, inside)}"
    if shown is not None:
        return shown
    if isinstance(value, list | tuple):  # such as a named tuple, whose fields are not instance attributes
        return f"{_name(type(value))}{_of_sequence(value, inside)}"
    if any(each is _ATTRIBUTES for each in inside):
        return f"<{_name(type(value))}>"
    public = {name: v for name, v in sorted(attributes(value).items()) if not name.startswith("_")}
    return _called(_name(type(value)), public, (*inside, _ATTRIBUTES))


def _of_module(value: nn.Module, inside: tuple[object, ...]) -> str:
    """Return the state, and a digest of what the `repr` may omit: the public attributes of the layers."""
    state = value.state_dict()
    settings = {
        f"{path}.{name}": _text(each, inside)
        for path, layer in value.named_modules()
        for name, each in sorted(vars(layer).items())
        if not name.startswith("_") and name != "training"
    }
    texts = [_text(dict(state), inside)] if state else []
    texts += [digest(repr(settings))] if settings else []
    return "".join(f" {text}" for text in texts)


def _called(name: str, values: Mapping[str, Any], inside: tuple[object, ...]) -> str:
    return f"{name}({', '.join(f'{key}={_text(value, inside)}' for key, value in values.items())})"


def _of_sequence(value: list[Any] | tuple[Any, ...], inside: tuple[object, ...]) -> str:
    parts = ", ".join(_text(each, inside) for each in value)
    if isinstance(value, list):
        return f"[{parts}]"
    return f"({parts},)" if len(value) == 1 else f"({parts})"


def _of_mapping(value: Mapping[Any, Any], inside: tuple[object, ...]) -> str:
    return "{" + ", ".join(f"{_text(k, inside)}: {_text(v, inside)}" for k, v in value.items()) + "}"


def _of_partial(value: functools.partial[Any], inside: tuple[object, ...]) -> str:
    given = [_text(each, inside) for each in (value.func, *value.args)]
    given += [f"{name}={_text(each, inside)}" for name, each in sorted(value.keywords.items())]
    return f"partial({', '.join(given)})"


def _of_tensor(value: torch.Tensor) -> str:
    kind = f"tensor(shape={tuple(value.shape)}, dtype={value.dtype}"
    try:
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # on the meta device, sparse, or a subclass
        return f"{kind})"
    return f"{kind}, {_of_bytes(data)})"


def _of_array(value: NDArray[Any], inside: tuple[object, ...]) -> str:
    if value.dtype.hasobject:  # its bytes are addresses
        return f"array(dtype={value.dtype}, {_text(value.tolist(), inside)})"
    return f"array(shape={value.shape}, dtype={value.dtype}, {_of_bytes(value)})"


def _of_function(function: FunctionType, inside: tuple[object, ...]) -> str:
    name = _name(function)
    if "<" not in function.__qualname__:  # neither <lambda> nor <locals>
        return name
    cells = [each.cell_contents if is_filled(each) else "<empty>" for each in function.__closure__ or ()]
    enclosed = [_text(each, inside) for each in cells]
    defaults = _text([function.__defaults__, function.__kwdefaults__], inside)
    return f"{name} {digest(repr((_of_code(function.__code__), defaults, enclosed)))}"


def _of_code(code: CodeType) -> tuple[Any, ...]:
    """Return what the code does, without its file and line numbers."""
    constants = [_of_code(c) if isinstance(c, CodeType) else _text(c, ()) for c in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_flags


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _of_bytes(array: NDArray[Any]) -> str:
    """Return a digest of the bytes; of both ends if the array is large: it may be a memory-mapped file."""
    flat = array.reshape(-1)
    if array.nbytes > _SAMPLED:
        rows = max(1, _SAMPLED // array.itemsize // 16)
        flat = np.concatenate([flat[:rows], flat[-rows:]])
    return digest(flat.tobytes())


def _shown(value: object) -> str | None:
    """Return the object's own `repr`; None if it has none, contains an address, or fails."""
    if type(value).__repr__ is object.__repr__:
        return None
    try:
        text = repr(value)
    except Exception:
        return None
    return None if _ADDRESS.search(text) else text


_KINDS: dict[Any, Callable[[Any, tuple[object, ...]], str]] = {
    enum.Enum: lambda value, _: f"{_name(type(value))}.{value.name}",
    NoneType | bool | int | float | complex | str | bytes: lambda value, _: repr(value),
    PurePath: lambda value, _: repr(str(value)),
    ModuleType: lambda value, _: str(value.__name__),
    torch.Tensor: lambda value, _: _of_tensor(value),
    np.ndarray: _of_array,
    Mapping: _of_mapping,
    set | frozenset: lambda value, inside: f"{{{', '.join(sorted(_text(each, inside) for each in value))}}}",
    functools.partial: _of_partial,
    MethodType: lambda value, inside: f"{_text(value.__self__, inside)}.{value.__func__.__name__}",
    FunctionType: _of_function,
}  # of each kind of values, the first that fits
