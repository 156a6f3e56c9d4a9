"""Ranks that tests fork answer as those that are started, wherever their answers go."""

import os
from contextlib import ExitStack

import pytest
from drivetrain.strategies import launch


@pytest.mark.process
def test_a_process_with_many_open_files() -> None:
    """The answer's number is among those that `rank_server.become` uses itself."""
    with ExitStack() as files:
        number = 0
        while number < 199:
            number = os.open(os.devnull, os.O_RDONLY)
            files.callback(os.close, number)
        assert launch(os.getpid, devices=1, device="cpu", timeout=60) != [os.getpid()]
