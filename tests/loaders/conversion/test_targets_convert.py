"""Masks, boxes and keypoints through `convert`: stored, scaled and turned with the image, shown, and rejected."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import contact_sheet, convert, inspect, open_beton, verify
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.beton.targets import encode_mask, palette
from loader_pictures import beton_of, jpeg_bytes, picture, refused, run_script, tar_file
from loader_stock_masks import COUNT, mask, size
from PIL import Image, ImageOps
from torchvision import tv_tensors
from torchvision.transforms import v2

CLASSES = ["ground", "car", "tree"]
BOXES = [[[3, 5, 30, 20], [20.5, 15.25, 25, 33]], [], [[0, 0, 1, 1]], [[-4, 2, 70, 90]], [[7, 7, 7, 7]]]
POINTS = [[[1, 2]], [[3.5, 4], [5, 6]], [], [[0, 0]], [[9, 9]]]


class Samples:
    """Pictures with a mask, boxes and keypoints; `change` replaces values of one sample."""

    def __init__(self, label: Callable[[int], Any] = mask, change: tuple[int, dict[str, Any]] = (0, {})) -> None:
        self.label, self.change = label, change

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {
            "image": jpeg_bytes(picture(index, *size(index))),
            "label": self.label(index),
            "boxes": BOXES[index],
            "points": POINTS[index],
        }
        return sample | (self.change[1] if index == self.change[0] else {})


FIELDS = {"boxes": "boxes", "points": "keypoints"}


def changed(**values: Any) -> Samples:
    return Samples(change=(3, values))


def test_targets_are_stored_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    report = convert(Samples(), path, fields=FIELDS, classes=CLASSES)
    kinds = {"image": "rgb_image", "label": "mask", "boxes": "boxes", "points": "keypoints"}
    assert report.fields == kinds
    assert "fields: image (rgb_image), label (mask), boxes (boxes), points (keypoints)" in str(report)
    single = open_beton(path)
    for beton in (single, open_files(path)):
        assert beton.fields == {"image": "rgb_image", "label": "bytes", "boxes": "json", "points": "json"}
        assert beton.targets == {"label": "mask", "boxes": "boxes", "points": "keypoints"}
        assert (beton.classes, beton.label_name) == (CLASSES, "label")
        assert beton.read("boxes", np.arange(COUNT)) == BOXES
        assert beton.read("points", np.arange(COUNT)) == POINTS
        with pytest.raises(BetonError, match=r"its labels are masks.*read\('label', indices\)"):
            _ = beton.labels
    assert single.num_classes == 3
    for index in range(COUNT):
        assert np.array_equal(single.mask("label", index), mask(index))
    with pytest.raises(BetonError, match="has no mask 'boxes'"):
        single.mask("boxes", 0)
    assert verify(path).sound


def as_palette(index: int) -> Image.Image:
    image = Image.fromarray(mask(index))
    image.putpalette(palette().tobytes())
    return image


@pytest.mark.parametrize(
    "label",
    [
        as_palette,
        lambda index: Image.fromarray(mask(index)),
        lambda index: Image.fromarray(mask(index).astype(np.uint16)),
        lambda index: mask(index).astype(np.int64),
        lambda index: torch.from_numpy(mask(index)),
        lambda index: torch.from_numpy(mask(index))[None],
        lambda index: tv_tensors.Mask(torch.from_numpy(mask(index))),
        lambda index: encode_mask(mask(index)),
        lambda index: [Image.fromarray(mask(index)), mask(index).astype(np.uint16)][index % 2],
    ],
    ids=["P", "L", "I;16", "int64", "tensor", "1HW", "tv_tensors", "png", "mixed"],
)
def test_every_form_of_a_mask_gives_the_same_file(tmp_path: Path, label: Callable[[int], Any]) -> None:
    convert(Samples(), tmp_path / "a.beton")
    convert(Samples(label), tmp_path / "b.beton", workers=1)
    assert (tmp_path / "a.beton").read_bytes() == (tmp_path / "b.beton").read_bytes()
    assert (open_beton(tmp_path / "b.beton").classes, open_beton(tmp_path / "b.beton").num_classes) == ([], 0)


def test_binary_and_large_masks_further_fields_and_arrays(tmp_path: Path) -> None:
    def sample(index: int) -> tuple[Any, ...]:
        return picture(index, 20, 30), index, Image.fromarray(mask(0)[:20, :30] > 0), np.full((20, 30), 40000)

    samples = [sample(index) for index in range(3)]
    path = tmp_path / "a.beton"
    beton = beton_of(samples, path, fields={"part": "mask", "ids": "mask"}, classes=["a", "b", "c"])
    assert beton.targets == {"part": "mask", "ids": "mask"}
    assert beton.labels.tolist() == [0, 1, 2]
    assert np.array_equal(beton.mask("part", 1), mask(0)[:20, :30] > 0)
    assert (beton.mask("ids", 2) == 40000).all()
    images, masks = np.stack([one[0] for one in samples]), np.stack([mask(0)[:20, :30]] * 3)
    assert np.array_equal(beton_of((images, masks), path).mask("label", 2), masks[2])


def test_a_mask_that_is_not_requested_stays_an_array(tmp_path: Path) -> None:
    samples = [(picture(0, 20, 30), 0, mask(0)[:20, :30])]
    beton = beton_of(samples, tmp_path / "a.beton", fields=["map"])
    assert (beton.fields["map"], beton.targets) == ("ndarray", {})


@pytest.mark.parametrize("options", [{"max_resolution": 33}, {"min_resolution": 17}], ids=str)
def test_targets_are_scaled_as_torchvision_does(tmp_path: Path, options: dict[str, int]) -> None:
    path = tmp_path / "a.beton"
    beton = beton_of(Samples(), path, fields=FIELDS, **options)
    for index in range(COUNT):
        height, width = size(index)
        new = [int(beton.heights[index]), int(beton.widths[index])]
        assert new < [height, width]
        sample = {
            "mask": tv_tensors.Mask(torch.from_numpy(mask(index))),
            "boxes": tv_tensors.BoundingBoxes(
                torch.tensor(BOXES[index], dtype=torch.float64).reshape(-1, 4), format="XYXY",
                canvas_size=(height, width),
            ),
        }  # fmt: skip
        expected = v2.Resize(new, antialias=True)(sample)
        assert np.array_equal(beton.mask("label", index), expected["mask"].numpy())
        boxes = np.array(beton.read("boxes", np.array([index]))[0]).reshape(-1, 4)
        if index != 3:  # beyond the image, which torchvision clamps in some versions
            assert np.allclose(boxes, expected["boxes"].numpy(), atol=1e-6)
        points = np.array(beton.read("points", np.array([index]))[0]).reshape(-1, 2)
        scale = np.array([new[1] / width, new[0] / height])
        assert np.allclose(points, np.array(POINTS[index]).reshape(-1, 2) * scale)


@pytest.mark.parametrize(("before", "after"), [(26, 22), (234, 224), (375, 90), (500, 375), (7, 1), (9, 8)])
def test_masks_are_scaled_with_the_rounding_of_torchvision(before: int, after: int, tmp_path: Path) -> None:
    """For the first three sizes, exact division would take other pixels."""
    stripes = np.broadcast_to(np.arange(before, dtype=np.uint16) % 251, (before, before))
    images = np.zeros((1, before, before, 3), np.uint8)
    convert((images, stripes[None]), tmp_path / "a.beton", max_resolution=after)
    as_mask = tv_tensors.Mask(torch.from_numpy(stripes.astype(np.uint8)))
    expected = v2.functional.resize(as_mask, [after, after])
    assert np.array_equal(open_beton(tmp_path / "a.beton").mask("label", 0), expected.numpy())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_targets_are_those_of_the_upright_picture(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.open(io.BytesIO(jpeg_bytes(picture(0, 40, 60), exif=exif)))
    upright = np.asarray(ImageOps.exif_transpose(image).convert("L")) > 127
    box = [[1, 2, 3, 4]]
    beton = beton_of([(image, upright, box)], tmp_path / "a.beton", fields={"boxes": "boxes"})
    assert (beton.heights[0], beton.widths[0]) == upright.shape
    assert np.array_equal(beton.mask("label", 0), upright)
    assert beton.read("boxes", np.array([0])) == [box]
    stored = np.asarray(beton.image(0).convert("L")) > 127
    assert (stored == upright).mean() > 0.95
    if orientation > 4:
        words = r"it has 60 × 40 pixels .* its image has 40 × 60; it is the mask of the upright picture"
        refused([(image, upright.T)], tmp_path, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": mask(2)}, r"sample 3: its mask 'label': it has 50 × 54 pixels .* its image has 45 × 61"),
        ({"label": mask(3).astype(int) % 3 - 1}, "sample 3: its mask 'label': it has the class index -1"),
        ({"label": mask(3).astype(int) + 70000}, "it has the class index 70000 at row 0, column 0"),
        ({"label": as_palette(3).convert("RGB")}, "an image of mode RGB; expected one class index per pixel"),
        ({"label": Image.fromarray(mask(3)).convert("F")}, "an image of mode F"),
        ({"label": mask(3) / 2}, r"it is float64 of shape \(61, 45\)"),
        ({"label": np.stack([mask(3)] * 2)}, r"uint8 of shape \(2, 61, 45\)"),
        ({"label": 3}, "sample 3: its mask 'label': it is int64 of shape"),
        ({"label": b"\x89PNG"}, "it is not a PNG file"),
        ({"label": encode_mask(mask(3))[:-20]}, "its PNG is truncated"),
        ({"label": mask(3) // 127 * 3}, "it has the class index 6 at row .* there are 3 classes; 255 is for"),
        ({"boxes": [[1, 2, 3, 4], [1, 2, 3]]}, "sample 3: its boxes 'boxes': expected any number of boxes"),
        ({"boxes": [[1, 2, float("nan"), 4]]}, "number 0 of its boxes .* not finite"),
        ({"boxes": [[1, 2, 0.5, 4]]}, "box 0 is .* ends before it begins"),
        ({"boxes": None}, "expected any number of boxes"),
        ({"points": torch.zeros(2, 3)}, "sample 3: its keypoints 'points': expected any number of keypoints"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else next(iter(value)),
)
def test_bad_targets_are_rejected_or_skipped(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"fields": FIELDS, "classes": CLASSES}
    refused(changed(**change), tmp_path, words, **options)
    report = convert(changed(**change), tmp_path / "a.beton", on_error="skip", **options)
    assert [name for name, _ in report.skipped] == ["sample 3"]
    assert len(open_beton(tmp_path / "a.beton")) == COUNT - 1


def test_a_mask_where_the_first_label_is_a_number(tmp_path: Path) -> None:
    samples = Samples(lambda index: mask(index) if index == 3 else index)
    refused(samples, tmp_path, "sample 3: its label is uint8")


def test_boxes_of_torchvision(tmp_path: Path) -> None:
    def boxes(form: str, canvas: tuple[int, int] = (61, 45), dtype: Any = torch.float32) -> Any:
        values = torch.tensor([[1, 2, 3, 4.5]], dtype=dtype)
        return tv_tensors.BoundingBoxes(values, format=form, canvas_size=canvas)

    beton = beton_of(changed(boxes=boxes("XYXY")), tmp_path / "a.beton", fields=FIELDS)
    assert beton.read("boxes", np.array([3])) == [[[1, 2, 3, 4.5]]]
    half = changed(boxes=boxes("XYXY", dtype=torch.bfloat16))
    beton = beton_of(half, tmp_path / "a.beton", fields=FIELDS)
    assert beton.read("boxes", np.array([3])) == [[[1, 2, 3, 4.5]]]
    refused(changed(boxes=boxes("XYWH")), tmp_path, "format is XYWH.*ConvertBoundingBoxFormat", fields=FIELDS)
    refused(changed(boxes=boxes("XYXY", (45, 61))), tmp_path, r"canvas is \(45, 61\)", fields=FIELDS)


def test_a_bomb_is_not_decoded(tmp_path: Path) -> None:
    """A PNG whose header promises 2.5 billion pixels."""
    header = encode_mask(mask(3))
    content = b"IHDR" + (50000).to_bytes(4) + (50000).to_bytes(4) + header[24:29]
    bomb = header[:12] + content + zlib.crc32(content).to_bytes(4) + header[33:]
    refused(changed(label=bomb), tmp_path, "it has 50000 × 50000 pixels")


def test_classes_name_the_indices(tmp_path: Path) -> None:
    refused(Samples(), tmp_path, r"sample 0: .*class index 2 .* there are 2 classes", classes=CLASSES[:2])

    class Named(Samples):
        classes = ("wrong",)

    assert beton_of(Named(), tmp_path / "a.beton").classes == []


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Images in `photos/a` and `photos/b.c`, and their masks."""
    photos, masks = tmp_path / "photos", tmp_path / "masks"
    for index in range(COUNT):
        name = ("a", "b.c")[index % 2]
        for root in (photos, masks):
            (root / name).mkdir(parents=True, exist_ok=True)
        suffix = (".jpg", ".PNG")[index % 3 == 1]
        Image.fromarray(picture(index, *size(index))).save(photos / name / f"x.{index}{suffix}")
        as_palette(index).save(masks / name / f"x.{index}.png")
    return photos, masks


def test_a_folder_of_masks(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, masks = folders
    path = tmp_path / "a.beton"
    beton = beton_of(photos, path, labels=masks, classes=CLASSES)
    for place, index in enumerate([0, 2, 4, 1, 3]):
        assert np.array_equal(beton.mask("label", place), mask(index))
    (tmp_path / "names.txt").write_text("ground\ncar\n tree \n\n", encoding="utf-8-sig")  # as Windows' Notepad
    command = "convert", str(photos), str(tmp_path / "b.beton"), "--labels", str(masks), "--classes"
    for names in ("ground,car,tree", str(tmp_path / "names.txt")):
        assert call(*command, names).code == 0
        assert manifest_path(tmp_path / "b.beton").read_bytes() == manifest_path(path).read_bytes()
    assert "class 1 has no name" in call(*command, "a,,b").line
    mistyped = str(tmp_path / "nmaes.txt")
    assert f"--classes {mistyped} is not a file. Pass a text file" in call(*command, mistyped).line
    many = ",".join(f"class {number:02}" for number in range(99))  # more characters than the name of a file may have
    assert call(*command, many).code == 0
    masks.rename(photos / "masks")  # below the images
    out = tmp_path / "c.beton"
    for where, images, own in (
        (tmp_path, photos, photos / "masks"),
        (photos, Path(), Path("masks")),
        (photos / "masks", Path(".."), Path()),
    ):
        monkeypatch.chdir(where)
        assert convert(images, out, labels=own).samples == COUNT
    (photos / "masks").rename(masks)
    (photos / "masks").symlink_to(masks)
    assert convert(photos, out, labels=photos / "masks").samples == COUNT


def test_masks_whose_suffix_has_capitals(folders: tuple[Path, Path], tmp_path: Path) -> None:
    photos, masks = folders
    for path in (masks / "b.c").iterdir():
        path.rename(path.with_suffix(".PNG"))
    beton = beton_of(photos, tmp_path / "a.beton", labels=masks, classes=CLASSES)
    for place, index in enumerate([0, 2, 4, 1, 3]):
        assert np.array_equal(beton.mask("label", place), mask(index))
    as_palette(1).save(masks / "b.c" / "x.1.png")
    refused(photos, tmp_path, r"x\.1\.PNG and .*x\.1\.png are masks of the same image", labels=masks)
    (masks / "b.c" / "x.1.png").unlink()
    (masks / "b.c" / "x.1.PNG").rename(masks / "b.c" / "x.5.PNG")
    refused(photos, tmp_path, r"x\.1\.PNG has no mask .*x\.1\.png\. Masks are PNG files", labels=masks)
    as_palette(1).save(masks / "b.c" / "x.1.png")
    refused(photos, tmp_path, r"mask .*x\.5\.PNG has no image in .*photos\. Add", labels=masks)


def test_folders_that_do_not_match(folders: tuple[Path, Path], tmp_path: Path) -> None:
    photos, masks = folders
    refused(photos, tmp_path, "is the folder of images and of masks", labels=photos)
    refused(tmp_path / "none", tmp_path, "none is not a folder", labels=masks)
    as_palette(0).save(masks / "a" / "more.png")
    refused(photos, tmp_path, r"mask .*more.png has no image in .*photos\. Add", labels=masks)
    (masks / "a" / "more.png").unlink()
    (photos / "a" / "x.0.png").write_bytes((masks / "a" / "x.0.png").read_bytes())
    refused(photos, tmp_path, "x.0.jpg and .*x.0.png have the same mask", labels=masks)
    (photos / "a" / "x.0.png").unlink()
    (masks / "b.c" / "x.3.png").rename(masks / "b.c" / "x.3.gif")
    refused(photos, tmp_path, r"x\.3\.jpg has no mask .*x\.3\.png\. Masks are PNG files", labels=masks)


def test_masks_in_shards(tmp_path: Path) -> None:
    members = {}
    for index in range(COUNT):
        members[f"{index}.jpg"] = jpeg_bytes(picture(index, *size(index)))
        members[f"{index}.mask.png"] = encode_mask(mask(index))
        members[f"{index}.json"] = str(index).encode()
    convert(tar_file(tmp_path / "a.tar", members), tmp_path / "a.beton", classes=CLASSES)
    end = call("convert", str(tmp_path / "a.tar"), str(tmp_path / "b.beton"), "--field", "mask.png=mask")
    assert end.code == 0
    one, other = open_beton(tmp_path / "a.beton"), open_beton(tmp_path / "b.beton")
    assert (one.targets, other.targets) == ({"label": "mask"}, {"mask.png": "mask"})
    assert other.labels.tolist() == list(range(COUNT))
    for index in range(COUNT):
        assert np.array_equal(one.mask("label", index), mask(index))
        assert np.array_equal(other.mask("mask.png", index), mask(index))


@pytest.mark.process
@pytest.mark.slow
def test_stock_reads_our_masks_and_we_read_theirs(tmp_path: Path) -> None:
    convert(Samples(), tmp_path / "ours.beton", fields={"boxes": "boxes"})
    run_script("loader_stock_masks.py", tmp_path)
    ours, theirs = np.load(tmp_path / "ours.npz"), np.load(tmp_path / "theirs.npz")
    for index in range(COUNT):
        assert np.array_equal(ours[f"label{index}"], mask(index))
        assert ours[f"boxes{index}"].tolist() == BOXES[index]
        assert np.array_equal(theirs[f"mask{index}"], mask(index))
    beton = open_beton(tmp_path / "theirs.beton")
    assert (beton.label_name, beton.targets, beton.num_classes) == ("mask", {"mask": "mask"}, 0)
    for index in range(COUNT):
        assert np.array_equal(beton.mask("mask", index), mask(index))
    assert verify(tmp_path / "theirs.beton").sound
    assert inspect(tmp_path / "theirs.beton").fields == {"image": "rgb_image", "mask": "mask"}
    contact_sheet(tmp_path / "theirs.beton", tmp_path / "sheet.png")


def test_inspection_counts_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    convert(Samples(), path, fields=FIELDS, classes=CLASSES)
    found = inspect(path)
    pixels = np.concatenate([mask(index).ravel() for index in range(COUNT)])
    names = {0: "ground", 1: "car", 2: "tree", 255: "255 (does not count)"}
    counts = {name: int((pixels == index).sum()) for index, name in names.items()}
    assert found.masks["label"].classes == counts
    assert (found.fields["label"], found.fields["points"]) == ("mask", "keypoints")
    assert "label: 4 class indices in all 5 masks, with their share of the pixels" in str(found)
    assert f"    ground: {100 * (pixels == 0).mean():.2f} %" in str(found)
    assert found.to_dict()["masks"]["label"]["damaged"] == 0


def test_the_contact_sheet_draws_targets(tmp_path: Path) -> None:
    gray = np.full((64, 64, 3), 100, np.uint8)
    half = np.zeros((64, 64), np.uint8)
    half[:, 32:] = 1
    sample = (gray, half, [[4, 4, 20, 20]], [[40, 40]])
    convert([sample], tmp_path / "a.beton", fields=FIELDS, classes=["sky", "car"])
    contact_sheet(tmp_path / "a.beton", tmp_path / "sheet.png", side=68)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)[2:66, 2:66]
    assert sheet[60, 10].tolist() == [50, 50, 50]  # half of black
    assert sheet[60, 60].tolist() == [114, 50, 50]  # half of dark red
    for row, column in ((4, 10), (40, 40)):
        assert sheet[row, column].tolist() == [255, 0, 0]


@pytest.mark.long
def test_verify_finds_bad_targets_without_checksums(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.beton", tmp_path / "b.beton"
    beton = beton_of(Samples(), path, fields=FIELDS, classes=CLASSES)
    data = bytearray(path.read_bytes())
    label, boxes = beton.columns["label"], beton.columns["boxes"]
    for byte in range(0, int(label.sizes[1]), 23):
        changed = bytearray(data)
        changed[int(label.pointers[1]) + byte] ^= 4
        copy.write_bytes(changed)
        (bad,) = verify(copy, workers=1).bad
        assert bad[0] == 1
        assert bad[1].startswith("its mask 'label': ")
    place = int(boxes.pointers[3])
    data[place : place + int(boxes.sizes[3])] = b"[[9, 2, 1, 1]]".ljust(int(boxes.sizes[3]) - 1) + b"\0"
    copy.write_bytes(data)
    assert verify(copy).sound  # without a manifest, nobody knows that they are boxes
    assert inspect(copy).masks["label"].damaged == 0
    first = int(label.pointers[0])
    data[first + 60] ^= 1
    copy.write_bytes(data)
    assert inspect(copy).masks["label"].damaged == 1
    assert "1 cannot be decoded (see: drivetrain verify)" in str(inspect(copy))
    with pytest.raises(BetonError, match="sample 0: its mask 'label': its PNG is damaged"):
        open_beton(copy).mask("label", 0)


def test_verify_checks_targets_by_the_manifest(tmp_path: Path) -> None:
    """What no checksum shows: of data that another program wrote, and of a manifest that was edited."""
    path, bad = tmp_path / "a.beton", {"boxes": [[9, 2, 1, 1]]}
    convert(Samples(change=(3, bad)), path, fields={"boxes": "json"}, classes=CLASSES)
    assert verify(path).sound
    manifest = manifest_path(path)
    manifest.write_text(manifest.read_text().replace('"label": "mask"', '"label": "mask", "boxes": "boxes"'))
    (fault,) = verify(path).bad
    assert fault[0] == 3
    assert fault[1].startswith("its boxes 'boxes': box 0 is [9, 2, 1, 1], which ends before it begins")
    manifest.write_text(manifest.read_text().replace(',\n  "tree"', ""))
    faults = verify(path).bad
    assert len(faults) == COUNT
    assert faults[0][1].startswith("its mask 'label': it has the class index 2 at row 15, column 20, but")


def test_the_manifest_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    convert(Samples(), path, fields=FIELDS, classes=CLASSES)
    text = manifest_path(path).read_text()
    for old, new, words in (
        ('"label": "mask"', '"label": "boxes"', "the target 'label' is 'boxes', but the field is bytes"),
        ('"label": "mask"', '"image": "mask"', "the field is rgb_image"),
        ('"label": "mask"', '"other": "mask"', "there is no such field"),
        ('"label": "mask"', '"label": ["mask"]', "is not a manifest"),
        ('"label": "mask"', '"label": "video"', "the target 'label' is 'video'"),
    ):
        assert text.count(old) == 1
        manifest_path(path).write_text(text.replace(old, new))
        with pytest.raises(BetonError, match=words):
            open_beton(path)
    manifest_path(path).write_text(text.replace('"targets": {', '"targets": 3, "x": {'))
    with pytest.raises(BetonError, match="is not a manifest"):
        open_beton(path)


def test_files_of_a_data_set_must_have_the_same_targets(tmp_path: Path) -> None:
    convert(Samples(), tmp_path / "a0.beton", fields=FIELDS)
    convert(Samples(), tmp_path / "a1.beton", fields={"boxes": "json", "points": "keypoints"})
    with pytest.raises(BetonError, match=r"a1\.beton has the targets .*fields="):
        open_files(str(tmp_path / "a{0,1}.beton"))
    convert(Samples(), tmp_path / "b{0..2}.beton", fields=FIELDS)
    several = open_files(str(tmp_path / "b{0..2}.beton"))
    assert several.targets == {"label": "mask", "boxes": "boxes", "points": "keypoints"}
    for index in range(COUNT):
        beton, own = several.locate(index)
        assert np.array_equal(beton.mask("label", own), mask(index))


def palette_folder(folder: Path) -> tuple[Path, Path]:
    """Two pictures and their masks, PNGs with a palette in which colors say nothing of the values 0, 1, 2 and 11."""
    for name in ("photos", "masks"):
        (folder / name).mkdir()
    for number in range(2):
        Image.fromarray(picture(number, 20, 30)).save(folder / f"photos/{number}.jpg")
        values = np.arange(600).reshape(20, 30) % 4
        shown = Image.fromarray(np.array([0, 1, 2, 11], np.uint8)[values])
        shown.putpalette(bytes(range(255, -1, -1)) * 3)
        shown.save(folder / f"masks/{number}.png")
    return folder / "photos", folder / "masks"


def test_values_of_masks_are_replaced(tmp_path: Path) -> None:
    photos, masks = palette_folder(tmp_path)
    expected = np.array([1, 0, 2, 255])[np.arange(600).reshape(20, 30) % 4]
    options = {"classes": ["a", "b", "c"], "progress": False}
    convert(photos, tmp_path / "a.beton", labels=masks, mask_map={11: 255, 0: 1, 1: 0}, **options)
    assert np.array_equal(open_beton(tmp_path / "a.beton").mask("label", 1), expected)
    flags = ["--ignore", "11", "--map", "0:1", "--map", "1:0", "--classes", "a,b,c", "--quiet"]
    end = call("convert", str(photos), str(tmp_path / "b.beton"), "--labels", str(masks), *flags)
    assert end.code == 0, end.err
    assert (tmp_path / "b.beton").read_bytes() == (tmp_path / "a.beton").read_bytes()
    with pytest.raises(DataError, match=r"0\.jpg, mask .*masks/0\.png: its mask 'label': it has the class index 11"):
        convert(photos, tmp_path / "c.beton", labels=masks, mask_map={0: 1}, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({11: 70000}, "70000 must be an integer"), ([11], "must map values"), ({1: 0}, "this data has none")],
)
def test_changes_of_masks_that_cannot_be(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        convert([(picture(0, 20, 30), 0)], tmp_path / "a.beton", mask_map=changes, progress=False)
