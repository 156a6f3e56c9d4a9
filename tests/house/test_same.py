"""`make same`: its trainings have every part of the house, and a number that changes is named."""

from drivetrain.common.options.config import options_of
from drivetrain.loaders.options import LoaderOptions
from drivetrain.pipeline.optim.optimizers import OPTIMIZERS
from drivetrain.pipeline.tasks import TASKS
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.transforms import TRANSFORMS
from places import load_script
from same_cases import CASES

ELSEWHERE = {"auto", "deepspeed.strategy"}
"""Strategies' modules: one chooses another, one takes minutes to compile."""


def test_every_part_has_a_training() -> None:
    cases = CASES.values()
    transforms = {type(transform).__name__ for case in cases for transform in case.transforms}
    assert TRANSFORMS.keys() - transforms == {"SeqLengthWarmup"}  # for text
    names = {case.distribute.get("strategy", "single") for case in cases}
    assert "zero_redundancy" in names  # of the module of ddp
    assert {known[0] for known in STRATEGIES.values()} - {STRATEGIES[name][0] for name in names} == ELSEWHERE
    tasks = {type(case.task).__name__ for case in cases if case.task is not None}
    assert tasks == set(TASKS)
    optimizers = {case.optimize.get("optimizer", "sgd") for case in cases}
    assert optimizers == OPTIMIZERS.keys() - {"adam"}  # adamw's
    assert {case.load.get("order", "random") for case in cases} == set(
        options_of(LoaderOptions)["order"].choices
    ) - {"sequential"}
    assert {case.distribute.get("precision", "fp32") for case in cases} == {"fp32", "bf16"}
    assert any(case.resumed for case in cases)


def test_a_difference_is_named() -> None:
    different = load_script("same").different
    epochs = [{"loss": (1.0).hex(), "val_loss": None, "metrics": {"top1": (0.5).hex()}}]
    other = [{**epochs[0], "metrics": {"top1": (0.25).hex()}}]
    before = {name: {"epochs": epochs, "weights": "a"} for name in ("equal", "metric", "weights", "gone")}
    now = before | {
        "metric": {"epochs": other, "weights": "a"},
        "weights": {"epochs": epochs, "weights": "b"},
    }
    del now["gone"]
    metric, weights, gone = different(before, now)
    assert metric.startswith("metric: epoch 0: {")
    assert (0.25).hex() in metric
    assert weights == "weights: the weights differ"
    assert gone == "gone: is missing now"
