"""Pipelines whose models are on the meta device: where their values come from, and what is refused."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import DrivetrainError, Pipeline, PlanError, StrategyError, strategies
from drivetrain.pipeline import FitResult
from drivetrain.strategies import launch
from drivetrain.transforms import Factorize, SqueezeExcite
from meta_jobs import Partly, Scaled, kept, on, on_both, on_meta, sharded
from pipeline_data import CLASSES, Layered, Toy, batch_norm_model, numbers, plain_model
from safetensors.torch import save_file

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]


@pytest.fixture(scope="module")
def ranks(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(on_both, toy, tmp_path_factory.mktemp("meta") / "run", devices=2, timeout=240)


@pytest.mark.parametrize("what", ["resumed", "begun with step-00000006", "begun with run", "evaluated"])
def test_loaded_weights_give_the_same_run_as_on_the_cpu(ranks: list[dict[str, Any]], what: str) -> None:
    """Of a model that nothing else initializes."""
    for rank in ranks:
        torch.testing.assert_close(rank[f"{what}, meta"], rank[f"{what}, cpu"], rtol=0, atol=0)
    if what == "resumed":
        torch.testing.assert_close(ranks[0]["resumed, meta"], ranks[0]["first"], rtol=0, atol=0)


def test_the_seed_gives_the_same_run_on_any_number_of_ranks(ranks: list[dict[str, Any]], toy: Toy) -> None:
    alone = sharded(toy, on_meta, ranks=1).fit(epochs=1, progress=False)
    torch.manual_seed(1)  # which does not matter
    assert kept(sharded(toy, on_meta, ranks=1).fit(epochs=1, progress=False))[0] == numbers(alone)
    for rank in ranks:
        torch.testing.assert_close(rank["from the seed"], numbers(alone), rtol=1e-5, atol=1e-5)
    other = sharded(toy, on_meta, ranks=1).replace(seed=1).fit(epochs=1, progress=False)
    assert numbers(other) != numbers(alone)


def refusal(pipeline: Pipeline, **fit: Any) -> str:
    with pytest.raises(DrivetrainError) as caught:
        pipeline.fit(epochs=1, progress=False, **fit)
    assert isinstance(caught.value, PlanError | StrategyError)
    return str(caught.value)


def test_what_nothing_initializes_is_refused(toy: Toy, tmp_path: Path) -> None:
    pipeline = sharded(toy, on("meta", Scaled), ranks=1)
    words = (
        "The model, a Scaled, is on the meta device and has no reset_parameters() to initialize scale, shift. "
        "Add that method"
    )
    assert words in refusal(pipeline)
    assert words in refusal(pipeline, resume="auto", out=tmp_path)  # where there is no checkpoint
    weights = {name: value for name, value in Scaled().state_dict().items() if name != "scale"}
    save_file(weights, tmp_path / "own.safetensors")
    assert words in refusal(pipeline, init_from=tmp_path / "own.safetensors")


def test_what_reset_parameters_forgets_is_refused(toy: Toy, tmp_path: Path) -> None:
    pipeline = sharded(toy, on("meta", Partly), ranks=1)
    words = (
        "The model, a Partly, is on the meta device and its reset_parameters() does not initialize "
        "shift, count, bytes, mask. Add them there"
    )
    assert words in refusal(pipeline)
    assert words in refusal(pipeline, resume="auto", out=tmp_path)  # where there is no checkpoint
    with pytest.raises(StrategyError, match=r"the model, a Partly, .* does not initialize"):
        strategies.get("fsdp").prepare(on("meta", Partly), partial(torch.optim.SGD, lr=0.1))
    sharded(toy, on("cpu", Partly), ranks=1).fit(epochs=1, out=tmp_path / "run", progress=False)
    for source in ("init_from", "resume"):
        begun = pipeline.fit(epochs=2, progress=False, **{source: tmp_path / "run"})
        assert begun.model.state_dict()["count"] == 0
        assert begun.model.shift.isfinite().all()


def test_weights_for_another_last_layer(toy: Toy, tmp_path: Path) -> None:
    state = plain_model(CLASSES + 1).state_dict()
    save_file(state, tmp_path / "own.safetensors")
    pipeline = sharded(toy, on_meta, ranks=1).optimize("sgd", lr=1e-9)
    result = pipeline.fit(epochs=1, init_from=tmp_path / "own.safetensors", progress=False)
    own = result.model.state_dict()
    torch.testing.assert_close(own["0.weight"], state["0.weight"])
    assert own["4.weight"].isfinite().all()
    assert own["4.weight"].abs().sum() > 0


def test_a_surgery_that_needs_values_is_refused(toy: Toy) -> None:
    pipeline = sharded(toy, on_meta, ranks=1)
    found = refusal(pipeline.transform(Factorize(min_channels=2)))
    assert "Factorize reads or sets values of weights, and on_meta is on the meta device" in found
    result = pipeline.transform(SqueezeExcite(min_channels=2)).fit(epochs=1, progress=False)
    assert all(value.isfinite().all() for value in result.model.state_dict().values())


class Searching(Layered):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(images)
        return found if found.sum().item() > 0 else -found


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (lambda toy: toy.pipeline(on_meta), "prepare: Sequential is on the meta device.* Use 'fsdp', also with one"),
        (lambda toy: sharded(toy, on("meta", lambda: plain_model(7)), 1), r"returns \(2, 7\) for 2 images"),
        (lambda toy: sharded(toy, on("meta", Searching), 1), "If its forward depends on values"),
    ],
    ids=["single", "width", "values"],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused(toy: Toy, pipeline: Any, words: str) -> None:
    assert re.search(words, refusal(pipeline(toy)))


def test_lightning_is_refused(toy: Toy) -> None:
    with pytest.raises(PlanError, match="on_meta is on the meta device, which only fit"):
        sharded(toy, on_meta).to_lightning(epochs=1)


@pytest.mark.parametrize("model", [on_meta, on("meta", plain_model)], ids=["factory", "module"])
def test_the_plan_says_what_is_held(toy: Toy, model: Any) -> None:
    row = sharded(toy, model).plan().steps[-1]
    assert row.why.endswith("a checkpoint or init_from= gives the values")
    assert "Each rank first builds" in sharded(toy, plain_model).plan().steps[-1].why


def test_the_summary_is_that_of_the_model_on_the_cpu(toy: Toy) -> None:
    one, other = (toy.pipeline(on(device, batch_norm_model)).summary() for device in ("cpu", "meta"))
    assert repr(one) == repr(other)
    assert not one.unknown


def test_a_run_is_loaded_from_its_folder(toy: Toy, tmp_path: Path) -> None:
    result = sharded(toy, on_meta, ranks=1).fit(epochs=1, out=tmp_path, progress=False)
    assert isinstance(result, FitResult)
    assert {value.device.type for value in result.model.state_dict().values()} == {"cpu"}
    assert result.evaluate(toy.val) == {name: pytest.approx(each) for name, each in result.metrics.items()}
