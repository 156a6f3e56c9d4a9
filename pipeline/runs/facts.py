"""What measured runs hold for, so that a file of them is continued only by a call for which they hold, too."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from ...common.errors import LedgerError
from ...common.names import imported
from ...common.storage.addresses import stamp
from ...loaders.sources import files_of
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan
from ..models.weights import weights_of
from ..telemetry.provenance import provenance
from ..training.build import identity_of
from ..training.model_identity import code_identity, digest
from .checkpoints.fingerprint import identity
from .config import FitConfig, known_callbacks

# The options of `fit` that belong to the training, not to one start of it.
KEPT = ("init_from", "on_nonfinite", "callbacks", "eval_every", "eval_every_steps")


def fit_options(spec: PipelineSpec) -> dict[str, Any]:
    """Return the options of `fit` with which every run of this pipeline trains, a measured one, too."""
    options = {name: value for name, value in spec.fit_defaults().items() if name in KEPT}
    callbacks = [one for one in options.pop("callbacks", ()) if not _only_looks(one)]
    return options | ({"callbacks": callbacks} if callbacks else {})


def _only_looks(callback: object) -> bool:
    kind: Any = type(callback)
    if isinstance(callback, Mapping):
        name = str(callback.get("name"))
        kind = imported("callback", name) if ":" in name else known_callbacks().get(name)
    return bool(getattr(kind, "only_looks", False))


def measured_config(spec: PipelineSpec, **options: Any) -> FitConfig:
    """Return the config of `fit` for a run of this pipeline that is measured: unless `options` have it save, it prints
    and saves nothing."""
    return FitConfig(**{"progress": False, "checkpoints": None, **fit_options(spec), **options})


def facts_of(plan: ResolvedPlan) -> dict[str, Any]:
    """Return every option of the training, its code and data, the machine, its environment and the versions."""
    return options_of(plan) | facts_here()


def options_of(plan: ResolvedPlan) -> dict[str, Any]:
    return {
        "recipe": plan.recipe,
        "model": f"{plan.spec.model_name} {identity(plan.spec.model_options)}",
        "seed": plan.seed,
        "task": f"{type(plan.task).__qualname__} {identity(plan.task.options)}",
        "transforms": [identity(one) for one in plan.transforms],
        **{
            f"{prefix}{field.name}": identity(getattr(config, field.name))
            for prefix, config in (("", plan.data), ("optimizer's ", plan.optimization), ("", plan.distribution))
            for field in dataclasses.fields(config)
            if field.init
        },
        "fit": identity(fit_options(plan.spec)),
        "code": _code(plan),
        "data": {name: stamp(name, plan.data.patience) for name in (*_sources(plan), *_of_options(plan))},
    }


def _code(plan: ResolvedPlan) -> str:
    """Return a digest of the model and of the code of all that the user gives."""
    how = plan.optimization
    given = [plan.task, plan.task.options, plan.transforms, how.optimizer, how.options, how.schedule]
    found = code_identity([*_owners([*given, fit_options(plan.spec)])])
    with suppress(Exception):  # which the first run raises
        found |= identity_of(plan.spec)
    if isinstance(plan.spec.model, nn.Module):
        found["weights"] = identity(plan.spec.model)
    return digest(json.dumps(found, sort_keys=True))


def _of_options(plan: ResolvedPlan) -> list[str]:
    """Return the files that options name: a model's weights, by the options of Drivetrain's models, and DeepSpeed's
    configuration. Published weights are none."""
    given = (*weights_of(plan.spec.model_options), plan.distribution.options.get("config"))
    return [str(one) for one in given if isinstance(one, str | Path) and stamp(one)]


def _owners(value: Any) -> Iterator[Any]:
    """Yield the functions and classes of a value, and of what a list or dict contains."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _owners(each)
    else:
        is_code = isinstance(value, type | functools.partial) or inspect.isroutine(value)
        yield value if is_code else type(value)


def _sources(plan: ResolvedPlan) -> list[str]:
    """Return the data, the files that select some of it, and the weights to begin with."""
    sources = [plan.data.train] if plan.data.val is None else [plan.data.train, plan.data.val]
    start = fit_options(plan.spec).get("init_from")
    names = {str(name) for source in sources for name in files_of(source).names} | {*plan.data.value_files}
    return sorted(names | (set() if start is None else {str(start)}))


def facts_here() -> dict[str, Any]:
    known = provenance()
    return {name: known[name] for name in ("hardware", "environment", "versions")}


def check_facts(path: Path, known: Mapping[str, Any], facts: Mapping[str, Any], *, same: bool = True) -> None:
    """Raise LedgerError if a file has `known` facts other than these, or not the `same` format."""
    if same and known == facts:
        return
    different = sorted(name for name in {*known, *facts} if known.get(name) != facts.get(name))
    more = [f"{len(different) - 3} more"] if len(different) > 3 else []
    raise LedgerError(
        f"{path} is of another {' and '.join(different[:3] + more) or 'version'}: what it measured does not hold here. "
        "Pass another name, or delete it."
    )
