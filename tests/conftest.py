"""Fixtures that more than one test file uses."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
from pipeline_data import Toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A converted toy data set, made once."""
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def composer() -> ModuleType:
    """`composer.functional`. Importing it takes seconds, warns, and replaces two signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import composer.functional as functional
        except ImportError as error:
            pytest.skip(f"Composer, the reference, is not installed: {error}")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return functional


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone, enough for DDP and FSDP2 to wrap a model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
