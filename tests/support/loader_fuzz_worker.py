"""Reads damaged `.beton` files on request, each in a process forked for it.

One line of stdin, `HOW PATH`, one JSON answer on a line of stdout: `{"error": type and message}`,
`{"samples": [[label, digest of the pixels, digest of the further fields], …]}`, or `{"crash": status}`. HOW is
`plain`, `verified`, or `lazy`: verified, with tables that are checked sample by sample. This process has imported all
and computed nothing, so that forking it is sound and cheap.
"""

import hashlib
import json
import os
import sys

import drivetrain.loaders.decode.decoder  # noqa: F401 — now, not in every child
import torch
from drivetrain.loaders import FFCVLoader, open_beton
from drivetrain.loaders.beton import data_set
from drivetrain.loaders.native.library import library

SIDE = 48


def read(path: str, how: str) -> dict[str, object]:
    """Open the file and read all of it, uncropped, as FFCVLoader does in evaluation, with every further field."""
    try:
        lazy = how == "lazy"
        data_set.CHECKED = 0 if lazy else data_set.CHECKED
        beton = open_beton(path, most=0 if lazy else None)
        assert lazy == (beton.tables is not None)
        names = [name for name in beton.fields if name not in (beton.image_name, beton.label_name)]
        one = (0.5,) * beton.channels
        with FFCVLoader(
            path, batch_size=4, image_size=SIDE, train=False, workers=1, eval_ratio=1.0, mean=one, std=one,
            dtype=torch.uint8 if beton.depth == 8 else torch.float32, fields=names, verify=how != "plain",
        ) as loader:  # fmt: skip
            samples = [
                [label.item(), digest(image.numpy().tobytes()), digest(repr(further).encode())]
                for images, labels, *columns in loader
                for image, label, *further in zip(images, labels, *columns, strict=True)
            ]
        return {"samples": samples}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    library()
    for line in sys.stdin:
        how, path = line.strip().split(" ", 1)
        pid = os.fork()
        if pid == 0:
            print(json.dumps(read(path, how)), flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            print(json.dumps({"crash": status}), flush=True)
