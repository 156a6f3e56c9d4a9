"""Models of other libraries: timm's, and Hugging Face's for image classification, of the hub or a folder."""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from ...common.errors import DataError, PlanError, RecipeError, require, suggest
from .weights import is_file_name, load_weights, omitted, read_weights, unusable

_PROBE_SECONDS = 5.0
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PROBLEMS = {  # by the kind of a task's targets: what the models call the loss for them
    "class indices": "single_label_classification",
    "labels": "multi_label_classification",
    "values": "regression",
}


@dataclass(frozen=True)
class HfModel:
    """`AutoModelForImageClassification` of a name on the hub (from the library's cache, or downloaded once), or of a
    local folder with `config.json`. No code of the hub is run."""

    name: str

    @property
    def __name__(self) -> str:
        return f"hf:{self.name}"

    def __call__(
        self,
        *,
        num_classes: int | None = None,
        weights: str | Path | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> nn.Module:
        """Build the model, in float32. `weights`: `"DEFAULT"`: those of `name`; or a folder or a file, whose last layer
        is left out if it has other outputs; None: random ones. `revision`: branch, tag or commit on the hub. `options`
        replace values of the configuration, such as `hidden_dropout_prob`."""
        if num_classes is not None:
            options["num_labels"] = num_classes
        auto = _transformers().AutoModelForImageClassification
        plain: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        with _quiet():
            config = self._config(revision, options)
            if weights is None or omitted():
                return self._built(auto, config, plain)
            with torch.device("meta"):
                kind: Any = type(self._built(auto, config, plain))
            return self._loaded(kind, config, weights, {**plain, "revision": revision})

    def _config(self, revision: str | None, options: dict[str, Any]) -> Any:
        read = _transformers().AutoConfig.from_pretrained
        flags = {"return_unused_kwargs": True, "trust_remote_code": False, "revision": revision}
        try:
            config, unused = _cached_or_fetched(read, self.name, **flags | options)
        except OSError as error:
            raise self._missing(error) from error
        except Exception as error:  # configurations check their values in many ways
            raise PlanError(f"{self.__name__} cannot be configured with {options}: {_line(error)}.") from error
        if unused := set(unused) & options.keys():
            raise PlanError(
                f"{self.__name__} does not take {sorted(unused)[0]!r}: its configuration, a {type(config).__name__}, "
                "has no such value."
            )
        return config

    def _built(self, auto: Any, config: Any, plain: dict[str, Any]) -> nn.Module:
        try:
            model: nn.Module = auto.from_config(config, **plain)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise PlanError(
                f"{self.__name__} is a model of type {config.model_type!r}, of which transformers has none for image "
                "classification. Choose one of those: https://huggingface.co/models?pipeline_tag=image-classification"
            ) from error
        return model

    def _loaded(self, kind: Any, config: Any, weights: str | Path, plain: dict[str, Any]) -> nn.Module:
        """With a new head where the weights have other outputs."""
        place, state = self.name if weights == "DEFAULT" else str(weights), None
        local = Path(place).exists()
        if weights != "DEFAULT" and not local:
            others = "folder, nor a name of weights: there is only 'DEFAULT'"
            what = "file" if is_file_name(weights) else others
            raise DataError(f"The weights {weights} of {self.__name__} are not a {what}.")
        if Path(place).is_file():
            state = read_weights(Path(place), self.__name__)
        given: dict[str, Any] = {
            "config": config, "state_dict": state, "ignore_mismatched_sizes": True, "output_loading_info": True,
        } | plain  # fmt: skip
        source = None if state is not None else place
        try:
            model, report = _cached_or_fetched(kind.from_pretrained, source, **given)
        except Exception as error:  # a damaged file makes the readers raise many types
            if isinstance(error, OSError) and not local:
                raise self._missing(error) from error
            raise unusable(place, self.__name__, _line(error)) from error
        if wrong := _misfit(model, report):
            raise unusable(place, self.__name__, wrong)
        built: nn.Module = model.train()
        return built

    def _missing(self, error: Exception) -> DataError:
        if Path(self.name).is_dir():
            return DataError(f"{self.__name__}: {_line(error)}. Pass a folder with a complete config.json.")
        hub = require("huggingface_hub.constants", "hf", "find its cache")
        return DataError(
            f"{self.__name__}: the files of {self.name} are neither in the cache {hub.HF_HUB_CACHE}, nor could they be "
            f"downloaded: {_line(error)}. Copy them there from a machine with a network (hf download {self.name}), or "
            "pass a local folder that has config.json: 'hf:path/to/folder'."
        )


def _cached_or_fetched(read: Any, source: str | None, **given: Any) -> Any:
    try:
        return read(source, local_files_only=True, **given)
    except OSError:
        if source is None or Path(source).is_dir():
            raise
        check_hub()
        return read(source, **given)


def check_hub() -> None:
    """Raise OSError if it cannot be reached: transformers would try again for up to two minutes."""
    hub = require("huggingface_hub.constants", "hf", "find the hub")
    address = urlsplit(hub.ENDPOINT)
    if hub.HF_HUB_OFFLINE or getproxies():  # transformers knows the first; a proxy answers instead of the hub
        return
    answered: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            port = address.port or (80 if address.scheme == "http" else 443)
            socket.create_connection((address.hostname or "", port), _PROBE_SECONDS).close()
            answered.append(True)

    # In a thread, because looking up a name has no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if not answered:
        raise OSError(f"{hub.ENDPOINT} does not answer within {_PROBE_SECONDS:g} s")


def hf_model(name: str) -> HfModel:
    """Nothing is read from the network."""
    _transformers()
    folder = Path(name)
    if name and folder.is_dir() and not (folder / "config.json").is_file():
        remedy = "Save it with save_pretrained()."
        raise RecipeError(f"The folder {folder} of hf:{name} has no config.json. {remedy}")
    if not (name and folder.is_dir()) and not _HUB_NAME.fullmatch(name):
        raise RecipeError(
            f"hf:{name} is neither a folder nor a name on Hugging Face's hub. Write hf:organization/model, or "
            "hf:path/to/folder with a config.json."
        )
    return HfModel(name)


def loss_mismatch(model: nn.Module, kind: str) -> str:
    """Return why the model's loss is not one for such targets, or "". Without `config.problem_type`, it is chosen by
    the first targets: a vector of numbers would be taken for labels."""
    chosen = getattr(getattr(model, "config", None), "problem_type", None)
    expected = _PROBLEMS.get(kind, chosen)
    if chosen in (None, expected):
        return ""
    return (
        f"The model's own loss is one for {chosen!r}, but the targets are {kind}. Build it with "
        f"problem_type={expected!r} (in a recipe: model_options.problem_type), or leave out loss='model'."
    )


def _misfit(model: Any, report: Mapping[str, Any]) -> str:
    """Return why weights are not those of the model, apart from its head; "" if they are."""
    prefix = f"{model.base_model_prefix}."

    def inside(names: Any) -> list[str]:
        return sorted(name for name in names if name.startswith(prefix))

    reshaped = inside(name for name, *_ in report["mismatched_keys"])
    if missing := inside(report["missing_keys"]):
        return f"{missing[0]!r} is missing ({len(missing)} such weights)"
    if reshaped:
        return f"{reshaped[0]!r} has another shape there ({len(reshaped)} such weights)"
    # Backbones are saved with a pooler that classifiers do not use.
    if more := [name for name in inside(report["unexpected_keys"]) if ".pooler." not in name]:
        return f"{more[0]!r} is not a weight of it ({len(more)} such weights)"
    return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging that the head is new, and from showing a bar for each model."""
    logging = require("transformers.utils.logging", "hf", "build one of its models")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _transformers() -> Any:
    return require("transformers", "hf", "build one of its models")


@dataclass(frozen=True)
class TimmModel:
    """Takes the options of timm's `create_model`. `pretrained`: True for timm's weights (its cache, or downloaded), or
    a file (.safetensors, or of torch.save). A classifier for another `num_classes` keeps its initialization."""

    name: str

    @property
    def __name__(self) -> str:
        return f"timm:{self.name}"

    def __call__(self, *, pretrained: bool | str | Path = False, **options: Any) -> nn.Module:
        file = None if isinstance(pretrained, bool) else Path(pretrained)
        published = pretrained is True and not omitted()
        try:
            model: Any = _timm().create_model(self.name, pretrained=published, **options)
        except (TypeError, AssertionError, OSError, RuntimeError) as error:
            if not (published and isinstance(error, OSError | RuntimeError)):
                raise PlanError(f"{self.__name__} does not take {options}: {_line(error)}.") from error
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
    known = _timm().list_models(include_tags=False)
    if name.partition(".")[0] not in known:
        raise RecipeError(f"timm has no model {name!r}.{suggest(name, known)}")
    return TimmModel(name)


def _timm() -> Any:
    return require("timm", "timm", "build one of its models")
