"""From a source to encoded samples: infer the fields from the first one, then encode all in threads, in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...common.errors import DataError
from ...common.exhaustion import exhaustion, is_exhaustion
from ..beton.layout import Field
from ..native.stop import Stopped, stoppable
from .columns import Sample
from .encode import Encoded, Encoding, encode_image, image_field
from .moving import store_target
from .sample_source import SampleSource
from .values import Stored, infer_field, label_field, store_label, store_value
from .writer import Skipped


@dataclass(frozen=True)
class Conversion:
    """What to convert.

    Attributes:
        source: the samples.
        encoding: of their images.
        fields: of every sample, the image first and the label second.
        on_error: what to do with bad samples.
        targets: the fields that move with the image, as name to kind.
        classes: number of classes that labels which are masks may have; 0: any.
    """

    source: SampleSource
    encoding: Encoding
    fields: list[Field]
    on_error: str
    targets: Mapping[str, str] = field(default_factory=dict)
    classes: int = 0


def first_fields(
    source: SampleSource, wanted: Mapping[str, str | None], on_error: str, encoding: Encoding
) -> list[Field]:
    """Return the fields inferred from the first usable sample.

    Raises:
        DataError: if it cannot be read, or its values have types that the format does not support.
    """

    def fields_of(index: int) -> list[Field]:
        image, label, *values = source.get(index)
        further = [
            infer_field(name, kind, value) for (name, kind), value in zip(wanted.items(), values, strict=True)
        ]
        return [image_field(encoding, image), label_field(label), *further]

    failure = None
    for index in range(len(source)):
        try:
            return fields_of(index)
        except Exception as error:  # a data set's own code may raise anything; blame the sample
            if refusal := _refusal(error):
                raise exhaustion(refusal, "memory for one image", "Free some memory.") from refusal
            failure = failure or error
            if on_error != "skip":
                raise _failed(source, index, error, fields_of) from _cause(error)
    assert failure is not None  # there is at least one sample
    name, reason = source.describe(0), _reason(failure)
    raise DataError(f"None of the {len(source)} samples could be used. The first, {name}: {reason}.")


def encoded_samples(conversion: Conversion, workers: int, progress: bool) -> Generator[Sample | Skipped]:
    """Encode in threads and yield the results in source order, holding only a few at a time.

    Raises:
        DataError: also if the system refuses memory, threads or open files.
    """
    count = len(conversion.source)
    return stoppable(
        partial(_encode, conversion), range(count), workers, "drivetrain-convert",
        title="Converting", progress=progress, total=count, wanted=f"{workers} threads, each with one image",
    )  # fmt: skip


def _encode(conversion: Conversion, index: int) -> Sample | Skipped:
    def encode(number: int) -> Sample:
        image, *values = conversion.source.get(number)
        encoded = encode_image(image, conversion.encoding, number)
        _check_size(conversion, encoded)
        stored = [
            _store(conversion, one, value, encoded)
            for one, value in zip(conversion.fields[1:], values, strict=True)
        ]
        return Sample(encoded, tuple(stored))

    try:
        return encode(index)
    except Stopped:
        raise
    except Exception as error:  # a data set's own code may raise anything; blame the sample
        if refusal := _refusal(error):
            raise refusal from None  # not the sample's fault
        if conversion.on_error == "skip":
            return Skipped(conversion.source.describe(index), _reason(error))
        raise _failed(conversion.source, index, error, encode) from _cause(error)


def _check_size(conversion: Conversion, encoded: Encoded) -> None:
    """Reject an image that does not fit into the array that stores it."""
    if (shape := conversion.fields[0].shape[:2]) and shape != (encoded.height, encoded.width):
        raise DataError(
            f"it has {encoded.height} × {encoded.width} pixels (height × width), but the first sample has {shape[0]} × "
            f"{shape[1]}; with image_mode={conversion.encoding.image_mode!r} all must have the same size: resize them "
            "first"
        )


def _store(conversion: Conversion, field: Field, value: Any, encoded: Encoded) -> Stored:
    """Return the value of a field besides the image, as stored."""
    is_label = field.name == "label"
    if (kind := conversion.targets.get(field.name)) is not None:
        return store_target(field.name, kind, value, encoded, conversion.classes if is_label else 0)
    return store_label(field, value) if is_label else store_value(field, value)


def _failed(source: SampleSource, index: int, error: Exception, again: Callable[[int], object]) -> DataError:
    """Return the error for a sample. If the first and the last fail alike, skipping is no remedy: all would fail."""
    reason = _reason(error).rstrip(".")
    if index == 0 and len(source) > 1 and _failure(again, len(source) - 1) == reason:
        return DataError(
            f"{source.describe(index)}: {reason}. The last sample fails alike: skipping is no remedy."
        )
    return DataError(
        f"{source.describe(index)}: {reason}. Repair or remove it, or use on_error='skip' (--skip-bad)."
    )


def _failure(again: Callable[[int], object], index: int) -> str:
    try:
        again(index)
    except Exception as error:
        return _reason(error).rstrip(".")
    return ""


def _refusal(error: Exception) -> BaseException | None:
    """Return the system's refusal (of memory, say) that caused `error`; None if the sample itself is bad."""
    causes = (error, error.__cause__, error.__context__)
    return next((cause for cause in causes if cause is not None and is_exhaustion(cause)), None)


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"reading it raised {type(error).__name__}: {error}"


def _cause(error: Exception) -> BaseException | None:
    """Return the user code's exception; a DataError of ours already contains everything."""
    return error.__cause__ if isinstance(error, DataError) else error
