"""Conversion shard by shard: each shard of the source becomes a file of its own, as soon as it is converted. So neither
the source nor the result has to fit on this machine, a second call continues, and others may convert some of them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from ...common.errors import BetonError, DataError, DrivetrainError, require_suffix
from ...common.storage.addresses import RemoteFile, RemoteFolder, download, is_address
from ...common.threads import end, in_order, results
from ..beton.data_set import open_files
from ..beton.manifest import manifest_path
from ..beton.reader import open_beton
from ..options import check_workers
from ..sources import expand, in_threads
from .on_ray import on_ray
from .sample_source import expand_shards, expanded, is_shards, named_once
from .single import Choices, ConvertReport, convert_here

_CONTINUES = "the same call continues with the others"


@dataclass(frozen=True)
class Shard:
    """A shard of the source, and the file that it becomes; either is a path or an address."""

    name: str
    size: int  # in bytes
    version: str  # what changes with its content
    out: str
    choices: Choices
    start: str = ""  # the folder that its paths begin in, where a task may work in another folder

    @property
    def origin(self) -> dict[str, Any]:
        """What the manifest keeps of it: a file with another origin, or other settings, is converted again."""
        chosen = self.choices
        return {
            "shard": self.name, "size": self.size, "version": self.version, "fields": dict(chosen.fields),
            "classes": list(chosen.classes or ()), "on_error": chosen.on_error,
        }  # fmt: skip

    @property
    def folder(self) -> RemoteFolder | None:
        """The address that its file goes to; None if that is on this machine."""
        return RemoteFolder(self.out.rpartition("/")[0], DataError) if is_address(self.out) else None


@dataclass(frozen=True)
class _Kept:
    """A file that an earlier call has completed."""

    out: str
    manifest: dict[str, Any]
    size: int


def convert_shards(
    source: Any, out: str | Path, choices: Choices, engine: str, workers: int | None, progress: bool
) -> ConvertReport:
    start, shards = perf_counter(), _shards(source, out, choices, engine)
    threads = 1 if workers is None and engine == "ray" else check_workers(workers)
    kept = _kept(shards)
    there = {one.out for one in kept}
    todo = [shard for shard in shards if shard.out not in there]
    if engine == "ray" and todo:
        run = on_ray(convert_alone, todo, threads, progress)
    else:
        run = _in_turn(todo, threads, progress)
    reports: list[ConvertReport] = []
    try:
        with closing(run):
            reports.extend(run)
    except DrivetrainError as error:
        complete = f"{len(kept) + len(reports)} of {len(shards)} files are complete; {_CONTINUES}."
        raise type(error)(f"{error} {complete}") from error.__cause__
    report = _report(out, kept, reports, perf_counter() - start)
    if shards[0].folder is None:
        open_files(str(out)).close()  # it also compares the shapes of arrays, which reports do not have
    return report


def _shards(source: Any, out: str | Path, choices: Choices, engine: str) -> list[Shard]:
    """Return all shards, checked, with the facts that are known without reading them."""
    if not is_shards(source) or choices.labels is not None:
        what = "labels=… are for folders" if choices.labels is not None else f"{source!r:.80} is something else"
        raise DataError(
            f"engine={engine!r} converts .tar shards, each to a file of its own; {what}. Leave engine= (--engine) out."
        )
    parts = ([part] if is_address(part) else expand_shards(part) for part in expanded(source))
    names = named_once([name for part in parts for name in part])
    outs = expand(str(out))
    if len(outs) != len(names) or len(set(outs)) < len(outs):
        raise DataError(
            f"engine={engine!r} makes a file of each shard: {out} stands for {len(set(outs))} files, and there are "
            f"{len(names)} shards. Pass a pattern of as many, such as 'train-{{000..{len(names) - 1:03}}}.beton'."
        )
    require_suffix(Path(outs[0]), ".beton", DataError)
    if len(folders := {name.rpartition("/")[0] for name in outs}) > 1:
        raise DataError(f"The files of {out} must be in one folder, not {len(folders)}.")
    if is_address(outs[0]):
        RemoteFolder(folders.pop(), DataError).probe()
    facts = in_threads(_facts, names)
    start = str(Path.cwd()) if engine == "ray" else ""  # a task works where its cluster was started
    return [Shard(name, *about, to, choices, start) for name, about, to in zip(names, facts, outs, strict=True)]


def _facts(name: str) -> tuple[int, str]:
    if is_address(name):
        return RemoteFile(name).facts()
    status = Path(name).stat()
    return status.st_size, f"mtime_ns={status.st_mtime_ns}"


def _kept(shards: Sequence[Shard]) -> list[_Kept]:
    folder = shards[0].folder
    sizes = {} if folder is None else {name: size for name, (size, _) in folder.versions().items()}

    settings = json.loads(json.dumps(shards[0].choices.settings))  # as a manifest has them; of all shards

    def look(shard: Shard) -> _Kept | None:
        path, manifest = Path(shard.out), None
        with suppress(OSError, ValueError, TypeError):
            file = manifest_path(path)
            text = file.read_bytes() if folder is None else folder.read(file.name)
            manifest = dict(json.loads(text or b""))
        if manifest is None or (manifest.get("origin"), manifest.get("settings")) != (shard.origin, settings):
            return None
        manifest.pop("crc32")
        if folder is not None:  # where it was written last
            return _Kept(shard.out, manifest, sizes[path.name]) if path.name in sizes else None
        try:
            open_beton(path).close()
        except (BetonError, OSError):
            return None
        return _Kept(shard.out, manifest, path.stat().st_size)

    return [one for one in in_threads(look, shards) if one is not None]


def _in_turn(todo: Sequence[Shard], threads: int, progress: bool) -> Generator[ConvertReport]:
    """Convert one after the other, while the next is fetched and the one before is sent; yield the report of each whose
    file is complete."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="drivetrain-send")
    sent: list[tuple[Future[None], ConvertReport]] = []

    def complete() -> Iterator[ConvertReport]:
        while sent:
            future, report = sent.pop()
            results([future])
            yield report

    with tempfile.TemporaryDirectory(prefix="drivetrain-convert-") as name:
        place = Path(name)
        try:
            with _fetched(todo, place) as fetched:
                for shard, tar in zip(todo, fetched, strict=True):
                    try:
                        report = _converted(shard, tar, place, threads, progress)
                    except DrivetrainError:
                        yield from complete()
                        raise
                    yield from complete()
                    sent.append((pool.submit(_send, shard, place), report))
                yield from complete()
        finally:
            end(pool)


def convert_alone(shard: Shard, threads: int) -> ConvertReport:
    """Convert one shard, wherever this is called."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-convert-") as place:
        with _fetched([shard], Path(place)) as fetched:
            report = _converted(shard, next(fetched), Path(place), threads, progress=False)
        _send(shard, Path(place))
    return report


@contextmanager
def _fetched(shards: Sequence[Shard], place: Path) -> Iterator[Iterator[Path]]:
    """Yield an iterator of the shards' files on this machine; the next one of an address is fetched ahead."""
    active: list[RemoteFile] = []

    def fetch(shard: Shard) -> Path:
        if not is_address(shard.name):
            return Path(shard.start, shard.name)
        source = RemoteFile(shard.name, version=shard.version)
        active.append(source)
        path = place / f"{len(active)}.tar"
        download(source, path, (shard.size, shard.version))
        return path

    def stop() -> None:
        for source in active:
            source.close()

    with closing(in_order(fetch, shards, 1, "drivetrain-fetch", ahead=1, stop=stop)) as files:
        yield files


def _converted(shard: Shard, tar: Path, place: Path, threads: int, progress: bool) -> ConvertReport:
    out = place / Path(shard.out).name if is_address(shard.out) else Path(shard.start, shard.out)
    try:
        report = convert_here(str(tar), out, shard.choices, threads, progress, shard.origin)
    except DrivetrainError as error:
        raise type(error)(str(error).replace(str(tar), shard.name)) from error.__cause__
    finally:
        if is_address(shard.name):
            tar.unlink()
    # Of an address, it names the copies in the folder for temporary files.
    skipped = [(sample.replace(str(tar), shard.name), reason) for sample, reason in report.skipped]
    return replace(report, path=shard.out, skipped=skipped)


def _send(shard: Shard, place: Path) -> None:
    folder = shard.folder
    if folder is None:
        return
    path = place / Path(shard.out).name
    manifest = manifest_path(path)
    folder.remove([path.name])  # an older one never is next to the new manifest
    for file in (manifest, path):
        folder.upload(file, file.name)
        file.unlink()


def _report(out: str | Path, kept: Sequence[_Kept], reports: Sequence[ConvertReport], seconds: float) -> ConvertReport:
    fields = {one.out: one.manifest["fields"] | one.manifest.get("targets", {}) for one in kept}
    fields |= {str(one.path): one.fields for one in reports}
    (first, common), *others = fields.items()
    for name, own in others:
        if own != common:
            raise DataError(
                f"{name} has the fields {own}, and {first} has {common}: they cannot be read as one data set. Make the "
                "labels and fields of all shards alike, and convert again."
            )
    treatments = Counter[str]()
    for each in (*(one.manifest["stored"] for one in kept), *(one.treatments for one in reports)):
        treatments.update(each)
    modes = Counter[str]()
    for each in (*(one.manifest.get("modes", {}) for one in kept), *(one.modes for one in reports)):
        modes.update(each)
    before = sum(one.manifest["samples"] for one in kept)
    return ConvertReport(
        path=str(out) if is_address(str(out)) else Path(out), samples=before + sum(one.samples for one in reports),
        classes=(reports[0].classes if reports else kept[0].manifest["classes"]), fields=common,
        treatments=dict(treatments.most_common()), modes=dict(modes),
        skipped=[each for one in reports for each in one.skipped],
        size=sum(one.size for one in kept) + sum(one.size for one in reports), seconds=seconds, kept=before,
    )  # fmt: skip
