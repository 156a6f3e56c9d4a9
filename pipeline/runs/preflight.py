"""Before a run on several ranks: check that they are about to train the same thing, and say so in one sentence if not.

Every rank posts what it has to the store in which the ranks met; rank 0 compares, and posts the verdict. Nothing here
is a collective, so a rank that is missing or has other data cannot make the others hang.
"""

import json
import os
import socket
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import CheckpointError, RecipeError, StrategyError
from ...common.storage.addresses import RemoteFile, RemoteFolder, is_address
from ...common.storage.files import appears
from ...common.storage.stream import mirror_at
from ...common.terminal import Wait
from ...common.version import __version__
from ...loaders.sources import Source, files_of, in_threads
from ...strategies.launching.group import group_store, in_group
from ...strategies.launching.meeting import arrives
from ..describe.config import FitOptions
from ..describe.resolve import ResolvedPlan
from ..recipes.convert import to_recipe
from ..recipes.schema import keys_of
from ..training.build import expected_device, identity_of
from ..training.model_identity import difference
from .artifacts import FitJob
from .checkpoints.directory import CheckpointDir
from .checkpoints.fingerprint import identity

_MODEL = "model"  # the fact with a checksum of what the model is
_EDGE, _FILES = 1 << 20, 64  # bytes of a file's beginning and end that are compared, of so many files
_ASKED = 1 << 8  # files at addresses that each rank asks for
_LEAST = 1 << 12  # bytes, of each of more files: 100,000 take 0.8 GB and some seconds
_LAG = 5.0  # seconds that a network file system may need to show a new file
_REMOTE_LAG = 60.0  # seconds that rank 0 may need to write one to an address, with retries
_OWN = (
    "train", "val", "cache", "cache_limit", "patience", "stream", "devices", "loading", "name", "description", "source",
    "published", "measured", "notes",
)  # fmt: skip
"""Keys of a recipe in which ranks may differ (paths), that preflight compares otherwise, or that describe it."""
_SHARED = (
    "epochs", "eval_every", "eval_every_steps", "on_nonfinite", "checkpoints", "resume", "init_from", "log_every",
    "continue_stopped", "changed_model",
)  # fmt: skip
"""Options of `fit` that are the same on all ranks."""


def preflight(plan: ResolvedPlan, job: FitJob) -> bool:
    """Compare this rank with the others, if any. Raise StrategyError on all, with what differs or who is missing.
    Return whether the run begins with `init_from`, as rank 0 sees it: others may see a checkpoint later."""
    if not in_group() or dist.get_world_size() == 1:
        if is_address(job.out):
            RemoteFolder(str(job.out), CheckpointError).probe()
        return _begins(job)
    store, rank, ranks = _store(), dist.get_rank(), dist.get_world_size()
    mine: dict[str, Any] = {"host": socket.gethostname(), "facts": {}, "sees out": True, "error": ""}
    with ExitStack() as stack:
        try:
            is_seen = stack.enter_context(_token(job, store, rank, plan.distribution.timeout))
            mine |= {"facts": facts(plan, job), "sees out": is_seen()}
            model = identity_of(plan.spec)  # built once more: the strategy is prepared by all ranks together
            if rank == 0:
                store.set("begins", json.dumps(_begins(job)))
            mine["facts"][_MODEL] = zlib.crc32(json.dumps(model, sort_keys=True).encode())
            store.set(f"{rank}/model", zlib.compress(json.dumps(model).encode()))
        except Exception as error:  # whatever it is, the others need not wait
            mine["error"] = f"{type(error).__name__}: {error}"
        store.set(str(rank), json.dumps(mine))
        if rank == 0:
            store.set("verdict", _verdict(store, ranks, job, plan.distribution.timeout))
    # Rank 0 may use all of its time for a rank that does not report.
    if verdict := _awaited(store, "verdict", Wait(plan.distribution.timeout + _LAG), 0):
        raise StrategyError(verdict)
    return bool(json.loads(store.get("begins")))


def _begins(job: FitJob) -> bool:
    if job.init_from is None or job.resume is None or job.folder is None:
        return job.init_from is not None
    return CheckpointDir(job.folder.resolve() / "checkpoints").newest() is None


def facts(plan: ResolvedPlan, job: FitJob) -> dict[str, str]:
    found = {"drivetrain": __version__, "torch": torch.__version__.partition("+")[0]}
    for name, source in (("training data", plan.data.train), ("validation data", plan.data.val)):
        found[name] = "none" if source is None else digest(source)
    own = {*_OWN, *keys_of(FitOptions)}
    try:
        recipe = {key: value for key, value in to_recipe(plan.spec).items() if key not in own}
        recipe["load settings"] = dict(plan.data.settings)
    except RecipeError:  # e.g. an own model: then the plan, whose text names everything
        whats = ("load" if step.asked_by == ".load()" else step.what for step in plan.steps)  # copies may be elsewhere
        recipe = {f"the step {what!r}": step.why for what, step in zip(whats, plan.steps, strict=True)}
    found |= {key: identity(value) for key, value in _flat(recipe).items()}
    found |= {f"fit({name})": identity(getattr(job, name)) for name in _SHARED}
    found["fit(out)"] = "none" if job.out is None else str(job.out) if is_address(job.out) else "a folder"
    found["fit(callbacks)"] = _callbacks(plan, job)
    found["device"] = expected_device(plan.distribution).type
    if plan.distribution.name.startswith("hsdp"):
        found["ranks on its machine"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return found


def _callbacks(plan: ResolvedPlan, job: FitJob) -> str:
    """Return their classes, with the options of those that the recipe names. Paths may differ, as those of data do."""
    entries = [one for one in plan.spec.fit_defaults().get("callbacks", ()) if isinstance(one, Mapping)]
    named = {str(one["name"]).rpartition(":")[2].rpartition(".")[2]: one for one in entries}
    shown = []
    for name in (type(one).__name__ for one in job.callbacks):
        given = named.get(name, {})
        same = sorted(key for key in given.keys() - {"name", "out"} if not Path(str(given[key])).is_absolute())
        options = ", ".join(f"{key}={identity(given[key])}" for key in same)
        shown.append(f"{name}({options})" if options else name)
    return ", ".join(shown)


def digest(source: Source) -> str:
    """Return what distinguishes a data source from others, at once for any size. Of many files at addresses, some are
    asked for: before the first step, ranks also compare what they know of the samples of all."""
    files = files_of(source)
    edge = max(min(_EDGE, _EDGE * _FILES // len(files.names)), _LEAST)
    far = [name for name in files.names if is_address(name)]
    asked = {*far[:: -(-len(far) // _ASKED)]} if far else ()
    compared = [name for name in files.names if name in asked or not is_address(name)]
    digests = in_threads(lambda name: _digest(name, edge), compared)
    if len(files.names) == 1:
        return digests[0]
    weights = "" if files.weights is None else f", weights {', '.join(map('{:g}'.format, files.weights))}"
    return f"{len(files.names)} files, CRC {zlib.crc32(' '.join(digests).encode()):08x}{weights}"


def _digest(name: str, edge: int) -> str:
    """A `.beton` file ends with the places of its samples, and begins with labels and sizes: compare so many bytes of
    both."""
    if is_address(name):  # of a stream
        size, version = RemoteFile(name).facts()
        return f"{size:,} bytes, {version}"
    path = Path(name)
    if (mirror := mirror_at(path)) is not None:
        return f"{mirror.size:,} bytes, {mirror.version}"
    if path.is_dir():
        names = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
        return f"{len(names)} entries, CRC {zlib.crc32(chr(0).join(names).encode()):08x}"
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        crc = zlib.crc32(file.read(edge))
        file.seek(max(size - edge, 0))
        return f"{size:,} bytes, CRC {zlib.crc32(file.read(edge), crc):08x}"


@contextmanager
def _token(job: FitJob, store: Any, rank: int, timeout: float) -> Iterator[Callable[[], bool]]:
    """Inside the block, rank 0 has a file in the run's folder, or at its address; yield what waits for this rank to see
    it, and returns whether it does. At an address, every rank writes one, because each uploads what it saves."""
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    name = f".preflight-{_awaited(store, 'token', Wait(timeout), 0)}"
    if job.folder is None:
        yield lambda: True
    elif is_address(job.out):
        files = RemoteFolder(str(job.out), CheckpointError)
        files.write(f"{name}-{rank}", b"")
        try:
            yield lambda: files.appears(f"{name}-0", _REMOTE_LAG)
        finally:
            files.remove([f"{name}-{rank}"])
    else:
        path = job.folder / name
        if rank == 0:
            path.touch()
        try:
            yield lambda: appears(path, _LAG)
        finally:
            if rank == 0:
                path.unlink(missing_ok=True)


def _store() -> Any:
    call = group_store("preflight").add(str(dist.get_rank()), 1)  # several runs may share a process group
    return group_store(f"preflight/{call}")


def _verdict(store: Any, ranks: int, job: FitJob, timeout: float) -> str:
    first: dict[str, Any] = {}
    wait = Wait(timeout)
    for rank in range(ranks):
        try:
            info = json.loads(_awaited(store, str(rank), wait, rank))
        except StrategyError as error:
            return str(error)
        first = first or info
        if said := _difference(rank, info, first, job) or _other_model(store, rank, info, first):
            return said
    return ""


def _other_model(store: Any, rank: int, info: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    if info["facts"][_MODEL] == first["facts"][_MODEL]:
        return ""
    there, own = (json.loads(zlib.decompress(store.get(f"{one}/model"))) for one in (0, rank))
    names = (f"rank 0 ({first['host']})", f"rank {rank} ({info['host']})")
    differs = difference(there, own, libraries=True, names=names)
    remedy = "Start all of them with the same code and packages, in the same files."
    return f"The ranks do not train the same model: {differs}. {remedy}" if differs else ""


def _awaited(store: Any, key: str, wait: Wait, whom: int) -> str:
    own, ranks = dist.get_rank(), dist.get_world_size()
    while not arrives(store, key):
        if wait.left <= 0:
            raise StrategyError(
                f"Rank {whom} of {ranks} did not report to rank {own} ({socket.gethostname()}) within {wait.limit:g} "
                "s. Look at its own output, or raise distribute(timeout=…)."
            )
        wait.report(
            lambda: (
                f"Rank {own} of {ranks} ({socket.gethostname()}) waits for rank {whom}, which has not reported yet "
                "what it trains: slow data, or a slow file system"
            )
        )
    return str(store.get(key).decode())


def _difference(rank: int, info: Mapping[str, Any], first: Mapping[str, Any], job: FitJob) -> str:
    who, lead = f"rank {rank} ({info['host']})", f"rank 0 ({first['host']})"
    if info["error"]:
        return f"{who[0].upper()}{who[1:]} cannot train: {info['error']}"
    for key in dict.fromkeys([*first["facts"], *info["facts"]]):
        if key == _MODEL:
            continue  # see `_other_model`
        own, there = info["facts"].get(key, "nothing"), first["facts"].get(key, "nothing")
        if own != there:
            return (
                f"The ranks do not train the same: {who} has {key} = {own}, {lead} has {there}. Start all of them with "
                "the same recipe, options, versions and copies of the data."
            )
    if not info["sees out"]:
        return f"{who[0].upper()}{who[1:]} does not see what {lead} writes to out={str(job.out)!r}. " + (
            "Set the same endpoint and credentials on all machines."
            if is_address(job.out)
            else "Pass a folder on a file system that all machines share."
        )
    return ""


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        key: each
        for inner, one in value.items()
        for key, each in _flat(one, f"{name}.{inner}" if name else str(inner)).items()
    }
