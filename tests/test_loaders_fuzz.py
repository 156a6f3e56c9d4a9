"""Damaged files, opened and read whole in processes of their own: an error, or the very same data.

Without a manifest the one thing that cannot be noticed is a change inside an image's bytes, which shows in
that image only, or in a label, which shows in that label only. With one, a label cannot change unnoticed.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.beton import Beton
from drivetrain.loaders.layout import FIELD, HEADER, Field, metadata_dtype
from drivetrain.loaders.manifest import manifest_path
from loader_pictures import jpeg_bytes, picture
from PIL import Image

MUTANTS, LIMIT = 200, 10.0
METADATA = HEADER.itemsize + 2 * FIELD.itemsize
ROW = metadata_dtype([Field("image", "rgb_image"), Field("label", "int")]).itemsize


class Reader:
    """A process that reads one file after another, each within a time limit."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("loader_fuzz_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def read(self, path: Path, limit: float = LIMIT) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        if not self._selector.select(limit):
            raise AssertionError(f"{path} hangs for {limit} s")
        line = self.process.stdout.readline()
        assert line, f"{path} ended the process with status {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._selector.close()
        self.process.kill()
        self.process.communicate()


@dataclass
class Mutant:
    """A change to a file: `data` at `position`, or the length it is cut to; and what it may alter unseen."""

    what: str
    position: int = 0
    data: bytes = b""
    length: int | None = None
    images: set[int] = field(default_factory=set)
    labels: set[int] = field(default_factory=set)

    def apply(self, path: Path) -> None:
        if self.length is not None:
            os.truncate(path, self.length)
            return
        with path.open("r+b") as file:
            file.seek(self.position)
            file.write(self.data)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten samples: five JPEG files (one progressive), five stored raw, of several sizes."""
    root = tmp_path_factory.mktemp("fuzz")
    for number in range(5):
        name = root / "images" / f"class{number}"
        name.mkdir(parents=True)
        pixels = picture(number, 66 + 4 * number, 90 - 5 * number)
        (name / "a.jpg").write_bytes(jpeg_bytes(pixels, progressive=number == 2))
        Image.fromarray(picture(50 + number, 20 + number, 31 - number)).save(name / "b.png")
    convert(root / "images", root / "fuzz.beton", progress=False)
    return root / "fuzz.beton"


def regions(beton: Beton) -> dict[str, tuple[int, int]]:
    """Name to first and last byte + 1 of each part of the file; the zeros before the pages are one."""
    first, table = int(beton.pointers.min()), int((beton.pointers + beton.sizes).max())
    tables = METADATA + len(beton) * ROW
    return {
        "header": (0, HEADER.itemsize),
        "fields": (HEADER.itemsize, METADATA),
        "metadata": (METADATA, tables),
        "zeros": (tables, first),
        "data": (first, table),
        "allocations": (table, len(beton.data)),
    }


def may_alter(mutant: Mutant, beton: Beton) -> Mutant:
    """Fills in whose image bytes and whose labels the mutant really changes."""
    span = len(mutant.data)
    before = beton.data[mutant.position : mutant.position + span]
    changed = mutant.position + np.flatnonzero(before != np.frombuffer(mutant.data, np.uint8))
    for at in changed.tolist():
        inside = (beton.pointers <= at) & (at < beton.pointers + beton.sizes)
        mutant.images |= set(np.flatnonzero(inside).tolist())
        sample, column = divmod(at - METADATA, ROW)
        if 0 <= sample < len(beton) and column >= ROW - 8:
            mutant.labels.add(sample)
    return mutant


def make_mutants(beton: Beton, count: int, seed: int) -> list[Mutant]:
    """Bit flips, bytes, zeroed stretches, exchanged stretches and cuts, spread over all parts of the file."""
    rng, parts = np.random.default_rng(seed), list(regions(beton).items())
    mutants = []
    for number in range(count):
        name, (start, stop) = parts[number % len(parts)]
        at = int(rng.integers(start, stop))
        kind = ("flip", "flip", "byte", "zeros", "swap", "cut")[int(rng.integers(6))]
        old = bytes(beton.data[at : min(at + int(rng.choice([2, 8, ROW])), stop)])
        if kind == "flip":
            mutant = Mutant(name, at, bytes([old[0] ^ 1 << int(rng.integers(8))]))
        elif kind == "byte":
            mutant = Mutant(name, at, bytes([int(rng.integers(256))]))
        elif kind == "zeros":
            mutant = Mutant(name, at, bytes(len(old)))
        elif kind == "swap":  # another stretch of the same part, put here
            other = start + (at - start + ROW) % max(stop - start - len(old), 1)
            mutant = Mutant(name, at, bytes(beton.data[other : other + len(old)]))
        else:
            mutant = Mutant(name, length=at)
        mutant.what = f"#{number} {kind} in {name} at {at}"
        mutants.append(may_alter(mutant, beton) if mutant.length is None else mutant)
    return mutants


def judge(mutant: Mutant, answer: dict[str, Any], sound: list[Any], manifest: bool) -> str:
    """What became of a mutant; raises AssertionError if that is not allowed."""
    if "error" in answer:
        assert answer["error"].startswith("BetonError: "), (mutant.what, answer)
        assert "mutant.beton" in answer["error"], (mutant.what, answer)
        return "refused"
    assert len(answer["samples"]) == len(sound), mutant.what
    pixels = {
        i for i, (now, was) in enumerate(zip(answer["samples"], sound, strict=True)) if now[1] != was[1]
    }
    labels = {
        i for i, (now, was) in enumerate(zip(answer["samples"], sound, strict=True)) if now[0] != was[0]
    }
    assert pixels <= mutant.images, mutant.what
    assert labels <= (set() if manifest else mutant.labels), mutant.what
    return "unseen" if pixels or labels else "identical"


@pytest.mark.parametrize("manifest", [False, True], ids=["alone", "with-manifest"])
def test_damage_is_refused_or_harmless(original: Path, tmp_path: Path, manifest: bool) -> None:
    beton, path, reader = open_beton(original), tmp_path / "mutant.beton", Reader()
    outcomes: Counter[str] = Counter()
    try:
        sound = reader.read(original, limit=100)["samples"]
        assert [label for label, _ in sound] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        if manifest:
            shutil.copy(manifest_path(original), manifest_path(path))
        for mutant in make_mutants(beton, MUTANTS // 2, seed=2 + manifest):
            path.unlink(missing_ok=True)
            subprocess.run(["cp", "--sparse=always", original, path], check=True, timeout=10)
            mutant.apply(path)
            outcomes[judge(mutant, reader.read(path), sound, manifest)] += 1
    finally:
        reader.close()
    assert outcomes["refused"] > 30, outcomes  # else the mutants do not reach what they should
    assert outcomes["identical"] > 10, outcomes
