"""Reads damaged `.beton` files on request, each in a process forked for it.

One line of stdin, `HOW PATH`, one JSON answer on a line of stdout: `{"error": type and message}`,
`{"samples": [[label, digest of the pixels, digest of the further fields], …]}`, or `{"crash": status}`. HOW is
`plain` or `verified`. This process has imported all and computed nothing, so that forking it is sound and cheap.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import drivetrain.loaders.kernels  # noqa: F401 — now, not in every child
import numpy as np
import torch
from drivetrain.errors import BetonError
from drivetrain.loaders import FFCVLoader, libffcv, open_beton, verify

SIDE = 48


def read(path: str, verified: bool) -> dict[str, object]:
    """Opens the file and reads all of it, uncropped, as FFCVLoader does in evaluation, and every further field.

    `verified` is to be passed on as FFCVLoader's `verify`; until it has that, `verify` goes first.
    """
    try:
        if verified and (bad := verify(path, workers=1, progress=False).bad):
            raise BetonError(f"{path}: sample {bad[0][0]}: {bad[0][1]}")
        with FFCVLoader(
            path, batch_size=4, image_size=SIDE, train=False, workers=1, eval_ratio=1.0, dtype=torch.uint8
        ) as loader:
            samples = [
                [label.item(), hashlib.sha256(image.numpy().tobytes()).hexdigest()]
                for images, labels in loader
                for image, label in zip(images, labels, strict=True)
            ]
        return {"samples": [[*pair, rest] for pair, rest in zip(samples, further(path), strict=True)]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def further(path: str) -> list[str]:
    """Digests of all fields but image and label, of each sample."""
    beton = open_beton(path)
    names = [name for name, kind in beton.fields.items() if kind != "rgb_image" and name != beton.label_name]
    everything = np.arange(len(beton))
    columns = [beton.read(name, everything) for name in names]
    rows = [repr([np.asarray(column[index]).tolist() for column in columns]) for index in range(len(beton))]
    return [hashlib.sha256(row.encode()).hexdigest() for row in rows]


if __name__ == "__main__":
    libffcv.library()  # importing FFCV takes seconds
    for line in sys.stdin:
        how, path = line.strip().split(" ", 1)
        pid = os.fork()
        if pid == 0:
            print(json.dumps(read(path, how == "verified")), flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            print(json.dumps({"crash": status}), flush=True)
