"""Callbacks on two ranks: whole gradients under every strategy, stops and errors that all ranks agree on."""

from functools import partial
from typing import Any

import pytest
import torch
from callback_jobs import OnRankOne, both, fail_before_gradients, fail_during_a_collective, sums_of
from deepspeed_methods import options_of
from drivetrain import DrivetrainError, EarlyStopping, Pipeline, StrategyError
from drivetrain.strategies import launch
from drivetrain.transforms import EMA
from pipeline_data import Toy, plain_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
STRATEGIES = ["ddp", "fsdp", "zero_redundancy", "fairscale_sharded_ddp"]
STAGES = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


def on_two(pipeline: Pipeline, strategy: str) -> Pipeline:
    return pipeline.distribute(strategy, devices=2, device="cpu", **options_of(strategy))


@pytest.fixture(scope="module")
def ranks(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    plain = toy.pipeline(plain_model)
    averaged = plain.transform(EMA(half_life=3))
    return launch(
        both, {name: on_two(plain, name) for name in STRATEGIES},
        {name: on_two(averaged, name) for name in ("ddp", "fsdp")}, tmp_path_factory.mktemp("runs"),
        devices=2, timeout=200,
    )  # fmt: skip


def compare(of_ranks: list[list[dict[str, float]]], toy: Toy) -> None:
    """The norms that each rank saw with those of one device."""
    alone = sums_of({"single": toy.pipeline(plain_model)})["single"]
    for steps in of_ranks:
        assert len(steps) == len(alone) == 4
        for one, two in zip(alone, steps, strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_and_parameters_are_those_of_one_device(strategy: str, toy: Toy, ranks: list[Any]) -> None:
    compare([sums[strategy] for sums, _ in ranks], toy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STAGES)
def test_those_of_deepspeed_too(strategy: str, toy: Toy) -> None:
    pipeline = on_two(toy.pipeline(plain_model), strategy)
    compare([sums["it"] for sums in launch(sums_of, {"it": pipeline}, devices=2, device="cpu", timeout=200)], toy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_wish_of_one_rank_stops_all_after_the_same_step(strategy: str, ranks: list[Any]) -> None:
    for _, runs in ranks:
        found = runs[strategy]
        assert (found["reason"], found["steps"], found["epochs"]) == ("rank 1 has seen enough", 6, 1)
        torch.testing.assert_close(found["stopped"], ranks[0][1][strategy]["stopped"], rtol=0, atol=0)
        assert found["after"] == 12
        torch.testing.assert_close(found["resumed"], found["whole"], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_has_its_own_state_of_a_callback_again(strategy: str, ranks: list[Any]) -> None:
    assert [runs[strategy]["restored"] for _, runs in ranks] == [0, 1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_error_on_one_rank_is_raised_on_all(strategy: str, ranks: list[Any]) -> None:
    for _, runs in ranks:
        error = runs[strategy]["error"]
        assert error.startswith("OnRankOne.on_step_end failed on rank 1: ZeroDivisionError: on the last rank\n")
        assert 'raise ZeroDivisionError("on the last rank")' in error


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_cuda_ranks_agree_one_step_later_and_at_the_end_of_an_epoch(strategy: str, ranks: list[Any]) -> None:
    """The same code on the CPU: at step 2 of an epoch of four steps, after step 3; at the last step, after it."""
    for _, runs in ranks:
        steps, error = runs[strategy]["late"]
        assert steps == [3, 4]
        assert error.startswith("OnRankOne.on_step_end failed on rank 1: ZeroDivisionError")


@pytest.mark.parametrize("every", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_during_a_collective_of_another_rank_ends_the_run(every: int | None, toy: Toy) -> None:
    """Also at a step that is evaluated. Rank 0 never leaves its collective, so rank 1 raises alone."""
    pipeline = on_two(toy.pipeline(plain_model), "ddp")
    with pytest.raises(StrategyError) as caught:
        launch(partial(fail_during_a_collective, eval_every_steps=every), pipeline, devices=2, timeout=100)
    assert "rank 1 of 2 raised DrivetrainError: Collective.on_step_end failed on rank 1" in str(caught.value)
    assert "ZeroDivisionError: instead of a collective" in str(caught.value)
    assert "did not get through the same event within 1 s" in str(caught.value)


def test_an_error_before_gradients_are_gathered_ends_the_run_at_once(toy: Toy) -> None:
    """The ranks of this strategy sum them, where rank 0 would wait for rank 1."""
    pipeline = on_two(toy.pipeline(plain_model), "fairscale_sharded_ddp")
    with pytest.raises(StrategyError) as caught:
        launch(fail_before_gradients, pipeline, devices=2, timeout=60)
    assert "rank 1 of 2 raised DrivetrainError: Unanswered.needs_gradients failed on rank 1" in str(caught.value)
    assert "ZeroDivisionError: instead of an answer" in str(caught.value)
    assert "did not get through the same event" not in str(caught.value)


@pytest.mark.slow
def test_ranks_that_fit_starts_send_back_the_callbacks_states(toy: Toy) -> None:
    pipeline = on_two(toy.pipeline(plain_model).optimize("sgd", lr=1e-9), "ddp")
    counting, early = OnRankOne(), EarlyStopping(patience=1, min_delta=0.1)
    result = pipeline.fit(epochs=4, progress=False, callbacks=[counting, early])
    assert len(result.history.epochs) == 2
    assert result.stopped is not None
    assert counting.steps == 8
    assert early.best == result.history.epochs[0].val_loss
    with pytest.raises(DrivetrainError, match="failed on rank 1: ZeroDivisionError: on the last rank"):
        pipeline.fit(epochs=1, progress=False, callbacks=[OnRankOne(fail=2)])
