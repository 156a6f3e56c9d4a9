"""DeepSpeed's ZeRO on real CPU ranks, compared with `Single` on the same global batches."""

from dataclasses import replace
from typing import Any

import fsdp_models as models
import pytest
import torch
from deepspeed_jobs import DISCARDING, FIRST, MOVED, MOVES, every_case, everything, moved
from deepspeed_methods import OFFLOAD, STAGES, averaged
from drivetrain import Pipeline
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import DeepSpeed, launch
from drivetrain.strategies.deepspeed.engine import _blank
from drivetrain.strategies.deepspeed.strategy import _deferred
from drivetrain.transforms import (
    EMA,
    ChannelsLast,
    MixUp,
    NoWeightDecay,
    ProgressiveResizing,
    SelectiveBackprop,
    TestTimeFlip,
    WeightStandardization,
)
from fsdp_jobs import on_meta, surgeries
from parity_jobs import BF16, CASES, FEW, KINDS, Case, Run, longer, same_run, train, weights
from pipeline_data import Toy, numbers, plain_model
from step_option_jobs import DEEPSPEED, check_run
from strategy_jobs import make_optimizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
Ranks = list[dict[str, Any]]
stages = pytest.mark.parametrize("name", STAGES)
FITTED = {"clipped accumulated": STAGES[2], "methods": STAGES[2], "batches": STAGES[2], "averaged": STAGES[1]}
"""The strategy that each pipeline is trained with."""


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach"])
def test_a_count_of_steps_is_resumed_where_the_optimizer_reads_it(option: str) -> None:
    """The meta device is in the place of a GPU."""
    flat, entry = torch.empty(4, device="meta"), {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}
    blank = _blank(flat, entry, {option: True})
    assert blank["step"].device.type == ("cpu" if option == "foreach" else "meta")
    assert blank["exp_avg"].shape == (4,)


@pytest.fixture(scope="module")
def pipelines(toy: Toy) -> dict[str, tuple[Pipeline, dict[str, Any]]]:
    """Name: a pipeline, and its options of `distribute` other than the strategy."""
    return {
        "clipped accumulated": (toy.pipeline(plain_model), {"clip_norm": 0.05, "accumulate": 2}),
        "methods": (
            toy.pipeline().transform(ChannelsLast(), WeightStandardization(), NoWeightDecay()).replace(seed=1),
            {},
        ),
        "batches": (
            toy.pipeline(plain_model).transform(
                SelectiveBackprop(), MixUp(), TestTimeFlip(), ProgressiveResizing(finetune=0.25)
            ),
            {},
        ),
        "averaged": (toy.pipeline(plain_model).transform(EMA(half_life=3)), {}),
    }


@pytest.fixture(scope="module")
def ranks(pipelines: Any) -> Ranks:
    """Both ranks' results of everything, from one launch."""
    asked = {
        name: pipeline.distribute(FITTED[name], devices=2, device="cpu", **how)
        for name, (pipeline, how) in pipelines.items()
    }
    return launch(everything, asked, devices=2, timeout=280)


def check_cases(ranks: Ranks, names: list[str], cases: list[Case], tolerance: float = 1e-5) -> None:
    for case in cases:
        single = train("single", case, parts=len(ranks))
        for name in names:
            for rank in ranks:
                same_run(rank[f"{name} {case.name}"], single, tolerance)
            first, last = (counted_alike(rank[f"{name} {case.name}"], case) for rank in (ranks[0], ranks[-1]))
            torch.testing.assert_close(first, last, rtol=0, atol=0)


def counted_alike(run: Run, case: Case) -> dict[str, torch.Tensor]:
    """The state; without the counts of BatchNorms that each rank skips by its own draws."""
    drawn = "num_batches" if case.name == "StochasticDepth" else "nothing"
    return {name: tensor for name, tensor in run.state.items() if drawn not in name}


@stages
def test_two_ranks_train_like_one_device(ranks: Ranks, name: str) -> None:
    check_cases(ranks, [name], FEW)


@pytest.mark.parametrize("name", OFFLOAD)
def test_two_ranks_that_offload_train_like_one_device(ranks: Ranks, name: str) -> None:
    check_cases(ranks, [name], FEW[:1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_strategy_trains_every_case_like_one_device(devices: int) -> None:
    ranks = launch(every_case, devices=devices, timeout=850)
    check_cases(ranks, [*STAGES, *OFFLOAD], longer(CASES))
    check_cases(ranks, OFFLOAD[1:], longer(KINDS))
    check_cases(ranks, [*STAGES[1:], *OFFLOAD[1:]], longer(BF16), 2e-2)
    if devices == 2:  # on four, sums in another order change the sixth digit: these models diverge
        check_cases(ranks, STAGES[1:], surgeries())
    for name in (*STAGES, *OFFLOAD):
        check_discarded(ranks, name)
    for case in longer(MOVED):
        single = train("single", case, parts=devices)
        for rank in ranks:
            for first, second in MOVES:
                same_run(rank[f"{first} to {second} {case.name}"][0], single, 1e-5)
    for rank in ranks:
        for name in STAGES:
            check_held(rank["held"][name], name, devices)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_other_models_train_like_one_device(ranks: Ranks, case: Case) -> None:
    """Tied weights and a block that runs twice, frozen parameters, a single layer, channels-last weights."""
    check_cases(ranks, STAGES[2:], [case])


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_changed_models_train_like_one_device(ranks: Ranks, case: Case) -> None:
    """Surgeries, as declared in the catalogue, under the stage that divides most."""
    check_cases(ranks, STAGES[2:], [case])


@pytest.mark.parametrize("name", STAGES[1:])
@pytest.mark.parametrize("case", BF16[1:], ids=lambda case: case.name)
def test_bf16_trains_like_autocast_on_one_device(ranks: Ranks, name: str, case: Case) -> None:
    """bf16 rounds at 2^-8; the weights that are trained, and exported, are fp32."""
    check_cases(ranks, [name], [case], 2e-2)
    for rank in ranks:
        exported = weights(rank[f"{name} {case.name}"])
        assert all(tensor.dtype == torch.float32 for tensor in exported.values())


def test_statistics_and_evaluation_are_those_of_ddp(ranks: Ranks) -> None:
    """`sync_buffers` reduces BatchNorm's statistics, in the middle of training and at its end."""
    for rank in ranks:
        ddp = rank[f"ddp {FEW[0].name}"]
        for name in STAGES:
            run = rank[f"{name} {FEW[0].name}"]
            torch.testing.assert_close(run.state, ddp.state, rtol=1e-5, atol=1e-5)
            assert run.evaluated == pytest.approx(ddp.evaluated, rel=1e-4)


@pytest.mark.parametrize(("first", "second"), MOVES[:4])
def test_a_training_moves_between_strategies(ranks: Ranks, first: str, second: str) -> None:
    """With weights and optimizer state exported by one and imported by the other, training continues unchanged."""
    single, state = moved("single", "single", replace(MOVED[0], accumulate=MOVED[0].accumulate * 2))
    for rank in ranks:
        run, optimizer = rank[f"{first} to {second}"]
        same_run(run, single, 1e-5)
        assert optimizer.entries.keys() == state.entries.keys()
        for name, entry in state.entries.items():
            torch.testing.assert_close(dict(optimizer.entries[name]), dict(entry), rtol=0, atol=1e-5)
        assert [group["params"] for group in optimizer.groups] == [g["params"] for g in state.groups]


@pytest.mark.parametrize("name", [*STAGES, *OFFLOAD])
def test_adam_on_the_cpu_is_torchs_fused_one(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert rank["fused"][name] == [("AdamW", True if name in OFFLOAD else None), ("SGD", None)]


@pytest.mark.parametrize(("strategy", "name"), DEEPSPEED)
def test_recomputed_models_train_as_on_one_device(ranks: Ranks, strategy: str, name: str) -> None:
    """Those of the other strategies are in test_step_options.py."""
    check_run(ranks[0]["options"], strategy, name, 2)


@pytest.mark.parametrize("name", DISCARDING)
def test_gradients_that_were_thrown_away_leave_no_trace(ranks: Ranks, name: str) -> None:
    check_discarded(ranks, name)


def check_discarded(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        none, some, all_ = rank["discarded"][name]
        torch.testing.assert_close(some, none, rtol=0, atol=0)
        torch.testing.assert_close(all_, none, rtol=0, atol=0)


def check_held(held: dict[str, float], name: str, devices: int) -> None:
    """In bytes per parameter: 4 for the parameter, for its gradient, and for the copy that AdamW's 8 belong to."""
    parameters = 4 / devices if name == "deepspeed_stage_3" else 4
    expected = {"parameters": parameters, "gradients": 4 / devices, "optimizer": 12 / devices}
    assert held == pytest.approx(expected, rel=0.05)
    assert sum(held.values()) <= 1.05 * sum(expected.values())


@stages
def test_bytes_per_parameter(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        check_held(rank["held"][name], name, 2)


@stages
def test_a_model_on_the_meta_device_begins_with_rank_0s_random_numbers(ranks: Ranks, name: str) -> None:
    torch.manual_seed(0)
    expected = on_meta().state_dict()
    for rank in ranks:
        torch.testing.assert_close(rank["meta"][name], dict(expected), rtol=0, atol=0)


@stages
def test_methods_work_or_are_declared_unsafe(ranks: Ranks, name: str) -> None:
    """What each `unsafe_with` rests on."""
    expected = averaged("single")
    for rank in ranks:
        found = rank["methods"]
        if name == "deepspeed_stage_3":
            assert "has partitioned it across the ranks" in found[f"EMA {name}"]
            assert "has partitioned it across the ranks" in found[f"SWA {name}"]
        else:
            torch.testing.assert_close(found[f"EMA {name}"], expected, rtol=0, atol=1e-5)
            assert found[f"SWA {name}"] > 1e-4  # the step continued from the weights before the mean
        assert found[f"SAM {name}"].startswith("PlanError")
        assert found[f"GradientClipping {name}"].startswith("PlanError")
        moves = found[f"LayerFreezing {name}"]
        assert isinstance(moves, str) or moves > 1e-4


@pytest.mark.parametrize("name", FITTED)
def test_a_pipeline_trains_like_one_device(ranks: Ranks, pipelines: Any, name: str) -> None:
    pipeline, how = pipelines[name]
    alone = {"accumulate": 2} if name == "batches" else how  # two ranks choose and mix as two microbatches
    same_fit(ranks[0]["pipelines"][name], pipeline.distribute("single", **alone))


def same_fit(found: Any, pipeline: Pipeline) -> None:
    alone = pipeline.fit(epochs=2, progress=False)
    assert not isinstance(found, str), found
    for one, two in zip(numbers(alone), found[0], strict=True):
        assert two == pytest.approx(one, abs=1e-5)
    torch.testing.assert_close(found[1], alone.model.state_dict(), rtol=1e-5, atol=1e-5)


def test_it_is_quiet_and_changes_nothing_around_it(ranks: Ranks) -> None:
    for rank in ranks:
        before, after = rank["process"]
        assert after == before
        assert rank["printed"] == ""


def test_it_is_imported_at_use_only_and_says_how_it_is_installed(ranks: Ranks) -> None:
    for rank in ranks:
        row, error = rank["missing"]
        assert row.startswith("deepspeed is needed to ")
        assert error.startswith("MissingExtra: deepspeed is needed to ")
        assert all("pip install 'drivetrain[deepspeed]'" in told for told in (row, error))


def test_it_does_not_import_what_is_not_used(ranks: Ranks) -> None:
    assert [rank["imported"] for rank in ranks] == [[], []]


def test_what_is_compiled_late_is_compiled_once() -> None:
    compiled: list[tuple[Any, ...]] = []

    def compile_(mode: str) -> Any:
        return lambda function: compiled.append((mode, function(1))) or function

    @_deferred(compile_)("default")
    def double(value: int) -> int:
        return 2 * value

    assert compiled == []
    assert (double(2), double(value=3), double.__name__) == (4, 6, "double")
    assert compiled == [("default", 2)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("twice", "'deepspeed_stage_3': DeepSpeed has already sharded the parameter 'weight'"),
        ("scalar", "'deepspeed_stage_1': the parameter 'scale' has no dimension"),
        ("wrapped", "'deepspeed_stage_2': the model is already wrapped in DistributedDataParallel"),
        ("lazy", "'deepspeed_stage_3': the parameter '0.weight' has no shape"),
        ("infinite", "the gradients are not finite"),
        ("uneven", "'step' is 1.0 for 'weight' and 2.0 for 'bias'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ranks: Ranks, what: str, words: str) -> None:
    assert words in ranks[0]["refusals"][what]


@stages
def test_alone_in_a_process_it_is_single(name: str) -> None:
    same_run(train(name, CASES[1]), train("single", CASES[1]), 0)


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"config": {}}], ids=str)
def test_alone_in_a_process_offload_and_config_would_do_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="no process group"):
        DeepSpeed("cpu", **options).prepare(models.resnet(), make_optimizer("sgd"))
