"""Several files as one data set, and mixes of data sets: the same samples as from one file, and exact shares."""

import itertools
import os
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import DataError
from drivetrain.common.errors import BetonError
from drivetrain.common.storage.cache import Remote, local_copy
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, sources
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.order.arrays import array_order, mixed_array
from drivetrain.loaders.order.epoch import mixed, shuffled
from drivetrain.loaders.sources import expand, files_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_pictures import run_python, same
from range_server import serving

SAMPLES = 60
OPTIONS: dict[str, Any] = {"batch_size": 10, "image_size": 32, "workers": 2, "dtype": torch.uint8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole.beton`, the same samples in `part-{0..2}.beton`, and other samples in `other.beton`."""
    made = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (SAMPLES, 40, 44, 3), dtype=np.uint8)
    labels = np.arange(SAMPLES) % 5
    options: dict[str, Any] = {"classes": list("abcde")}
    convert((images, labels), made / "whole.beton", **options)
    for number, part in enumerate((slice(0, 7), slice(7, 40), slice(40, 60))):
        convert((images[part], labels[part]), made / f"part-{number}.beton", **options)
    convert((255 - images[:20], labels[:20]), made / "other.beton", **options)
    return made


def loaded(loader: Any, epochs: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with loader:
        return [tuple(map(torch.cat, zip(*list(loader), strict=True))) for _ in range(epochs)]  # type: ignore[misc]


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_files_in_parts_are_the_data_set_in_one(folder: Path, order: str) -> None:
    whole = loaded(FFCVLoader(folder / "whole.beton", order=order, **OPTIONS))
    assert same(whole, loaded(FFCVLoader(folder / "part-{0..2}.beton", order=order, **OPTIONS)))
    halves: list[Any] = []
    for rank in range(2):
        shard = {"rank": rank, "world_size": 2}
        with FFCVLoader(folder / "part-{0..2}.beton", order=order, **OPTIONS, **shard) as loader:
            halves.append([images for images, _ in loader])
    joined = torch.cat([torch.cat(pair) for pair in zip(*halves, strict=True)])
    assert torch.equal(joined, whole[0][0])


def test_torchs_loader_reads_parts_too(folder: Path) -> None:
    options = OPTIONS | {"workers": 0}
    whole = loaded(TorchLoader(folder / "whole.beton", **options))
    assert same(whole, loaded(TorchLoader(folder / "part-{0..2}.beton", **options)))
    mix = {folder / "whole.beton": 1, folder / "other.beton": 1}
    labels = [labels for _, labels in loaded(TorchLoader(mix, **options))]
    assert [torch.equal(a, b[1]) for a, b in zip(labels, loaded(FFCVLoader(mix, **OPTIONS)), strict=True)] == [True] * 2


def test_quasi_random_order_runs_through_all_files(folder: Path) -> None:
    with FFCVLoader(folder / "part-{0..2}.beton", order="quasi_random", **OPTIONS) as loader:
        assert sorted(np.concatenate(loader.shares(0)).tolist()) == list(range(SAMPLES))
        assert len(np.unique(loader.beton.pages)) == 3
        epochs = loaded(loader)
    assert sorted(epochs[0][1].tolist()) == sorted(np.arange(SAMPLES) % 5)


def test_one_value_of_each_kind_by_sample(folder: Path) -> None:
    whole, parts = open_files(folder / "whole.beton"), open_files(folder / "part-{0..2}.beton")
    indices = np.array([59, 3, 39, 40, 7, 6])
    assert parts.read("label", indices).tolist() == whole.read("label", indices).tolist()
    assert parts.read("image", indices) == whole.read("image", indices)
    shards = [parts.locate(index) for index in indices]
    assert [one.checksum(own) for one, own in shards] == [whole.files[0].checksum(i) for i in indices]
    assert parts.checksum == whole.checksum
    shard, own = parts.locate(41)
    assert shard.image(own).tobytes() == whole.files[0].image(41).tobytes()
    assert (len(parts), parts.classes) == (SAMPLES, list("abcde"))


def test_a_damaged_sample_is_named_by_its_file(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("part-*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    beton = open_files(tmp_path / "part-1.beton")
    data = bytearray((tmp_path / "part-1.beton").read_bytes())
    data[int(beton.pointers[5]) + 9] ^= 1
    (tmp_path / "part-1.beton").write_bytes(data)
    with pytest.raises(BetonError, match=r"part-1.beton: sample 5: its data changed"):
        loaded(FFCVLoader(tmp_path / "part-{0..2}.beton", verify=True, **OPTIONS))


@pytest.mark.parametrize("damage", ['"numbed": 1', '"number": "1"'])
def test_a_damaged_number_of_a_file_is_named(tmp_path: Path, damage: str) -> None:
    convert((np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)), tmp_path / "{a,b}.beton", progress=False)
    manifest = tmp_path / "b.beton.json"
    text = manifest.read_text()
    assert text.count('"number": 1') == 1
    manifest.write_text(text.replace('"number": 1', damage))
    with pytest.raises(BetonError, match=r"b\.beton\.json is not a manifest"):
        open_files(tmp_path / "{a,b}.beton")


@pytest.mark.parametrize("order", ["random", "quasi_random"])
def test_a_mix_has_exact_shares(folder: Path, order: str) -> None:
    mix = {str(folder / "part-{0..2}.beton"): 1, str(folder / "other.beton"): 3}
    with FFCVLoader(mix, order=order, **OPTIONS) as loader:
        assert len(loader) * 10 == 80
        drawn = [np.concatenate(loader.shares(epoch)) for epoch in range(6)]
        for epoch in drawn:
            assert Counter((epoch % 80 >= 60).tolist()) == {False: 20, True: 60}
            assert len(np.unique(epoch)) == 80  # each repetition has its own augmentation
        seen = Counter(np.concatenate(drawn[:3]) % 80)
        assert {seen[index] for index in range(60)} == {1}  # 3 × 20 of 60 samples
        assert {seen[index] for index in range(60, 80)} == {9}
        assert not np.array_equal(drawn[0], drawn[1])
        first = loaded(loader)
        loader.set_epoch(0)
        assert same(first, loaded(loader))
    with FFCVLoader(mix, order=order, **OPTIONS) as loader:
        state = loader.state_dict() | {"position": 3, "epoch": 1}
        loader.load_state_dict(state)
        rest = torch.cat([images for images, _ in loader])
        assert torch.equal(rest, first[1][0][30:])
    with (
        FFCVLoader(folder / "{part-0,part-1,part-2,other}.beton", order=order, **OPTIONS) as loader,
        pytest.raises(DataError, match=r"has weights=\[1.0, 3.0\], but this loader has \[\]"),
    ):
        loader.load_state_dict(state)


def test_repetitions_within_an_epoch_differ(folder: Path) -> None:
    mix = {str(folder / "whole.beton"): 1, str(folder / "other.beton"): 3}
    with FFCVLoader(mix, **OPTIONS) as loader:
        numbers = np.concatenate(loader.shares(0))
        images = loaded(loader, 1)[0][0]
    one = np.flatnonzero(numbers % 80 == 70)
    assert len(one) == 3
    assert not torch.equal(images[one[0]], images[one[1]])


def test_the_frequencies_of_a_mix_are_those_of_its_draws(folder: Path) -> None:
    """By which the mean of targets is weighted. In three epochs, each of 60 samples is drawn once, and of 20 nine
    times."""
    with FFCVLoader({str(folder / "whole.beton"): 1, str(folder / "other.beton"): 3}, **OPTIONS) as loader:
        drawn = np.concatenate([np.concatenate(loader.shares(epoch)) % 80 for epoch in range(3)])
        often = loader.frequencies
    assert often / often.sum() == pytest.approx(np.bincount(drawn, minlength=80) / len(drawn))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_shares_and_turns_of_any_mix(sets: list[tuple[int, float]], epoch: int, seed: int, older: bool) -> None:
    bounds = np.cumsum([0, *(size for size, _ in sets)])
    parts = [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
    weights, total = [weight for _, weight in sets], int(bounds[-1])
    options: list[dict[str, int]] = [{"seed": seed, "epoch": number} for number in range(epoch + 1)]
    if older:
        epochs = [mixed_array(parts, weights, **each, samples=total) for each in options]
        order = array_order(epochs[-1], order="random", **options[-1], batch_size=7)
    else:
        drawn = [mixed(parts, weights, **each, samples=total) for each in options]
        epochs = [each.at(np.arange(each.count)) for each in drawn]
        order = shuffled(drawn[-1], **options[-1])
    for part, weight in zip(parts, weights, strict=True):
        counts = [int(np.isin(one % total, part).sum()) for one in epochs]
        assert len(set(counts)) == 1
        assert abs(counts[0] - total * weight / sum(weights)) <= 1
        seen = Counter((np.concatenate(epochs) % total).tolist())
        times = {seen[index] for index in part.tolist()}
        assert max(times) - min(times) <= 1
    assert all(len(np.unique(one)) == len(one) == total for one in epochs)
    assert sorted(order.at(np.arange(order.count))) == sorted(epochs[-1])


def test_selected_samples_of_a_mix(folder: Path) -> None:
    mix = {str(folder / "whole.beton"): 1, str(folder / "other.beton"): 1}
    with FFCVLoader(mix, indices=[0, 1, 2, 3, 4, 5, 6, 60, 61, 62], **OPTIONS) as loader:
        drawn = np.concatenate(loader.shares(0)) % 80
    assert Counter((drawn >= 60).tolist()) == {True: 5, False: 5}
    assert set(drawn.tolist()) <= {0, 1, 2, 3, 4, 5, 6, 60, 61, 62}
    with pytest.raises(DataError, match="no sample of the data set with the samples 60 to 79"):
        FFCVLoader(mix, indices=range(20), **OPTIONS)
    with pytest.raises(DataError, match=r"weight 0.001 leaves no sample of 80"):
        FFCVLoader({str(folder / "whole.beton"): 1, str(folder / "other.beton"): 0.001}, **OPTIONS)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("train.beton", ["train.beton"]),
        ("t-{08..11}", ["t-08", "t-09", "t-10", "t-11"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("a{b}c", ["a{b}c"]),
        ("{a,b{1..2}}.x", ["a.x", "b1.x", "b2.x"]),
        ("{{a,b},c}-{d}{0..1}", ["a-{d}0", "a-{d}1", "b-{d}0", "b-{d}1", "c-{d}0", "c-{d}1"]),
        ("{x{a,b}y", ["{xay", "{xby"]),
        ("s3://b/{000..001}.beton?x=1", ["s3://b/000.beton?x=1", "s3://b/001.beton?x=1"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert list(expand(pattern)) == names


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("t-{3..1}.beton", "must run upwards"),
        ("t-{0..999999}.beton", "more than 100,000 files"),
        ({}, "is empty"),
        ({"a.beton": 0}, "a positive number"),
        ({"a.beton": True}, "a positive number"),
        ({"a.beton": float("nan")}, "a positive number"),
        ({3: 1.0}, "must map a .beton file"),
        (["a.beton"], "not a list"),
    ],
)
def test_unusable_sources(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        files_of(source)


def test_files_that_do_not_belong_together(folder: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (20, 40, 44, 3), dtype=np.uint8)
    convert((images, np.arange(20) % 5), tmp_path / "named.beton", classes=list("vwxyz"))
    convert((images, np.arange(20) / 5), tmp_path / "targets.beton")
    other = str(folder / "other.beton")
    with pytest.raises(BetonError, match=r"named.beton has the classes .*'v'.* and .*other.beton has"):
        FFCVLoader({other: 1, str(tmp_path / "named.beton"): 1}, **OPTIONS)
    with pytest.raises(BetonError, match=r"targets.beton has the fields .*float"):
        FFCVLoader({other: 1, str(tmp_path / "targets.beton"): 1}, **OPTIONS)
    with pytest.raises(BetonError, match=r"part-3.beton does not exist"):
        FFCVLoader(folder / "part-{0..3}.beton", **OPTIONS)
    with pytest.raises(DataError, match="order='sequential' does not keep"):
        FFCVLoader({other: 1, str(folder / "whole.beton"): 1}, train=False, **OPTIONS)


@pytest.mark.usefixtures("own_cache")
def test_parts_at_an_address(folder: Path) -> None:
    whole = loaded(FFCVLoader(folder / "whole.beton", **OPTIONS))
    with serving(folder) as server:
        address = server.address("part-{0..2}.beton")
        assert same(whole, loaded(FFCVLoader(address, **OPTIONS)))
        mix = {address: 1, str(folder / "other.beton"): 2}
        plain = {str(folder / "part-{0..2}.beton"): 1, str(folder / "other.beton"): 2}
        assert same(loaded(FFCVLoader(mix, **OPTIONS)), loaded(FFCVLoader(plain, **OPTIONS)))


MANY = """
import os, resource, sys
from drivetrain import DataError
from drivetrain.loaders import FFCVLoader

def batches(files):
    with FFCVLoader(f"{sys.argv[1]}/{{000..{files - 1:03}}}.beton", batch_size=50, image_size=16, workers=1) as loader:
        list(loader)
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
assert 300 < batches(300) < 1000
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
assert batches(140) == 256
try:
    batches(300)
except DataError as error:
    print(error)
"""


MORE = """
import resource, sys
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.beton import data_set

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
data_set.CHECKED = 0
for data_set.MOST_OPEN in (1024, 150):  # with their manifests; and while others are checked
    with FFCVLoader(sys.argv[1] + "/{000..299}.beton", batch_size=50, image_size=16, workers=1, verify=True) as loader:
        list(loader)
    del loader
"""


@pytest.mark.parametrize("waits", [True, False])
def test_threads_open_files_that_take_waiting(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:  # the machine's other work must not look like waiting
        monkeypatch.setattr(sources, "thread_time", sources.perf_counter)

    def one(number: int) -> tuple[int, bool]:
        time.sleep(0.02 * waits)
        return number, threading.current_thread() is threading.main_thread()

    for count in range(4):
        found = sources.in_threads(one, range(count))
        assert found == [(number, not waits or number == 0) for number in range(count)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_hundreds_of_files_need_few_descriptors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        for suffix in ("", ".json"):
            os.link(folder / f"part-0.beton{suffix}", tmp_path / f"{number:03}.beton{suffix}")
    ended = run_python(MANY, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "too many open files" in ended.stdout
    assert "Raise the limit (ulimit -n), use fewer and larger files" in ended.stdout
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = run_python(MORE, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_conversion_to_several_files(folder: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (SAMPLES, 40, 44, 3), dtype=np.uint8), np.arange(SAMPLES) % 5
    options: dict[str, Any] = {"classes": list("abcde")}
    pattern = tmp_path / "set-{00..03}.beton"
    report = convert((images, labels), pattern, **options)
    assert (report.samples, report.modes, report.path) == (SAMPLES, {"raw": SAMPLES}, pattern)
    files = sorted(tmp_path.glob("set-*.beton"))
    assert [len(open_files(file)) for file in files] == [15, 15, 15, 15]
    assert report.size == sum(file.stat().st_size for file in files)
    assert same(loaded(FFCVLoader(pattern, **OPTIONS)), loaded(FFCVLoader(folder / "whole.beton", **OPTIONS)))
    # A selection, in any order, is a data set; files of two conversions are none.
    assert len(open_files(tmp_path / "set-{00,02}.beton")) == 30
    kept = [(file, file.read_bytes()) for file in sorted(tmp_path.glob("set-02*"))]
    convert((255 - images, labels), pattern, **options)
    for file, content in kept:
        file.write_bytes(content)
    with pytest.raises(BetonError, match=r"set-02.beton does not follow .*set-01.beton"):
        open_files(pattern)


def test_a_conversion_that_fails_leaves_no_file(tmp_path: Path) -> None:
    images, labels = np.zeros((9, 8, 8, 3), dtype=np.uint8), np.arange(9)
    pattern = tmp_path / "set-{0..2}.beton"
    with pytest.raises(DataError, match="there are 7 classes"):
        convert((images, labels), pattern, classes=list("abcdefg"))
    assert list(tmp_path.iterdir()) == []
    for wrong, message in (
        ("set-{0..9}.beton", "stands for 10 files, but there are only 9 samples"),
        ("set-{0..999}.beton", "at most 256 different ones"),
        ("set-{0,0}.beton", "different ones"),
        ("{a,b}/set.beton", "in one folder"),
        ("set-{0..1}", "beton"),
    ):
        with pytest.raises(DataError, match=message):
            convert((images, labels), tmp_path / wrong)
    assert list(tmp_path.iterdir()) == []


def test_copies_that_are_made_together_keep_the_limit(folder: Path, tmp_path: Path) -> None:
    for number in range(16):
        (tmp_path / f"{number:02}.beton").write_bytes((folder / "part-0.beton").read_bytes())
    size = (folder / "part-0.beton").stat().st_size
    with serving(tmp_path) as server:
        files = files_of(server.address("{00..15}.beton"))
        with pytest.raises(DataError, match="does not fit"):
            files.map(lambda file: local_copy(file, Remote(tmp_path / "cache", 8.5 * size / 1e9)))
        assert len([*(tmp_path / "cache").glob("*/*.beton")]) == 8
        copies = files.map(lambda file: local_copy(file, Remote(tmp_path / "other", 17 * size / 1e9)))
        assert len(open_files(copies)) == 16 * 7


@pytest.mark.parametrize("without", [0, 1])
def test_a_file_without_a_manifest_among_others(tmp_path: Path, without: int) -> None:
    images = np.random.default_rng(2).integers(0, 256, (20, 40, 44, 3), dtype=np.uint8)
    convert((images, np.arange(20) / 5), tmp_path / "t-{0..1}.beton")
    (tmp_path / f"t-{without}.beton.json").unlink()
    with closing(open_files(tmp_path / "t-{0..1}.beton")) as opened:
        assert (opened.labels.tolist(), opened.has_checksums) == ((np.arange(20) / 5).tolist(), False)
