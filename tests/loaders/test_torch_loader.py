"""TorchLoader, implemented with PyTorch, yields the samples and batches of FFCVLoader, with nearly the same values."""

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.sample_options import SampleOptions
from loader_pictures import image_folder, make, picture, raw_pictures, same
from PIL import Image
from process_state import run, running_children, wait_until_ended
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.transforms import Compose

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def load(kind: Any, source: Any, epoch: int = 0, **options: Any) -> Batches:
    with make(kind, source, **{"image_size": 16, **options}) as loader:
        loader.set_epoch(epoch)
        return list(loader)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": True},
        {"train": False},
        {"seed": 7, "epoch": 3},
        {"indices": range(3, 20)},
        {"world_size": 2, "rank": 1},
        {"indices": range(21), "world_size": 4, "rank": 3},
    ],
    ids=str,
)
def test_same_samples_in_the_same_batches(numbered: Path, options: dict[str, Any]) -> None:
    ours, theirs = load(FFCVLoader, numbered, **options), load(TorchLoader, numbered, **options)
    assert [labels.tolist() for _, labels in ours] == [labels.tolist() for _, labels in theirs]
    assert [images.shape for images, _ in ours] == [images.shape for images, _ in theirs]
    assert {images.dtype for images, _ in theirs} == {torch.float32}
    assert {labels.dtype for _, labels in theirs} == {torch.int64}


def test_alternating_flips_do_not_depend_on_the_crops(tmp_path: Path) -> None:
    """Of a ramp from left to right, a crop's first and last column show its width and whether it is mirrored."""
    ramp = np.broadcast_to(np.arange(0, 256, 4, np.uint8)[:, None], (200, 64, 64, 3)).copy()
    file = tmp_path / "ramps.beton"
    convert((ramp, np.zeros(200, np.int64)), file, progress=False)
    options: dict[str, Any] = {"scale": (0.1, 1.0), "flip": "alternating", "batch_size": 200, "dtype": torch.uint8}
    options |= {"order": "sequential"}
    ((first, _),), ((second, _),) = (load(TorchLoader, file, epoch, **options) for epoch in (0, 1))
    rises, others = ((each[:, 0, 8, -1].int() - each[:, 0, 8, 0]).numpy() for each in (first, second))
    assert ((rises > 0) != (others > 0)).all()
    wide = np.abs(rises) > np.median(np.abs(rises))
    assert 0.35 < np.mean(rises[wide] > 0) < 0.65
    assert 0.35 < np.mean(rises[~wide] > 0) < 0.65


def test_stored_pixels_come_out_exactly(numbered: Path) -> None:
    options = {"train": False, "image_size": 12, "eval_ratio": 1.0, "dtype": torch.uint8}
    ours, theirs = load(FFCVLoader, numbered, **options), load(TorchLoader, numbered, **options)
    assert same(ours, theirs)
    padded = {"crop": "padded", "image_size": 12, "padding": 0, "flip": False, "dtype": torch.uint8}
    assert same(load(FFCVLoader, numbered, **padded), load(TorchLoader, numbered, **padded))


def test_padded_crop_shifts_over_reflected_edges(numbered: Path) -> None:
    images, _ = raw_pictures(23)
    ((drawn, labels), *_) = load(TorchLoader, numbered, crop="padded", image_size=12, flip=False, dtype=torch.uint8)
    for one, label in zip(drawn.permute(0, 2, 3, 1).numpy(), labels, strict=True):
        padded = np.pad(images[label], ((4, 4), (4, 4), (0, 0)), mode="reflect")
        places = [padded[y : y + 12, x : x + 12] for y in range(9) for x in range(9)]
        assert any(np.array_equal(one, place) for place in places)


def test_image_folder_and_data_set_sources(photos: Path) -> None:
    folder = photos.parent / "photos-images"
    from_beton = load(TorchLoader, photos)
    assert same(load(TorchLoader, folder), from_beton)
    assert same(load(TorchLoader, str(folder)), from_beton)
    assert same(load(TorchLoader, ImageFolder(str(folder))), from_beton)
    for source in (photos, folder):
        with TorchLoader(source, batch_size=4, image_size=16, workers=0) as loader:
            assert loader.num_classes == 3


class Joint(VisionDataset):  # type: ignore[misc]
    """A data set that applies `transforms`, as torchvision's OxfordIIITPet does."""

    classes, targets = ("a", "b", "c", "d"), (0, 1, 2, 3)  # before the transform of labels

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transforms(Image.fromarray(picture(index, 20, 24)), index)


def test_a_data_set_that_transforms_images_and_labels() -> None:
    """It keeps its transform of labels, and two loaders of it have their own transforms of images."""
    data = Joint("", transform=None, target_transform=lambda label: label + 10)
    options = {"batch_size": 4, "image_size": 16, "workers": 0, "order": "sequential"}
    with TorchLoader(data, **options) as loader, TorchLoader(data, train=False, **options) as evaluation:
        ((exact, _),) = evaluation
        ((images, labels),) = loader
        assert labels.tolist() == [10, 11, 12, 13]
        assert (loader.classes, loader.labels.tolist()) == ([], [10, 11, 12, 13])  # as in a file made from it
        assert not torch.equal(images, exact)
        loader.set_image_size(8)
        ((images, labels),) = loader
        assert (images.shape[-1], labels.tolist()) == (8, [10, 11, 12, 13])
    assert data.transform is None


def test_float_targets(tmp_path: Path) -> None:
    images, _ = raw_pictures(5)
    convert((images, np.linspace(-1, 1, 5)), tmp_path / "t.beton")
    for rank in (0, 1):  # one sample is left for the last batch: rank 1 gets an empty one
        options = {"batch_size": 2, "world_size": 2, "rank": rank, "train": False}
        ours = load(FFCVLoader, tmp_path / "t.beton", **options)
        theirs = load(TorchLoader, tmp_path / "t.beton", **options)
        assert [labels.tolist() for _, labels in ours] == [labels.tolist() for _, labels in theirs]
        assert {labels.dtype for _, labels in theirs} == {torch.float32}


def test_augmentation_is_keyed_by_sample_and_epoch(photos: Path) -> None:
    """So any number of ranks and a resumed epoch give the same pixels; the global random state is left alone."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = load(TorchLoader, photos, seed=2, epoch=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(load(TorchLoader, photos, seed=2, epoch=1), whole)
    assert not same(load(TorchLoader, photos, seed=2, epoch=2), whole)
    assert not same(load(TorchLoader, photos, seed=1, epoch=2), whole)
    ranks = [{"rank": rank, "world_size": 2, "drop_last": False} for rank in range(2)]
    parts = [load(TorchLoader, photos, seed=2, epoch=1, **rank) for rank in ranks]
    joined = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(*parts, strict=True)]
    assert same(joined, whole)
    with TorchLoader(photos, batch_size=4, image_size=16, workers=0, seed=2) as first:
        first.set_epoch(1)
        batches = iter(first)
        next(batches)
        next(batches)
        state = first.state_dict()
    with TorchLoader(photos, batch_size=4, image_size=16, workers=0, seed=2) as second:
        second.load_state_dict(state)
        assert same(list(second), whole[2:])


class Numbers:
    """Images of random numbers, whatever their transform."""

    transform: Any = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3, 4, 4), index


def test_the_random_numbers_of_a_sample_stay() -> None:
    """Resumed runs depend on the seed that torch gets for each."""
    with TorchLoader(Numbers(), batch_size=6, image_size=4, workers=0, order="sequential", seed=5) as loader:
        loader.set_epoch(2)
        ((images, labels),) = loader
    assert labels.tolist() == [*range(6)]
    for index, image in enumerate(images):
        seed = 5 * 0x9E3779B97F4A7C15 + 2 * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB
        generator = torch.Generator().manual_seed(seed % 2**64)
        assert torch.equal(image, torch.rand(3, 4, 4, generator=generator))


def test_repetitions_within_an_epoch_have_augmentations_of_their_own(photos: Path) -> None:
    """Of 18 samples, the first has the weight of ten."""
    with make(TorchLoader, photos, batch_size=6, image_size=16) as loader:
        loader.select(loader.selection(SampleOptions(balance=(10.0, *[1.0] * 17))))
        numbers = np.concatenate(loader.shares(0))
        images = torch.cat([images for images, _ in loader])
    repeated = np.flatnonzero(numbers % 18 == 0)
    assert len(repeated) >= 6
    assert len({images[place].numpy().tobytes() for place in repeated.tolist()}) > 1


@pytest.mark.process
def test_worker_processes(photos: Path) -> None:
    """The same batches; an epoch left early; none of the processes remains after close()."""
    whole = load(TorchLoader, photos), load(TorchLoader, photos, epoch=1)
    with TorchLoader(photos, batch_size=4, image_size=16, workers=2) as loader:
        assert same(list(loader), whole[0])
        next(iter(loader))
        loader.set_epoch(1)
        assert same(list(loader), whole[1])
        processes = running_children("spawn_main")
        assert len(processes) == 2
        kept = iter(loader)  # a loop that somebody still holds must not keep them alive
        next(kept)
    assert not wait_until_ended(processes, 5)


@pytest.mark.slow
@pytest.mark.process
def test_script_without_a_main_guard(photos: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
from drivetrain.loaders import TorchLoader
print("begin")
with TorchLoader({str(photos)!r}, batch_size=6, image_size=16, workers=1) as loader:
    print(len(list(loader)), len(list(loader)))
print(__file__)
""")
    done = run(sys.executable, script, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"begin\n3 3\n{script}\n"


class Awkward:
    """A data set whose second sample cannot be read."""

    transform: Any = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index:
            raise OSError("no such row.")
        return self.transform(Image.new("RGB", (16, 16))), 0


class Tensors(Awkward):
    """A data set that keeps its images as tensors."""

    def __init__(self) -> None:
        self.images = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index]), 0


class Pictures(Awkward):
    """A data set of two pictures in color, or what a function makes of them."""

    def __init__(self, change: Any = Image.fromarray) -> None:
        self.change = change

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.change(picture(index, 16, 16))), 0


@pytest.mark.parametrize("channels", [1, 4])
def test_pictures_of_a_data_set_have_the_channels_of_the_mean(channels: int) -> None:
    """In training, too: evaluation converts them."""
    options: dict[str, Any] = {"mean": (0.5,) * channels, "std": (0.5,) * channels, "dtype": torch.uint8}
    options |= {"batch_size": 2, "order": "sequential"}
    ((exact, _),) = load(TorchLoader, Pictures(), train=False, eval_crop="whole", **options)
    ((images, _),) = load(TorchLoader, Pictures(), crop="whole", flip=False, **options)
    assert images.shape == (2, channels, 16, 16)
    assert torch.equal(images, exact)


@pytest.mark.parametrize("train", [True, False])
def test_bits_of_a_data_sets_pictures_are_not_dropped(train: bool) -> None:
    wide = Pictures(lambda levels: Image.fromarray(levels[..., 0].astype(np.uint16) * 257))
    with pytest.raises(DataError, match=r"^Sample 0 of Pictures could not be loaded: .*have more than 8 bits"):
        load(TorchLoader, wide, train=train, batch_size=2, mean=(0.5,), std=(0.5,), order="sequential")


@pytest.mark.parametrize("train", [True, False])
def test_a_data_sets_picture_of_floats_is_named(train: bool) -> None:
    floats = Pictures(lambda levels: Image.fromarray(levels[..., 0].astype(np.float32)))
    with pytest.raises(DataError, match=r"^Sample 0 of Pictures could not be loaded: .*pixels are floats"):
        load(TorchLoader, floats, train=train, batch_size=2, order="sequential")


def test_colors_of_a_data_sets_pictures_are_resized_without_their_opacity() -> None:
    """As in evaluation and in files: each channel by itself."""
    stripes = np.broadcast_to(np.arange(16, dtype=np.uint8) % 2 * 255, (16, 16))  # black ones are transparent
    data = Pictures(lambda _: Image.fromarray(np.dstack([stripes] * 4)))
    options: dict[str, Any] = {"mean": (0.5,) * 4, "std": (0.5,) * 4, "dtype": torch.uint8}
    options |= {"batch_size": 2, "image_size": 8, "order": "sequential"}
    ((exact, _),) = load(TorchLoader, data, train=False, eval_crop="whole", **options)
    ((images, _),) = load(TorchLoader, data, crop="whole", flip=False, **options)
    assert (images.int() - exact.int()).abs().max() <= 2


class Returning(Awkward):
    """A data set whose samples are what a function makes of an image."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.transform(Image.new("RGB", (16, 16))))


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        (lambda image: (image, 0, "a.jpg"), r"\(Tensor, int, str\)"),
        (lambda image: (image, "cat"), r"\(Tensor, str\)"),
        (lambda image: (image, {"area": 3}), r"\(Tensor, dict\)"),
        (lambda image: {"image": image, "label": 0}, "dict"),
        (lambda image: image, "Tensor"),
    ],
)
def test_samples_that_are_no_pairs_of_image_and_label(sample: Any, what: str) -> None:
    with (
        TorchLoader(Returning(sample), batch_size=2, image_size=16, workers=0) as loader,
        pytest.raises(DataError, match=rf"^A sample of the data set is {what}\. Each must be an image and a label"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        (np.int32(1), torch.int64),
        (torch.tensor(1, dtype=torch.uint8), torch.int64),
        (np.float64(0.5), torch.float32),
        (np.array([0, 1, 1]), torch.float32),
        (torch.zeros(16, 16, dtype=torch.uint8), torch.uint8),
    ],
    ids=["int32", "uint8", "float64", "vector", "mask"],
)
def test_labels_of_a_data_set_have_the_types_of_our_files(label: Any, dtype: torch.dtype) -> None:
    ((_, labels),) = load(TorchLoader, Returning(lambda image: (image, label)), batch_size=2)
    assert labels.dtype == dtype
    assert torch.equal(labels[1], torch.as_tensor(label, dtype=dtype))


@pytest.mark.parametrize("crop", ["whole", "random"])
def test_cutout_leaves_the_data_set_as_it_is(crop: str) -> None:
    data = Tensors()
    options: dict[str, Any] = {"batch_size": 2, "crop": crop, "flip": False, "cutout": 8, "dtype": torch.uint8}
    ((images, _),) = load(TorchLoader, data, **options)
    assert ((images != 255).sum((1, 2, 3)) == 3 * 64).all()
    assert (data.images == 255).all()


@pytest.mark.slow
@pytest.mark.process
def test_workers_find_functions_of_the_script(photos: Path, tmp_path: Path) -> None:
    script, images = tmp_path / "script.py", photos.with_name(f"{photos.stem}-images")
    script.write_text(f"""
from drivetrain.loaders import TorchLoader
from torchvision.datasets import ImageFolder
def swapped(label):
    return 2 - label
if __name__ == "__main__":
    data = ImageFolder({str(images)!r}, target_transform=swapped)
    with TorchLoader(data, batch_size=6, image_size=16, workers=1, order="sequential") as loader:
        print([labels.unique().tolist() for _, labels in loader])
""")
    done = run(sys.executable, script, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (0, "[[2], [1], [0]]\n"), done.stderr


def test_data_set_that_raises() -> None:
    with TorchLoader(Awkward(), batch_size=1, image_size=16, workers=0, train=False) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(DataError, match="Sample 1 of Awkward could not be loaded: OSError: no such row"):
            next(batches)
        with pytest.raises(DataError, match="Awkward has no attribute `targets`"):
            _ = loader.num_classes


@pytest.mark.process
def test_a_data_set_that_workers_cannot_have(photos: Path) -> None:
    data = ImageFolder(photos.parent / "photos-images", target_transform=lambda label: 2 - label)
    words = r"ImageFolder cannot be sent to worker processes: .*lambda.*; or workers=0"
    with make(TorchLoader, data, workers=1) as loader, pytest.raises(DataError, match=words):
        next(iter(loader))
    with make(TorchLoader, data, workers=0) as loader:
        assert len(next(iter(loader))) == 2


def test_a_data_set_of_a_notebook_needs_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not import its class, and end, which torch reports as if the system had killed them."""
    notebook: Any = ModuleType("__main__")
    notebook.Pictures = Pictures
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(Pictures, "__module__", "__main__")
    # The class itself, or something of it in what a data set has.
    inner = (Pictures(), partial(Pictures), Compose([Pictures()]))
    for data in (Pictures(), *map(Returning, inner)):
        words = rf"^{type(data).__name__} is, or uses, what a notebook .* defines, .*; or pass workers=0"
        with (
            TorchLoader(data, batch_size=2, image_size=16, workers=1) as loader,
            pytest.raises(DataError, match=words),
        ):
            next(iter(loader))
    with TorchLoader(Pictures(), batch_size=2, image_size=16, workers=0) as loader:
        assert len(next(iter(loader))[0]) == 2


def test_a_broken_file_in_an_image_folder(tmp_path: Path) -> None:
    image_folder(tmp_path / "images", {"x.jpg": b"words"})
    with (
        TorchLoader(tmp_path / "images", batch_size=1, image_size=16, workers=0) as loader,
        pytest.raises(DataError, match=r"Sample 0 of PictureFolder could not be loaded: .*x\.jpg"),
    ):
        list(loader)


@pytest.mark.timeout(30)
def test_a_pipe_in_an_image_folder_is_not_waited_for(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", {})
    os.mkfifo(folder / "a" / "x.jpg")
    with (
        TorchLoader(folder, batch_size=1, image_size=16, workers=0) as loader,
        pytest.raises(DataError, match=r"Sample 0 of PictureFolder .*x\.jpg: it is not an image that Pillow can read"),
    ):
        list(loader)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_of_samples_are_told_without_torchs_words(tmp_path: Path, workers: int) -> None:
    """Also from a worker process, whose exceptions torch raises with their traceback as the message."""
    sizes = {"x.png": (16, 16), "y.png": (20, 18)}
    image_folder(tmp_path / "images", {name: Image.new("RGB", size) for name, size in sizes.items()})
    options = {"batch_size": 1, "image_size": 16, "workers": workers, "crop": "padded", "order": "sequential"}
    with TorchLoader(tmp_path / "images", **options) as loader:
        for _ in range(2):  # the loader continues after an error
            loader.set_epoch(0)
            batches = iter(loader)
            assert next(batches)[0].shape == (1, 3, 16, 16)
            with pytest.raises(DataError) as caught:
                next(batches)
            assert str(caught.value) == (
                "crop='padded' shifts full images, which must all have 16 × 16 pixels (height × "
                "width); one image has 18 × 20. "
                "Use crop='resized'."
            )
    with TorchLoader(Awkward(), batch_size=2, image_size=16, workers=workers) as loader:
        with pytest.raises(DataError) as caught:
            next(iter(loader))
        assert str(caught.value) == (
            "Sample 1 of Awkward could not be loaded: OSError: no such row. Exclude it with indices=, or repair it."
        )


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_changed_pixels_are_noticed_by_the_manifest(kind: Any, numbered: Path, tmp_path: Path) -> None:
    """Raw pixels decode to anything; only the checksum knows, and only `verify=True` asks it."""
    path = tmp_path / "changed.beton"
    beton = open_beton(numbered)
    data = bytearray(beton.data)
    data[int(beton.pointers[7]) + 5] ^= 1
    path.write_bytes(data)
    assert len(load(kind, path, train=False)) == 6
    with pytest.raises(DataError, match=r"verify=True .*changed\.beton has no manifest"):
        load(kind, path, train=False, verify=True)
    (tmp_path / "changed.beton.json").write_bytes(numbered.with_name("numbered.beton.json").read_bytes())
    with pytest.raises(DataError, match=r"sample 7: its data changed since the conversion \(CRC-32 mismatch\)"):
        load(kind, path, train=False, verify=True)
