"""FFCV's own operations in the loader: deterministic, and rejected where they cannot work."""

import hashlib
import time
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.loaders.decode.draws import sample_keys
from drivetrain.loaders.decode.operations import seeds_of
from loader_pictures import raw_beton, raw_pictures, run_python

SIDE = 12


@pytest.fixture(scope="module")
def ops() -> Any:
    import ffcv_operations

    return ffcv_operations


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("operations") / "raws.beton", 20, SIDE)


def load(path: Path, operations: list[Any], epoch: int = 0, **options: Any) -> torch.Tensor:
    base = {"batch_size": 8, "image_size": SIDE, "crop": "padded", "padding": 0, "flip": False}
    base |= {"dtype": torch.uint8, "order": "sequential"}
    with FFCVLoader(path, operations=operations, **{**base, **options}) as loader:
        loader.set_epoch(epoch)
        return torch.cat([images for images, _ in loader])


@pytest.mark.long
def test_a_users_own_operation(ops: Any, raws: Path) -> None:
    originals = torch.from_numpy(raw_pictures(20, SIDE)[0]).permute(0, 3, 1, 2)
    assert torch.equal(load(raws, []), originals)
    assert torch.equal(load(raws, [ops.Invert()]), 255 - originals)


@pytest.mark.slow
def test_operations_follow_one_another(ops: Any, raws: Path) -> None:
    originals = torch.from_numpy(raw_pictures(20, SIDE)[0]).permute(0, 3, 1, 2)
    assert torch.equal(load(raws, [ops.Invert(), ops.Invert()]), originals)


@pytest.mark.long
def test_random_operations_depend_on_seed_epoch_and_sample_alone(ops: Any, raws: Path) -> None:
    """Stock FFCV gives others at every run."""
    options = {"batch_size": 8, "image_size": SIDE, "crop": "padded", "padding": 0, "flip": False}
    options |= {"order": "sequential", "dtype": torch.uint8, "operations": [ops.RandomHorizontalFlip(0.5)]}
    # Each loader compiles its operations again, for seconds: the test of another process has another seed, too.
    with FFCVLoader(raws, workers=1, **options) as loader:
        once = torch.cat([images for images, _ in loader])
        loader.set_epoch(1)
        assert not torch.equal(once, torch.cat([images for images, _ in loader]))
    kept = [3, 11, 12, 0, 19, 7, 4]
    some = load(raws, [ops.RandomHorizontalFlip(0.5)], workers=3, batch_size=2, indices=kept)
    assert torch.equal(once[kept], some)


@pytest.mark.slow  # each of the three is compiled twice
@pytest.mark.process
def test_several_random_operations_are_the_same_in_another_process(ops: Any, raws: Path) -> None:
    once = load(raws, [ops.RandomBrightness(0.5, 1.0), ops.RandomTranslate(2), ops.Cutout(3)])
    there = run_python(
        "import sys; sys.path[:0] = ['.', sys.argv[2]]; from pathlib import Path; import test_operations as t\n"
        "import hashlib, ffcv_operations as ops\n"
        "images = t.load(Path(sys.argv[1]), [ops.RandomBrightness(0.5, 1.0), ops.RandomTranslate(2), ops.Cutout(3)])\n"
        "print(hashlib.sha256(images.numpy().tobytes()).hexdigest())",
        raws,
        Path(__file__).parent,
    )
    assert there.stdout.strip() == hashlib.sha256(once.numpy().tobytes()).hexdigest(), there.stderr
    assert not torch.equal(once, load(raws, [ops.RandomBrightness(0.5, 1.0)], seed=1))


def test_each_operation_has_seeds_of_its_own() -> None:
    keys = sample_keys(0, 0, np.arange(50))
    seeds = np.stack([seeds_of(keys, place) for place in range(12)])
    assert len(np.unique(seeds)) == seeds.size
    assert np.array_equal(seeds[:4], [keys >> np.uint64(8 * place) & np.uint64(2**32 - 1) for place in range(4)])


@pytest.mark.slow
def test_samples_draw_differently(ops: Any, tmp_path: Path) -> None:
    same = np.repeat(raw_pictures(1, SIDE)[0], 30, axis=0)
    convert((same, np.zeros(30, int)), tmp_path / "same.beton")
    flipped = load(tmp_path / "same.beton", [ops.RandomHorizontalFlip(0.5)])
    share = (flipped != flipped[0]).flatten(1).any(1).float().mean().item()
    assert 0.2 < share < 0.8


@pytest.mark.slow
@pytest.mark.long
def test_operation_that_asks_for_indices_and_floats(ops: Any, raws: Path) -> None:
    mask, alpha = np.full((SIDE, SIDE, 3), 255.0), np.full((SIDE, SIDE), 1.0)
    images = load(raws, [ops.Poison(mask, alpha, [2, 13])])
    white = (images == 255).flatten(1).all(1)
    assert white.nonzero().flatten().tolist() == [2, 13]


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("ToTensor()", "The loader already does the work of ToTensor"),
        ("ImageMixup(0.5, True)", "ImageMixup mixes the samples"),
        ("Halves()", r"Halves returns uint8 of shape \(6, 6, 3\)"),
        ("torch.nn.Identity()", "not an FFCV operation"),
        ("'Cutout'", "not an FFCV operation"),
    ],
)
def test_operations_that_cannot_be(ops: Any, raws: Path, operation: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(raws, [eval(operation, {**vars(ops), "torch": torch})])


@pytest.mark.long
def test_an_exception_reaches_the_caller_at_once(ops: Any, tmp_path: Path) -> None:
    """Stock FFCV waits forever: its worker thread is dead, and the loop does not notice."""
    images = raw_pictures(20, SIDE)[0] | 8
    images[13, 0, 0, 0] = 7
    convert((images, np.arange(20)), tmp_path / "dark.beton")
    options = {"batch_size": 2, "image_size": SIDE, "train": False, "eval_ratio": 1.0}
    with FFCVLoader(tmp_path / "dark.beton", operations=[ops.RaisesAtDark()], **options) as loader:
        list(zip(range(3), loader, strict=False))
        begin = time.monotonic()
        with pytest.raises(DataError, match=r"operation RaisesAtDark failed: ValueError: too dark.*\(1, 12, 12, 3\)"):
            list(loader)
        assert time.monotonic() - begin < 1


@pytest.mark.slow
@pytest.mark.long
def test_the_callers_random_numbers_are_left_alone(ops: Any, raws: Path) -> None:
    @nb.njit
    def seed() -> None:
        np.random.seed(3)  # noqa: NPY002

    @nb.njit
    def draw() -> float:
        return np.random.random()  # noqa: NPY002

    seed()
    expected = [draw() for _ in range(2)]
    seed()
    first = draw()
    load(raws, [ops.RandomBrightness(0.5, 1.0)])
    assert [first, draw()] == expected
