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


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone, enough for DDP and FSDP2 to wrap a model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
