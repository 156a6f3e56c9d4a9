"""One conversion on this machine: the fields are inferred from the first sample; then all are encoded in threads, and
written in order."""

from __future__ import annotations

import html
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ...common.errors import DataError, require_suffix
from ...common.exhaustion import exhaustion, is_exhaustion
from ...common.terminal import shortened
from ...common.version import __version__
from ..beton.layout import Field
from ..beton.targets import MOVING, STORED_AS
from ..native.stop import Stopped, stoppable
from ..sources import expand
from .encode import Encoding, encode_image, image_field
from .folders import refuse_odd_names, why_ignored
from .sample_source import SampleSource, open_source
from .values import Colors, Stored, infer_field, label_field, store_label, store_target, store_value
from .writer import Sample, Skipped, write_betons

_MOST = 256  # files of a conversion: all are open until the last is complete, and systems allow 1,024
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # usually not classes


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        path: the `.beton` file, or the pattern of several; a string if that is an address.
        samples: number of samples in all of them.
        classes: class names in label order; empty if the source has none.
        fields: name to kind of each field, `image` and `label` first; of targets that move with the image, `mask`,
            `boxes` or `keypoints`.
        treatments: number of images by treatment, e.g. `{"copied unchanged": 390, "scaled down": 2}`.
        modes: number of images stored as `"jpg"` and as `"raw"` pixels.
        skipped: `(sample, reason)` of each skipped sample (`on_error="skip"` only).
        ignored: files in a folder's classes that are not images by their suffixes, and images that are in none of them.
        size: of the files, in bytes.
        seconds: duration of the conversion.
        kept: how many of the samples are in files that an earlier call had completed (with an `engine`).

    Example::

        >>> report = convert("photos", "copy.beton", progress=False)
        >>> report.modes
        {'jpg': 4}
    """

    path: str | Path
    samples: int
    classes: list[str]
    fields: dict[str, str]
    treatments: dict[str, int]
    modes: dict[str, int]
    skipped: list[tuple[str, str]]
    size: int
    seconds: float
    ignored: list[str] = field(default_factory=list)
    kept: int = 0

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the report as lines of text: the first of many skipped and ignored files, with `verbose` all."""
        only = len(self.treatments) == 1
        ways = ", ".join(f"{'all' if only else f'{count:,}'} {way}" for way, count in self.treatments.items())
        made = self.samples - self.kept
        rate = f", {made / max(self.seconds, 1e-9):,.0f} images/s" if made else ""
        lines = [f"{self.path}: {self.samples:,} images ({ways}), {self.size / 1e6:,.1f} MB{rate}"]
        if self.kept:
            lines.append(f"  {self.kept:,} of the images were converted by an earlier call")
        if len(self.modes) > 1:
            lines.append(f"  stored: {self.modes['jpg']:,} JPEG, {self.modes['raw']:,} raw")
        if len(self.fields) > 2 or self.fields.get("label") == "mask":
            lines.append(f"  fields: {', '.join(f'{name} ({kind})' for name, kind in self.fields.items())}")
        lines += shortened([f"  skipped {name}: {reason}" for name, reason in self.skipped], verbose)
        lines += shortened([f"  ignored {name}: {why_ignored(name)}" for name in self.ignored], verbose)
        if len(self.classes) > 1 and _SPLITS.issuperset(map(str.lower, self.classes)):
            commands = "; ".join(f"drivetrain convert FOLDER/{name} {name}.beton" for name in self.classes)
            lines.append(
                f"  warning: the classes {' and '.join(self.classes)} are named like splits of a data set. If they "
                f"are, convert each folder by itself: {commands}"
            )
        if len(self.classes) == 1 and self.fields.get("label") == "int":
            lines.append(
                f"  warning: there is one class, {self.classes[0]}, so a classifier learns nothing from it. Each class "
                "is a folder of images in the folder that is converted."
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain JSON types."""
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True)
class Choices:
    """What to make of the samples, checked: options of `convert`."""

    encoding: Encoding
    fields: Mapping[str, str | None]
    labels: str | Path | None
    classes: Sequence[str] | None
    mask_map: Mapping[int, int]
    on_error: str

    @property
    def settings(self) -> dict[str, Any]:
        """What the manifest keeps of them."""
        return asdict(self.encoding) | ({"mask_map": self.mask_map} if self.mask_map else {})


def convert_here(
    source: Any, out: str | Path, choices: Choices, threads: int, progress: bool,
    origin: Mapping[str, Any] | None = None,
) -> ConvertReport:  # fmt: skip
    """Convert a source on this machine. `origin`: of a shard that is converted by itself, what it was, which the
    manifest keeps."""
    start, outs, encoding = perf_counter(), [Path(name) for name in expand(str(out))], choices.encoding
    _check_files(outs)
    samples = open_source(source, list(choices.fields), choices.labels, list(choices.classes or ()))
    if len(samples) == 0:
        raise DataError(f"The {samples.kind} contains no samples, so there is nothing to convert.")
    if len(outs) > len(samples):
        raise DataError(f"{out} stands for {len(outs)} files, but there are only {len(samples)} samples.")
    stored = first_fields(samples, choices.fields, choices.on_error, encoding)
    masks = stored[1].kind == STORED_AS["mask"]
    floats = stored[1].kind == "float"
    unequal = stored[1].kind == "ndarray" and len(samples.classes) != stored[1].shape[0]
    # A data set's own names may be those of something else than masks, targets, or vectors of other lengths.
    names = list(choices.classes or (() if masks or floats or unequal else samples.classes))
    refuse_odd_names(names)
    if choices.classes and floats:
        raise DataError(
            f"classes={names!r:.80} names class indices, but the labels are floats, which are targets. Make the labels "
            "integers, or leave classes out."
        )
    if choices.classes and stored[1].kind == "ndarray" and len(names) != stored[1].shape[0]:
        raise DataError(
            f"classes={names!r:.80} has {len(names)} names, but each label has {stored[1].shape[0]} values. Pass a "
            "name for each of them, or leave classes out."
        )
    targets = {"label": "mask"} if masks else {}
    targets |= {name: kind for name, kind in choices.fields.items() if kind in MOVING}
    if choices.mask_map and "mask" not in targets.values():
        raise DataError("mask_map replaces values of masks (--map, --ignore), and this data has none. Leave it out.")
    conversion = Conversion(
        samples, encoding, stored, choices.on_error, targets, len(names), choices.mask_map, bool(choices.classes)
    )
    named = origin["shard"] if origin else source
    about = {
        "classes": names,
        **({"targets": targets} if targets else {}),
        "source": f"{samples.kind} {named}" if isinstance(source, str | Path) else samples.kind,
        **({"origin": origin} if origin else {}),
        "settings": choices.settings,
        "drivetrain": __version__,
    }
    with closing(encoded_samples(conversion, threads, progress)) as encoded:
        written = write_betons(outs, encoded, len(samples), conversion.fields, about)
    return ConvertReport(
        path=Path(out), samples=written.samples, classes=written.classes, fields=written.fields | targets,
        treatments=dict(written.treatments.most_common()), modes=dict(written.modes),
        skipped=[(sample.name, sample.reason) for sample in written.skipped],
        size=written.size, seconds=perf_counter() - start, ignored=list(getattr(samples, "ignored", ())),
    )  # fmt: skip


def _check_files(outs: Sequence[Path]) -> None:
    if len(set(outs)) < len(outs) or len({out.parent for out in outs}) > 1 or len(outs) > _MOST:
        raise DataError(
            f"The {len(outs)} files from {outs[0]} to {outs[-1]} must be at most {_MOST} different ones in one folder."
        )
    for out in outs:
        if out.is_dir():
            raise DataError(f"{out} is a folder. Pass the file to write, e.g. {out / 'train.beton'}.")
        require_suffix(out, ".beton", DataError)
        if out.exists() and not out.is_file():
            raise DataError(f"{out} is not a regular file and will not be replaced. Pass another name.")
        if not out.parent.is_dir():
            raise DataError(f"The folder {out.parent} does not exist. Create it first.")


@dataclass(frozen=True)
class Conversion:
    source: SampleSource
    encoding: Encoding
    fields: list[Field]  # of every sample, the image first and the label second
    on_error: str
    targets: Mapping[str, str] = field(default_factory=dict)  # name to kind of those that move with the image
    classes: int = 0  # number of classes that labels which are masks may have; 0: any
    mask_map: Mapping[int, int] = field(default_factory=dict)  # values of masks to replace
    named: bool = False  # whether the caller has named the classes


def first_fields(
    source: SampleSource, wanted: Mapping[str, str | None], on_error: str, encoding: Encoding
) -> list[Field]:
    """Return the fields inferred from the first usable sample."""

    def fields_of(index: int) -> list[Field]:
        image, label, *values = source.get(index)
        pairs = zip(wanted.items(), values, strict=True)
        further = [infer_field(name, kind, value) for (name, kind), value in pairs]
        return [image_field(encoding, image), label_field(label), *further]

    reason = ""
    for index in range(len(source)):
        try:
            return fields_of(index)
        except Exception as error:  # a data set's own code may raise anything; blame the sample
            if refusal := _refusal(error):
                raise exhaustion(refusal, "memory for one image", "Free some memory.") from refusal
            reason = reason or _reason(error)
            if on_error != "skip":
                raise _failed(source, index, error, fields_of) from _cause(error)
    raise DataError(f"None of the {len(source)} samples could be used. The first, {source.describe(0)}: {reason}.")


def encoded_samples(conversion: Conversion, workers: int, progress: bool) -> Generator[Sample | Skipped]:
    """Encode in threads and yield the results in source order, holding only a few at a time."""
    count = len(conversion.source)
    return stoppable(
        partial(_encode, conversion), range(count), workers, "drivetrain-convert",
        title="Converting", progress=progress, total=count, wanted=f"{workers} threads, each with one image",
    )  # fmt: skip


def _encode(conversion: Conversion, index: int) -> Sample | Skipped:
    def encode(number: int) -> Sample:
        image, *values = conversion.source.get(number)
        encoded = encode_image(image, conversion.encoding, number)
        if (shape := conversion.fields[0].shape[:2]) and shape != (encoded.height, encoded.width):
            raise DataError(
                f"it has {encoded.height} × {encoded.width} pixels (height × width), but the first sample has "
                f"{shape[0]} × {shape[1]}; with image_mode={conversion.encoding.image_mode!r} all must have the same "
                "size: resize them first"
            )
        stored, colors = list[Stored](), dict[str, Colors]()
        for own, value in zip(conversion.fields[1:], values, strict=True):
            is_label = own.name == "label"
            if (kind := conversion.targets.get(own.name)) is not None:
                classes = conversion.classes if is_label else 0
                data, colors[own.name] = store_target(own.name, kind, value, encoded, classes, conversion.mask_map)
                stored.append(data)
            else:
                stored.append(_label(conversion, own, value) if is_label else store_value(own, value))
        return Sample(encoded, tuple(stored), colors)

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


def _label(conversion: Conversion, own: Field, value: Any) -> Stored:
    """Return a label as stored. Whether labels are targets shows only with the first that is one."""
    stored = store_label(own, value)
    if conversion.named and own.kind == "int" and isinstance(stored, float):
        raise DataError(f"its label is {stored}, a target, but classes= (--classes) names class indices")
    return stored


def _failed(source: SampleSource, index: int, error: Exception, again: Callable[[int], object]) -> DataError:
    """Return the error for a sample. If the first and the last fail alike, skipping is no remedy: all would fail."""
    reason = _reason(error).rstrip(".")
    remedy = "Repair or remove it, or use on_error='skip' (--skip-bad)."
    if index == 0 and len(source) > 1:
        try:
            again(len(source) - 1)
        except Exception as last:
            if _reason(last).rstrip(".") == reason:
                remedy = "The last sample fails alike: skipping is no remedy."
    return DataError(f"{source.describe(index)}: {reason}. {remedy}")


def _refusal(error: Exception) -> BaseException | None:
    """Return the system's refusal (of memory, say) that caused `error`; None if the sample itself is bad."""
    causes = (error, error.__cause__, error.__context__)
    return next((cause for cause in causes if cause is not None and is_exhaustion(cause)), None)


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"reading it raised {type(error).__name__}: {error}"


def _cause(error: Exception) -> BaseException | None:
    return error.__cause__ if isinstance(error, DataError) else error  # a DataError contains everything
