"""Compare 52 small trainings with those of an earlier revision, bit for bit: `make same [BASE=REVISION]`.

    python .ci/same.py [--base REVISION]

The numbers of the base are recorded once for each kind of processor and version of torch, in `.build/same/`, by running
`tests/support/same_cases.py` in a checkout of that revision; floating-point sums differ between machines, so no record
would hold elsewhere. Then the same file runs here, and each case whose losses, metrics or weights differ is named.

The exit status is 0 if all are equal, 1 if one is not, and 2 if a case cannot run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".build/same"
CASES = "tests/support/same_cases.py"
PROCESSES = 2


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """What the bits of a sum depend on, as a short name."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    facts = [
        platform.machine(),
        platform.processor(),
        flags,
        *(version(name) for name in ("torch", "torchvision", "numpy")),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def checkout(revision: str) -> Path:
    """Return a folder with that revision as a package named drivetrain, with its native library."""
    folder = STATE / revision[:12] / "drivetrain"
    if not folder.exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", str(folder), revision)
    if not (folder / "loaders/native/libdrivetrain.so").exists():
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, check=True)
    return folder


def run(package: Path, names: list[str], out: Path) -> dict[str, Any]:
    """Run these cases with that package, in two processes, and return their numbers."""
    environment = os.environ | {
        "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    parts = [(out / f"{part}.json", names[part::PROCESSES]) for part in range(PROCESSES)]
    running = [
        subprocess.Popen([sys.executable, str(ROOT / CASES), str(path), *part], env=environment, cwd=out)
        for path, part in parts
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(2)
    return {name: numbers for path, _ in parts for name, numbers in json.loads(path.read_text()).items()}


def different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name each case that is not as before, with the first difference."""
    found = []
    for name, numbers in before.items():
        if name not in now:
            found.append(f"{name}: is missing now")
        elif numbers != now[name]:
            epochs = zip(numbers["epochs"], now[name]["epochs"], strict=False)
            first = next((f"epoch {at}: {old} is now {new}" for at, (old, new) in enumerate(epochs) if old != new), "")
            found.append(f"{name}: {first or 'the weights differ'}")
    return found


def main() -> int:
    """Record what is missing, compare, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="HEAD", help="the revision to compare with")
    revision = git("rev-parse", parser.parse_args().base + "^{commit}")
    names = json.loads(
        subprocess.run(
            [sys.executable, str(ROOT / CASES)], check=True, capture_output=True, text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        ).stdout
    )  # fmt: skip
    record = STATE / f"{revision[:12]}-{machine()}-{hashlib.sha256((ROOT / CASES).read_bytes()).hexdigest()[:8]}.json"
    if not record.exists():
        print(f"Recording {len(names)} trainings of {revision[:12]} …", flush=True)
        record.write_text(json.dumps(run(checkout(revision), names, STATE / "before"), indent=1))
    found = different(json.loads(record.read_text()), run(ROOT / ".build/drivetrain", names, STATE / "now"))
    print("\n".join(found) or f"{len(names)} trainings are as in {revision[:12]}, bit for bit.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
