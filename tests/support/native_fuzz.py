"""Builds native_fuzz.c with sanitizers and runs it on small JPEGs: `make fuzz`, and shorter in the tests."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

NATIVE = Path(__file__).parents[2] / "loaders" / "native"
SANITIZERS = {"address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"], "none": []}


# Without variants for other processors: sanitizers lack them.
_COMPILE = [
    "gcc",
    "-std=gnu11",
    "-O1",
    "-g",
    "-ffp-contract=off",
    "-DDT_NO_CLONES",
    "-fno-sanitize-recover=all",
]


def build(out: Path, sanitizers: Sequence[str]) -> None:
    """Compile the harness and the native core."""
    harness = Path(__file__).with_suffix(".c")  # includes load.c
    sources = [path for path in sorted(NATIVE.glob("*.c")) if path.name != "load.c"]
    command = [*_COMPILE, *sanitizers, "-o", out, harness, *sources, "-ljpeg", "-lm", "-lpthread"]
    subprocess.run(command, check=True, timeout=300)


def build_library(out: Path, sanitizers: Sequence[str]) -> None:
    """Compile the native core as the library that Python loads."""
    sources = sorted(NATIVE.glob("*.c"))
    command = [*_COMPILE, *sanitizers, "-shared", "-fPIC", "-o", out, *sources, "-ljpeg", "-lm"]
    subprocess.run(command, check=True, timeout=300)


def write_corpus(folder: Path) -> None:
    """Write pictures of a few sizes in each coding: subsampled, progressive, with restart markers, grey, CMYK."""
    rng = np.random.default_rng(0)
    ways = [
        *({"subsampling": kind} for kind in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")),
        {"progressive": True}, {"progressive": True, "subsampling": "4:4:4"}, {"restart_marker_blocks": 3},
        {"restart_marker_rows": 1}, {"mode": "L"}, {"mode": "CMYK"}, {"quality": 5},
    ]  # fmt: skip
    for height, width in ((64, 80), (37, 51), (16, 16), (8, 200), (131, 9)):
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        for number, way in enumerate(ways):
            options = dict(way)
            file = io.BytesIO()
            picture.convert(str(options.pop("mode", "RGB"))).save(file, "JPEG", **options)
            (folder / f"{height}-{width}-{number}.jpg").write_bytes(file.getvalue())


def run(kind: str, executions: int, seed: int, threads: int, folder: Path) -> str:
    """Build and run the harness in `folder`; return what it prints.

    Raises:
        subprocess.CalledProcessError: if a sanitizer complains, or a part of a picture differs from the whole.
    """
    corpus, program = folder / "corpus", folder / f"fuzz-{kind}"
    corpus.mkdir(exist_ok=True)
    write_corpus(corpus)
    build(program, SANITIZERS[kind])
    # Sizes in damaged tables may ask for more memory than there is: the core must notice, and not the sanitizer.
    environment = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"}
    done = subprocess.run(
        [program, corpus, str(seed), str(executions), str(threads)],
        env=environment, capture_output=True, text=True, check=False, timeout=36_000,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=SANITIZERS, default="address")
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(options.kind, options.executions, options.seed, options.threads, Path(folder)))


if __name__ == "__main__":
    main()
