"""What can be converted: folders of images, tar shards, indexable data sets and arrays, behind one interface."""

import copy
import glob
import io
import json
import sys
import tarfile
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...common.errors import DataError
from ..sources import expand
from .folders import FolderSource, LabeledFolder, MaskFolder, class_numbers

_IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp")
_LABEL_MEMBERS = ("cls", "mask.png", "json")  # the first of these, unless a mask is a further field
_LABEL_KEYS = ("label", "cls", "class")  # of an object in a .json
_BLOCK = 512
_ABSENT = -1

Members = dict[str, tuple[int, int]]  # extension to offset and size, for the members of a sample


class SampleSource(Protocol):
    """Samples by index. Several threads may call `get`."""

    kind: str
    classes: list[str]

    def __len__(self) -> int: ...

    def get(self, index: int) -> tuple[Any, ...]:
        """Return the image in any form that `encode_image` accepts, the label, and each further field's value."""
        ...

    def describe(self, index: int) -> str:
        """Return the sample's name for an error message: a path, or its index."""
        return f"sample {index}"


def open_source(
    source: Any, fields: Sequence[str] = (), labels: str | Path | None = None, classes: Sequence[str] = ()
) -> SampleSource:
    """Open any source of `convert`, with further `fields`; `classes` are names in label order."""
    if labels is not None:
        if not isinstance(source, str | Path) or is_shards(source):
            raise DataError(f"labels={str(labels)!r} are for a folder of images. Leave them out for other sources.")
        if not isinstance(labels, str | Path):
            raise DataError(f"labels={labels!r:.80} must be the path of a table of labels, or of a folder of masks.")
        _refuse_fields(fields, "folder")
        if Path(labels).is_dir():
            return MaskFolder(Path(source), Path(labels))
        return LabeledFolder(Path(source), Path(labels), classes)
    if is_shards(source):
        return TarSource(source, fields)
    if isinstance(source, str | Path):
        _refuse_fields(fields, "folder")
        return FolderSource(Path(source), classes)
    if isinstance(source, tuple) and len(source) == 2 and hasattr(source[0], "shape") and _are_labels(source[1]):
        _refuse_fields(fields, "pair of arrays")
        return ArraySource(*source)
    if isinstance(source, Mapping) and source and 0 not in source:  # such as Hugging Face's of all splits
        first, *others = map(repr, source)
        more = f" and {len(others)} more" if others else ""
        raise DataError(
            f"A {type(source).__name__} with the keys {first}{more} has no sample 0. If it has data sets, convert each "
            f"of them to a file of its own: convert(data[{first}], 'train.beton')."
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source, fields, classes)
    raise DataError(
        f"A {type(source).__name__} cannot be converted. Pass a folder with one folder per class, .tar shards, a "
        "pair of arrays (images, labels), or a data set with len() and [index] that returns (image, label)."
    )


def _are_labels(labels: Any) -> bool:
    return hasattr(labels, "shape") or isinstance(labels, list)


def _refuse_fields(fields: Sequence[str], kind: str) -> None:
    if fields:
        wrong = f"A {kind} has only image and label, no fields {list(fields)}."
        raise DataError(f"{wrong} Pass a data set or .tar shards.")


class ArraySource(SampleSource):
    """A pair of arrays: images `(N, H, W, C)`, `(N, C, H, W)` or `(N, H, W)`, uint8 or uint16; and labels `(N,)`,
    `(N, K)`, or masks, `(N, H, W)`, which may also be a list."""

    kind = "arrays"

    def __init__(self, images: Any, labels: Any) -> None:
        if hasattr(labels, "to_numpy"):  # of pandas, which would index them by their names, not by their places
            labels = labels.to_numpy()
        if isinstance(labels, list):
            try:
                labels = np.asarray(labels)
            except ValueError:
                raise DataError(
                    "The labels are a list of values that differ in shape. Pass one number, or one vector of K, "
                    "per image; masks of other sizes as a data set of (image, mask)."
                ) from None
        dtype = str(images.dtype).removeprefix("torch.")
        if dtype not in ("uint8", "uint16") or len(images.shape) not in (3, 4):
            raise DataError(
                f"The images are {dtype} of shape {tuple(images.shape)}. Pass uint8, 0 to 255, of shape "
                "(N, H, W, 3), (N, 3, H, W) or (N, H, W); for uint16 and other channels, with image_mode=."
            )
        if len(labels.shape) not in (1, 2, 3) or 0 in labels.shape[1:]:
            raise DataError(
                f"The labels have shape {tuple(labels.shape)}. Pass one number per image, (N,), one vector per "
                "image, (N, K), or one mask per image, (N, H, W)."
            )
        if len(images) != len(labels):
            raise DataError(f"There are {len(images)} images and {len(labels)} labels. Pass one label per image.")
        self._images, self._labels, self.classes = images, labels, []

    def __len__(self) -> int:
        return len(self._images)

    def get(self, index: int) -> tuple[Any, Any]:
        return self._images[index], self._labels[index]


class DatasetSource(SampleSource):
    """Any indexable data set. Only one thread at a time calls `__getitem__`, which may not be thread-safe."""

    def __init__(self, dataset: Any, fields: Sequence[str] = (), classes: Sequence[str] = ()) -> None:
        self.kind = f"dataset {type(dataset).__name__}"
        features = getattr(dataset, "features", None)  # of a Hugging Face data set
        self._features = features if isinstance(features, dict) else {}
        self.classes = class_names(dataset, self._features.get("label"))
        self._numbers = self._renumbered(dataset, classes)
        self._dataset, self._fields, self._lock = self._undecoded(dataset), list(fields), threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def get(self, index: int) -> tuple[Any, ...]:
        with self._lock:
            sample = self._dataset[index]
        if isinstance(sample, dict):
            return self._from_dict(sample)
        wanted = 2 + len(self._fields)
        if not isinstance(sample, tuple | list) or len(sample) != wanted:
            names = ", ".join(["image", "label", *self._fields])
            has = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            what = f"a pair ({names})" if wanted == 2 else f"a tuple ({names})"
            raise DataError(f"it is a {type(sample).__name__}{has}; expected {what} or a dict")
        image, label, *values = sample
        return image, label if self._numbers is None else self._numbers[label], *values

    def _from_dict(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        image = sample.get("image", sample.get("img"))
        if image is None or "label" not in sample:
            raise DataError(f"it has the keys {sorted(sample)}; expected 'image' (or 'img') and 'label'")
        missing = [name for name in self._fields if name not in sample]
        if missing:
            raise DataError(f"it has the keys {sorted(sample)}; the fields {missing} are missing")
        return image, sample["label"], *(sample[name] for name in self._fields)

    def _renumbered(self, dataset: Any, classes: Sequence[str]) -> Sequence[int] | None:
        """Return the class index of each class of torchvision's ImageFolder if `classes` has their names, and more, as
        of a folder; None if they have their own."""
        folders = sys.modules.get("torchvision.datasets.folder")  # which who has such a data set has imported
        known = folders is not None and type(dataset).__getitem__ is folders.DatasetFolder.__getitem__
        # Those of torchvision's ImageNet are not the names of its folders.
        if not (known and classes and list(dataset.class_to_idx) == self.classes):
            return None
        numbers = class_numbers(Path(dataset.root), self.classes, classes)
        return None if isinstance(numbers, range) else numbers

    def _undecoded(self, dataset: Any) -> Any:
        """Make a Hugging Face data set, or torchvision's ImageFolder, return each image's file as it is stored, so that
        JPEGs are copied unchanged."""
        folders = sys.modules.get("torchvision.datasets.folder")  # which who has such a data set has imported
        if folders is not None and type(dataset).__getitem__ is folders.DatasetFolder.__getitem__:
            if dataset.transform is None and dataset.loader in (folders.default_loader, folders.pil_loader):
                dataset = copy.copy(dataset)
                dataset.loader = _stored_at
            return dataset
        if not hasattr(dataset, "cast_column") or getattr(dataset, "format", {}).get("type") is not None:
            return dataset  # another one, or one whose samples the user's own transform or format defines
        for name in ("image", "img"):
            feature: Any = self._features.get(name)
            # With another mode, such as "L", the data set converts what the file has.
            if getattr(feature, "decode", False) and getattr(feature, "mode", None) in (None, "RGB"):
                return dataset.cast_column(name, type(feature)(decode=False))
        return dataset


def _stored_at(path: str) -> dict[str, Any]:
    """Return an image of a Hugging Face data set that is a file."""
    return {"bytes": None, "path": path}


def class_names(dataset: Any, feature: Any = None) -> list[str]:
    """Return a data set's names of its classes, or those of its labels' `feature`. None if it transforms its labels
    (torchvision's `target_transform`): names are those of the classes before."""
    if getattr(dataset, "target_transform", None) is not None:
        return []
    for names in (getattr(dataset, "classes", None), getattr(feature, "names", None)):
        # It may be an array, or of a data set of the user's own their number.
        if isinstance(names, Collection) and not isinstance(names, str) and len(names):
            # torchvision's ImageNet has a tuple of all names of a class.
            return [", ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names]
    return []


def is_shards(source: Any) -> bool:
    """Whether `source` names tar shards: a string or path that ends in `.tar`, or a list of them."""
    if isinstance(source, str | Path):
        return str(source).endswith(".tar") and not Path(source).is_dir()
    return isinstance(source, list | tuple) and bool(source) and all(
        isinstance(part, str | Path) and is_shards(part) for part in source
    )  # fmt: skip


def expanded(source: Any) -> list[str]:
    """Return the names that a pattern, or each of several, stands for; see `expand`. Files are not looked for."""
    patterns = [source] if isinstance(source, str | Path) else source
    return [name for pattern in patterns for name in expand(str(pattern))]


def expand_shards(source: Any) -> list[str]:
    """Return the shards' paths: `{000..003}` counts with leading zeros, `{a,b}` lists; `*`, `?`, `[…]` match files."""
    paths = []
    for pattern in expanded(source):
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))  # noqa: PTH207 — any root
        if not matches:
            raise DataError(f"{pattern} does not exist. Pass a .tar file, a pattern, or a list.")
        paths += matches
    return named_once(paths)


def named_once(shards: list[str]) -> list[str]:
    """Return the shards; raise a DataError if one is there twice, such as by two patterns that both match it."""
    for name, count in Counter(shards).most_common(1):
        if count > 1:
            raise DataError(
                f"{name} is named {count} times: each of its samples would be in the data as often. Name it once."
            )
    return shards


class TarSource:
    """Samples of WebDataset's tar shards: members with the same key, such as `0001.jpg`, `0001.cls` and `0001.npy`,
    found by an index of offsets, built in one pass over the headers."""

    kind = "tar shards"
    classes: list[str] = []  # noqa: RUF012 — shards have no names, and nothing is ever added

    def __init__(self, source: Any, fields: Sequence[str] = ()) -> None:
        self._shards = expand_shards(source)
        self._fields = [name.removeprefix(".").lower() for name in fields]
        images = sorted(_IMAGE_MEMBERS, key=self._fields.__contains__)  # a further field only if there is no other
        labels = [end for end in _LABEL_MEMBERS if end != "mask.png" or end not in self._fields]
        self._starts, self._keys = array("q"), list[str]()
        self._kinds = bytearray()  # per sample: which label extension it has
        self._places = array("q")  # per sample: offset and size of image, label and each field
        absent = (_ABSENT, 0)
        for shard in self._shards:
            self._starts.append(len(self._keys))
            for key, members in _index(shard).items():
                image = next((end for end in images if end in members), None)
                label = next((end for end in labels if end in members), None)
                self._keys.append(key)
                self._kinds.append(_LABEL_MEMBERS.index(label) if label else 0)
                for end in (image, label, *self._fields):
                    self._places.extend(members.get(end, absent) if end else absent)

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, index: int) -> tuple[Any, ...]:
        label = _LABEL_MEMBERS[self._kinds[index]]
        wanted = [(None, f"image ({', '.join(_IMAGE_MEMBERS)})"), (label, "label (.cls, .mask.png or .json)")]
        wanted += [(name, f"member .{name}") for name in self._fields]
        values = []
        try:
            with open(self._shard(index), "rb") as file:  # noqa: PTH123 — called per sample
                for number, (end, what) in enumerate(wanted, index * len(wanted)):
                    offset, size = self._places[2 * number : 2 * number + 2]
                    if offset == _ABSENT:
                        raise DataError(f"it has no {what}")
                    file.seek(offset)
                    data = file.read(size)
                    if len(data) < size:
                        raise DataError("its shard was truncated during the conversion")
                    values.append(_parse(data, end))
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None
        values[1] = _label(values[1])
        return tuple(values)

    def describe(self, index: int) -> str:
        return f"{self._shard(index)}: key {self._keys[index]}"

    def _shard(self, index: int) -> str:
        return self._shards[bisect_right(self._starts, index) - 1]


def _index(shard: str) -> dict[str, Members]:
    """Return the members of a shard by key, reading only its headers."""
    samples: dict[str, Members] = {}
    try:
        size = Path(shard).stat().st_size
        with tarfile.open(shard, "r:") as tar:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # otherwise it keeps all of them
                if member.isfile():
                    _add_member(shard, samples, member)
                if member.offset_data + member.size > size:
                    raise DataError(f"{shard} is truncated within its member {member.name}. Download it again.")
            end = tar.offset
        with Path(shard).open("rb") as file:
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
                raise DataError(f"{shard} is truncated or damaged at byte {end}. Download it again.")
    except DataError:
        raise
    except (tarfile.TarError, ValueError) as error:
        raise DataError(f"{shard} is truncated or not a tar file ({error}). Download it again.") from None
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error.strerror}.") from None
    return samples


def _add_member(shard: str, samples: dict[str, Members], member: tarfile.TarInfo) -> None:
    folder, _, base = member.name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem:
        return  # without a key, ignored as in WebDataset
    members = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
    if extension.lower() in members:
        raise DataError(f"{shard} contains the member {member.name} twice. Recreate the shard.")
    members[extension.lower()] = (member.offset_data, member.size)


def _parse(data: bytes, extension: str | None) -> Any:
    try:
        if extension == "cls" and data.strip().lstrip(b"-").isdigit():
            return int(data)  # JSON does not allow leading zeros
        if extension in ("json", "cls"):
            return json.loads(data)
        if extension is not None and extension.rpartition(".")[2] == "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # damaged files make numpy's reader raise many types
        raise DataError(f"its member .{extension} cannot be read: {error}") from None
    return data


def _label(label: Any) -> Any:
    if not isinstance(label, dict):
        return label
    for key in _LABEL_KEYS:
        if key in label:
            return label[key]
    raise DataError(f"its .json has the keys {sorted(label)}; expected one of {_LABEL_KEYS}")
