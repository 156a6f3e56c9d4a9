"""Loading speed against the loaders of other libraries, on a folder of photographs. `make bench-peers PHOTOS=FOLDER`.

    python benchmarks/peers.py FOLDER --python PEERS/bin/python [--rounds 7] [--workers 2]

The peers run in processes of their own, in an environment of their own (`--python`), and wait while another measures:
all are interleaved in each round. RandomResizedCrop (0.25, 1) and (0.08, 1) to 224, flip, normalized float32, on a CPU.
Writes results/peers.json.

TorchCodec and SPDL load FFmpeg's shared libraries (Debian 12: `apt-get install libavdevice59`); `--peers` leaves them
out. Slipstream, which reads `.beton` files, too, is not measured: the package index has no package of that name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, convert
from measuring import Contender, compare, measure, save
from one_shot import BATCH, SIDE

from loaders import epochs_of, linked

SCALES = (0.25, 0.08)
PEERS = {"DALI": "dali", "TorchCodec": "torchcodec", "torchvision": "torchvision", "SPDL": "spdl"}


class Peer:
    """A peer's process."""

    def __init__(self, python: Path, name: str, folder: Path, scale: float, workers: int) -> None:
        script = Path(__file__).with_name("peer_epochs.py")
        command = [str(python), str(script), name, str(folder), str(scale), str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended: see its message above.")
        return line

    def epoch(self) -> float:
        """Return images/s of one epoch."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    tables: list[Table] = []
    results: dict[str, Any] = {}
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as directory:
        folder, path = linked(options.folder, Path(directory) / "images", 3), Path(directory) / "photos.beton"
        print(convert(folder, path, workers=options.workers))
        for scale in SCALES:
            given: dict[str, Any] = {
                "batch_size": BATCH, "image_size": SIDE, "workers": options.workers, "scale": (scale, 1.0)
            }  # fmt: skip
            peers = {name: Peer(options.python, PEERS[name], folder, scale, options.workers) for name in options.peers}
            contenders: dict[str, Contender] = {
                "FFCVLoader": epochs_of(FFCVLoader(path, **given)),
                "FFCVLoader, verify=True": epochs_of(FFCVLoader(path, verify=True, **given)),
                "stock FFCV": epochs_of(StockFFCVLoader(path, **given)),
                **{name: peer.epoch for name, peer in peers.items()},
            }
            table, rows = compare(f"scale ({scale}, 1)", "images/s", measure(contenders, options.rounds), "FFCVLoader")
            tables.append(table)
            results[f"scale {scale}"] = rows
            results["versions"] = {k: v for peer in peers.values() for k, v in peer.versions.items()}
            for peer in peers.values():
                peer.close()
    torch.set_num_threads(threads)
    save(tables, results, options.out / "peers.json")


if __name__ == "__main__":
    main()
