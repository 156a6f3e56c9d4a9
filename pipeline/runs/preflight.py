"""Before a run on several ranks: check that they are about to train the same thing, and say so in one sentence if not.

Every rank posts what it has to the store in which the ranks met; rank 0 compares, and posts the verdict. Nothing here
is a collective, so a rank that is missing or has other data cannot make the others hang.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import DrivetrainError, RecipeError, StrategyError
from ...files import appears
from ...loaders.remote.mirror import Mirror
from ...strategies.launching.group import in_group
from ...version import __version__
from ..checkpoints.identity import identity
from ..recipes.export import to_recipe
from ..spec.resolve import ResolvedPlan
from ..training.build import expected_device
from .artifacts import FitJob

_EDGE = 1 << 20  # bytes of a file's beginning and end that are compared
_LAG = 5.0  # seconds that a network file system may need to show a new file
_OWN = (
    "train", "val", "devices", "loading", "name", "description", "source", "published", "measured", "notes",
)  # fmt: skip
"""Keys of a recipe in which ranks may differ (paths), that preflight compares otherwise, or that describe it."""
_SHARED = (
    "epochs", "eval_every", "eval_every_steps", "on_nonfinite", "checkpoints", "resume", "init_from",
)  # fmt: skip
"""Options of `fit` that are the same on all ranks."""


def preflight(plan: ResolvedPlan, job: FitJob) -> None:
    """Compare this rank with the others; without a process group, do nothing.

    Raises:
        StrategyError: on every rank, naming a rank and its host, what differs, and both values; or the rank that has
            not answered within the time limit of collectives.
    """
    if not in_group() or dist.get_world_size() == 1:
        return
    store, rank, ranks = _store(), dist.get_rank(), dist.get_world_size()
    mine: dict[str, Any] = {"host": socket.gethostname(), "facts": {}, "sees out": True, "error": ""}
    with ExitStack() as stack:
        try:
            token = stack.enter_context(_token(job.folder, store, rank))
            mine |= {"facts": facts(plan, job), "sees out": token is None or appears(token, _LAG)}
        except (OSError, DrivetrainError) as error:
            mine["error"] = f"{type(error).__name__}: {error}"
        store.set(str(rank), json.dumps(mine))
        if rank == 0:
            store.set("verdict", _verdict(store, ranks, job, plan.distribution.timeout))
    try:
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise StrategyError(f"Rank 0 did not compare the ranks: {error}") from error
    if verdict:
        raise StrategyError(verdict)


def facts(plan: ResolvedPlan, job: FitJob) -> dict[str, str]:
    """Return what must be the same on all ranks, as text by name."""
    found = {"drivetrain": __version__, "torch": torch.__version__.partition("+")[0]}
    for name, source in (("training data", plan.data.train), ("validation data", plan.data.val)):
        found[name] = "none" if source is None else digest(Path(source))
    try:
        recipe = {key: value for key, value in to_recipe(plan.spec).items() if key not in _OWN}
        recipe["load settings"] = dict(plan.data.settings)
    except RecipeError:  # e.g. an own model: then the plan, whose text names everything
        recipe = {f"the step {step.what!r}": step.why for step in plan.steps}
    found |= {key: identity(value) for key, value in _flat(recipe).items()}
    found |= {f"fit({name})": identity(getattr(job, name)) for name in _SHARED}
    found["fit(out)"] = "none" if job.folder is None else "a folder"
    found["fit(callbacks)"] = ", ".join(type(one).__name__ for one in job.callbacks)
    found["device"] = expected_device(plan.distribution).type
    if plan.distribution.name.startswith("hsdp"):
        found["ranks on its machine"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return found


def digest(path: Path) -> str:
    """Return the size and a CRC-32 of a file's first and last MiB, or of a folder's names; at once for any size.

    A `.beton` file ends with a digest of all its samples, and begins with the labels and positions.
    """
    if (mirror := Mirror.at(path)) is not None:
        return f"{mirror.size:,} bytes, {mirror.version}"
    if path.is_dir():
        names = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
        return f"{len(names)} entries, CRC {zlib.crc32(chr(0).join(names).encode()):08x}"
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        crc = zlib.crc32(file.read(_EDGE))
        file.seek(max(size - _EDGE, 0))
        return f"{size:,} bytes, CRC {zlib.crc32(file.read(_EDGE), crc):08x}"


@contextmanager
def _token(folder: Path | None, store: Any, rank: int) -> Iterator[Path | None]:
    """Inside the block, rank 0 has a file in the run's folder; yield its path in this rank's folder."""
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    name = store.get("token").decode()
    if folder is None:
        yield None
        return
    path = folder / f".preflight-{name}"
    if rank == 0:
        path.touch()
    try:
        yield path
    finally:
        if rank == 0:
            path.unlink(missing_ok=True)


def _store() -> Any:
    """Return the store of this call, the same on every rank."""
    store = dist.distributed_c10d._get_default_store()
    call = store.add(f"drivetrain/preflight/{dist.get_rank()}", 1)  # several runs may share a process group
    return dist.PrefixStore(f"drivetrain/preflight/{call}", store)  # type: ignore[attr-defined]


def _verdict(store: Any, ranks: int, job: FitJob, timeout: float) -> str:
    """Return a sentence on the first difference, "" if there is none."""
    first: dict[str, Any] = {}
    deadline = time.monotonic() + timeout
    for rank in range(ranks):
        try:
            store.wait([str(rank)], timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
        except RuntimeError:
            return (
                f"Rank {rank} of {ranks} did not report to rank 0 ({first.get('host', socket.gethostname())}) within "
                f"{timeout:g} s. Look at its own output, or raise distribute(timeout=…)."
            )
        info = json.loads(store.get(str(rank)).decode())
        first = first or info
        if said := _difference(rank, info, first, job):
            return said
    return ""


def _difference(rank: int, info: Mapping[str, Any], first: Mapping[str, Any], job: FitJob) -> str:
    who, lead = f"rank {rank} ({info['host']})", f"rank 0 ({first['host']})"
    if info["error"]:
        return f"{who[0].upper()}{who[1:]} cannot train: {info['error']}"
    for key in dict.fromkeys([*first["facts"], *info["facts"]]):
        own, there = info["facts"].get(key, "nothing"), first["facts"].get(key, "nothing")
        if own != there:
            return (
                f"The ranks do not train the same: {who} has {key} = {own}, {lead} has {there}. Start all of them with "
                "the same recipe, options, versions and copies of the data."
            )
    if not info["sees out"]:
        return (
            f"{who[0].upper()}{who[1:]} does not see what {lead} writes to out={str(job.folder)!r}. Pass a folder on a "
            "file system that all machines share."
        )
    return ""


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested dicts as one, with dotted keys."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        key: each
        for inner, one in value.items()
        for key, each in _flat(one, f"{name}.{inner}" if name else str(inner)).items()
    }
