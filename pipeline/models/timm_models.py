"""timm's models by name: `"timm:resnet18"`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...common.errors import DataError, PlanError, RecipeError, require, suggest
from .weights import load_weights, omitted


@dataclass(frozen=True)
class TimmModel:
    """The factory of one of timm's models.

    Called with timm's arguments of `create_model`: `num_classes`, `drop_rate`, … With `pretrained=True`, timm's weights
    from its cache, downloaded if necessary; with `pretrained="file.safetensors"` (or .pth), those of a file. If
    `num_classes` differs from that of the weights, the classifier is not loaded and keeps its initialization.
    """

    name: str

    @property
    def __name__(self) -> str:
        return f"timm:{self.name}"

    def __call__(self, *, pretrained: bool | str | Path = False, **options: Any) -> nn.Module:
        """Build the model.

        Raises:
            PlanError: for an argument that the model does not have.
            DataError: if the weights are not there, or do not fit.
        """
        file = None if isinstance(pretrained, bool) else Path(pretrained)
        published = pretrained is True and not omitted()
        try:
            model: Any = _timm().create_model(self.name, pretrained=published, **options)
        except TypeError as error:
            raise PlanError(f"{self.__name__} does not take {options}: {error}.") from error
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"The weights of the cache or the network cannot be loaded into {self.__name__}: {error}. Pass "
                "pretrained='FILE' with weights of this model, or pretrained=False."
            ) from error
        if file is not None and not omitted():
            heads = model.pretrained_cfg.get("classifier", ())
            load_weights(model, file, self.__name__, (heads,) if isinstance(heads, str) else heads)
        built: nn.Module = model
        return built


def timm_model(name: str) -> TimmModel:
    """Return the factory of timm's model `name`, without the prefix.

    Raises:
        RecipeError: for an unknown name, with the closest one.
        MissingExtra: without timm.
    """
    known = _timm().list_models(include_tags=False)
    if name.partition(".")[0] not in known:
        raise RecipeError(f"timm has no model {name!r}.{suggest(name, known)}")
    return TimmModel(name)


def _timm() -> Any:
    return require("timm", "timm", "build one of its models")
