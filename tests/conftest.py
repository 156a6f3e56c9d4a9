"""Fixtures that more than one test file uses."""

import gc
import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from unittest import mock

import composer_reference
import gpu_device
import machines
import outcomes
import psutil
import pytest
import spared
import torch
from cifar10_files import FILE_BYTES, FakeNpm, closed_port
from drivetrain.loaders.datasets.names import cifar10
from drivetrain.strategies import registry
from drivetrain.strategies.launching import launcher
from forked_ranks import STARTED, RankServer
from pipeline_data import Toy
from places import ROOT, TESTS
from torchvision.datasets import CIFAR10

os.environ.setdefault("NUMBA_OPT", "1")
"""FFCV's operations and loaders are compiled in each process, for seconds, and run for moments."""


THREADS = torch.get_num_threads()


class PlainRoot:
    """Collects the repository's folder as a folder. It is a package, too, and pytest would import it by the folder's
    name, which need not be that of a package: `drivetrain-main`."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(PlainRoot())
    outcomes.register(config, lambda: RankServer.forked)


def pytest_collection_finish() -> None:
    """What all test files import stays, a million objects: without them a collection takes milliseconds, not seconds,
    and many tests ask for one. Of stock FFCV, which some import, the single thread it sets for torch does not stay: the
    last digits of a sum depend on it, and ranks have more."""
    torch.set_num_threads(THREADS)
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C works in this process and its children, also where a shell has started the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test: what was tuned before is not known in it."""
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def time_spared() -> Iterator[None]:
    """See `spared.py`."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, instead in spared.replaced():
            if name != "fsync" or not STARTED:
                patch.setattr(place, name, instead)
        yield


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """One for all tests of this process."""
    with closing(RankServer()) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(request: pytest.FixtureRequest, rank_server: RankServer) -> Iterator[None]:
    """Ranks are forked but where their start is tested. See `forked_ranks.py`."""
    with pytest.MonkeyPatch.context() as patch:
        if not STARTED and request.path.parent != TESTS / "strategies/launching":
            patch.setattr(launcher, "start_interpreter", rank_server.start)
        yield


@pytest.fixture
def forked(rank_server: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks there, too, for what comes after the start: an interpreter takes seconds."""
    if not STARTED:
        monkeypatch.setattr(launcher, "start_interpreter", rank_server.start)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A converted toy data set, made once."""
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def composer() -> ModuleType:
    """`composer.functional`, imported quietly."""
    return composer_reference.load("composer.functional")


@pytest.fixture(scope="module", autouse=True)
def threads_kept() -> Iterator[None]:
    """torch's threads are those of before after each file: the jobs of ranks, which some files also run in this
    process, set one. It precedes the fixtures that a file asks for."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread(threads_kept: None) -> None:  # noqa: ARG001
    """As in ranks: sums, and the random numbers of some models, depend on it. To the end of the file."""
    torch.set_num_threads(1)


@pytest.fixture
def nothing_registered() -> Iterator[None]:
    """Strategies that a test registers are forgotten after it."""
    with mock.patch.dict(registry.REGISTERED):
        yield


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone, enough for DDP and FSDP2 to wrap a model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts; whatever is left of them and their children is killed."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[machines.Cluster]:
    """Two machines, in namespaces of this one; they end with whatever runs on them."""
    if why := machines.why_not():
        pytest.skip(why)
    with closing(machines.Cluster(tmp_path, 2)) as made:
        yield made


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> list[machines.Machine | None]:
    """Two machines with networks of their own, where these can be made; else both are this one, on loopback."""
    return [None, None] if machines.why_not() else request.getfixturevalue("cluster").machines


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's URL is unreachable, and the PATH is empty, unless a test changes that."""
    monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{closed_port()}/cifar-10-python.tar.gz")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def small_cifar10(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The MD5s of the small data set in the place of the published ones."""
    md5s = {name: hashlib.md5(data).hexdigest() for name, data in FILE_BYTES.items()}
    monkeypatch.setattr(cifar10, "MD5S", md5s)
    return md5s


@pytest.fixture
def npm(no_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNpm:  # noqa: ARG001
    """The only program on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeNpm(folder, monkeypatch)


@pytest.fixture
def logging_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Weights & Biases without its server, and MLflow with a folder of files."""
    settings = {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"{tmp_path.as_uri()}/mlruns",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    wandb, mlflow = (pytest.importorskip(name) for name in ("wandb", "mlflow"))
    yield wandb, mlflow
    wandb.teardown()


@pytest.fixture
def cached_cifar10(tmp_path: Path, small_cifar10: dict[str, str]) -> Path:
    """A root that holds the small data set."""
    folder = tmp_path / "root" / "cifar10"
    folder.mkdir(parents=True)
    for name in small_cifar10:
        (folder / name).write_bytes(FILE_BYTES[name])
    names = "\n".join(cifar10.CLASSES)
    (folder / cifar10.META).write_text(f"{names}\n\n")  # the official file ends in an empty line
    return folder.parent


@pytest.fixture
def device() -> Iterator[gpu_device.Device]:
    """The GPU, for tests marked `gpu`; they fail if nothing was computed on it."""
    with gpu_device.at_work() as found:
        yield found
