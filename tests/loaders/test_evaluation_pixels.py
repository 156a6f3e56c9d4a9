"""One function defines the pixels of evaluation: all loaders, `Evaluation` and Pillow agree on any file."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Pipeline
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.decode.augmentation import central_crops, fitted
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.options import LoaderOptions, fill_color
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_pictures import image_folder, jpeg_bytes, make, picture
from PIL import Image
from torchvision.datasets import FakeData

SIDES = [(261, 335), (500, 375), (90, 160), (64, 64), (33, 20), (1, 70), (300, 300)]
WAYS: list[dict[str, Any]] = [
    {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"restart_marker_rows": 1},
]  # fmt: skip
RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC, "nearest": Image.Resampling.NEAREST
}  # fmt: skip
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of one class, of several codings and sizes: training decodes some at a part of theirs."""
    files = {f"{n:02}.jpg": jpeg_bytes(picture(n, *SIDES[n % len(SIDES)]), **WAYS[n % len(WAYS)]) for n in range(14)}
    return image_folder(tmp_path_factory.mktemp("evaluation") / "images", files)


@pytest.fixture(scope="module")
def beton(folder: Path) -> Path:
    """Progressive ones are recoded, without loss."""
    convert(folder, folder.parent / "photos.beton")
    assert open_beton(folder.parent / "photos.beton").manifest is not None
    return folder.parent / "photos.beton"


def opened(file: Path) -> Image.Image:
    return Image.open(io.BytesIO(file.read_bytes()))


def evaluated(kind: Any, source: Any, **options: Any) -> torch.Tensor:
    given: dict[str, Any] = {"batch_size": 14, "image_size": 48, "mean": MEAN, "std": STD}
    with make(kind, source, train=False, **{**given, **options}) as loader:
        return torch.cat([batch[0] for batch in loader])


def made_by(files: Any, depth: int = 8, **options: Any) -> torch.Tensor:
    given: dict[str, Any] = {"batch_size": 1, "image_size": 48, "mean": MEAN, "std": STD}
    make = pickle.loads(pickle.dumps(Evaluation(LoaderOptions(**{**given, **options}), depth)))
    return torch.stack([make(file) for file in files])


CASES: list[dict[str, Any]] = [
    {"interpolation": interpolation, **own}
    for interpolation in ("bilinear", "bicubic", "nearest", "area")
    for own in (
        {}, {"image_size": 20}, {"image_size": (40, 24), "eval_ratio": 0.6},
        {"eval_ratio": 1.0, "dtype": torch.bfloat16}, {"eval_crop": "whole", "image_size": (24, 90)},
        {"eval_crop": "fit", "dtype": torch.uint8},
    )
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_all_loaders_and_single_pictures_agree_bit_for_bit(folder: Path, beton: Path, options: dict[str, Any]) -> None:
    files = sorted(folder.glob("a/*"))
    expected = evaluated(FFCVLoader, beton, **options)
    assert torch.equal(made_by(files, **options), expected)
    assert torch.equal(made_by([file.read_bytes() for file in files], **options), expected)
    if options["interpolation"] == "area":
        return
    assert torch.equal(made_by(map(opened, files), **options), expected)
    for source in (folder, beton):
        assert torch.equal(evaluated(TorchLoader, source, **options), expected)


@pytest.mark.parametrize("options", [own for own in CASES if own["interpolation"] in RESAMPLING], ids=str)
def test_it_is_pillows(folder: Path, options: dict[str, Any]) -> None:
    """Of bytes, of which part and where: Pillow's, in every bit, across and then down."""
    own = {**options, "dtype": torch.uint8}
    made = LoaderOptions(batch_size=1, **{"image_size": 48, **own, "mean": MEAN})
    found = made_by(sorted(folder.glob("a/*")), **own)
    for file, image in zip(sorted(folder.glob("a/*")), found, strict=True):
        whole_picture = opened(file)
        top, left, height, width = 0, 0, whole_picture.height, whole_picture.width
        sides = np.array([height]), np.array([width])
        place = (0, 0, *made.size)
        if made.eval_crop == "center":
            top, left, height, width = central_crops(*sides, made.size, made.eval_ratio)[0].tolist()
        elif made.eval_crop == "fit":
            place = tuple(fitted(*sides, made.size)[0].tolist())
        crop, filter_ = (
            whole_picture.crop((left, top, left + width, top + height)),
            RESAMPLING[own["interpolation"]],
        )
        # In two steps: Pillow 13 chooses the order by the shape.
        resized = crop.resize((place[3], height), filter_).resize((place[3], place[2]), filter_)
        whole = Image.new("RGB", made.size[::-1], fill_color(made.mean))
        whole.paste(resized, (place[1], place[0]))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(whole)), file.name
        at_once = np.asarray(crop.resize((place[3], place[2]), filter_)).astype(int)
        assert np.abs(at_once - np.asarray(resized)).max() <= 2  # of Pillow 13; before, 0


def test_torchs_default_device_changes_nothing(folder: Path, beton: Path) -> None:
    """C writes to the memory of these tensors: of another device, it would be no address of the host."""
    files = sorted(folder.glob("a/*"))[:2]
    expected, policy = made_by(files), {"name": "rand_augment"}

    def trained() -> list[torch.Tensor]:
        options = {"flip": "alternating", "policy": policy, "cutout": 9}
        with make(TorchLoader, beton, seed=3, **options) as loader:
            return [each for batch in loader for each in batch]

    plain = trained()
    with torch.device("meta"):
        assert torch.equal(made_by(files), expected)
        for kind, source in ((FFCVLoader, beton), (TorchLoader, beton), (TorchLoader, folder)):
            assert torch.equal(evaluated(kind, source)[:2], expected)
        assert all(map(torch.equal, trained(), plain))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_pillows(data: st.DataObject) -> None:
    """Noise, which is the worst case for a filter, and shrinks by any factor; also of one and four channels."""
    height, width = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 200))
    size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    channels = data.draw(st.sampled_from([1, 3, 4]))
    name = data.draw(st.sampled_from(["bilinear", "bicubic"]))
    image = np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)
    if data.draw(st.booleans()):
        image = np.where(image > 127, np.uint8(255), np.uint8(0))
    (found,) = made_by(
        [image], image_size=size, eval_crop="whole", interpolation=name, dtype=torch.uint8,
        mean=(0.5,) * channels, std=(0.2,) * channels,
    )  # fmt: skip
    for channel in range(channels):
        plane = Image.fromarray(image[:, :, channel])
        filter_ = RESAMPLING[name]
        expected = plane.resize((size[1], height), filter_).resize(size[::-1], filter_)
        assert np.array_equal(found[channel].numpy(), np.asarray(expected))


def odd_files(root: Path) -> list[Path]:
    """Files that are not kept as they are by `convert`: turned, gray, with opacity, a palette, CMYK, 16 bits."""
    (root / "a").mkdir(parents=True)
    base, exif = Image.fromarray(picture(5, 90, 70)), Image.Exif()
    exif[0x0112] = 6
    wide = (np.arange(90 * 70, dtype=np.uint32).reshape(90, 70) * 10).astype(np.uint16)
    images: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "turned.jpg": (base, {"exif": exif}), "turned.png": (base, {"exif": exif}),
        "gray.jpg": (base.convert("L"), {}), "gray.png": (base.convert("L"), {}),
        "opacity.png": (base.convert("RGBA"), {}), "palette.png": (base.quantize(16), {}),
        "turned.webp": (base, {"exif": exif, "lossless": True}), "lossy.webp": (base, {}),
        "progressive.jpg": (base, {"exif": exif, "progressive": True}), "pixel.jpg": (base.resize((1, 1)), {}),
        "cmyk.jpg": (base.convert("CMYK"), {}), "bits.png": (Image.fromarray(wide), {}),
    }  # fmt: skip
    for name, (image, how) in images.items():
        image.save(root / "a" / name, **how)
    return sorted(root.glob("a/*"))


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
def test_odd_files_are_seen_as_convert_sees_them(tmp_path: Path, interpolation: str) -> None:
    """Bit for bit what a file without loss has; a JPEG that must be encoded again is within its quality."""
    files = odd_files(tmp_path / "images")
    options: dict[str, Any] = {"image_size": (48, 32), "interpolation": interpolation, "dtype": torch.uint8}
    convert(tmp_path / "images", tmp_path / "raw.beton", write_mode="raw")
    convert(tmp_path / "images", tmp_path / "lossy.beton")
    expected = evaluated(FFCVLoader, tmp_path / "raw.beton", **options)
    assert torch.equal(made_by(files, **options), expected)
    assert torch.equal(made_by(map(opened, files), **options), expected)
    assert torch.equal(evaluated(TorchLoader, tmp_path / "images", **options), expected)
    assert torch.equal(evaluated(TorchLoader, tmp_path / "raw.beton", **options), expected)
    lossy = evaluated(FFCVLoader, tmp_path / "lossy.beton", **options)
    assert not torch.equal(lossy, expected)  # as the documentation says
    assert (lossy.float() - expected.float()).abs().mean() < 6
    assert torch.equal(evaluated(TorchLoader, tmp_path / "lossy.beton", **options), lossy)


@pytest.mark.parametrize(("kind", "high", "words"), [(np.float32, 4000, "floats"), (np.int32, 255, "mode I, 32 bits")])
def test_values_that_are_not_those_of_bytes(kind: Any, high: int, words: str, tmp_path: Path) -> None:
    """Pillow would clip floats, and the upper 8 of 16 bits be 0."""
    values = np.linspace(0, high, 24 * 24).reshape(24, 24).astype(kind)
    folder = image_folder(tmp_path / "images", {"values.tiff": Image.fromarray(values)})
    for load in (
        lambda: convert(folder, tmp_path / "values.beton"),
        lambda: evaluated(TorchLoader, folder, batch_size=1),
        lambda: made_by([folder / "a" / "values.tiff"]),
        lambda: made_by([Image.fromarray(values)]),
    ):
        with pytest.raises(DataError, match=f"its pixels .*{words}.* convert them to uint8 or uint16 first"):
            load()


def test_dark_values_of_16_bits_stay_dark(tmp_path: Path) -> None:
    dark = np.full((24, 24), 200, np.uint16)
    for name in ("dark.pgm", "dark.png", "dark.tiff"):
        Image.fromarray(dark).save(tmp_path / name)
        assert not made_by([tmp_path / name], dtype=torch.uint8).any()


def test_a_file_that_was_scaled_down_is_another_picture(folder: Path, tmp_path: Path) -> None:
    """Its predictions from the original are not its evaluation; those of what is stored are."""
    convert(folder, tmp_path / "small.beton", max_resolution=100)
    stored = open_beton(tmp_path / "small.beton")
    images = evaluated(FFCVLoader, tmp_path / "small.beton")
    assert not torch.equal(made_by(sorted(folder.glob("a/*"))), images)
    assert torch.equal(made_by([stored.image(index) for index in range(len(stored))]), images)


@pytest.mark.slow
@pytest.mark.long
def test_ffcvs_own_loader_evaluates_the_same_crops(folder: Path, tmp_path: Path) -> None:
    """With sides whose share is no whole number, which FFCV rounds down."""
    files = [file for file in sorted(folder.glob("a/*")) if min(opened(file).size) > 1]
    convert([(file.read_bytes(), 0) for file in files], tmp_path / "own.beton")
    stock = evaluated(StockFFCVLoader, tmp_path / "own.beton", dtype=torch.uint8)
    options: dict[str, Any] = {"interpolation": "area", "dtype": torch.uint8}
    assert torch.equal(evaluated(FFCVLoader, tmp_path / "own.beton", **options), stock)
    assert torch.equal(made_by(files, **options), stock)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "ffcv",
        *(pytest.param(name, marks=(pytest.mark.slow, pytest.mark.process)) for name in ("torch", "ffcv_stock")),
    ],
)
def test_predictions_take_the_runs_pixels(folder: Path, tmp_path: Path, name: str) -> None:
    files = [file for file in sorted(folder.glob("a/*")) if min(opened(file).size) > 1]
    samples = [(file.read_bytes(), number % 2) for number, file in enumerate(files)]
    convert(samples, tmp_path / "own.beton")
    own = str(tmp_path / "own.beton")
    options: dict[str, Any] = {"eval_ratio": 0.81, "mean": MEAN, "std": STD}
    pipeline = Pipeline("cifar_resnet", num_classes=2, width=4).load(
        own, own, loader=name, batch_size=4, image_size=24, eval_image_size=40, workers=1, **options
    )
    result = pipeline.optimize("sgd", lr=0.01).fit(epochs=1)
    kind = {"ffcv": FFCVLoader, "torch": TorchLoader, "ffcv_stock": StockFFCVLoader}[name]
    expected = evaluated(kind, own, image_size=40, **options)
    found = torch.stack([result.preprocess(file) for file in files])
    if name == "ffcv_stock":  # of whose bytes it is the same; FFCV normalizes in another order
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    with torch.no_grad():
        outputs = result.model(expected).softmax(1)
    rows = result.predict(files)
    assert [row["probability"] for row in rows] == pytest.approx(outputs.amax(1).tolist(), abs=1e-5)


def test_data_sets_of_pillows_images(tmp_path: Path) -> None:
    """As a data set of torchvision gives them: with EXIF data, and of other modes."""
    files = odd_files(tmp_path / "images")
    data = FakeData(len(files), image_size=(3, 8, 8))
    images = [opened(file) for file in files]
    data.__class__ = type("Opened", (FakeData,), {"__getitem__": lambda own, at: (own.transform(images[at]), 0)})
    options: dict[str, Any] = {"dtype": torch.uint8}
    assert torch.equal(evaluated(TorchLoader, data, **options), made_by(files, **options))
    with TorchLoader(
        data, batch_size=len(files), image_size=48, workers=0, crop="whole", flip=False, order="sequential"
    ) as loader:
        ((trained, _),) = loader  # upright, too
    upright = made_by(files, eval_crop="whole", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert (trained - upright).abs().max() < 0.1


def test_what_is_no_picture(tmp_path: Path) -> None:
    make = Evaluation(LoaderOptions(batch_size=1, image_size=16))
    (tmp_path / "half.jpg").write_bytes(jpeg_bytes(picture(0, 90, 90))[:900])
    (tmp_path / "text.jpg").write_text("no picture")
    for wrong, words in (
        (tmp_path / "half.jpg", "half.jpg cannot be read as an image: it cannot be decoded"),
        (tmp_path / "text.jpg", "text.jpg cannot be read as an image: it is not an image"),
        (tmp_path / "none.jpg", "none.jpg cannot be read as an image: .*No such file"),
        (np.zeros((9, 9, 3)), "An image does not suit the model: its pixels are float64"),
        (np.zeros((9, 9, 2), np.uint8), r"its shape is \(9, 9, 2\)"),
        (np.zeros((70_000, 1, 3), np.uint8), "its longest side is 70000 pixels"),
        (3, "takes the path or the bytes of an image file, a PIL image, or an array, not a int"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=words):
            make(wrong)
    assert repr(make) == "Evaluation(16 × 16, ratio=0.875, interpolation='bilinear')"


def test_a_mask_of_another_size_is_refused() -> None:
    prepare, pixels = Evaluation(LoaderOptions(batch_size=1, image_size=16)), picture(0, 40, 30)
    image, mask = prepare(pixels, torch.ones(40, 30, dtype=torch.uint8))
    assert (image.shape, mask.shape, mask.unique().tolist()) == ((3, 16, 16), (16, 16), [1])
    for shape in ((20, 15), (80, 60), (30, 40), (1, 40, 30)):
        with pytest.raises(DataError, match=r"A mask has the shape .* but its picture has 40 × 30 pixels"):
            prepare(pixels, torch.ones(shape, dtype=torch.uint8))


@pytest.mark.parametrize("mode", ["L", "RGBA", "I;16"])
def test_other_channels_and_bits(tmp_path: Path, mode: str) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 8
    for number in range(4):
        image = Image.fromarray(picture(number, 50, 40))
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 251)
        else:
            image = image.convert(mode)
        image.save(tmp_path / "images" / "a" / f"{number}.png", exif=exif)
    files = sorted(tmp_path.glob("images/a/*"))
    convert(tmp_path / "images", tmp_path / "own.beton", image_mode=mode)
    channels = 4 if mode == "RGBA" else 1
    options: dict[str, Any] = {"mean": (0.5,) * channels, "std": (0.2,) * channels}
    for interpolation in RESAMPLING:
        own = {**options, "interpolation": interpolation}
        expected = evaluated(FFCVLoader, tmp_path / "own.beton", **own)
        depth = 16 if mode == "I;16" else 8
        assert torch.equal(made_by(files, depth, **own), expected)
        assert torch.equal(evaluated(TorchLoader, tmp_path / "own.beton", **own), expected)
