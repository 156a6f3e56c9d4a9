"""What measured runs hold for, so that a file of them is continued only by a call for which they hold, too."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from ...common.errors import LedgerError
from ...loaders.sources import files_of
from ..checkpoints.fingerprint import identity
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan
from ..telemetry.provenance import provenance
from ..training.build import build_model, fork_rng
from ..training.model_identity import code_identity, digest, model_identity

# The options of `fit` that belong to the training, not to one start of it.
KEPT = ("init_from", "on_nonfinite", "callbacks", "eval_every", "eval_every_steps")


def fit_options(spec: PipelineSpec) -> dict[str, Any]:
    """Return the options of `fit` with which every run of this pipeline trains, a measured one, too."""
    return {name: value for name, value in spec.fit_defaults().items() if name in KEPT}


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
            for prefix, config in (
                ("", plan.data),
                ("optimizer's ", plan.optimization),
                ("", plan.distribution),
            )
            for field in dataclasses.fields(config)
            if field.init
        },
        "code": _code(plan),
        "data": {name: stamp(name) for name in _sources(plan)},
    }


def _code(plan: ResolvedPlan) -> str:
    """Return a digest of the model and of the code of model, task and transforms."""
    found = code_identity([type(one) for one in (plan.task, *plan.transforms)])
    with fork_rng(plan.seed), suppress(Exception), warnings.catch_warnings():  # the first run has them
        warnings.simplefilter("ignore")
        build_model(
            plan.spec, plan.transforms, lambda new: found.update(model_identity(new, plan.spec.model))
        )
    if isinstance(plan.spec.model, nn.Module):
        found["weights"] = identity(plan.spec.model)
    return digest(json.dumps(found, sort_keys=True))


def _sources(plan: ResolvedPlan) -> list[str]:
    sources = [plan.data.train] if plan.data.val is None else [plan.data.train, plan.data.val]
    return sorted({str(name) for source in sources for name in files_of(source).names})


def stamp(name: str | Path) -> list[int]:
    """Return a file's size and time of change; nothing of an address: a copy of it has its version in its name."""
    try:
        status = Path(name).stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


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
