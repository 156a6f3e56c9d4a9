"""Schedules: by name with options (torch's own schedulers' numbers), functions of the progress, torch's schedulers."""

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_schedules
import pytest
import torch
from drivetrain import CheckpointError, Pipeline, PlanError, RecipeError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.training.schedule import Schedule
from pipeline_data import Toy, numbers, plain_model
from same_runs import assert_resumes
from torch.optim import lr_scheduler

Factory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
STEPS = 60
PEAK = 0.4


def optimizer(**options: Any) -> torch.optim.SGD:
    first, second = ([torch.nn.Parameter(torch.zeros(1))] for _ in range(2))
    return torch.optim.SGD([{"params": first}, {"params": second, "lr": PEAK / 10}], lr=PEAK, **options)


def ours(steps: int = STEPS, begin: int = 0, **options: Any) -> list[list[float]]:
    """The learning rates of each group at each step, from `begin`."""
    own = optimizer(momentum=0.9)
    schedule = Schedule(OptimizerConfig(**options), own, steps)
    rates = []
    for step in range(begin, steps):
        first = schedule.set_lr(step)
        rates.append([group["lr"] for group in own.param_groups])
        assert first == rates[-1][0]
        own.step()
    return rates


def torchs(make: Factory, steps: int = STEPS) -> list[list[float]]:
    reference = optimizer(momentum=0.9)
    scheduler, rates = make(reference), []
    for _ in range(steps):
        rates.append([group["lr"] for group in reference.param_groups])
        reference.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("step", {}, lambda o: lr_scheduler.StepLR(o, STEPS // 3)),
        ("step", {"every": 0.2, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, STEPS // 5, gamma=0.5)),
        ("multistep", {}, lambda o: lr_scheduler.MultiStepLR(o, [18, 36, 48], gamma=0.2)),
        (
            "multistep",
            {"milestones": [0.05, 0.55], "gamma": 0.3},
            lambda o: lr_scheduler.MultiStepLR(o, [3, 33], gamma=0.3),
        ),
        ("cosine", {}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        ("linear", {"end": 0.1}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS)),
        ("constant", {}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_by_name_the_numbers_of_torchs_schedulers(name: str, options: dict[str, Any], make: Factory) -> None:
    found = ours(schedule=name, schedule_options=options)
    torch.testing.assert_close(found, torchs(make), rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [7, 20, 60, 1000])
@pytest.mark.parametrize("rise", [0.3, 0.45])
def test_one_cycle_has_torchs_curve(steps: int, rise: float) -> None:
    def make(own: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(own, [PEAK, PEAK / 10], total_steps=steps, pct_start=rise)

    found = ours(steps, schedule="onecycle", schedule_options={"rise": rise})
    torch.testing.assert_close(found, torchs(make, steps), rtol=0, atol=1e-12)
    assert all(math.isfinite(rate) for few in (1, 2, 3) for rate, _ in ours(few, schedule="onecycle"))


def test_the_end_of_a_cosine_is_torchs_eta_min() -> None:
    found = [rate for rate, _ in ours(schedule="cosine", schedule_options={"end": 0.1})]
    reference = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=PEAK / 10))
    assert found == pytest.approx([rate for rate, _ in reference], abs=1e-12)


def test_milestones_are_steps_whatever_the_rounding() -> None:
    """A fraction that is a whole number of steps falls on that step."""
    for steps in [*range(2, 40), 390]:
        for at in range(1, steps):
            config = OptimizerConfig(schedule="multistep", schedule_options={"milestones": (at / steps,), "gamma": 0})
            assert config.lr_factor(at - 1, steps) == 1
            assert config.lr_factor(at, steps) == 0
    config = OptimizerConfig(schedule="step", schedule_options={"every": 0.1})
    assert [config.lr_factor(step, 10) for step in range(10)] == pytest.approx([0.1**n for n in range(10)])


def test_warmup_stable_decay() -> None:
    config = OptimizerConfig(schedule="wsd", warmup=0.1)
    factors = [config.lr_factor(step, 100) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factors[10:81] == pytest.approx([1.0] * 71)
    assert factors[81:] == pytest.approx([1 - math.sqrt(n / 20) for n in range(1, 21)], abs=1e-7)
    options = {"decay": 0.5, "shape": "linear", "end": 0.2}
    line = OptimizerConfig(schedule="wsd", schedule_options=options)
    assert [line.lr_factor(step, 4) for step in range(5)] == pytest.approx([1, 1, 1, 0.6, 0.2])


def test_a_function_of_the_progress_follows_the_warmup() -> None:
    config = OptimizerConfig(schedule=lambda progress: 2 - progress, warmup=0.2)
    factors = [config.lr_factor(step, 10) for step in range(10)]
    assert factors[:2] == pytest.approx([2 / 3, 4 / 3])
    assert factors[2:] == pytest.approx([2 - n / 8 for n in range(8)])
    by_name = OptimizerConfig(schedule="own_schedules:dip", schedule_options={"depth": 0.4})
    assert by_name.lr_factor(5, 10) == pytest.approx(0.6)
    assert by_name == OptimizerConfig(schedule=own_schedules.dip, schedule_options={"depth": 0.4})
    assert OptimizerConfig(schedule=math.sqrt).lr_factor(1, 4) == 0.5, "written in C, without names"


SCHEDULERS: dict[str, Factory] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, gamma=0.5),
    "cosine with restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 9),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=20, eta_min=0.01),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.3, 0.2], total_steps=60),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [5],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_step_by_step_and_from_any_step(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR passes the deprecated epoch
        reference = torchs(SCHEDULERS[name])
    found = ours(schedule=SCHEDULERS[name])
    assert found == reference, "the same operations"
    for begin in (1, 13, STEPS - 1):
        assert ours(schedule=SCHEDULERS[name], begin=begin) == reference[begin:]
    warm = ours(schedule=SCHEDULERS[name], warmup=0.2)
    ramp = [(step + 1) / 13 for step in range(12)] + [1.0] * (STEPS - 12)
    expected = [[rate * factor for rate in pair] for pair, factor in zip(reference, ramp, strict=True)]
    assert warm == expected


def test_what_a_scheduler_changes_besides_the_learning_rate_is_restored() -> None:
    def schedule(begin: int) -> list[tuple[float, float]]:
        own = optimizer(momentum=0.9)
        own.param_groups[0]["dampening"] = 0.0
        made = Schedule(OptimizerConfig(schedule=own_schedules.one_cycle), own, 8)
        assert "max_lr" not in own.param_groups[0], "created once to be checked, and undone"
        if begin:  # as a checkpoint does, before the first step
            own.param_groups[0].update(lr=9.0, momentum=0.123, dampening=0.25, max_lr=0.2)
        pairs = []
        for step in range(begin, 8):
            made.set_lr(step)
            pairs.append((own.param_groups[0]["lr"], own.param_groups[0]["momentum"]))
            own.step()
        assert own.param_groups[0]["dampening"] == (0.25 if begin else 0.0), "not the scheduler's"
        return pairs

    whole = schedule(0)
    assert len({momentum for _, momentum in whole}) > 3
    for begin in (1, 4, 7):
        assert schedule(begin) == whole[begin:]


@pytest.mark.parametrize(
    ("lr", "half"), [(torch.tensor(PEAK), 0.5), (PEAK, np.float32(0.5))], ids=["a tensor", "a factor of NumPy's"]
)
def test_learning_rates_that_are_no_floats(lr: Any, half: Any) -> None:
    """torch writes a tensor in place, which another run has, too."""

    def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda step: half ** (step + 1))

    def rates(begin: int) -> list[float]:
        own = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        made = Schedule(OptimizerConfig(schedule=halving), own, 8)
        found: list[float] = []
        for step in range(begin, 8):
            found.append(made.set_lr(step))
            own.step()
        return found

    for begin in (0, 3):
        assert rates(begin) == pytest.approx([PEAK * 0.5**step for step in range(begin + 1, 9)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "No schedule is named 'cosin'.* Did you mean 'cosine'.*multistep.*wsd"),
        ({"schedule": 3}, "schedule=3 must be a name, a function of the progress, or a factory"),
        ({"schedule_options": {"every": 0.3}}, "schedule='cosine' has no option 'every'. Known: end"),
        ({"schedule": "constant", "schedule_options": {"a": 1}}, "has no option 'a'. It has no options"),
        ({"schedule": "step", "schedule_options": {"evry": 0.3}}, "Did you mean 'every'"),
        ({"schedule": "step", "schedule_options": {"every": 0}}, r"every=0 must be a number in \(0, 1\]"),
        ({"schedule": "step", "schedule_options": {"gamma": "0.1"}}, "gamma='0.1' must be a number"),
        ({"schedule": "step", "schedule_options": [0.3]}, r"schedule_options=\[0.3\] must be a dict"),
        ({"schedule": "multistep", "schedule_options": {"milestones": (0.6, 0.3)}}, "must be increasing fractions"),
        ({"schedule": "multistep", "schedule_options": {"milestones": 0.5}}, "milestones=0.5 must be increasing"),
        ({"schedule": "multistep", "schedule_options": {"milestones": (30, 60)}}, r"fractions of the run in \(0, 1\)"),
        ({"schedule": "wsd", "schedule_options": {"shape": "sqrt"}}, "shape='sqrt' is unknown.*1-sqrt"),
        ({"schedule": "onecycle", "warmup": 0.1}, r"its own warm-up, but warmup=0.1.*'rise'"),
        ({"schedule": "multistep", "warmup": 0.4}, "after 0.3 of the run, before warmup=0.4 ends"),
        ({"schedule": lambda progress: -progress}, "returns -0.1 at the progress 0.1"),
        ({"schedule": lambda progress: 1 / (1 - progress)}, "the progress 1, raised ZeroDivisionError"),
        ({"schedule": lambda progress: progress * math.nan}, "returns nan at the progress 0, .*finite"),
        ({"schedule": lambda progress: f"fast {progress}"}, "returns 'fast 0.0' at the progress 0"),
        ({"schedule": lambda: 1.0}, "cannot be called with schedule_options={}: too many positional"),
        (
            {"schedule": lambda o: lr_scheduler.StepLR(o, 30)},
            "raised TypeError: float is not an Optimizer.*must name its parameter optimizer",
        ),
        ({"schedule": own_schedules.dip, "schedule_options": {"deep": 1}}, "unexpected keyword argument 'deep'"),
        ({"schedule": lr_scheduler.StepLR}, "missing a required argument: 'step_size'"),
        ({"schedule": lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau depends on a metric.*'wsd'"),
        ({"schedule": "own_schedules:gone"}, "'own_schedules:gone' cannot be imported: module .* no attribute 'gone'"),
        ({"schedule": "own_schedules:not_callable"}, "is 3, not a function or a class"),
        ({"schedule": "os:system"}, "names Python's standard library"),
        ({"schedule": "__main__:f"}, "defined in the running script"),
    ],
)  # fmt: skip
def test_what_is_refused_when_the_pipeline_is_described(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        Pipeline(plain_model).optimize("sgd", lr=0.1, **options)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), "ReduceLROnPlateau depends on a metric"),
        (lambda optimizer: optimizer, r"<lambda> returned SGD.*which is not a scheduler.*do not name its parameter"),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, "x", gama=2), "cannot create its scheduler for the .* SGD"),
        (lambda optimizer: lr_scheduler.ConstantLR(optimizer, -1), "cannot create its scheduler"),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda _: -1.0), "sets the learning rate -0.1 at step 0"),
    ],
)  # fmt: skip
def test_what_is_refused_before_the_first_step(toy: Toy, schedule: Any, message: str) -> None:
    pipeline = toy.pipeline().optimize("sgd", lr=0.1, schedule=schedule)
    with pytest.raises(PlanError, match=f"(?s){message}"):
        pipeline.fit(epochs=1, progress=False)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no step is taken
@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    ],
)
def test_a_second_training_in_a_loop_of_ones_own_has_the_same_learning_rates(toy: Toy, schedule: Any) -> None:
    """Except where the caller has set another one in between."""

    def rates() -> list[tuple[float, float]]:
        begun = built.begin(1)
        return [(begun.set_lr(step), group["peak_lr"]) for step in range(4)]

    pipeline = toy.pipeline(plain_model, batch_size=16).optimize("sgdw", lr=0.4, schedule=schedule)
    with pipeline.build() as built:
        (group,) = built.engine.optimizer.param_groups
        first = rates()
        assert first[0] == (0.4, 0.4)
        assert first[-1][0] < 0.4
        assert rates() == first
        group["lr"] = 0.1
        assert rates()[0] == (0.1, 0.1)


def test_a_scheduler_that_ends_too_early_is_named(toy: Toy) -> None:
    linear = functools.partial(lr_scheduler.PolynomialLR, total_iters=4, power=0.5)
    toy.pipeline().optimize("sgd", lr=0.1, schedule=linear).fit(epochs=2, progress=False)
    short = toy.pipeline().optimize(
        "sgd", lr=0.1, schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 3)
    )
    with pytest.raises(PlanError, match=r"at step 4; .*total number of steps"):
        short.fit(epochs=2, progress=False)
    cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=4)
    with pytest.raises(PlanError, match=r"OneCycleLR ends at step 4: Tried to step 5 times.*total number of steps"):
        toy.pipeline().optimize("sgd", lr=0.1, momentum=0.9, schedule=cycle).fit(epochs=2, progress=False)


def test_in_recipes_and_plans(toy: Toy) -> None:
    """By name, by dotted name, with options; there and back."""
    for schedule, options in (
        ("multistep", {"milestones": (0.5, 0.75), "gamma": 0.1}),
        ("wsd", {"decay": 0.3}),
        (own_schedules.dip, {"depth": 0.25}),
        (own_schedules.steps, {"size": 2}),
        (lr_scheduler.StepLR, {"step_size": 5}),
    ):
        pipeline = toy.pipeline(torch.nn.Identity).optimize("sgd", schedule=schedule, schedule_options=options)
        recipe = pipeline.to_recipe()
        assert Pipeline.from_recipe(recipe) == pipeline
        name = schedule if isinstance(schedule, str) else f"{schedule.__module__}:{schedule.__name__}"
        assert recipe["schedule"] == name
        (row,) = (step for step in resolve(pipeline, files=False).steps if step.what.startswith("optimizer"))
        for text in (name.rpartition(":")[2], *(f"{key}={value}" for key, value in options.items())):
            assert text in row.what
            assert text.partition("=")[0] in repr(pipeline)
    assert "0x" not in repr(pipeline)
    changed = Pipeline.from_recipe(recipe, schedule="step", schedule_options={"every": 0.25})
    assert changed.optimized.lr_factor(1, 4) == pytest.approx(0.1)
    with pytest.raises(RecipeError, match="every='a quarter' must be a number"):
        Pipeline.from_recipe(recipe, schedule="step", schedule_options={"every": "a quarter"})
    for unnamed in (lambda progress: 1 - progress, functools.partial(own_schedules.dip, depth=0.1)):
        with pytest.raises(RecipeError, match=r"cannot be imported by name.*schedule_options"):
            toy.pipeline(torch.nn.Identity).optimize("sgd", schedule=unnamed).to_recipe()


@pytest.mark.long
def test_resuming_goes_on_bit_for_bit(toy: Toy, tmp_path: Path) -> None:
    """With a scheduler that changes the momentum, too."""
    one_cycle = {"schedule": own_schedules.one_cycle, "warmup": 0.2}
    assert_resumes(toy.pipeline().optimize("sgd", lr=0.1, momentum=0.9, **one_cycle), tmp_path, (3, 4, 6))


@pytest.mark.long
def test_a_longer_run_from_a_finished_one(toy: Toy, tmp_path: Path) -> None:
    """A torch scheduler counts steps; what follows the progress would change the steps that are done."""
    steps = toy.pipeline().optimize("sgd", lr=0.1, momentum=0.9, schedule=own_schedules.steps)
    whole = steps.fit(epochs=2, progress=False)
    steps.fit(epochs=1, progress=False, out=tmp_path / "steps")
    longer = steps.fit(epochs=2, progress=False, out=tmp_path / "steps", resume="auto")
    assert numbers(longer) == numbers(whole)
    for schedule in ("wsd", own_schedules.dip):
        tied = toy.pipeline().optimize("sgd", lr=0.1, momentum=0.9, schedule=schedule)
        tied.fit(epochs=1, progress=False, out=tmp_path / "tied")
        name = schedule if isinstance(schedule, str) else "dip"
        with pytest.raises(CheckpointError, match=f"schedule='{name}'"):
            tied.fit(epochs=2, progress=False, out=tmp_path / "tied", resume="auto")
        other = {"schedule": schedule, "schedule_options": {"end": 0.1} if name == "wsd" else {"depth": 0.1}}
        with pytest.raises(CheckpointError, match=r"schedule_options = \{\}"):
            toy.pipeline().optimize("sgd", lr=0.1, momentum=0.9, **other).fit(
                epochs=1, progress=False, out=tmp_path / "tied", resume="auto"
            )
