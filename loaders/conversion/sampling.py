"""From a source to encoded samples: the fields that the first decides, then all of them, by threads in order."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tqdm.auto import tqdm

from ...errors import DataError
from ..beton.layout import Field
from .columns import Sample
from .encode import Encoding, encode_image
from .sources import Source
from .values import infer_field, label_field, store_label, store_value
from .writer import Skipped

_AHEAD = 8
"""Samples in preparation per worker: enough that none waits for a slow neighbour."""


@dataclass(frozen=True)
class Job:
    """What to encode, how, into which fields (the image first, the label second), and what if it fails."""

    source: Source
    encoding: Encoding
    fields: list[Field]
    on_error: str


def first_fields(source: Source, wanted: Mapping[str, str | None], on_error: str) -> list[Field]:
    """The fields that the first usable sample decides.

    Raises:
        DataError: if it cannot be read, or its values are of no kind that the format holds.
    """
    image, failure = Field("image", "rgb_image"), None
    for index in range(len(source)):
        try:
            _, label, *values = source.get(index)
            further = [
                infer_field(name, kind, value)
                for (name, kind), value in zip(wanted.items(), values, strict=True)
            ]
            return [image, label_field(label), *further]
        except Exception as error:  # whatever a data set's own code raises, it is this sample's fault
            failure = failure or error
            if on_error != "skip":
                raise _failed(source, index, error) from _cause(error)
    assert failure is not None  # there is at least one sample
    name, reason = source.describe(0), _reason(failure)
    raise DataError(f"None of the {len(source)} samples could be used; the first, {name}: {reason}.")


def encoded_samples(job: Job, workers: int, progress: bool) -> Generator[Sample | Skipped]:
    """Encodes in threads, gives the results in source order, and holds only a few at a time."""
    waiting: deque[Future[Sample | Skipped]] = deque()
    count = len(job.source)
    bar = tqdm(total=count, desc="Converting", unit="img", disable=not (progress and _watched()), leave=False)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="drivetrain-convert")
    try:
        for index in range(count):
            waiting.append(pool.submit(_encode, job, index))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
                bar.update()
        while waiting:
            yield waiting.popleft().result()
            bar.update()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def _encode(job: Job, index: int) -> Sample | Skipped:
    try:
        image, label, *values = job.source.get(index)
        encoded = encode_image(image, job.encoding, index)
        further = [store_value(field, value) for field, value in zip(job.fields[2:], values, strict=True)]
        return Sample(encoded, (store_label(job.fields[1], label), *further))
    except Exception as error:  # whatever a data set's own code raises, it is this sample's fault
        if job.on_error == "skip":
            return Skipped(job.source.describe(index), _reason(error))
        raise _failed(job.source, index, error) from _cause(error)


def _failed(source: Source, index: int, error: Exception) -> DataError:
    return DataError(
        f"{source.describe(index)}: {_reason(error).rstrip('.')}. Mend or remove it, or use "
        "on_error='skip' (--skip-bad)."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"reading it raised {type(error).__name__}: {error}"


def _cause(error: Exception) -> BaseException | None:
    """What the user's own code raised; a DataError of ours says all there is to say."""
    return error.__cause__ if isinstance(error, DataError) else error


def _watched() -> bool:
    """Whether somebody sees a progress bar: a terminal or a notebook, not a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
