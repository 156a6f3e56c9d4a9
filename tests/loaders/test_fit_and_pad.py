"""Full images, resized or scaled to fit, and shifted over a constant color: both loaders against Pillow."""

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.decode.augmentation import draw_choices, fitted
from drivetrain.loaders.decode.decoder import Decoder
from drivetrain.loaders.decode.draws import sample_keys
from drivetrain.loaders.native import library
from drivetrain.loaders.options import LoaderOptions, fill_color
from hypothesis import given
from hypothesis import strategies as st
from loader_pictures import image_folder, jpeg_bytes, make, picture
from native_pixels import load_pictures
from PIL import Image
from torchvision.transforms import v2

LOADERS = [FFCVLoader, TorchLoader]
MEAN = (0.1, 0.5, 0.902)
FILL = (26, 128, 230)  # 25.5 and 127.5 to the even number
SIZES = [
    (36, 90),
    (90, 36),
    (50, 50),
    (1, 70),
    (70, 1),
    (1, 1),
    (24, 40),
    (12, 20),
    (23, 41),
    (7, 9),
    (60, 100),
]
OUTPUTS = [(24, 40), (40, 24), 32]


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw pictures: wide and tall ones, lines, one pixel, smaller and larger than the outputs."""
    root = tmp_path_factory.mktemp("fit")
    images = {f"{number:02}.png": picture(number, *size) for number, size in enumerate(SIZES)}
    convert(image_folder(root / "images", images), root / "raws.beton", write_mode="raw")
    return root / "raws.beton"


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of one size."""
    root = tmp_path_factory.mktemp("pad")
    files = {f"{n:02}.jpg": jpeg_bytes(picture(n, 24, 40), subsampling=n % 3) for n in range(24)}
    convert(image_folder(root / "images", files), root / "jpegs.beton")
    return root / "jpegs.beton"


def load(kind: Any, path: Path, image_size: Any = (24, 40), **options: Any) -> Any:
    """Return the images `(N, H, W, 3)`, as stored."""
    given = {"batch_size": 6, "order": "sequential", "dtype": torch.uint8, "mean": MEAN}
    with make(kind, path, image_size=image_size, **{**given, **options}) as loader:
        return np.concatenate([images.permute(0, 2, 3, 1).float().numpy() for images, _ in loader])


def resized(image: Image.Image, size: tuple[int, int], interpolation: str, at_once: bool) -> Image.Image:
    """Pillow's resize to (height, width); in two steps, because Pillow 13 chooses their order by the shape."""
    resampling = getattr(Image.Resampling, interpolation.upper())
    if not at_once:
        image = image.resize((size[1], image.height), resampling)
    return image.resize(size[::-1], resampling)


def letterbox(image: Image.Image, size: tuple[int, int], interpolation: str, at_once: bool) -> np.ndarray:
    """Scaled by the smaller ratio of sides, and centered on the mean color."""
    scale = min(Fraction(size[0], image.height), Fraction(size[1], image.width))
    height, width = max(1, round(image.height * scale)), max(1, round(image.width * scale))
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    whole = np.empty((*size, 3), np.uint8)
    whole[:] = FILL
    whole[top : top + height, left : left + width] = resized(image, (height, width), interpolation, at_once)
    return whole.astype(int)


def expected(path: Path, crop: str, image_size: Any, interpolation: str, at_once: bool = False) -> np.ndarray:
    beton, size = open_beton(path), image_size if isinstance(image_size, tuple) else (image_size, image_size)
    images = [beton.image(index) for index in range(len(beton))]
    if crop == "fit":
        return np.stack([letterbox(image, size, interpolation, at_once) for image in images])
    return np.stack([np.asarray(resized(image, size, interpolation, at_once)) for image in images]).astype(int)


@given(*[st.integers(1, 65535)] * 2, *[st.integers(1, 3000)] * 2)
def test_the_place_of_an_image_that_fits(h: int, w: int, height: int, width: int) -> None:
    ((top, left, tall, wide),) = fitted(np.array([h]), np.array([w]), (height, width)).tolist()
    scale = min(Fraction(height, h), Fraction(width, w))
    assert (tall, wide) == (max(1, round(h * scale)), max(1, round(w * scale)))
    assert (top, left) == ((height - tall) // 2, (width - wide) // 2)
    assert tall == height or wide == width
    assert tall <= height
    assert wide <= width


def test_halves_are_rounded_to_even() -> None:
    heights, widths = np.array([2, 2, 6]), np.array([1, 3, 1])
    assert fitted(heights, widths, (5, 30))[:, 2:].tolist() == [[5, 2], [5, 8], [5, 1]]
    assert fitted(widths, heights, (30, 5))[:, 2:].tolist() == [[2, 5], [8, 5], [1, 5]]


@pytest.mark.parametrize("size", OUTPUTS, ids=str)
@pytest.mark.parametrize("crop", ["whole", "fit"])
@pytest.mark.parametrize("interpolation", ["nearest", "bicubic", "bilinear"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_images_are_pillows(raws: Path, kind: Any, size: Any, crop: str, interpolation: str, train: bool) -> None:
    which = {"crop": crop, "flip": False} if train else {"eval_crop": crop}
    images = load(kind, raws, size, train=train, interpolation=interpolation, **which)
    fast = kind is FFCVLoader and train and interpolation == "bilinear"
    at_once = train and (kind is TorchLoader or fast)
    off = np.abs(images - expected(raws, crop, size, interpolation, at_once))
    assert off.max() <= (2 if fast else 0)


def test_area_is_that_of_the_place_alone(raws: Path) -> None:
    images = load(FFCVLoader, raws, train=False, interpolation="area", eval_crop="fit")
    beton = open_beton(raws)
    places = fitted(beton.heights.astype(np.int64), beton.widths.astype(np.int64), (24, 40)).tolist()
    for index, (top, left, height, width) in enumerate(places):
        alone = load_pictures([np.asarray(beton.image(index))], (height, width), method=library.AREA)[0]
        known = np.full((24, 40, 3), FILL)
        known[top : top + height, left : left + width] = alone
        assert np.array_equal(images[index], known)


@pytest.mark.parametrize("crop", ["whole", "fit"])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_full_image_is_mirrored(kind: Any, raws: Path, crop: str) -> None:
    """With what is around it: an odd column more on the right is then on the left."""
    images = load(kind, raws, 33, crop=crop, interpolation="nearest", seed=3)
    known = expected(raws, crop, 33, "nearest")
    mirrored = [not np.array_equal(image, one) for image, one in zip(images, known, strict=True)]
    assert 0 < sum(mirrored) < len(mirrored)
    for image, one, turned in zip(images, known, mirrored, strict=True):
        assert np.array_equal(image, one[:, ::-1] if turned else one)


def test_jpegs_are_decoded_smaller_by_their_place(jpegs: Path) -> None:
    """In training, of 24 × 40 pixels at a half, which the place of 12 × 20 in the output allows, and the output would
    not; in evaluation, never."""
    images = load(FFCVLoader, jpegs, (12, 31), crop="fit", flip=False)
    halved = load(FFCVLoader, jpegs, (12, 20), crop="whole", flip=False)
    exact = load(FFCVLoader, jpegs, (12, 20), train=False, eval_crop="whole")
    assert np.array_equal(exact, expected(jpegs, "whole", (12, 20), "bilinear"))
    assert np.array_equal(images[:, :, 5:25], halved)
    assert not np.array_equal(halved, expected(jpegs, "whole", (12, 20), "bilinear"))
    assert (images[:, :, :5] == FILL).all()
    assert (images[:, :, 25:] == FILL).all()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_filled_is_normalized(kind: Any, dtype: torch.dtype, raws: Path) -> None:
    std = (0.2, 0.3, 0.4)
    images = load(kind, raws, 32, train=False, eval_crop="fit", dtype=dtype, std=std)
    color = torch.tensor([(n / 255 - m) / s for n, m, s in zip(FILL, MEAN, std, strict=True)])
    # The difference is of the order of a half level, which bfloat16 keeps to 1/256 of itself.
    assert np.allclose(images[0, 0], color.to(dtype).float(), rtol=0, atol=2e-5)
    assert np.allclose(images[0, 31], color.to(dtype).float(), rtol=0, atol=2e-5)


def test_the_color_is_one_of_256_levels() -> None:
    assert fill_color((0.5, -0.2, 1.3)) == (128, 0, 255)
    assert fill_color(MEAN) == FILL


# --- Constant padding ---


@pytest.mark.parametrize("options", [{}, {"interpolation": "area"}, {"padding": 0}, {"padding": 23}], ids=str)
def test_constant_padding_is_torchvisions(jpegs: Path, options: dict[str, Any]) -> None:
    """On the same draw: the image's shifts and mirroring."""
    shared = {"crop": "padded", "seed": 5, **options}
    images = load(FFCVLoader, jpegs, padding_mode="constant", **shared)
    reflected = LoaderOptions(batch_size=1, image_size=(24, 40), **shared)
    chosen = draw_choices(reflected, sample_keys(5, 0, np.arange(24)), np.full(24, 24), np.full(24, 40))
    beton, padding = open_beton(jpegs), reflected.padding
    assert 0 < chosen.flips.sum() < 24
    assert len(np.unique(chosen.boxes[:, :2], axis=0)) > 8 or not padding
    for index, (down, right, _, _) in enumerate(chosen.boxes.tolist()):
        image = v2.functional.pad(beton.image(index), [padding] * 4, fill=list(FILL), padding_mode="constant")
        image = v2.functional.crop(image, padding - down, padding - right, 24, 40)
        known = np.asarray(image)
        assert np.array_equal(images[index], known[:, ::-1] if chosen.flips[index] else known)


@pytest.mark.parametrize("kind", LOADERS)
def test_constant_padding_gives_windows_of_the_padded_image(kind: Any, jpegs: Path) -> None:
    images = load(kind, jpegs, crop="padded", padding=3, padding_mode="constant", flip=False)
    beton, seen = open_beton(jpegs), set()
    for index, image in enumerate(images):
        whole = np.empty((30, 46, 3), np.uint8)
        whole[:] = FILL
        whole[3:27, 3:43] = beton.image(index)
        windows = np.lib.stride_tricks.sliding_window_view(whole, (24, 40, 3))[:, :, 0]
        places = np.argwhere((windows == image).all((2, 3, 4)))
        assert len(places) == 1
        seen.add(tuple(places[0]))
    assert len(seen) > 10


@pytest.mark.parametrize("kind", LOADERS)
def test_constant_padding_needs_images_of_that_size(kind: Any, raws: Path) -> None:
    with pytest.raises(DataError, match=r"crop='padded' shifts full images, .* 24 × 40 pixels"):
        load(kind, raws, crop="padded", padding_mode="constant")
    images = load(kind, raws, crop="padded", padding_mode="constant", train=False)
    assert np.array_equal(images, load(kind, raws, train=False))


# --- Around it ---


@pytest.mark.parametrize("kind", LOADERS)
def test_the_image_size_may_change(kind: Any, raws: Path) -> None:
    options = {"train": False, "eval_crop": "fit", "interpolation": "nearest", "dtype": torch.uint8}
    with make(kind, raws, batch_size=11, image_size=20, mean=MEAN, **options) as one:
        list(one)
        one.set_image_size((24, 40))
        ((images, _),) = one
    assert np.array_equal(images.permute(0, 2, 3, 1), expected(raws, "fit", (24, 40), "nearest"))


def test_another_sample_is_placed_by_its_own_shape(tmp_path: Path) -> None:
    """`on_error="skip"`: a tall image in the place of a damaged wide one."""
    sizes, path = [(30, 90), (90, 30)], tmp_path / "two.beton"
    files = {f"{n}.jpg": jpeg_bytes(picture(n, *size)) for n, size in enumerate(sizes)}
    convert(image_folder(tmp_path / "images", files), path)
    options: dict[str, Any] = {"crop": "fit", "flip": False, "interpolation": "nearest", "batch_size": 2}
    known = load(FFCVLoader, path, 40, **options)
    beton, data = open_beton(path), bytearray(path.read_bytes())
    start = int(beton.pointers[0])
    data[start + 2 : start + 40] = bytes(38)
    path.write_bytes(data)
    found = load(FFCVLoader, path, 40, on_error="skip", **options)
    assert np.array_equal(found, known[[1, 1]])


@pytest.mark.parametrize(
    "place",
    [(-1, 0, 24, 24), (0, -1, 24, 24), (1, 0, 24, 24), (0, 17, 24, 24), (0, 0, 0, 5), (0, 0, 5, 2**62)],
    ids=str,
)
def test_a_place_outside_of_the_output_is_refused(raws: Path, place: tuple[int, ...]) -> None:
    beton = open_files(raws)
    settings = LoaderOptions(batch_size=1, image_size=(24, 40), train=False, eval_crop="fit", dtype=torch.uint8)
    decoder = Decoder(beton, settings, ())
    images = torch.full((1, 24, 40, 3), 7, dtype=torch.uint8)
    request = decoder.request(np.array([2]), 0, [images[:, None]], np.array([2]), {})
    choices = dataclasses.replace(request.draws[0].choices, places=np.array([place]))
    draw = dataclasses.replace(request.draws[0], choices=choices)
    with pytest.raises(BetonError, match="sample 2"):
        decoder.load(dataclasses.replace(request, draws=(draw,)), slice(0, 1))
    assert (images == 7).all()
    decoder.load(request, slice(0, 1))
    decoder.close()


def test_memory_for_the_place_is_counted(raws: Path) -> None:
    def need(**options: Any) -> int:
        settings = LoaderOptions(batch_size=1, image_size=(24, 40), **options)
        return Decoder(open_files(raws), settings, ()).workspace_bytes

    picture_bytes = 3 * 24 * 40
    assert need(crop="fit") == need(crop="whole") + picture_bytes
    assert need(train=False, eval_crop="fit") == need(train=False) + picture_bytes
    positions = 8 * (24 + 40)  # of the nearest pixels
    assert need(crop="padded", padding_mode="constant") == need(crop="padded") + picture_bytes + positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_crop": "squash"}, "eval_crop='squash' is not known. Known: center, fit, whole"),
        ({"padding_mode": "edge", "crop": "padded"}, "padding_mode='edge' is not known. Known: constant"),
        ({"padding_mode": "reflct"}, "padding_mode='reflct' .* Did you mean 'reflect'"),
        ({"eval_crop": 1}, "eval_crop=1 is not known"),
        (
            {"eval_crop": "fit", "eval_ratio": 1.0},
            r"eval_crop='fit' takes the full image, but eval_ratio=1\.0 .* Leave eval_ratio at 0\.875, or use "
            "eval_crop='center'",
        ),
        ({"eval_crop": "whole", "eval_ratio": 0.5, "train": False}, r"eval_crop='whole' .*eval_ratio=0\.5"),
        ({"padding_mode": "constant"}, "padding_mode='constant' .* crop='resized' .* use crop='padded'"),
        ({"padding": 2}, "padding=2 is of crop='padded', but crop='resized' does not use it. Leave padding at 4,"),
        (
            {"crop": "whole", "scale": (0.5, 1.0)},
            r"scale=\(0\.5, 1\.0\) is of crop='resized', but crop='whole' .* at \(0\.25, 1\.0\), or use crop='resized'",
        ),
        ({"crop": "padded", "ratio": (1, 1)}, r"ratio=\(1, 1\) is of crop='resized', but crop='padded' does not"),
        (
            {"scale": (0.5, 1.0), "views": [{"crop": "fit"}, {"crop": "random"}]},
            "scale=.* is of crop='resized', but crop='fit' or crop='random' does not",
        ),
        ({"views": [{"crop": "whole", "padding": 3}]}, "padding=3 is of crop='padded', but crop='whole' does not"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LoaderOptions(**{"batch_size": 1, "image_size": 16, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train": False, "eval_crop": "fit"},
            "eval_crop='fit' is not available in .* Use eval_crop='center', or",
        ),
        ({"train": False, "eval_crop": "whole"}, "eval_crop='whole' is not available"),
        ({"crop": "fit"}, "crop='fit' is not available in .* Use crop='resized', or"),
        ({"crop": "padded", "padding_mode": "constant"}, "crop='padded' is not available"),
    ],
)
def test_ffcvs_own_loader_has_none_of_it(raws: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        StockFFCVLoader(raws, batch_size=2, image_size=16, workers=1, **options)
