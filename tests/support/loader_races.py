"""Loads epochs with the native library under the thread sanitizer; test_loader_races.py builds and starts it.

    loader_races.py LIBRARY FILE.beton kept|shared

Two loaders with four threads each run at a time: color jitter, a policy, two sizes, ends in mid-epoch. With `shared`,
all threads get one workspace, so that the sanitizer must find a race.
"""

import sys
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.decode import decoder
from drivetrain.loaders.native import library


def train(path: Path, images: list[int], **options: Any) -> None:
    """Load one epoch, the beginning of the next, and another in a different size; add the number of images."""
    loader = FFCVLoader(
        path, batch_size=24, image_size=48, workers=4, color_jitter=(0.4, 0.4, 0.4), cutout=8, **options
    )
    images.append(sum(len(batch) for batch, *_ in loader))
    for batch, *_ in islice(loader, 2):
        images.append(len(batch))
    loader.set_image_size(40)
    images.append(sum(len(batch) for batch, *_ in loader))
    next(iter(loader))
    loader.close()


def main() -> None:
    name, path, workspaces = sys.argv[1:]
    library._FILE = Path(name)
    if workspaces == "shared":
        only = decoder.Workspace()
        decoder.Workspace = lambda: only  # type: ignore[assignment,misc]
    images: list[int] = []
    mixed: dict[str, Any] = {"policy": {"name": "aug_mix"}, "verify": True}
    plain: dict[str, Any] = {"policy": {"name": "rand_augment"}, "interpolation": "area"}
    threads = [Thread(target=train, args=(Path(path), images), kwargs=each) for each in (mixed, plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(images)} images")


if __name__ == "__main__":
    main()
