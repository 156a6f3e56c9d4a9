"""A run does not depend on what its caller, or a callback, has set in torch or in the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain import Callback, DrivetrainError, RunView
from pipeline_data import SIDE, Toy, left_in, numbers


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        float64,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "float64", "device", "autocast"],
)
def test_the_settings_of_the_caller_change_nothing(
    toy: Toy, around: Callable[[], AbstractContextManager[object]]
) -> None:
    pipeline, image = toy.pipeline(), np.zeros((SIDE, SIDE, 3), np.uint8)
    plain = pipeline.fit(epochs=1, progress=False)
    with around():
        set_by_caller = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.get_default_device(), torch.is_autocast_enabled("cpu"),
        )  # fmt: skip
        result = pipeline.fit(epochs=1, progress=False)
        evaluated, predicted = result.evaluate(), result.predict(image)
        with pipeline.build() as built:
            assert next(built.engine.plain_model.parameters()).dtype == torch.float32
            assert built.begin(1).set_lr(0) == 0.1
        assert set_by_caller == (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.get_default_device(), torch.is_autocast_enabled("cpu"),
        )  # fmt: skip
    assert numbers(result) == numbers(plain)
    assert evaluated == plain.evaluate()
    assert predicted == plain.predict(image)


def test_a_relative_folder_and_another_working_directory(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moves(Callback):
        def on_step_end(self, view: RunView) -> None:
            (tmp_path / f"at{view.step}").mkdir()
            os.chdir(tmp_path / f"at{view.step}")

    monkeypatch.chdir(tmp_path)
    toy.pipeline().fit(epochs=2, out="run", progress=False, callbacks=[Moves()])
    assert left_in(tmp_path / "run") == [
        "checkpoints", "curves.png", "history.json", "model.safetensors", "plan.txt",
    ]  # fmt: skip
    assert not list((tmp_path / "at8").iterdir())


def test_a_history_is_saved_as_json_only(toy: Toy, tmp_path: Path) -> None:
    history = toy.pipeline().fit(epochs=1, progress=False).history
    history.save(tmp_path / "h.json")
    for name, remedy in (
        ("h.png", r"ends in \.json. Its curves are curves\.png"),
        ("h.txt", r"does not end in \.json"),
    ):
        with pytest.raises(DrivetrainError, match=remedy):
            history.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["h.json"]
