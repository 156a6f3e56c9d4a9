"""Damaged files, each opened and fully read in a separate process: an error, or exactly the same data.

Without a manifest, only a change inside a value is undetectable, which affects that sample's image, label or additional
fields only, and a change of an ndarray's dtype to another of the same width. With a verified manifest, every change is
detected.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.beton.layout import FIELD, HEADER, metadata_dtype, tables_start
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.beton.reader import Beton
from loader_pictures import jpeg_bytes, picture
from process_state import start_server

LIMIT = 20.0
NAMES = ["score", "box", "text", "meta"]


class Reader:
    """Reads one file after another, each in a process of its own within a time limit."""

    def __init__(self) -> None:
        self.process = start_server("loader_fuzz_worker.py")
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def read(self, path: Path, how: str, limit: float = LIMIT) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{how} {path}\n")
        self.process.stdin.flush()
        if not self._selector.select(limit):
            raise AssertionError(f"{path} hangs for {limit} s")
        line = self.process.stdout.readline()
        assert line, f"{path} ended the process with status {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._selector.close()
        os.killpg(self.process.pid, signal.SIGKILL)  # a reader that hangs, too
        self.process.communicate()


@dataclass
class Mutant:
    """A change to a file: `data` at `position`, or the length it is cut to; and whose values it may alter unseen."""

    what: str
    position: int = 0
    data: bytes = b""
    length: int | None = None
    images: set[int] = field(default_factory=set)
    labels: set[int] = field(default_factory=set)
    further: set[int] = field(default_factory=set)

    def apply(self, path: Path) -> None:
        if self.length is not None:
            os.truncate(path, self.length)
            return
        with path.open("r+b") as file:
            file.seek(self.position)
            file.write(self.data)


class Samples:
    """Ten samples: five JPEG files (one progressive), five pictures stored raw, with fields of every kind."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index // 2
        if index % 2:
            image: Any = picture(50 + number, 20 + number, 31 - number)
        else:
            image = jpeg_bytes(picture(number, 66 + 4 * number, 90 - 5 * number), progressive=number == 2)
        return {
            "image": image,
            "label": number,
            "score": index / 4,
            "box": np.arange(40, dtype=np.float32) * index,
            "text": b"some words " * (1 + number) if index != 3 else b"",
            "meta": {"index": index, "words": ["some", "words"] * number},
        }


class Arrays(Samples):
    """The same with images of one channel of 16 bits, in an ndarray field."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.random.default_rng(index).integers(0, 1 << 16, (20, 31)).astype(np.uint16)
        return super().__getitem__(index) | {"image": image}


@pytest.fixture(scope="module", params=["pictures", "arrays"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.beton"
    arrays = request.param == "arrays"
    convert(Arrays() if arrays else Samples(), path, fields=NAMES, image_mode="I;16" if arrays else None)
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with closing(Reader()) as one:
        yield one


def row_of(beton: Beton) -> Any:
    return metadata_dtype([column.field for column in beton.columns.values()])


def regions(beton: Beton) -> dict[str, tuple[int, int]]:
    """Name to first and last byte + 1 of each part of the file; each field's descriptor and data is one."""
    start = tables_start(len(beton.columns))
    tables = start + len(beton) * row_of(beton).itemsize
    first = int(beton.pointers.min())
    table = int(np.fromfile(beton.path, HEADER, 1)["alloc_table_ptr"][0])
    found = {"header": (0, HEADER.itemsize), "metadata": (start, tables), "zeros": (tables, first)}
    for number, name in enumerate(beton.columns):
        at = HEADER.itemsize + number * FIELD.itemsize
        used = 320 if beton.fields[name] == "ndarray" else 60
        found[f"descriptor of {name}"] = (at, at + used)  # where something is
    return found | {
        "metadata again": (start, tables),
        "data": (first, table),
        "allocations": (table, len(beton.data)),
    }


def may_alter(mutant: Mutant, beton: Beton) -> Mutant:
    """Fill in whose values the mutant really changes, without a manifest to notice."""
    before = beton.data[mutant.position : mutant.position + len(mutant.data)]
    changed = mutant.position + np.flatnonzero(before != np.frombuffer(mutant.data, np.uint8))
    row, fields = row_of(beton), list(beton.columns.values())
    for at in changed.tolist():
        for column in fields:
            if column.field.allocated:
                inside = (column.pointers <= at) & (at < column.pointers + column.sizes)
                altered = mutant.images if column.field.name == "image" else mutant.further
                altered |= set(np.flatnonzero(inside).tolist())
        sample, offset = divmod(at - tables_start(len(fields)), row.itemsize)
        if 0 <= sample < len(beton):
            for number, altered in ((1, mutant.labels), (2, mutant.further)):
                start = row.fields[f"f{number}"][1]
                if start <= offset < start + 8:
                    altered.add(sample)
        number, offset = divmod(at - HEADER.itemsize, FIELD.itemsize)
        if 0 <= number < len(fields) and fields[number].field.kind == "ndarray" and offset > 17:
            altered = mutant.further if number else mutant.images
            altered |= set(range(len(beton)))  # read as another type of the same width
    return mutant


def make_mutants(beton: Beton, count: int, seed: int) -> list[Mutant]:
    """Bit flips, bytes, zeroed stretches, exchanged stretches and cuts, spread over all parts of the file."""
    rng, parts, row = np.random.default_rng(seed), list(regions(beton).items()), row_of(beton).itemsize
    mutants = []
    for number in range(count):
        name, (start, stop) = parts[number % len(parts)]
        at = int(rng.integers(start, stop))
        kind = ("flip", "flip", "byte", "zeros", "swap", "cut")[int(rng.integers(6))]
        old = bytes(beton.data[at : min(at + int(rng.choice([2, 8, row])), stop)])
        if kind == "flip":
            mutant = Mutant(name, at, bytes([old[0] ^ 1 << int(rng.integers(8))]))
        elif kind == "byte":
            mutant = Mutant(name, at, bytes([int(rng.integers(256))]))
        elif kind == "zeros":
            mutant = Mutant(name, at, bytes(len(old)))
        elif kind == "swap":  # another stretch of the same part, put here
            other = start + (at - start + row) % max(stop - start - len(old), 1)
            mutant = Mutant(name, at, bytes(beton.data[other : other + len(old)]))
        else:
            mutant = Mutant(name, length=at)
        mutant.what = f"#{number} {kind} in {name} at {at}"
        mutants.append(may_alter(mutant, beton) if mutant.length is None else mutant)
    return mutants


def judge(mutant: Mutant, answer: dict[str, Any], sound: list[Any], verified: bool) -> str:
    """Return the outcome of a mutant; raise AssertionError if it is not allowed."""
    if "error" in answer:
        assert answer["error"].startswith("BetonError: "), (mutant.what, answer)
        assert "mutant.beton" in answer["error"], (mutant.what, answer)
        return "refused"
    assert "crash" not in answer, (mutant.what, answer)
    assert len(answer["samples"]) == len(sound), mutant.what
    unseen = False
    for place, allowed in enumerate((mutant.labels, mutant.images, mutant.further)):
        pairs = zip(answer["samples"], sound, strict=True)
        altered = {index for index, (now, was) in enumerate(pairs) if now[place] != was[place]}
        assert altered <= (set() if verified else allowed), mutant.what
        unseen |= bool(altered)
    return "unseen" if unseen else "identical"


@pytest.mark.process
@pytest.mark.parametrize("mutants", [30, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["plain", "verified", "lazy"])
def test_damage_is_refused_or_harmless(original: Path, reader: Reader, tmp_path: Path, how: str, mutants: int) -> None:
    verified = how != "plain"
    beton, path = open_beton(original), tmp_path / "mutant.beton"
    outcomes: Counter[str] = Counter()
    sound = reader.read(original, how, limit=100)["samples"]
    assert [label for label, _, _ in sound] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    if verified:
        shutil.copy(manifest_path(original), manifest_path(path))
    for mutant in make_mutants(beton, mutants, seed=2 + verified + (how == "lazy")):
        path.unlink(missing_ok=True)
        subprocess.run(["cp", "--sparse=always", original, path], check=True, timeout=10)
        mutant.apply(path)
        outcomes[judge(mutant, reader.read(path, how), sound, verified)] += 1
    assert outcomes["refused"] > 0.3 * mutants, outcomes  # else the mutants do not reach what they should
    assert outcomes["identical"] > 0.05 * mutants, outcomes
