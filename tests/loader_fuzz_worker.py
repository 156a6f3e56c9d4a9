"""Reads damaged `.beton` files on request: one path per line of stdin, one JSON answer per line of stdout.

The answer is `{"error": type and message}` or `{"samples": [[label, digest of the pixels], …]}`.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from drivetrain.loaders import FFCVLoader

SIDE = 48


def read(path: str) -> dict[str, object]:
    """Opens the file and reads all of it, uncropped, as FFCVLoader does in evaluation."""
    try:
        with FFCVLoader(
            path, batch_size=4, image_size=SIDE, train=False, workers=1, eval_ratio=1.0, dtype=torch.uint8
        ) as loader:
            samples = [
                [label.item(), hashlib.sha256(image.numpy().tobytes()).hexdigest()]
                for images, labels in loader
                for image, label in zip(images, labels, strict=True)
            ]
        return {"samples": samples}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(read(line.strip())), flush=True)
