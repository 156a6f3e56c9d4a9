"""Models by name, for recipes: Drivetrain's own, torchvision's, and any importable factory."""

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.errors import DataError, RecipeError, suggest
from ...common.names import imported, name_of
from .cifar import airbench_net, cifar_resnet
from .libraries import HfModel, TimmModel, hf_model, timm_model
from .segmentation import fpn
from .weights import is_file_name, load_weights, omitted

Factory = Callable[..., nn.Module]


def model_factory(name: str) -> Factory:
    """Return a model's factory by name: a name in `MODELS`, one of `torchvision.models.list_models()`, `"timm:NAME"`,
    `"hf:NAME"`, or `"package.module:attribute"`, which imports a function or an `nn.Module` class."""
    if name in MODELS:
        return MODELS[name]
    if name.startswith("timm:"):
        return timm_model(name.removeprefix("timm:"))
    if name.startswith("hf:"):
        return hf_model(name.removeprefix("hf:"))
    if ":" in name:
        return _imported(name)
    known = _names()
    if name not in known:
        raise RecipeError(
            f"No model is named {name!r}. Write a custom one as package.module:factory."
            f"{suggest(name, [*MODELS, *known])}"
        )
    factory: Factory = _torchvision().get_model_builder(name)
    return factory


def name_of_factory(factory: Factory) -> str | None:
    """Return the name for which `model_factory` returns exactly this factory; None if there is none."""
    for name, own in MODELS.items():
        if own is factory:
            return name
    if isinstance(factory, TimmModel | HfModel):
        return factory.__name__
    name = getattr(factory, "__name__", "")
    module = getattr(factory, "__module__", None) or ""
    known = module.startswith("torchvision.models.") and name in _names()
    candidate = name if known else name_of(factory)
    try:
        return candidate if candidate is not None and model_factory(candidate) is factory else None
    except RecipeError:
        return None  # of a name that is no model's, such as an optimizer's


def _torchvision() -> Any:
    import torchvision.models  # here: it takes 3 s

    return torchvision.models


def _names() -> list[str]:
    names: list[str] = _torchvision().list_models(module=_torchvision())
    return names


def _imported(name: str) -> Factory:
    target = imported("model", name, RecipeError)
    if not (inspect.isfunction(target) or (inspect.isclass(target) and issubclass(target, nn.Module))):
        raise RecipeError(
            f"The model {name!r} is {target!r:.80}. Name a function that returns an nn.Module, or an nn.Module class."
        )
    factory: Factory = target
    return factory


def vit(
    num_classes: int = 1000,
    image_size: int = 224,
    patch_size: int = 16,
    width: int = 384,
    depth: int = 12,
    heads: int = 6,
    mlp: int = 1536,
) -> nn.Module:
    """Build torchvision's `VisionTransformer`; the defaults are ViT-S's. It accepts images of `image_size` pixels only,
    a multiple of `patch_size`."""
    from torchvision.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(image_size, patch_size, depth, heads, width, mlp, num_classes=num_classes)
    return model


def vit_s16(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """Build ViT-S/16, with 22 million parameters, a class token and learned positions, like torchvision's others."""
    return vit(num_classes, image_size)


def pretrained(name: str, num_classes: int, weights: str | Path | None = "DEFAULT") -> nn.Module:
    """Build a torchvision model with a new last layer and pretrained weights: published ones by name, or as the object
    that torchvision has, downloaded once to `torch.hub.get_dir()` ("DEFAULT": the best); a file, `.safetensors` or of
    `torch.save`, whose last layer is loaded if it fits; or None for random ones."""
    models, known = _torchvision(), _names()
    if name not in known:
        raise RecipeError(f"No model is named {name!r}.{suggest(name, known)}")
    published, file = models.get_model_weights(name).__members__, None
    weights = next((own for own, each in published.items() if each is weights), weights)
    if weights is not None and weights not in published:
        is_name = isinstance(weights, str | Path)  # and not the object of another model
        if not (is_name and (omitted() or is_file_name(weights))):  # a file that is not needed any more need not exist
            raise RecipeError(
                f"{name} has no weights {weights!r}, nor is that a file.{suggest(str(weights), published)}"
            )
        file = Path(weights)
    if file is not None or weights is None:
        how = {"init_weights": file is None} if name in AUXILIARY else {}  # else torchvision warns of its default
        model: nn.Module = models.get_model(name, weights=None, **how)
    elif omitted():
        model = models.get_model(name, weights=None, **_built_for(name, published[str(weights)]))
    else:
        model = _published(name, published[str(weights)])
    removed = _without_auxiliary(model)
    head = _replace_head(model, num_classes, name)
    if file is not None and not omitted():
        load_weights(model, file, name, (head,), removed)
    return model


def projected(name: str, dim: int = 128, **options: Any) -> nn.Module:
    """Build a model that returns embeddings `(B, dim)`: its last linear layer is replaced by two with a ReLU between
    them, the first as wide as its input, as in SimCLR (arXiv:2002.05709, section 4.2). All other layers keep their
    names, so `fit(init_from=…)` of the plain model takes their weights."""
    model = model_factory(name)(**options)
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise RecipeError(f"{name} has no linear layer that a projection could replace.")
    path, width = linear[-1][0], linear[-1][1].in_features
    model.set_submodule(path, nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim)))
    return model


def _built_for(name: str, weights: Any) -> dict[str, Any]:
    """Return the arguments with which torchvision builds a model for published weights, and not without them."""
    if name.startswith("vit_"):
        return {"image_size": weights.meta["min_size"][0]}
    if name not in AUXILIARY:
        return {}
    heads = {"aux_logits": False} if name == "googlenet" else {}  # its auxiliary ones are removed
    return {"transform_input": True, "init_weights": False, **heads}


def _published(name: str, weights: Any) -> nn.Module:
    """From torch's cache or the network."""
    cached = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    there = cached.exists()
    try:
        model: nn.Module = _torchvision().get_model(name, weights=weights)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]  # no network, or a wrong checksum
        if there:
            raise DataError(
                f"The weights {weights.name} of {name} in {cached} are damaged: {reason}. Delete the file; it is then "
                "downloaded again."
            ) from error
        raise DataError(
            f"The weights {weights.name} of {name} could not be downloaded: {reason}. Put their file into "
            f"{cached.parent}, pass the path of a file as weights, or set weights to null."
        ) from error
    return model


def _without_auxiliary(model: nn.Module) -> tuple[str, ...]:
    """Remove the auxiliary classifiers of GoogLeNet and Inception: they are of ImageNet's classes, and outputs would be
    others in training than in evaluation. Of published weights, torchvision removes only GoogLeNet's. Return their
    names, which files of weights may have."""
    names = tuple(name for name in ("aux1", "aux2", "AuxLogits") if hasattr(model, name))
    if names:
        model.aux_logits = False  # type: ignore[assignment]
    for name in names:
        setattr(model, name, None)
    return names


def _replace_head(model: nn.Module, num_classes: int, name: str) -> str:
    layers: list[tuple[str, Any]]
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    path, last = layers[-1]
    new: nn.Module
    if isinstance(last, nn.Linear):
        width, new = last.out_features, nn.Linear(last.in_features, num_classes, last.bias is not None)
    else:
        width = last.out_channels
        new = nn.Conv2d(last.in_channels, num_classes, 1, bias=last.bias is not None)
    if width != CLASSES:
        last_layer = f"The last layer of {name}, {path}"
        raise RecipeError(f"{last_layer}, returns {width} values, not logits of {CLASSES} classes.")
    model.set_submodule(path, new)
    return path


AUXILIARY = ("googlenet", "inception_v3")  # have auxiliary classifiers
CLASSES = 1000  # of ImageNet, for which torchvision's models are built
LIBRARIES = ("timm:", "hf:")  # for these prefixes, no code named by a recipe or a checkpoint is imported
MODELS: dict[str, Factory] = {
    "airbench_net": airbench_net,
    "cifar_resnet": cifar_resnet,
    "fpn": fpn,
    "pretrained": pretrained,
    "projected": projected,
    "vit": vit,
    "vit_s16": vit_s16,
}
