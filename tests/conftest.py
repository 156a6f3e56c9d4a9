"""Fixtures that more than one test file uses."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import composer_reference
import pytest
from pipeline_data import Toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A converted toy data set, made once."""
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def composer() -> ModuleType:
    """`composer.functional`, imported quietly."""
    return composer_reference.load("composer.functional")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in ranks: sums, and the random numbers of some models, depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone, enough for DDP and FSDP2 to wrap a model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
