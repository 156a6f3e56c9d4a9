"""`convert(engine="shards")` and `"ray"`: a file of each shard, complete at once; a second call converts the others."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from drivetrain import DataError
from drivetrain.common.storage import addresses
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.conversion import shards
from drivetrain.loaders.conversion.on_ray import warn_if_too_many
from loader_pictures import jpeg_bytes, picture, tar_file
from object_store import Store, object_store
from process_state import run

pytestmark = pytest.mark.usefixtures("here")

SHARDS, EACH = 4, 5
IN, OUT = "in/{00..03}.tar", "out/{00..03}.beton"


def write_shard(path: Path, first: int, labels: list[Any] | None = None, samples: int = EACH) -> None:
    members = {}
    for number in range(first, first + samples):
        label = number % 3 if labels is None else labels[number - first]
        members[f"{number:04}.jpg"] = jpeg_bytes(picture(number, 40, 50))
        members[f"{number:04}.cls"] = json.dumps(label).encode()
    tar_file(path, members)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shards in `in/` and an empty `out/`."""
    monkeypatch.chdir(tmp_path)
    for name in ("in", "out", "tmp"):
        Path(name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for number in range(SHARDS):
        write_shard(Path(f"in/{number:02}.tar"), number * EACH)
    return tmp_path


def test_tasks_of_ray_use_the_folder_of_the_call(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a cluster that runs work in the folder where it was started."""
    (here / "elsewhere").mkdir()

    def on_ray(convert_one: Any, todo: Any, threads: int, progress: bool) -> Iterator[Any]:  # noqa: ARG001
        for shard in todo:
            with contextlib.chdir(here / "elsewhere"):
                report = convert_one(shard, threads)
            yield report

    monkeypatch.setattr(shards, "on_ray", on_ray)
    assert convert(IN, OUT, engine="ray", progress=False).samples == 20
    assert len(open_files(OUT)) == 20
    assert convert(IN, OUT, engine="ray", progress=False).kept == 20


def by_shard(**options: Any) -> Any:
    return convert(IN, OUT, engine="shards", progress=False, **options)


def times() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in Path("out").glob("*.beton")}


def test_each_shard_becomes_a_file_that_is_read_with_the_others() -> None:
    report = by_shard()
    assert (report.samples, report.kept, report.modes) == (20, 0, {"jpg": 20})
    assert report.treatments == {"copied unchanged": 20}
    opened = open_files(OUT)
    assert opened.labels.tolist() == [number % 3 for number in range(20)]
    for number in range(SHARDS):
        alone = convert(f"in/{number:02}.tar", "alone.beton", progress=False)
        assert Path(alone.path).read_bytes() == Path(f"out/{number:02}.beton").read_bytes()
    assert report.size == sum(path.stat().st_size for path in Path("out").glob("*.beton"))
    assert not list(Path("tmp").iterdir())


def test_a_second_call_converts_what_is_missing_damaged_or_changed() -> None:
    first = by_shard()
    before = times()
    again = by_shard()
    assert (again.samples, again.kept, again.size) == (20, 20, first.size)
    assert (again.treatments, again.modes) == (first.treatments, first.modes) == ({"copied unchanged": 20}, {"jpg": 20})
    assert again.fields == first.fields
    assert times() == before
    Path("out/00.beton").unlink()
    Path("out/01.beton.json").unlink()
    damaged = Path("out/02.beton")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    write_shard(Path("in/03.tar"), 90, samples=7)
    report = by_shard()
    assert (report.samples, report.kept) == (22, 0)
    assert len(open_files(OUT)) == 22
    Path("out/03.beton").unlink()
    report = by_shard()
    assert (report.samples, report.kept) == (22, 15)
    assert "15 of the images were converted by an earlier call" in str(report)


def test_other_options_convert_again() -> None:
    by_shard()
    assert by_shard(max_resolution=30).kept == 0
    assert by_shard(max_resolution=30).kept == 20
    assert by_shard(max_resolution=30, classes=["a", "b", "c"]).kept == 0
    assert by_shard(max_resolution=30, classes=["a", "b", "c"]).kept == 20
    assert by_shard(max_resolution=30, classes=["a", "b", "c"]).classes == ["a", "b", "c"]


def test_files_that_were_made_otherwise_are_not_kept() -> None:
    convert(IN, OUT, progress=False)
    assert by_shard().kept == 0


def test_a_bad_shard_ends_the_work_and_the_same_call_continues() -> None:
    whole = Path("in/02.tar").read_bytes()
    Path("in/02.tar").write_bytes(whole[:3000])
    with pytest.raises(DataError, match=r"in/02\.tar is truncated.* 2 of 4 files are complete; the same call"):
        by_shard()
    assert sorted(times()) == ["00.beton", "01.beton"]
    Path("in/02.tar").write_bytes(whole)
    assert by_shard().kept == 10


def test_skipped_samples_are_reported_by_shard() -> None:
    write_shard(Path("in/01.tar"), 5, labels=[0, "none", 1, 2, 0])
    report = by_shard(on_error="skip")
    assert report.samples == 19
    assert [name for name, _ in report.skipped] == ["in/01.tar: key 0006"]


def test_shards_with_different_fields_are_named() -> None:
    write_shard(Path("in/01.tar"), 5, labels=[0.5, 1.5, 0.5, 1.5, 0.5])
    with pytest.raises(DataError, match=r"01\.beton has the fields .*float.*, and out/00\.beton has .*int"):
        by_shard()


@pytest.mark.parametrize(
    ("source", "out", "options", "message"),
    [
        ("in", OUT, {}, "converts .tar shards, each to a file of its own; 'in' is something else"),
        (IN, OUT, {"labels": "labels.csv"}, "labels=… are for folders"),
        (IN, "out/{0..2}.beton", {}, r"stands for 3 files, and there are 4 shards\. .*train-\{000\.\.003\}"),
        (IN, "out/one.beton", {}, "stands for 1 files, and there are 4 shards"),
        (IN, "out/{a,a,b,c}.beton", {}, "stands for 3 files"),
        (IN, "{out,in}/{0,1}.beton", {}, "must be in one folder, not 2"),
        (IN, "out/{0..3}.bin", {}, "does not end in .beton"),
        (IN, "nowhere/{0..3}.beton", {}, "The folder nowhere does not exist"),
        ("in/{00..04}.tar", "out/{0..4}.beton", {}, "in/04.tar does not exist"),
        (IN, OUT, {"engine": "spark"}, "engine='spark' must be 'threads', 'shards', 'ray'"),
        ("s3://b/{00..03}.tar", OUT, {"engine": "threads"}, "s3://b.* is an address. engine='shards'"),
        (["s3://b/00.tar", "s3://b/01.tar"], OUT, {"engine": "threads"}, "s3://b/00.tar is an address. engine="),
        (IN, "s3://b/{00..03}.beton", {"engine": "threads"}, "s3://b.* is an address"),
    ],
)
def test_bad_arguments(source: Any, out: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(source, out, **{"engine": "shards", "progress": False, **options})
    assert not list(Path("out").iterdir())


@pytest.fixture
def store(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An object store with the shards; there are none on this machine."""
    monkeypatch.setattr(addresses, "_PAUSE", 0.01)
    with object_store() as store:
        for path in (here / "in").iterdir():
            boto3.client("s3").upload_file(str(path), "bucket", f"in/{path.name}")
        shutil.move("in", "copies")
        yield store


REMOTE = {"source": f"s3://bucket/{IN}", "out": f"s3://bucket/{OUT}", "engine": "shards", "progress": False}


def objects(store: Store) -> set[str]:
    return set(store.names("out/"))


PAIRS = {f"{number:02}.beton{end}" for number in range(SHARDS) for end in ("", ".json")}


def test_from_address_to_address(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    report = convert(**REMOTE)
    assert (report.path, report.samples, report.kept) == (REMOTE["out"], 20, 0)
    assert objects(store) == PAIRS
    assert not list(Path("tmp").iterdir())
    monkeypatch.setenv("DRIVETRAIN_DATA", str(Path("cache").absolute()))
    opened = open_files(str(REMOTE["out"]))
    assert opened.labels.tolist() == [number % 3 for number in range(20)]
    alone = convert("copies/02.tar", "alone.beton", progress=False)
    boto3.client("s3").download_file("bucket", "out/02.beton", "stored.beton")
    assert Path(alone.path).read_bytes() == Path("stored.beton").read_bytes()
    store.remove("out/01.beton")
    boto3.client("s3").upload_file("copies/00.tar", "bucket", "in/03.tar")
    report = convert(**REMOTE)
    assert (report.samples, report.kept) == (20, 10)
    assert objects(store) == PAIRS
    assert "s3://bucket/in/03.tar" in open_beton("s3://bucket/out/03.beton").manifest["source"]


@pytest.mark.usefixtures("store")
def test_from_an_address_to_this_machine() -> None:
    assert convert(**REMOTE | {"out": OUT}).samples == 20
    assert len(open_files(OUT)) == 20
    assert convert(**REMOTE | {"out": OUT}).kept == 20


def test_errors_name_the_address(store: Store) -> None:
    boto3.client("s3").put_object(Bucket="bucket", Key="in/01.tar", Body=b"no tar" * 1000)
    with pytest.raises(DataError, match=r"s3://bucket/in/01\.tar is truncated or .* 1 of 4 files are complete"):
        convert(**REMOTE)
    assert objects(store) == {"00.beton", "00.beton.json"}
    assert not list(Path("tmp").iterdir())


@pytest.mark.usefixtures("store")
def test_reports_name_the_address() -> None:
    """As of samples that are skipped, of files whose fields differ."""
    store_shard([0, "none", 1, 2, 0])
    report = convert(**REMOTE, on_error="skip")
    assert [name for name, _ in report.skipped] == ["s3://bucket/in/01.tar: key 0006"]
    store_shard([0.5, 1.5, 0.5, 1.5, 0.5])
    words = r"s3://bucket/out/01\.beton has the fields .*float.*, and s3://bucket/out/00\.beton has .*int"
    with pytest.raises(DataError, match=words):
        convert(**REMOTE, on_error="skip")


def store_shard(labels: list[Any]) -> None:
    """Replace the second shard in the store."""
    write_shard(Path("copies/01.tar"), EACH, labels=labels)
    boto3.client("s3").upload_file("copies/01.tar", "bucket", "in/01.tar")


@pytest.mark.process
@pytest.mark.parametrize(
    "request_held", [pytest.param(r"^GET .*/in/02\.tar", marks=pytest.mark.slow), r"^PUT .*/out/02\.beton "]
)
def test_killed_while_it_reads_or_writes_the_store(store: Store, request_held: str) -> None:
    store.hold = request_held
    code = f"from drivetrain.loaders import convert; convert(**{REMOTE!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    assert store.held.wait(60)
    process.kill()
    process.wait()
    store.hold = None
    complete = {name for name in objects(store) if name.endswith(".beton")}
    assert complete < {name for name in PAIRS if name.endswith(".beton")}
    report = convert(**REMOTE)
    assert (report.samples, report.kept) == (20, EACH * len(complete))
    assert objects(store) == PAIRS


@pytest.mark.slow
@pytest.mark.process
def test_interrupted(store: Store) -> None:
    store.hold = r"^GET .*/in/02\.tar"
    code = f"from drivetrain.loaders import convert; convert(**{REMOTE!r})"
    environment = os.environ | {"TMPDIR": str(Path("tmp").absolute())}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment)
    assert store.held.wait(60)
    time.sleep(0.5)  # it converts the second meanwhile
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    store.hold = None
    _, printed = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in printed
    assert not list(Path("tmp").glob("drivetrain-*"))
    assert convert(**REMOTE).samples == 20


RAY = f"""
from drivetrain import DataError
from drivetrain.loaders import convert
report = convert({IN!r}, {OUT!r}, engine="ray", progress=False)
print("converted", report.samples, report.kept, sorted(report.treatments.items()))
open("in/01.tar", "wb").write(b"no tar" * 1000)
try:
    convert({IN!r}, {OUT!r}, engine="ray", progress=False)
except DataError as error:
    print("error", error)
import ray
assert not ray.is_initialized()
"""


def test_tasks_that_no_machine_can_take() -> None:
    machines = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 9.0}}]
    with pytest.warns(UserWarning, match="Each shard takes 5 CPUs .* no machine of Ray's cluster has more than 4"):
        warn_if_too_many(5, machines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_too_many(4, machines)


@pytest.mark.process
@pytest.mark.slow
def test_on_ray() -> None:
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets need a short path
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"HOME": folder, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths}
    Path("out/03.beton").touch()  # of somebody else
    try:
        printed = run(sys.executable, "-c", RAY, env=os.environ | own, timeout=300)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert printed.returncode == 0, printed.stderr
    assert "converted 20 0 [('copied unchanged', 20)]" in printed.stdout
    assert "error in/01.tar is truncated or" in printed.stdout
    assert "3 of 4 files are complete; the same call continues with the others." in printed.stdout
    opened = open_files(OUT)
    assert np.array_equal(opened.labels, [number % 3 for number in range(20)])


def test_a_shard_of_another_size_is_another_one() -> None:
    """Copies may keep the time of their source."""
    by_shard()
    time_ns = Path("in/03.tar").stat().st_mtime_ns
    write_shard(Path("in/03.tar"), 90, samples=50)
    os.utime("in/03.tar", ns=(time_ns, time_ns))
    Path("out/00.beton.json").write_text("[]")
    report = by_shard()
    assert (report.samples, report.kept) == (65, 10)


def test_shards_with_arrays_of_different_shapes_are_named() -> None:
    write_shard(Path("in/00.tar"), 0, labels=[[0, 1, 0]] * EACH)
    for number in range(1, SHARDS):
        write_shard(Path(f"in/{number:02}.tar"), number * EACH, labels=[[0, 1]] * EACH)
    with pytest.raises(DataError, match=r"01\.beton has the fields .*ndarray float32 \(2,\).*00\.beton has"):
        by_shard()
