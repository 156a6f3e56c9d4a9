"""The parts of a GPU kit: size limit, checks, and assembly over several calls."""

import json
import os
import random
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import process_state
import pytest
from drivetrain.loaders.native import library
from places import GPU, ROOT, load_script

pytestmark = pytest.mark.process

install, kit = load_script("install", GPU), load_script("kit", GPU)
LIMIT = 64 << 10


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A kit of a few parts: random files, and a wheel that can be imported."""
    tree, noise = tmp_path / "tree", random.Random(0)
    sizes = {"cifar/a": 40, "cifar/b": 30, "photos/c.jpg": 20, "source/empty": 0, "source/d": 10}
    for name, size in sizes.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(noise.randbytes(1000 * size))
    wheel(tree, "drivetrain", LIBRARY)
    wheel(tree, "torch", TORCH)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    kit.write_parts(tree, tmp_path / "kit", LIMIT, {"revision": "abc", "python": version})
    return tmp_path / "kit"


LIBRARY = {
    "__init__": "__version__ = '9.0'",
    "loaders/__init__": "",
    "loaders/native/library": "library = print",
}
TORCH = {"__init__": "from types import SimpleNamespace as N\n__version__, cuda = '9', N(is_available=bool)"}


def wheel(tree: Path, name: str, modules: dict[str, str]) -> None:
    """Stands for the real ones, which take minutes to build: pip installs it."""
    about = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    (tree / "wheels").mkdir(exist_ok=True)
    with zipfile.ZipFile(tree / f"wheels/{name}-9.0-py3-none-any.whl", "w") as archive:
        for module, text in modules.items():
            archive.writestr(f"{name}/{module}.py", text)
        for file, text in about.items():
            archive.writestr(f"{name}-9.0.dist-info/{file}", text)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.tar"))


def call(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As on the machine: the script alone, with the standard library."""
    command = sys.executable, folder / "install.py", *arguments
    return process_state.run(*command, env={**os.environ, "PYTHONPATH": ""})


def refused(folder: Path, store: Path) -> str:
    """What is printed where `add` fails."""
    done = call(folder, "add", "--store", store)
    assert done.returncode == 1
    assert done.stderr.startswith("KitError: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_part_is_under_the_limit_and_listed(made: Path) -> None:
    listed = json.loads((made / "kit.json").read_text())["parts"]
    assert [path.name for path in parts(made)] == [part["name"] for part in listed]
    assert len(listed) >= 2
    assert all(path.stat().st_size <= LIMIT for path in parts(made))
    assert all(part["sha256"] == install.digest(made / part["name"]) for part in listed)
    assert (made / "install.py").exists()
    assert kit.PART_BYTES <= 60 << 20


def test_a_file_larger_than_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(LIMIT))
    with pytest.raises(install.KitError, match=r"large has 67,584 bytes: more than a part, .* 65,536"):
        kit.split([tmp_path / "large"], LIMIT)


def test_parts_that_arrive_over_several_calls(made: Path, tmp_path: Path) -> None:
    """Each call brings one part, as the machine's own limit has it; then all is installed, once."""
    store = tmp_path / "store"
    all_parts, away = parts(made), tmp_path / "away"
    away.mkdir()
    for path in all_parts:
        path.rename(away / path.name)
    early = call(made, "install", "--store", store)
    assert early.returncode == 1
    assert f"{len(all_parts)} of {len(all_parts)} parts are missing" in early.stderr
    assert all(path.name in early.stderr for path in all_parts)
    for number, path in enumerate(all_parts, 1):
        (away / path.name).rename(path)
        done = call(made, "add", "--store", store)
        assert done.returncode == 0, done.stderr
        assert f"{number} of {len(all_parts)} parts are in" in done.stdout
        path.unlink()
    done = call(made, "install", "--store", store)
    assert done.returncode == 0, done.stderr
    assert (store / "kit" / "cifar" / "a").stat().st_size == 40_000
    assert (store / "site" / "drivetrain" / "__init__.py").exists()
    installed = json.loads((store / "installed.json").read_text())
    assert installed == {"drivetrain": "9.0", "torch": "9", "cuda": False, "id": installed["id"]}
    stamp = (store / "site").stat().st_mtime_ns
    assert call(made, "install", "--store", store).returncode == 0
    assert (store / "site").stat().st_mtime_ns == stamp  # not a second time


def test_what_a_killed_install_left_is_replaced(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for place in ("kit.unpacking/old", "site/old"):
        (store / place).parent.mkdir(parents=True)
        (store / place).write_text("half")
    assert install.add(made, store) == []
    install.install(store)
    assert not (store / "kit" / "old").exists()
    assert not (store / "site" / "old").exists()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    else:
        del data[-512:]
    path.write_bytes(data)


@pytest.mark.parametrize(("how", "said"), [("flipped", "is damaged: its SHA-256 is"), ("short", "it was truncated")])
def test_a_damaged_part_is_named_and_not_kept(made: Path, tmp_path: Path, how: str, said: str) -> None:
    bad = parts(made)[1]
    damage(bad, how)
    told = refused(made, tmp_path / "store")
    assert said in told
    assert f"Copy {bad.name} again." in told
    assert not (tmp_path / "store" / "parts" / bad.name).exists()


def test_a_part_that_is_damaged_in_the_store_is_not_unpacked(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    install.add(made, store)
    damage(store / "parts" / parts(made)[0].name, "flipped")
    with pytest.raises(install.KitError, match="is damaged: its SHA-256"):
        install.assemble(store)
    assert not (store / "kit").exists()


def test_one_missing_part_is_named(made: Path, tmp_path: Path) -> None:
    store, last = tmp_path / "store", parts(made)[-1]
    last.unlink()
    assert install.add(made, store) == [last.name]
    with pytest.raises(install.KitError, match=rf"1 of \d+ parts are missing in .*: {last.name}\. Put them"):
        install.install(store)


def change_manifest(made: Path, **entries: str) -> None:
    file = made / "kit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_parts_of_another_kit_are_refused(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    install.add(made, store)
    change_manifest(made, id="other")
    with pytest.raises(install.KitError, match="holds parts of another kit"):
        install.add(made, store)


@pytest.mark.parametrize("text", [None, "", "{}", '{"id": "a", "python": "3.12", "parts": []}', '{"parts": [{}]}'])
def test_a_damaged_manifest_is_one_error(made: Path, tmp_path: Path, text: str | None) -> None:
    (made / "kit.json").unlink()
    if text is not None:
        (made / "kit.json").write_text(text)
    assert "kit.json" in refused(made, tmp_path / "store")


def test_another_python_is_named_before_pip_is_tried(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    change_manifest(made, python="2.7")
    install.add(made, store)
    with pytest.raises(install.KitError, match=r"wheels are for Python 2\.7 on x86_64; this is Python 3"):
        install.install(store)
    assert not (store / "site").exists()


def test_a_wheel_that_needs_a_library_of_the_system_is_named(tmp_path: Path) -> None:
    """As Drivetrain's would, were it packed as the compiler makes it."""
    path = tmp_path / "drivetrain-9.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library._FILE, "drivetrain/loaders/native/libdrivetrain.so")
    with pytest.raises(install.KitError, match=r"drivetrain-9\.0-.*\.whl needs \['libjpeg\.so\.\d+'\], "):
        kit.check_complete(path, tmp_path)


def test_the_versions_are_those_of_the_lock_file() -> None:
    for name in (*kit.WHEELS, *kit.FROM_SOURCE, "ffcv"):
        assert kit.pinned(name).startswith(f"{name}==")
    with pytest.raises(install.KitError, match=r"requirements\.txt has no nothing; run: make lock"):
        kit.pinned("nothing")


def test_cifar10_is_packed_without_loss(cached_cifar10: Path, tmp_path: Path) -> None:
    from drivetrain.common.errors import DataError
    from drivetrain.loaders.datasets.names import cifar10

    pack = load_script("cifar10_pack", GPU)
    source, packed, out = cached_cifar10 / "cifar10", tmp_path / "packed", tmp_path / "as-root/cifar10"
    out.parent.mkdir()
    pack.pack(source, packed, LIMIT)
    pack.unpack(packed, out)
    for name in cifar10.MD5S:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert cifar10.fetch_cifar10(out.parent) == out
    with pytest.raises(DataError, match=r"more than part_bytes=10\."):
        pack.pack(source, tmp_path / "small", 10)
    labels = packed / "test_batch.bin.labels"
    labels.write_bytes(labels.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"test_batch\.bin, unpacked from .*, is not the official file"):
        pack.unpack(packed, tmp_path / "other")
    assert not (tmp_path / "other" / "test_batch.bin").exists()
    labels.unlink()
    with pytest.raises(DataError, match=r"does not hold test_batch\.bin as it was packed"):
        pack.unpack(packed, tmp_path / "third")


def test_each_dependency_is_in_the_kit_or_the_machines_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=\[]", each)[0] for each in project["dependencies"]}
    assert names <= {*kit.WHEELS, *kit.OF_THE_MACHINE}
