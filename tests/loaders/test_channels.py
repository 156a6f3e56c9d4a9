"""Images of one and four channels, and of 16 bits, in the loaders: against Pillow, torch, and the same in RGB."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, device, open_beton
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.options import LoaderOptions
from late_streams import LateStreams
from loader_pictures import make, run_script
from loader_stock_arrays import COUNT as COUNT_OF_FFCV
from loader_stock_arrays import KINDS, pixels
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

MODES = {"L": (1, 8), "RGBA": (4, 8), "I;16": (1, 16), "RGB;16": (3, 16), "RGBA;16": (4, 16)}
COUNT, HEIGHT, WIDTH = 12, 50, 60
MEAN, STD = (0.1, 0.5, 0.7, 0.9), (0.2, 0.25, 0.3, 0.35)
OUTPUTS = [(20, 30), (70, 90), (50, 60), (7, 120), (49, 61)]

Files = Callable[[str], Path]


def levels(channels: int, depth: int) -> NDArray[Any]:
    """Noise with all levels, and a picture with full black and white, `(COUNT, H, W, C)`."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (COUNT, HEIGHT, WIDTH, 4))
    images[0] = 255 * (images[0] > 127)
    found: NDArray[Any] = images[..., :channels] * (257 if depth == 16 else 1)
    if depth == 16:
        found[1:6] = rng.integers(0, 1 << 16, (5, HEIGHT, WIDTH, channels))
    return found.astype(f"u{depth // 8}")


def masks() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 9, (COUNT, HEIGHT, WIDTH)).astype(np.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the file of images of a mode; RGB as raw pixels."""
    root, made = tmp_path_factory.mktemp("channels"), dict[str, Path]()

    def file(mode: str) -> Path:
        if mode not in made:
            made[mode] = root / f"{mode.replace(';', '-')}.beton"
            images = levels(*(MODES | {"RGB": (3, 8)})[mode])
            convert((images, np.arange(COUNT)), made[mode], image_mode=mode, write_mode="raw")
        return made[mode]

    return file


def load(path: Path, image_size: Any, kind: Any = FFCVLoader, epochs: int = 1, **options: Any) -> Any:
    """Return the images of the epochs: `(N, …)`, or a list of such for groups of views; with the labels after them."""
    channels = open_beton(path).channels
    given = {"order": "sequential", "mean": MEAN[:channels], "std": STD[:channels]}
    with make(kind, path, image_size=image_size, **given | options) as loader:
        batches = [batch for _ in range(epochs) for batch in loader]
    columns = [list(column) for column in zip(*batches, strict=True)]
    return [torch.cat(column) if isinstance(column[0], torch.Tensor) else column for column in columns]


def evaluate(path: Path, image_size: Any, kind: Any = FFCVLoader, **options: Any) -> torch.Tensor:
    images: torch.Tensor = load(path, image_size, kind, train=False, **options)[0]
    return images


def stored_levels(images: torch.Tensor, depth: int) -> torch.Tensor:
    """Undo the normalization."""
    mean, std = (torch.tensor(each[: images.shape[1]]).double().view(-1, 1, 1) for each in (MEAN, STD))
    return (images.double() * std + mean) * ((1 << depth) - 1)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
@pytest.mark.parametrize(("interpolation", "most"), [("nearest", 0), ("bicubic", 0), ("bilinear", 1)])
def test_bytes_are_pillows(files: Files, mode: str, interpolation: str, most: int) -> None:
    """Of each channel by itself: Pillow weighs colors by their opacity."""
    resampling = Image.Resampling[interpolation.upper()]
    for size in OUTPUTS:
        found = evaluate(files(mode), size, eval_crop="whole", interpolation=interpolation, dtype=torch.uint8).numpy()
        for image, own in zip(levels(*MODES[mode]), found, strict=True):
            for channel, plane in zip(np.moveaxis(image, -1, 0), own, strict=True):
                across = Image.fromarray(channel).resize((size[1], HEIGHT), resampling)  # first, as before Pillow 13
                expected = np.asarray(across.resize(size[::-1], resampling))
                assert np.abs(plane.astype(int) - expected.astype(int)).max() <= most, size


@pytest.mark.parametrize("mode", ["I;16", "RGB;16", "RGBA;16"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_16_bits_are_torchs_floats(files: Files, mode: str, interpolation: str) -> None:
    """Rounded: half a level, and what float32 cannot represent. bfloat16 are the same numbers, rounded."""
    images = torch.from_numpy(levels(*MODES[mode]).astype(np.float64)).permute(0, 3, 1, 2)
    for size in OUTPUTS:
        expected = functional.interpolate(images, size, mode=interpolation, antialias=True).clamp(0, 65535)
        options = {"eval_crop": "whole", "interpolation": interpolation}
        found = evaluate(files(mode), size, **options)
        assert (stored_levels(found, 16) - expected).abs().max() < 0.53
        half = evaluate(files(mode), size, dtype=torch.bfloat16, **options)
        assert half.equal(found.bfloat16())


@pytest.mark.parametrize("mode", MODES)
def test_pixels_of_the_output_size_are_the_stored_ones(files: Files, mode: str) -> None:
    channels, depth = MODES[mode]
    expected = torch.from_numpy(levels(channels, depth).astype(np.float64)).permute(0, 3, 1, 2)
    found = evaluate(files(mode), (HEIGHT, WIDTH), eval_crop="whole")
    assert found.dtype == torch.float32
    assert (stored_levels(found, depth) - expected).abs().max() < 0.02
    half = evaluate(files(mode), (HEIGHT, WIDTH), eval_crop="whole", dtype=torch.bfloat16)
    assert half.equal(found.bfloat16())
    if depth == 8:
        assert evaluate(files(mode), (HEIGHT, WIDTH), eval_crop="whole", dtype=torch.uint8).equal(expected.byte())


TRAINING: list[dict[str, Any]] = [
    {"crop": "resized"}, {"crop": "random"}, {"crop": "whole"}, {"crop": "fit", "image_size": (40, 90)},
    {"crop": "fit", "image_size": (90, 40)}, {"crop": "padded", "image_size": (HEIGHT, WIDTH), "padding": 9},
    {"crop": "padded", "image_size": (HEIGHT, WIDTH), "padding": 9, "padding_mode": "constant"},
    {"cutout": 7}, {"views": 2}, {"views": [{"count": 2}, {"image_size": 16, "scale": (0.05, 0.3), "cutout": 5}]},
    {"flip": "alternating"}, {"train": False}, {"train": False, "eval_crop": "fit"},
    {"train": False, "eval_crop": "whole"}, {"train": False, "image_size": (20, 60), "eval_ratio": 0.6},
]  # fmt: skip


@pytest.fixture(scope="module")
def beside_rgb(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return the file of a mode, and that of the same pictures in RGB."""
    root, images = tmp_path_factory.mktemp("beside"), levels(4, 8)
    convert((images[..., :3], np.arange(COUNT)), root / "rgb.beton", write_mode="raw")

    @functools.cache
    def made(mode: str) -> tuple[Path, Path]:
        channels, depth = MODES[mode]
        own = images[..., :channels].astype(np.uint16) * 257 if depth == 16 else images[..., :channels]
        path = root / f"{mode.replace(';', '-')}.beton"
        convert((own, np.arange(COUNT)), path, image_mode=mode)
        return path, root / "rgb.beton"

    return made


@pytest.mark.parametrize("options", TRAINING, ids=str)
@pytest.mark.parametrize("mode", ["L", "RGBA", "RGB;16"])
def test_they_become_what_rgb_does(
    mode: str, options: dict[str, Any], beside_rgb: Callable[[str], tuple[Path, Path]]
) -> None:
    """The same draws, crops, flips, places and colors: to the nearest pixel, so that each channel is exactly equal."""
    options = {"image_size": (24, 32), "interpolation": "nearest", "epochs": 2, "seed": 3, **options}
    channels, (own, rgb) = MODES[mode][0], beside_rgb(mode)
    # A mean that is a level of both depths; 257 · 128 = 65535 · 128 / 255.
    options |= {"mean": (128 / 255,) * channels, "std": (0.5,) * channels}
    theirs = options | {"mean": (128 / 255,) * 3, "std": (0.5,) * 3}
    both = load(own, **options), load(rgb, **theirs)
    for pair in zip(*(each[:-1] for each in both), strict=True):
        views = ([one] if isinstance(one, torch.Tensor) else _joined(one) for one in pair)
        for one, other in zip(*views, strict=True):
            shared = min(channels, 3)
            torch.testing.assert_close(one[..., :shared, :, :], other[..., :shared, :, :], rtol=0, atol=1e-6)
    assert both[0][-1].equal(both[1][-1])


def _joined(groups: list[Any]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*groups, strict=True)]


@pytest.mark.parametrize("mode", ["L", "RGBA;16"])
def test_batches_do_not_depend_on_workers_and_ranks(files: Files, mode: str) -> None:
    options: dict[str, Any] = {"image_size": (24, 32), "order": "random", "views": 2, "seed": 5}
    images, labels = load(files(mode), **options)
    for workers in (1, 5):
        again = load(files(mode), **options, workers=workers)
        assert images.equal(again[0])
        assert labels.equal(again[1])
    shares = [load(files(mode), **options, rank=rank, world_size=2) for rank in range(2)]
    both = [part for batch in zip(*(share[0].split(2) for share in shares), strict=True) for part in batch]
    assert torch.cat(both).equal(images)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
@pytest.mark.parametrize("mode", ["L", "I;16", "RGBA"])
def test_masks_move_with_them(kind: Any, mode: str, tmp_path: Path) -> None:
    """A mask that is in the image's pixels stays equal to them."""
    channels, depth = MODES[mode]
    images = np.repeat(masks()[..., None], channels, axis=-1).astype(f"u{depth // 8}")
    convert((images, masks()), tmp_path / "a.beton", image_mode=mode)
    for options in (
        {},
        {"crop": "padded", "image_size": (HEIGHT, WIDTH)},
        {"train": False, "eval_crop": "fit"},
    ):
        given: dict[str, Any] = {"image_size": (24, 40), "crop": "random", **options}
        found, moved = load(tmp_path / "a.beton", kind=kind, **given)
        rounded = stored_levels(found, depth).round()[:, 0]
        if options.get("eval_crop") != "fit":
            assert rounded.equal(moved.double())
        else:
            assert moved.shape == found[:, 0].shape


def test_boxes_and_keypoints_move_with_them(tmp_path: Path) -> None:
    boxes, points = [[10.0, 5.0, 40.0, 30.0]], [[12.0, 13.0]]
    fields = {"boxes": "boxes", "points": "keypoints"}
    found = []
    for mode, dtype, channels in (("RGB", np.uint8, 3), ("I;16", np.uint16, 1)):
        image = np.zeros((HEIGHT, WIDTH, channels), dtype)
        data = [{"image": image, "label": 0, "boxes": boxes, "points": points}] * 8
        convert(data, tmp_path / "a.beton", image_mode=mode, fields=fields, write_mode="raw")
        found.append(load(tmp_path / "a.beton", (24, 32), fields=("boxes", "points"))[2:])
    for one, other in zip(*found, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_torchs_loader_evaluates_alike(files: Files, mode: str, interpolation: str) -> None:
    depth = MODES[mode][1]
    for options in ({"eval_crop": "whole"}, {"eval_crop": "fit"}, {"eval_ratio": 0.8}):
        both = [
            stored_levels(evaluate(files(mode), (20, 30), kind, interpolation=interpolation, **options), depth)
            for kind in (FFCVLoader, TorchLoader)
        ]
        assert both[0].shape == both[1].shape
        assert (both[0] - both[1]).abs().max() < 1.001


@pytest.mark.parametrize("mode", MODES)
def test_torchs_loader_trains(files: Files, mode: str) -> None:
    channels = MODES[mode][0]
    options: list[dict[str, Any]] = [
        {}, {"crop": "random"}, {"crop": "fit"}, {"cutout": 5}, {"flip": "alternating"}, {"views": 2},
        {"crop": "padded", "image_size": (HEIGHT, WIDTH), "padding_mode": "constant"}, {"interpolation": "bicubic"},
    ]  # fmt: skip
    for own in options:
        given = {"image_size": (24, 32), **own}
        shape = (COUNT, *((2,) if "views" in own else ()), channels, *given["image_size"])
        for kind in (FFCVLoader, TorchLoader):
            images = load(files(mode), kind=kind, **given)[0]
            assert tuple(images.shape) == shape
            least, most = ((level - np.array(MEAN)) / np.array(STD) for level in (0, 1))
            flat = images.reshape(-1, channels, images.shape[-2] * images.shape[-1])
            assert (flat.amin((0, 2)).numpy() >= least[:channels] - 1e-4).all()
            assert (flat.amax((0, 2)).numpy() <= most[:channels] + 1e-4).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_the_preprocessing_is_the_evaluation(files: Files, mode: str, interpolation: str) -> None:
    channels, depth = MODES[mode]
    beton = open_beton(files(mode))
    mean, std = MEAN[:channels], STD[:channels]
    places = [(size, crop) for size in ((20, 30), (70, 90)) for crop in ("center", "whole", "fit")]
    for size, crop in [*places, ((40, 90), "fit"), ((HEIGHT, WIDTH), "whole")]:
        options: dict[str, Any] = {"eval_crop": crop, "interpolation": interpolation}
        options |= {"eval_ratio": 0.8} if crop == "center" else {}
        make = Evaluation(LoaderOptions(batch_size=1, image_size=size, mean=mean, std=std, **options), depth)
        own = torch.stack([make(beton.pixels(number)) for number in range(COUNT)])
        assert torch.equal(own, evaluate(files(mode), size, **options)), (size, crop)


def test_the_preprocessing_takes_other_pictures() -> None:
    """Of 8 bits, each mode is converted; bits are never dropped."""
    made = LoaderOptions(batch_size=1, image_size=8, mean=(0.5,), std=(0.2,))
    gray, wide = Evaluation(made), Evaluation(made, 16)
    color = Image.fromarray(levels(3, 8)[2])
    assert gray(color).equal(gray(color.convert("L")))
    assert Evaluation(LoaderOptions(batch_size=1, image_size=8, mean=MEAN, std=STD))(color).shape == (
        4,
        8,
        8,
    )
    picture = Image.fromarray(levels(1, 16)[2, :, :, 0])
    assert wide(picture).equal(wide(levels(1, 16)[2]))
    for crop, bad in ((gray, picture), (wide, color), (wide, levels(3, 16)[0])):
        with pytest.raises(DataError, match="An image does not suit the model: "):
            crop(bad)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "bool"])
def test_tensors_of_other_types_are_refused(kind: str) -> None:
    """Also of those that NumPy lacks."""
    gray = Evaluation(LoaderOptions(batch_size=1, image_size=8, mean=(0.5,), std=(0.2,)))
    with pytest.raises(DataError, match=f"An image does not suit the model: its pixels are {kind}, but 'L' has uint8"):
        gray(torch.zeros(8, 8, dtype=getattr(torch, kind)))


@pytest.mark.parametrize("mode", MODES)
def test_batches_for_a_gpu(files: Files, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are normalized there, 16 bits before; the results are the same."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "CudaStreams", LateStreams)
    channels, depth = MODES[mode]
    options: dict[str, Any] = {
        "batch_size": 4, "image_size": (24, 32), "seed": 2, "workers": 2,
        "mean": MEAN[:channels], "std": STD[:channels],
    }  # fmt: skip
    with (
        FFCVLoader(files(mode), **options) as here,
        FFCVLoader(files(mode), **options, device="cuda:1") as there,
    ):
        sent = []
        assert there._image_dtype == (torch.uint8 if depth == 8 else torch.float32)
        for images, _ in there:
            there._feed.streams.copies.run()  # type: ignore[union-attr]
            sent.append(images.clone())
        for (images, _), other in zip(here, sent, strict=True):
            torch.testing.assert_close(images, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("L", {"mean": (0.5,) * 3, "std": (0.5,) * 3},
         r"have 1 channel of 8 bits, but mean=\(0.5, 0.5, 0.5\) .* Pass mean= and std= with 1 value, for pixels"),
        ("RGBA;16", {"mean": (0.5,), "std": (0.5,)}, "have 4 channels of 16 bits.* Pass mean= and std= with 4 values"),
        ("L", {"interpolation": "area"}, "interpolation='area' is for RGB with 8 bits, but .* 1 channel of 8 bits"),
        ("RGBA", {"color_jitter": (0.1, 0, 0)}, r"color_jitter=\(0.1, 0, 0\) is for RGB with 8 bits"),
        ("RGB;16", {"policy": {"name": "trivial_augment"}}, "policy=.* is for RGB with 8 bits, but .* 3 channels of"),
        ("L", {"views": [{"count": 2}, {"color_jitter": (0.1, 0, 0)}]}, "color_jitter=.* is for RGB"),
        ("I;16", {"dtype": torch.uint8}, "dtype=torch.uint8 is for .* Use torch.float32 or torch.bfloat16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_settings_that_they_do_not_have(
    files: Files, kind: Any, mode: str, options: dict[str, Any], words: str
) -> None:
    if kind is TorchLoader and options.get("interpolation") == "area":
        words = "interpolation='area' is only available in FFCVLoader"
    with pytest.raises(DataError, match=words):
        load(files(mode), 16, kind, **options)


def test_what_is_for_rgb_only(files: Files, tmp_path: Path) -> None:
    path = files("L")
    with pytest.raises(DataError, match="Pass mean= and std= with 1 value"):
        FFCVLoader(path, batch_size=4, image_size=8)
    one: dict[str, Any] = {"batch_size": 4, "image_size": 8, "mean": (0.5,), "std": (0.5,)}
    with pytest.raises(DataError, match=r"operations= of FFCV take RGB with 8 bits, but .* 1 channel of 8 bits"):
        FFCVLoader(path, **one, operations=[object()])
    with pytest.raises(DataError, match="has its images in an ndarray field, which FFCV's own loader does not crop"):
        StockFFCVLoader(path, **one)
    (tmp_path / "a").mkdir()
    Image.new("L", (9, 9)).save(tmp_path / "a" / "1.png")
    with pytest.raises(DataError, match="have 3 channels of 8 bits"):
        TorchLoader(tmp_path, **one | {"batch_size": 1})


def test_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    convert((levels(1, 16), np.arange(COUNT)), path, image_mode="I;16")
    assert evaluate(path, 16, verify=True).equal(evaluate(path, 16))
    with path.open("r+b") as file:
        file.seek(int(open_beton(path).pointers[5]))
        file.write(b"\x7f\x12")
    evaluate(path, 16)
    with pytest.raises(DataError, match="sample 5: its data changed"):
        evaluate(path, 16, verify=True)


@pytest.mark.slow
@pytest.mark.process
def test_files_of_ffcvs_writer_load(tmp_path: Path) -> None:
    run_script("loader_stock_arrays.py", tmp_path)
    for name, (dtype, shape) in KINDS.items():
        depth = 8 * np.dtype(dtype).itemsize
        found = evaluate(tmp_path / f"theirs-{name}.beton", shape[:2], eval_crop="whole")
        expected = torch.from_numpy(pixels(name).astype(np.float64)).reshape(found.permute(0, 2, 3, 1).shape)
        assert (stored_levels(found, depth) - expected.permute(0, 3, 1, 2)).abs().max() < 0.02
    options: dict[str, Any] = {"color_jitter": (0.5, 0.5, 0.5), "interpolation": "area", "dtype": torch.uint8}
    assert load(tmp_path / "theirs-color.beton", 16, **options, batch_size=COUNT_OF_FFCV)[0].shape == (
        COUNT_OF_FFCV,
        3,
        16,
        16,
    )
