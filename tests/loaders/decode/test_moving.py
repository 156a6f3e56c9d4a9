"""Masks, boxes and keypoints move as torchvision's `tv_tensors` do, with the draws of their image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.decode import augmentation
from drivetrain.loaders.decode.draws import sample_keys
from drivetrain.loaders.options import LoaderOptions
from loader_pictures import file_bytes, jpeg_bytes, picture
from numpy.typing import NDArray
from torchvision import tv_tensors
from torchvision.transforms import v2

SIZES = [(61, 47), (40, 90), (64, 64), (33, 50), (120, 31), (47, 61)]
FIELDS = {"boxes": "boxes", "points": "keypoints"}


def mask(index: int, classes: int = 7) -> NDArray[np.uint8]:
    """Class indices, all different nearby, so that a shift by one pixel shows."""
    height, width = SIZES[index]
    y, x = np.mgrid[0:height, 0:width]
    return ((3 * x + 5 * y + index) % classes).astype(np.uint8)


def boxes(index: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(index)
    height, width = SIZES[index]
    corners = np.sort(rng.uniform(0, 1, (index % 4, 2, 2)), axis=1) * [width, height]
    return corners.reshape(-1, 4).astype(np.float32)


def points(index: int) -> NDArray[np.float32]:
    height, width = SIZES[index]
    return (np.random.default_rng(index + 50).uniform(0, 1, (3, 2)) * [width, height]).astype(np.float32)


class Samples:
    """Pictures with a mask, boxes and keypoints."""

    def __init__(self, masks: Any = mask, raw: bool = False) -> None:
        self.masks, self.raw = masks, raw

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = picture(index, *SIZES[index])
        image = pixels if self.raw else jpeg_bytes(pixels)
        return {"image": image, "label": self.masks(index), "boxes": boxes(index), "points": points(index)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moving") / "a.beton"
    convert(Samples(), path, fields=FIELDS)
    return path


def moved_by_torchvision(index: int, own: augmentation.Choices, at: int, size: tuple[int, int]) -> tuple[Any, Any, Any]:
    """The targets of one image with the choices made for it."""
    height, width = SIZES[index]
    canvas = {"canvas_size": (height, width)}
    targets: list[Any] = [
        tv_tensors.Mask(torch.from_numpy(mask(index))[None]),
        tv_tensors.BoundingBoxes(torch.from_numpy(boxes(index)), format="XYXY", **canvas),  # type: ignore[call-overload]
        tv_tensors.KeyPoints(torch.from_numpy(points(index)), **canvas),
    ]
    top, left, h, w = own.boxes[at].tolist()
    to = [0, 0, *size] if own.places is None else own.places[at].tolist()
    edges = [to[1], to[0], size[1] - to[1] - to[3], size[0] - to[0] - to[2]]
    moved = []
    for target in targets:
        target = v2.functional.crop(target, top, left, h, w)
        target = v2.functional.resize(target, to[2:], v2.InterpolationMode.NEAREST)
        fill = 255 if isinstance(target, tv_tensors.Mask) else 0
        target = v2.functional.pad(target, edges, fill=fill)
        moved.append(v2.functional.horizontal_flip(target) if own.flips[at] else target)
    return moved[0][0], moved[1], moved[2]


SETTINGS: dict[str, dict[str, Any]] = {
    "resized": {"scale": (0.1, 1.0)},
    "resized, not square": {"image_size": (20, 45)},
    "enlarged": {"image_size": 130, "scale": (0.05, 0.3)},
    "whole": {"crop": "whole"},
    "random": {"crop": "random", "image_size": (30, 25)},
    "fit": {"crop": "fit", "image_size": (40, 56)},
    "evaluation": {"train": False, "eval_ratio": 0.8},
    "evaluation, fit": {"train": False, "eval_crop": "fit"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_targets_equal_those_of_torchvision_with_the_same_draws(name: str, file: Path) -> None:
    options = {"batch_size": len(SIZES), "image_size": 32, "seed": 3, **SETTINGS[name]}
    settings = LoaderOptions(**options)
    heights, widths = np.array(SIZES).T
    with FFCVLoader(file, order="sequential", workers=2, fields=tuple(FIELDS), **options) as loader:
        for epoch in range(3 if settings.train else 1):
            images, masks, found_boxes, found_points = next(iter(loader))
            assert images.shape[2:] == masks.shape[1:] == settings.size
            assert masks.dtype == torch.uint8
            keys = sample_keys(3, epoch, np.arange(len(SIZES)))
            own = augmentation.draw_choices(settings, keys, heights, widths)
            for index in range(len(SIZES)):
                m, b, p = moved_by_torchvision(index, own, index, settings.size)
                assert torch.equal(masks[index], m), (epoch, index)
                assert torch.allclose(found_boxes[index], b.as_subclass(torch.Tensor), atol=1e-4)
                assert torch.allclose(found_points[index], p.as_subclass(torch.Tensor), atol=1e-4)
                assert found_boxes[index].dtype == found_points[index].dtype == torch.float32


@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_a_padded_crop_moves_the_mask_like_the_pixels(mode: str, tmp_path: Path) -> None:
    """The images show their own masks, in one channel, so both can be compared after any shift."""
    pictures = np.stack([picture(seed, 12, 12) for seed in range(8)])
    shown = [(np.repeat(p[:, :, :1], 3, 2), p[:, :, 0] % 200) for p in pictures]
    path = tmp_path / "a.beton"
    convert(shown, path)
    options = {"crop": "padded", "padding": 5, "padding_mode": mode, "dtype": torch.uint8}
    with FFCVLoader(path, batch_size=8, image_size=12, workers=1, **options) as loader:
        for _ in range(4):
            images, masks = next(iter(loader))
            inside = masks != 255
            assert torch.equal(images[:, 0][inside] % 200, masks[inside])
            assert bool(inside.all()) == (mode == "reflect")


@pytest.mark.parametrize("workers", [1, 3])
def test_they_do_not_depend_on_workers_and_ranks(file: Path, workers: int) -> None:
    def load(**ranks: int) -> tuple[Any, ...]:
        with FFCVLoader(
            file, batch_size=6, image_size=24, workers=workers, fields=("boxes",), seed=1, **ranks
        ) as loader:
            return next(iter(loader))

    whole, parts = load(), [load(rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(whole[1], torch.cat([part[1] for part in parts]))
    for one, other in zip(whole[2], parts[0][2] + parts[1][2], strict=True):
        assert torch.equal(one, other)


def test_a_file_of_ffcv_says_its_kinds_by_hand(file: Path, tmp_path: Path) -> None:
    """Without a manifest the label is a mask, because nothing else is a label; the others are as stored."""
    copy = tmp_path / "copy.beton"
    copy.write_bytes(file.read_bytes())
    options = {"batch_size": 6, "image_size": 24, "workers": 1, "train": False}
    with FFCVLoader(copy, fields=("boxes",), **options) as plain:
        _, masks, stored = next(iter(plain))
    assert stored == [boxes(index).tolist() for index in range(6)]
    with FFCVLoader(copy, fields={"boxes": "boxes"}, **options) as kinds:
        _, again, moved = next(iter(kinds))
    with FFCVLoader(file, fields=("boxes",), **options) as manifest:
        _, known, expected = next(iter(manifest))
    assert torch.equal(masks, known)
    assert torch.equal(again, known)
    assert all(torch.equal(one, other) for one, other in zip(moved, expected, strict=True))
    with FFCVLoader(file, fields={"boxes": None}, **options) as unmoved:
        assert next(iter(unmoved))[2] == stored


def test_class_indices_above_255(tmp_path: Path) -> None:
    def wide(index: int) -> NDArray[np.int64]:
        return mask(index).astype(np.int64) * 100

    path = tmp_path / "wide.beton"
    convert(Samples(wide), path)
    with FFCVLoader(path, batch_size=6, image_size=24, train=False, crop="whole", workers=1) as loader:
        _, masks = next(iter(loader))
    assert masks.dtype == torch.int32
    assert masks.max() == 600
    late = tmp_path / "late.beton"
    convert(Samples(lambda index: wide(index) if index > 2 else mask(index)), late)
    with (
        FFCVLoader(late, batch_size=6, image_size=24, train=False, workers=1) as loader,
        pytest.raises(BetonError, match=r"sample 3.*class index 600, but the first sample's has 8 bits"),
    ):
        next(iter(loader))
    names = [str(number) for number in range(601)]
    convert(Samples(lambda index: wide(index) if index > 2 else mask(index)), late, classes=names)
    with FFCVLoader(late, batch_size=6, image_size=24, train=False, workers=1) as loader:
        assert next(iter(loader))[1].max() == 600


def test_class_indices_above_255_of_a_further_mask(tmp_path: Path) -> None:
    """Its classes have no names, so that the first sample decides."""
    path = tmp_path / "a.beton"
    options: dict[str, Any] = {"batch_size": 2, "image_size": 12, "workers": 1, "train": False, "fields": ["map"]}

    def write(*levels: int) -> None:
        samples = [(picture(n, 12, 12), n, np.full((12, 12), level)) for n, level in enumerate(levels)]
        convert(samples, path, fields={"map": "mask"})

    write(3, 300)
    words = "sample 1.* class index 300, .* Convert the data with another first sample, whose mask has"
    with FFCVLoader(path, **options) as loader, pytest.raises(BetonError, match=words):
        next(iter(loader))
    write(300, 3)
    with FFCVLoader(path, **options) as loader:
        assert next(iter(loader))[2].amax((1, 2)).tolist() == [300, 3]


def test_a_damaged_mask_is_an_error_or_another_sample(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.beton"
    copy.write_bytes(file.read_bytes())
    beton = open_beton(copy)
    start = int(beton.columns["label"].pointers[4])
    with copy.open("r+b") as opened:
        opened.seek(start + 60)
        opened.write(b"\xff\x00\xff\x00")
    options = {"batch_size": 6, "image_size": 24, "workers": 1, "seed": 2}
    with FFCVLoader(copy, **options) as loader, pytest.raises(BetonError, match=r"sample 4.*mask 'label'"):
        next(iter(loader))
    with FFCVLoader(copy, on_error="skip", fields={"boxes": "boxes"}, **options) as loader:
        images, masks, found = next(iter(loader))
        assert loader.replaced == [4]
    assert len(images) == len(masks) == len(found) == 6
    assert all(isinstance(each, torch.Tensor) for each in found)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_first_mask_that_is_damaged_can_be_excluded(kind: Any, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.beton"
    copy.write_bytes(file.read_bytes())
    start = int(open_beton(copy).columns["label"].pointers[0])
    with copy.open("r+b") as opened:
        opened.seek(start + 60)
        opened.write(b"\xff\x00\xff\x00")
    options = {"batch_size": 5, "image_size": 24, "workers": int(kind is FFCVLoader)}
    with kind(copy, indices=range(1, 6), **options) as loader:
        assert next(iter(loader))[1].shape == (5, 24, 24)
    words = r"sample 0.*mask 'label'"
    with kind(copy, order="sequential", **options) as loader, pytest.raises(BetonError, match=words):
        next(iter(loader))


def test_a_png_of_a_field_that_is_no_mask(tmp_path: Path) -> None:
    png = file_bytes(picture(1, 12, 12), "PNG")
    samples = [(picture(n, 12, 12), n, png) for n in range(4)]
    path = tmp_path / "a.beton"
    convert(samples, path, fields={"map": "bytes"})
    with pytest.raises(BetonError, match=r"sample 0.*its mask 'map': it is a PNG that is RGB"):
        FFCVLoader(path, batch_size=2, image_size=12, fields={"map": "mask"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 2}, r"'label' \(mask\) do not follow views=2"),
        ({"policy": {"name": "trivial_augment"}}, "do not follow policy=.*Leave the policy out"),
        ({"fields": {"boxes": "mask"}}, "'boxes' is stored as json, but mask are stored as bytes"),
        ({"fields": {"boxes": "box"}}, "must be one of 'mask', 'boxes', 'keypoints'"),
        ({"fields": ("box",)}, "'box' is not a field.*boxes"),
    ],
)
def test_what_targets_do_not_follow_is_refused(file: Path, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FFCVLoader(file, batch_size=2, image_size=24, **options)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_three_augment_moves_no_mask(kind: Any, file: Path) -> None:
    options: dict[str, Any] = {
        "batch_size": 4,
        "image_size": 24,
        "workers": int(kind is FFCVLoader),
        "seed": 3,
    }
    with kind(file, **options) as plain, kind(file, policy={"name": "three_augment"}, **options) as changed:
        (images, masks, *_), (others, same, *_) = next(iter(plain)), next(iter(changed))
    assert torch.equal(masks, same)
    assert not torch.equal(images, others)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_policy_that_is_set_later_moves_no_pixels_either(kind: Any, file: Path) -> None:
    with kind(file, batch_size=2, image_size=24, workers=int(kind is FFCVLoader)) as loader:
        with pytest.raises(DataError, match=r"do not follow policy=.*rand_augment.* Leave the policy out"):
            loader.set_policy({"name": "rand_augment"})
        assert loader.settings.policy is None
        assert next(iter(loader))[1].shape == (2, 24, 24)


def test_operations_of_ffcv_are_refused(file: Path) -> None:
    with pytest.raises(DataError, match="do not follow FFCV's operations"):
        FFCVLoader(file, batch_size=2, image_size=24, operations=[object()])


def test_points_do_not_follow_reflected_edges(tmp_path: Path) -> None:
    samples = [(picture(n, 12, 12), n, [[1.0, 2.0]]) for n in range(4)]
    path = tmp_path / "a.beton"
    convert(samples, path, fields={"points": "keypoints"})
    options = {"batch_size": 4, "image_size": 12, "crop": "padded", "fields": ("points",)}
    with pytest.raises(DataError, match=r"reflected edges. Use padding_mode='constant'"):
        FFCVLoader(path, **options)
    with FFCVLoader(path, padding_mode="constant", **options) as loader:
        assert next(iter(loader))[2][0].shape == (1, 2)


def test_ffcvs_own_loader_has_no_targets_that_move(file: Path) -> None:
    with pytest.raises(DataError, match=r"label: mask.*own loader does not have"):
        StockFFCVLoader(file, batch_size=2, image_size=24)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader, StockFFCVLoader])
def test_a_field_that_does_not_exist(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "a.beton"
    samples = [{"image": picture(n, 12, 12), "label": n, "boxes": boxes(n)} for n in range(4)]
    convert(samples, path, fields={"boxes": "boxes"})
    with pytest.raises(DataError, match=r"'boxs' is not a field of .*Did you mean 'boxes'"):
        kind(path, batch_size=2, image_size=12, workers=1, fields={"boxs": "boxes"})
