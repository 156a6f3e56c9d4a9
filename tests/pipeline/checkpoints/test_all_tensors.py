"""The state of a model is all its tensors: non-persistent buffers and complex ones are evaluated, kept and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from drivetrain import CheckpointError, PlanError
from drivetrain.common.model_state import BufferCopies, unlisted_tensors
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.checkpoints.content import CheckpointContent
from drivetrain.pipeline.checkpoints.weights import load_model, open_tensors, save_weights
from drivetrain.pipeline.runs.result import load_run
from drivetrain.strategies import launch
from drivetrain.transforms import EMA, SAM, SWA, Lookahead
from drivetrain.transforms.common.averaging import Averages
from msgspec import structs
from pipeline_data import Toy
from safetensors.torch import load_file
from stateful_models import Complex, Growing, Remembering, difference, kept

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = {
    "plain": [], "ema": [EMA(half_life=3)], "swa": [SWA(0.2, 0.9)], "lookahead": [Lookahead()],
    "sam": [SAM()],
}  # fmt: skip
ON_RANKS = ["ddp", "zero_redundancy", "fsdp", "deepspeed_stage_2", "fairscale_oss"]


REFUSED = {
    "Complex zero_redundancy": "one dtype", "Complex fsdp": "only real ones can be sharded",
    "Complex deepspeed_stage_2": "only real ones can be sharded", "Complex fairscale_oss": "one dtype",
}  # fmt: skip
"""Backends that put all parameters into one buffer."""


def check(found: object, name: str, exact: bool = True) -> None:
    assert not isinstance(found, str), f"{name}: {found}"
    metrics, *others, difference = found
    for other in others:
        assert other == (metrics if exact else pytest.approx(metrics, abs=1e-5)), name
    assert difference <= (0.0 if exact else 1e-5), name


@pytest.mark.parametrize("model", [Remembering, Complex])
def test_what_was_trained_is_evaluated_kept_and_resumed(model: type, toy: Toy, tmp_path: Path) -> None:
    pipelines = {name: toy.pipeline(model).transform(*methods) for name, methods in METHODS.items()}
    for name, found in kept(pipelines | {"growing": toy.pipeline(Growing)}, tmp_path).items():
        check(found, name)


@pytest.mark.process
@pytest.mark.long
def test_on_ranks(toy: Toy, tmp_path: Path) -> None:
    pipelines = {
        f"{model.__name__} {name}": toy.pipeline(model).distribute(name, devices=2, device="cpu")
        for model in (Remembering, Complex)
        for name in ON_RANKS
    }
    for name, found in launch(kept, pipelines, tmp_path, devices=2, timeout=200)[0].items():
        if name in REFUSED:
            assert re.fullmatch(f"StrategyError: .* the parameter .*{REFUSED[name]}.*'ddp'.", found), found
        else:
            check(found, name, exact=False)


def test_the_weights_load_in_plain_torch_and_the_rest_lies_beside(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(Growing)
    result = pipeline.fit(epochs=1, progress=False, out=tmp_path)
    plain = Growing()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    rest = load_file(tmp_path / "model.unlisted.safetensors")
    assert rest.keys() == {"mean", "spread", "steps", "late"}
    assert rest["steps"] == 4
    assert difference(load_run(tmp_path).model, result.model) == 0

    (tmp_path / "model.unlisted.safetensors").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"belongs together with model\.unlisted\.safetensors.*missing"):
        pipeline.evaluate(tmp_path)
    save_weights({"mean": torch.zeros(8)}, tmp_path / "model.unlisted.safetensors")
    with pytest.raises(CheckpointError, match="of another moment"):
        pipeline.evaluate(tmp_path / "model.safetensors")
    assert not load_model(tmp_path / "model.safetensors", epochs=1)


def test_checkpoints_of_older_versions(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have no file of non-persistent buffers."""
    pipeline = toy.pipeline(Remembering)
    pipeline.fit(epochs=1, progress=False, out=tmp_path, checkpoints=Checkpoints(every_steps=2, keep=9))
    old = tmp_path / "checkpoints/step-00000002"
    content = CheckpointContent.from_json((old / "state.json").read_bytes())
    (old / "unlisted.safetensors").unlink()
    files = {name: about for name, about in content.files.items() if name != "unlisted.safetensors"}
    (old / "state.json").write_bytes(structs.replace(content, files=files, drivetrain="0.1").to_json())
    pipeline.fit(epochs=1, resume=old)
    assert "did not save the non-persistent buffers: mean, spread, steps begin" in capsys.readouterr().out


def test_complex_numbers_are_averaged() -> None:
    model = Complex()
    first = {
        name: value.clone()
        for name, value in {**dict(model.named_parameters()), **unlisted_tensors(model)}.items()
    }
    averages = Averages(model)
    with torch.no_grad():
        model.turn += 2j
        model.wide += 4
    averages.add(0.25)
    averages.install()
    torch.testing.assert_close(model.turn.data, first["turn"].data + 0.5j)
    torch.testing.assert_close(model.wide, first["wide"] + 1)


def test_the_average_of_a_buffer_that_grows_begins_again() -> None:
    model = Growing()
    model(torch.randn(2, 3, 16, 16))  # one value is there
    averages = Averages(model)
    for length in (2, 3):
        model(torch.randn(2, 3, 16, 16))
        averages.add(0.25)
        assert averages.state_dict()["late"].shape == (length,)
        torch.testing.assert_close(averages.state_dict()["late"], model.late, rtol=0, atol=0)
    late = model.late.clone()
    model(torch.randn(2, 3, 16, 16))
    averages.add(0.25)
    torch.testing.assert_close(averages.state_dict()["late"], late + 0.25 * (model.late - late))
    other = Averages(Growing())
    with pytest.raises(PlanError, match="'late'"):
        other.load_state_dict(averages.state_dict())


def test_buffers_that_a_forward_replaces_are_restored() -> None:
    model = Growing()
    before = {name: value.clone() for name, value in model.named_buffers()}
    kept, spread = BufferCopies(model), model.spread
    for _ in range(2):
        model(torch.randn(2, 3, 16, 16))
    kept.restore()
    assert model.spread is spread
    assert model.late is None
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_dtypes_in_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(3, 2, dtype=torch.complex128).to(dtype).t()
    save_weights({"b": value, "a": torch.ones(1)}, tmp_path / "x.safetensors", about={"z": "1", "y": "2"})
    save_weights({"a": torch.ones(1), "b": value}, tmp_path / "y.safetensors", about={"y": "2", "z": "1"})
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    found = open_tensors(tmp_path / "x.safetensors")["b"]
    assert found.dtype == dtype
    torch.testing.assert_close(
        torch.view_as_real(found), torch.view_as_real(value.contiguous()), rtol=0, atol=0
    )
    header = (tmp_path / "x.safetensors").read_bytes()[8:]
    kinds = json.JSONDecoder().raw_decode(header.decode("latin1"))[0]
    assert ("complex" in kinds["__metadata__"]) == (dtype != torch.complex64)
