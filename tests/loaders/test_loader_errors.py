"""Settings that the loaders and `resolve` reject: one typed error each, with the value and what is allowed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, resolve
from loader_pictures import jpeg_folder, raw_beton

COUNT, SIDE = 10, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("errors") / "file.beton", COUNT, SIDE)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size=0 must be a positive integer"),
    ({"batch_size": -4}, "batch_size=-4"),
    ({"batch_size": 2.5}, "batch_size=2.5 must be a positive integer"),
    ({"batch_size": "4"}, "batch_size='4' must be a positive integer"),
    ({"batch_size": 11}, r"batch_size=11 is larger than the data set of 10 .*at most 10\.$"),
    ({"batch_size": 11, "train": False, "drop_last": True}, "there is no full batch. Set it to at most 10"),
    ({"batch_size": 6, "indices": range(5)}, "data set of 5 samples"),
    ({"batch_size": 5, "rank": 0, "world_size": 2}, "is global and not divisible by 2 ranks. Set it to 4"),
    ({"batch_size": 1, "rank": 0, "world_size": 2}, "Set it to 2"),
    ({"rank": 0, "world_size": 0}, "world_size=0"),
    ({"rank": 1, "world_size": 1}, "rank=1 must be from 0 to world_size - 1 = 0"),
    (
        {"rank": 1},
        "rank=1 and world_size=None: pass both, or neither, to use those of torch.distributed's process group",
    ),
    ({"world_size": 2}, "rank=None and world_size=2: pass both"),
    ({"rank": True, "world_size": 2}, "rank=True must be an integer"),
    (
        {"train": False, "batch_size": 16, "rank": 0, "world_size": 16},
        "10 samples cannot be shared among 16 ranks",
    ),
    ({"rank": -1, "world_size": 2}, "rank=-1"),
    ({"image_size": 0}, "image_size=0 must be a positive integer, or two: height and width"),
    ({"image_size": 12.0}, "image_size=12.0 must be a positive integer"),
    ({"seed": -1}, r"seed=-1 must be an integer from 0 to 2\*\*63 - 1"),
    ({"seed": 2**63}, "seed=9223372036854775808"),
    ({"seed": None}, "seed=None"),
    ({"order": "randon"}, "order='randon' is not known. Did you mean 'random'"),
    ({"order": ""}, "order='' is not known"),
    ({"drop_last": 0}, "drop_last=0 must be True or False"),
    ({"crop": "pad"}, "crop='pad' is not known. .*Known: fit, padded, random, resized, whole"),
    ({"scale": (0, 1)}, r"scale=\(0, 1\)"),
    ({"scale": (0.5, 0.2)}, "scale="),
    ({"scale": (0.5, 2)}, "scale="),
    ({"scale": 0.5}, "scale=0.5 must be 2 finite numbers"),
    ({"scale": "ab"}, "scale='ab' must be 2 finite numbers"),
    ({"ratio": (-1, 1)}, "ratio="),
    ({"ratio": (1, 2, 3)}, "ratio=.*2 finite numbers"),
    ({"crop": "padded", "padding": SIDE}, "padding=12 must be from 0 to less than image_size"),
    ({"crop": "padded", "padding": -1}, "padding=-1"),
    ({"eval_ratio": 0}, "eval_ratio=0"),
    ({"eval_ratio": 1.1}, "eval_ratio=1.1"),
    ({"eval_ratio": "all"}, "eval_ratio='all'"),
    ({"mean": (0.5,)}, r"std=.* must be as many numbers as mean=\(0.5,\)"),
    ({"mean": (0.5,) * 2, "std": (0.5,) * 2}, "mean=.*3 finite numbers"),
    ({"mean": (0.5,), "std": (0.5,)}, r"have 3 channels of 8 bits, but mean=\(0.5,\)"),
    ({"mean": 0.5}, "mean=0.5 must be 3 finite numbers"),
    ({"std": (0, 1, 1)}, "std=.*positive"),
    ({"dtype": torch.float64}, "dtype=torch.float64 must be torch.float32, torch.bfloat16 or torch.uint8"),
    ({"workers": -1}, "workers=-1"),
    ({"workers": 1.5}, "workers=1.5"),
    ({"batches_ahead": 0}, "batches_ahead=0"),
    ({"indices": []}, "indices must be a non-empty list"),
    ({"device": "gpu"}, "device='gpu' is not a torch device"),
    ({"device": "cuda:77"}, "device='cuda:77' does not exist: torch finds [0-9]+ CUDA"),
    ({"device": "meta"}, "device='meta' is not supported for batches"),
    ({"indices": [True] * 3}, "non-empty list"),
    ({"indices": [0, 10]}, "indices contains 10, but the data set has samples 0 to 9"),
    ({"indices": [-1]}, "indices contains -1"),
    ({"indices": [0.5]}, "indices must be"),
    ({"indices": [[1], [2]]}, "indices must be"),
    ({"indices": 3}, "indices must be"),
    ({"image_sise": 12}, "The loader has no option 'image_sise'. Did you mean 'image_size'"),
    ({"shuffle": True}, "The loader has no option 'shuffle'. Known: batch_size"),
]


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_both_loaders_refuse(path: Path, kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        kind(path, **{"batch_size": 2, "image_size": SIDE, **options})


def test_ffcv_loader_needs_a_thread(path: Path) -> None:
    with pytest.raises(DataError, match="workers=0 must be a positive integer"):
        FFCVLoader(path, batch_size=2, image_size=SIDE, workers=0)


def test_a_state_that_is_none(path: Path) -> None:
    loader, words = FFCVLoader(path, batch_size=2, image_size=SIDE), "None is not a loader's state"
    with loader, pytest.raises(DataError, match=words):
        loader.load_state_dict(None)  # type: ignore[arg-type]


def test_numpy_integers_will_do(path: Path) -> None:
    with FFCVLoader(
        path, batch_size=np.int64(5), image_size=np.int32(SIDE), seed=np.uint8(3), workers=np.int64(1)
    ) as loader:
        assert len(list(loader)) == 2
        assert {type(value) for value in loader.state_dict().values()} == {int, str}


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_padded_crop_needs_images_of_one_size(path: Path, kind: Any) -> None:
    with pytest.raises(DataError, match=r"crop='padded' .* 16 × 16 pixels .* sample 0 of .* has 12 × 12.*'resized'"):
        kind(path, batch_size=2, image_size=16, crop="padded")
    kind(path, batch_size=2, image_size=16, crop="padded", train=False).close()


def test_indices_that_became_too_few(path: Path) -> None:
    """The refusal leaves the loader as it was."""
    with FFCVLoader(path, batch_size=4, image_size=SIDE) as loader:
        with pytest.raises(DataError, match="batch_size=4 is larger"):
            loader.set_indices([1, 2, 3])
        with pytest.raises(DataError, match="indices contains 99"):
            loader.set_indices([1, 2, 3, 99])
        assert len(list(loader)) == 3


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_file_that_is_not_there(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = re.escape(str(tmp_path))
    with pytest.raises(BetonError, match=rf"^none\.beton does not exist in the working directory, {where}\. Create"):
        kind("none.beton", batch_size=2, image_size=SIDE)
    with pytest.raises(BetonError, match=r"none\.beton does not exist. Create it with: drivetrain convert"):
        kind(tmp_path / "none.beton", batch_size=2, image_size=SIDE)


def test_folders(tmp_path: Path) -> None:
    folder = jpeg_folder(tmp_path / "images", per_class=1)
    with pytest.raises(BetonError, match=r"images is not a file\. Convert a folder with: drivetrain convert"):
        FFCVLoader(folder, batch_size=2, image_size=SIDE)
    (folder / "dog").mkdir()
    with pytest.raises(DataError, match="dog contains no images"):
        TorchLoader(folder, batch_size=2, image_size=SIDE)
    with pytest.raises(DataError, match="A list cannot be loaded"):
        TorchLoader([1, 2], batch_size=2, image_size=SIDE)


# resolve


def test_resolve_leaves_files_alone(path: Path, tmp_path: Path) -> None:
    assert resolve(path) == path
    assert resolve(str(path)) == path
    assert resolve(tmp_path / "later.beton") == tmp_path / "later.beton"  # opening it says what is wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar10:trian", "Did you mean 'cifar10:train'"),
        ("cifar10:Test", "Did you mean 'cifar10:test'"),
        ("CIFAR10", "Known: cifar10:test, cifar10:train"),
        ("imagenet", "neither a file nor a named data set"),
        ("", "The data source is empty. Pass a .beton file, or one of cifar10:train, cifar10:test"),
    ],
)
def test_resolve_unknown_names(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        resolve(name, progress=False)


def test_resolve_refuses_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"photos is a folder. Convert it first: drivetrain convert .*photos\.beton"):
        resolve(tmp_path / "photos")
    monkeypatch.chdir(tmp_path / "photos")
    with pytest.raises(DataError, match=r"drivetrain convert \. photos\.beton$"):
        resolve(".")


def test_commands_in_errors_quote_names_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"drivetrain convert 'my photos' 'my photos\.beton'$"):
        resolve("my photos")
    with pytest.raises(BetonError, match=r"drivetrain convert 'my photos' OUT\.beton$"):
        FFCVLoader("my photos", batch_size=2, image_size=SIDE)
    with pytest.raises(BetonError, match=r"drivetrain convert SOURCE 'my file\.beton'$"):
        FFCVLoader("my file.beton", batch_size=2, image_size=SIDE)
