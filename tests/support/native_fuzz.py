"""Builds native_fuzz.c and runs it on small JPEGs: `make fuzz`, and shorter in the tests.

    native_fuzz.py [--kind address|plain|thread|leaks] [--executions N] [--seed 0] [--threads 2]
    native_fuzz.py --kind libfuzzer [--seconds 600] [--keep FOLDER]

`address` and `thread` are sanitizers; `plain` is `address` without the variants of functions for this processor,
which the thread sanitizer lacks, too. `leaks` is without one, for as many calls as ten million loaded images take:
what the process has allocated after a hundredth of them must be what it has in the end, byte for byte.

`libfuzzer` is clang's, guided by coverage (Debian: clang and libclang-rt-dev, or CC=clang-19), from the same files and
those of FOLDER, which keeps what it finds.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE, COMPILED = ROOT / "loaders" / "native", ROOT / ".build" / "native_fuzz"
CORPUS = Path(__file__).with_name("jpeg_corpus.c")
FLAGS = {
    "address": ["-fsanitize=address,undefined"],
    "plain": ["-fsanitize=address,undefined", "-DDT_NO_CLONES"],
    "thread": ["-fsanitize=thread", "-DDT_NO_CLONES"],
    "leaks": ["-O2"],
}
EXECUTIONS = {"address": 1_000_000, "plain": 200_000, "thread": 200_000, "leaks": 28_000_000}
GROWTH = 16 << 20
"""Bytes by which the memory that the system counts may grow without a leak: the allocator keeps what it gets back."""


@dataclass
class Result:
    """Number of executions, of pictures decoded as a whole, and of samples loaded; and the bytes that the process has
    allocated, and in memory, at first and after each round, when nothing is in use.
    """

    executions: int
    decoded: int
    loaded: int
    allocated: list[int]
    resident: list[int]

    @property
    def leaked(self) -> int:
        """Bytes allocated since the first round, which allocates what threads keep."""
        return self.allocated[-1] - self.allocated[1]

    @property
    def grown(self) -> int:
        """Bytes of memory that the system has given since."""
        return self.resident[-1] - self.resident[1]


_PIECES = "-DDT_PIECE=512"  # of a file, so that libjpeg gets those of the corpus in several
_COMPILE = ["gcc", "-std=gnu11", "-O1", "-g", "-ffp-contract=off", _PIECES, "-fno-sanitize-recover=all"]


def build(out: Path, flags: Sequence[str]) -> None:
    sources = [Path(__file__).with_suffix(".c"), *sorted(NATIVE.glob("*.c"))]
    _compile(out, sources, [*flags, "-ljpeg", "-lm", "-lpthread"])


def build_library(out: Path, flags: Sequence[str]) -> None:
    _compile(out, sorted(NATIVE.glob("*.c")), [*flags, "-shared", "-fPIC", "-ljpeg", "-lm"])


def _compile(out: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Compile to `out`; what has been compiled of the same text is kept, because that takes seconds."""
    digest = sha256(repr([*_COMPILE, *flags]).encode())
    for path in (*sources, *sorted(NATIVE.glob("*.h"))):
        digest.update(path.read_bytes())
    kept = COMPILED / digest.hexdigest()
    if not kept.exists():
        COMPILED.mkdir(parents=True, exist_ok=True)
        partial = COMPILED / f"{os.getpid()}.partial"
        subprocess.run([*_COMPILE, "-o", partial, *sources, *flags], check=True, timeout=300)
        partial.replace(kept)
    shutil.copy(kept, out)


def write_corpus(folder: Path) -> None:
    """Write pictures of a few sizes in each sampling and coding that libjpeg reads; see jpeg_corpus.c."""
    subprocess.run([_corpus_program(folder), folder], check=True, timeout=300)


def write_jpeg(folder: Path, size: tuple[int, int], sampling: str, way: int, detail: int | None = None) -> Path:
    """Write one of them, of `size` (height, width), and plain from line `detail` on; see jpeg_corpus.c."""
    arguments = (*size, sampling, way, size[0] if detail is None else detail)
    subprocess.run([_corpus_program(folder), folder, *map(str, arguments)], check=True, timeout=300)
    return folder / f"{size[0]}x{size[1]}-{sampling}-{way}.jpg"


def _corpus_program(folder: Path) -> Path:
    program = folder.parent / "jpeg_corpus"
    if not program.exists():
        _compile(program, [CORPUS], ["-ljpeg"])
    return program


def run(kind: str, executions: int, seed: int, threads: int, folder: Path, rounds: int = 1) -> Result:
    """Build and run the harness in `folder`; raise if a sanitizer complains, or a part of a picture differs from the
    whole."""
    corpus, program = folder / "corpus", folder / f"fuzz-{kind}"
    corpus.mkdir(exist_ok=True)
    write_corpus(corpus)
    build(program, FLAGS[kind])
    # Sizes in damaged tables may ask for more memory than there is: the core must notice, and not the sanitizer.
    environment = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"}
    done = subprocess.run(
        [program, corpus, *map(str, (seed, executions, threads, rounds))],
        env=environment, capture_output=True, text=True, check=False, timeout=36_000,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        done.check_returncode()
    *memory, counts = ([*map(int, re.findall(r"\d+", line))] for line in done.stdout.splitlines())
    return Result(*counts[:3], *([line[column] for line in memory] for column in (1, 2)))


def run_libfuzzer(folder: Path, seconds: int, keep: Path) -> int:
    corpus, program = folder / "corpus", folder / "libfuzzer"
    for made in (corpus, keep):
        made.mkdir(parents=True, exist_ok=True)
    write_corpus(corpus)
    sources = [Path(__file__).with_name("libfuzzer_target.c"), *sorted(NATIVE.glob("*.c"))]
    flags = ["-fsanitize=fuzzer,address,undefined", "-DDT_NO_CLONES"]
    command = [os.environ.get("CC", "clang"), *_COMPILE[1:], *flags, "-o", program, *sources, "-ljpeg", "-lm"]
    try:
        built = subprocess.run(command, check=False, timeout=300).returncode == 0
    except FileNotFoundError:
        built = False
    if not built:
        raise SystemExit("clang's fuzzer cannot be built: apt-get install clang libclang-rt-dev, or set CC.")
    options = [f"-max_total_time={seconds}", "-max_len=16384", "-print_final_stats=1", "-timeout=20"]
    fuzzed = [program, *options, f"-artifact_prefix={keep}/failed-", keep, corpus]
    return subprocess.run(fuzzed, check=False, timeout=seconds + 600).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*FLAGS, "libfuzzer"], default="address")
    parser.add_argument("--executions", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--keep", type=Path, default=Path(".build/libfuzzer"))
    options = parser.parse_args()
    if options.kind == "libfuzzer":
        with tempfile.TemporaryDirectory() as folder:
            raise SystemExit(run_libfuzzer(Path(folder), options.seconds, options.keep.resolve()))
    executions = options.executions or EXECUTIONS[options.kind]
    rounds = 100 if options.kind == "leaks" else 1
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.kind, executions, options.seed, options.threads, Path(folder), rounds)
    print(f"{result.executions:,} executions, {result.decoded:,} decoded wholly, {result.loaded:,} loaded")
    if options.kind == "leaks":
        for what, found in (("allocated", result.allocated), ("resident", result.resident)):
            print(f"{what} after the first round {found[1]:,} bytes, and in the end {found[-1]:,}")
        if result.leaked or result.grown > GROWTH:
            raise SystemExit("Memory is lost.")


if __name__ == "__main__":
    main()
