"""Shards converted on the machines of a Ray cluster, each by one task."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from ...common.errors import DataError, DrivetrainError, require
from ...common.terminal import progress_bar

T = TypeVar("T")
R = TypeVar("R")


def on_ray(
    convert: Callable[[T, int], R], shards: Sequence[T], threads: int, progress: bool
) -> Generator[R, None, None]:
    """Yield `convert(shard, threads)` of each shard, as they end. A cluster that runs is used (`RAY_ADDRESS`, or this
    machine's); else one is started here, and ended. Ray starts a task again whose machine is lost."""
    ray = require("ray", "ray", "convert on several machines")
    begun = not ray.is_initialized()
    if begun:
        ray.init(log_to_driver=False, include_dashboard=False)
    waiting = []
    try:
        warn_if_too_many(threads, ray.nodes())
        task = ray.remote(num_cpus=threads)(convert)
        waiting = [task.remote(shard, threads) for shard in shards]
        with progress_bar(len(waiting), progress, desc="Converting", unit="shard") as bar:
            while waiting:
                (ended,), waiting = ray.wait(waiting)
                yield ray.get(ended)
                bar.update()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DrivetrainError):
            raise error.cause from None
        raise DataError(f"A task of Ray failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise DataError(f"Ray could not convert the shards: {error}") from error
    finally:
        for one in waiting:
            ray.cancel(one)
        if begun:
            ray.shutdown()


def warn_if_too_many(threads: int, machines: Sequence[Mapping[str, Any]]) -> None:
    """A cluster may still grow: a task that no machine can take waits, without a word."""
    most = max((int(one["Resources"].get("CPU", 0)) for one in machines if one["Alive"]), default=0)
    if threads > most:
        warnings.warn(
            f"Each shard takes {threads} CPUs (workers=, --workers), and no machine of Ray's cluster has more than "
            f"{most}: the conversion waits until one joins. Stop it, and pass fewer.",
            stacklevel=4,
        )
