"""`from_composer`: algorithms of Composer's in a pipeline train as with Composer's Trainer, on several ranks, too,
resume bit for bit, and are refused where they have no place."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from drivetrain import (
    CheckpointError,
    Classification,
    DrivetrainError,
    Pipeline,
    PlanError,
    RecipeError,
)
from drivetrain import transforms as ours
from drivetrain.pipeline import FitResult
from drivetrain.pipeline.runs.checkpoints.state import chosen, plain_names
from drivetrain.strategies import launch
from drivetrain.transforms import Transform, from_composer
from drivetrain.transforms.composer.session import PLACES
from drivetrain.transforms.composer.transform import KNOWN
from pipeline_data import (
    BATCH,
    CLASSES,
    TRAIN,
    StopsAt,
    Toy,
    batch_norm_model,
    fit_all,
    numbers,
    plain_model,
    surroundings,
)
from places import ROOT
from torch import nn

pytestmark = [
    # Composer's own, and torch's about how Composer calls it.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("composer"),
]


@pytest.fixture(scope="module")
def jobs(composer: ModuleType) -> Any:  # noqa: ARG001 - imports it quietly
    """`composer_jobs`, which imports Composer."""
    import composer_jobs

    return composer_jobs


def fit(pipeline: Pipeline, epochs: int = 2, **options: Any) -> FitResult:
    return pipeline.fit(epochs=epochs, progress=False, **options)


def refuses(message: str, pipeline: Pipeline) -> None:
    with pytest.raises(PlanError, match=message):
        pipeline.plan()


def same(result: FitResult, state: dict[str, torch.Tensor]) -> None:
    """The same weights, bit for bit."""
    weights = result.model.state_dict()
    assert weights.keys() == state.keys()
    for name, value in weights.items():
        assert torch.equal(value, state[name]), name


PARITY: dict[str, Callable[[Any], list[Any]]] = {
    "LabelSmoothing": lambda j: [j.algorithms.LabelSmoothing(0.2)],
    "GradientClipping": lambda j: [j.algorithms.GradientClipping("norm", 0.1)],
    "ProgressiveResizing": lambda j: [j.algorithms.ProgressiveResizing(finetune_fraction=0.2)],
    "BlurPool": lambda j: [j.algorithms.BlurPool(min_channels=1)],
    "SelectiveBackprop": lambda j: [j.SEEDED["SelectiveBackprop"](0.0, 1.0)],
    "SWA": lambda j: [j.algorithms.SWA("0.1dur", "0.9dur")],
    "MixUp, LabelSmoothing": lambda j: [j.SEEDED["MixUp"](0.4), j.algorithms.LabelSmoothing()],
    "MixUp of the loss": lambda j: [j.SEEDED["MixUp"](0.4, interpolate_loss=True)],
    **{name: lambda j, name=name: [j.SEEDED[name]()] for name in ("CutMix", "CutOut", "ColOut")},
    "a user's": lambda j: [j.Doubles(1.5), j.Counts()],
}


@pytest.mark.process
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "accumulate"), [*((name, 1) for name in PARITY), ("MixUp, LabelSmoothing", 2), ("a user's", 2)]
)
def test_it_trains_as_with_composers_trainer(name: str, accumulate: int, jobs: Any, toy: Toy) -> None:
    pipeline = toy.pipeline(jobs.strided_model).distribute("single", accumulate=accumulate)
    result = fit(pipeline.transform(*map(from_composer, PARITY[name](jobs))))
    same(result, jobs.by_composer(pipeline, PARITY[name](jobs), split=BATCH // accumulate))
    if (name, accumulate) == ("LabelSmoothing", 1):
        assert numbers(result) != numbers(fit(pipeline))


@pytest.mark.process
@pytest.mark.usefixtures("one_thread")
def test_averages_are_evaluated_and_are_the_result(jobs: Any, toy: Toy, tmp_path: Path) -> None:
    """Composer's EMA puts its weights into the model for evaluations."""
    pipeline = toy.pipeline(plain_model)
    averaging = pipeline.transform(from_composer(jobs.algorithms.EMA(half_life="5ba")))
    result = fit(averaging, out=tmp_path)
    ema = jobs.algorithms.EMA(half_life="5ba")
    jobs.by_composer(pipeline, [ema])
    same(result, {name.removeprefix("module."): t for name, t in ema.ema_model.named_parameters_dict.items()})
    same(fit(averaging, out=tmp_path, resume="auto"), result.model.state_dict())  # from the last checkpoint


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [
        ("BlurPool", "apply_blurpool", {}),
        ("SqueezeExcite", "apply_squeeze_excite", {"min_channels": 64}),
        ("Factorize", "apply_factorization", {"min_channels": 128}),
        ("ChannelsLast", "apply_channels_last", {}),
        ("WeightStandardization", "apply_weight_standardization", {}),
    ],
)
def test_surgery_is_that_of_the_functional_form(
    name: str, function: str, options: dict[str, int], composer: ModuleType, jobs: Any
) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    plain = resnet18(num_classes=4)
    mine, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    transform = from_composer(getattr(jobs.algorithms, name)(**options))
    torch.manual_seed(1)
    report = transform.apply(mine)
    torch.manual_seed(1)
    getattr(composer, function)(theirs, **options)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(mine.eval()(images), theirs.eval()(images))
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert bool(report.changed) == (name != "ChannelsLast")
    if name == "Factorize":
        with pytest.raises(PlanError, match="in a way that cannot be undone by names alone"):
            transform.to_plain(mine.state_dict(), mine)
        return
    back = transform.to_plain(mine.state_dict(), mine)
    assert plain.state_dict().keys() <= back.keys()
    assert all(torch.equal(back[key], value) for key, value in plain.state_dict().items())
    mine.load_state_dict(transform.from_plain(back, mine))


def test_clipping_is_that_of_clip_norm(jobs: Any, toy: Toy) -> None:
    clipping = jobs.algorithms.GradientClipping("norm", 0.1)
    result = fit(toy.pipeline().transform(from_composer(clipping)))
    assert numbers(result) == numbers(fit(toy.pipeline().distribute("single", clip_norm=0.1)))


def test_events_come_in_composers_order(jobs: Any, toy: Toy) -> None:
    everything = jobs.Everything()
    everything.seen.clear()
    fit(toy.pipeline().transform(from_composer(everything)).distribute("single", accumulate=2))
    steps = TRAIN // BATCH
    seen = [event for event in everything.seen if event[0] != "init"]
    micro = [
        "before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"
    ]  # fmt: skip
    step = [
        "after_dataloader", "batch_start", "before_train_batch", *micro, *micro, "after_train_batch",
        "batch_end",
    ]  # fmt: skip
    epoch = ["epoch_start", *step * steps, "epoch_end", "eval_start", "eval_end"]
    assert [event[0] for event in seen] == ["fit_start", *epoch * 2, "fit_end"]
    assert next(event for event in everything.seen if event[0] == "init")[1:] == (0, 0, 0, 0, None, 0)
    at = {name: [event[1:] for event in seen if event[0] == name] for name in jobs.PLACED}
    assert at["epoch_start"] == [(0, 0, 0, 0, None, 1), (1, steps, 0, TRAIN, BATCH, 1)]
    assert at["batch_start"][1] == (0, 1, 1, BATCH, BATCH, 1)
    assert at["before_forward"][2] == (0, 1, 1, BATCH, BATCH // 2, 1)
    assert at["batch_end"][-1] == (1, 2 * steps, steps, 2 * TRAIN, BATCH, 1)
    assert at["epoch_end"] == [(1, steps, 0, TRAIN, BATCH, 1), (2, 2 * steps, 0, 2 * TRAIN, BATCH, 1)]


def test_it_is_a_value(jobs: Any, toy: Toy) -> None:
    """Training does not change the object, and trains the same again; equal ones are equal, also on a rank."""
    counts = jobs.Counts()
    pipeline = toy.pipeline().transform(from_composer(counts), from_composer(jobs.Draws()))
    before = surroundings()
    first, second = fit(pipeline), fit(pipeline)
    assert surroundings() == before
    assert numbers(first) == numbers(second)
    assert counts.steps == 0
    counts.steps = 3
    assert from_composer(counts) != from_composer(jobs.Counts())
    mixing = from_composer(jobs.algorithms.MixUp(0.3))
    assert mixing == from_composer(jobs.algorithms.MixUp(0.3)) != from_composer(jobs.algorithms.MixUp(0.4))
    assert hash(mixing) == hash(from_composer(jobs.algorithms.MixUp(0.3)))
    assert f"{mixing}" == "from_composer(MixUp(alpha=0.3))"
    declared = from_composer(jobs.Doubles(3.0), safe_with="fsdp")
    for each in (mixing, from_composer(jobs.algorithms.ColOut()), declared):
        assert pickle.loads(cloudpickle.dumps(each)) == each == copy.copy(each)
    # A run's numbers do not depend on the global generators.
    np.random.seed(5)  # noqa: NPY002
    assert numbers(fit(pipeline)) == numbers(first)


@pytest.mark.long
def test_it_resumes_bit_for_bit(jobs: Any, toy: Toy, tmp_path: Path) -> None:
    made = [jobs.Counts(), jobs.Draws(), jobs.algorithms.EMA(half_life="3ba")]
    begun = toy.pipeline(batch_norm_model).transform(*map(from_composer, made))
    pipeline = begun.transform(from_composer(jobs.algorithms.LabelSmoothing()))
    whole = fit(pipeline, 3)
    for step in (4, 6):
        fit(pipeline, 3, out=tmp_path / f"{step}", callbacks=[StopsAt(step)])
        again = fit(pipeline, 3, out=tmp_path / f"{step}", resume="auto", continue_stopped=True)
        assert numbers(again) == numbers(whole)
        same(again, whole.model.state_dict())
    other = begun.transform(from_composer(jobs.algorithms.LabelSmoothing(0.3)))
    with pytest.raises(CheckpointError, match=r"smoothing.: 0\.1.*smoothing.: 0\.3"):
        fit(other, 3, out=tmp_path / "4", resume="auto")
    with pytest.raises(CheckpointError, match="depends on the length of the training"):
        fit(pipeline, 4, out=tmp_path / "4", resume="auto")


def test_more_epochs_where_that_is_declared(jobs: Any, toy: Toy, tmp_path: Path) -> None:
    smoothing = from_composer(jobs.algorithms.LabelSmoothing())
    declared = from_composer(jobs.Doubles(), depends_on_length=False)
    pipeline = toy.pipeline().transform(smoothing, declared)
    fit(pipeline, 1, out=tmp_path)
    assert numbers(fit(pipeline, 2, out=tmp_path, resume="auto")) == numbers(fit(pipeline, 2))


@pytest.fixture(scope="module")
def cases(jobs: Any) -> dict[str, tuple[list[Transform], dict[str, Any]]]:
    """Name: transforms, and how one device must distribute to compute the same."""
    made = jobs.algorithms
    return {
        "BlurPool, LabelSmoothing": ([made.BlurPool(min_channels=1), made.LabelSmoothing()], {}),
        "MixUp": ([made.MixUp(0.4)], {"accumulate": 2}),
        "ProgressiveResizing": ([made.ProgressiveResizing()], {}),
        "GradientClipping": ([made.GradientClipping("norm", 0.1)], {}),
        "a user's": ([jobs.Doubles(), jobs.Draws()], {"accumulate": 2}),
        "EMA": ([made.EMA(half_life="3ba")], {}),
    }  # fmt: skip


@pytest.mark.slow  # two ranks import Composer
@pytest.mark.process
def test_ranks_train_as_one_device(jobs: Any, cases: Any, toy: Toy) -> None:
    pipelines, alone = {}, {}
    for name, (made, how) in cases.items():
        pipeline = toy.pipeline(jobs.strided_model).transform(*map(from_composer, made))
        pipelines[name] = pipeline.distribute("ddp", devices=2)
        if name in ("BlurPool, LabelSmoothing", "MixUp"):
            pipelines[f"sharded {name}"] = pipeline.distribute("fsdp", devices=2)
        alone[name] = fit(pipeline.distribute("single", **how))
    late = from_composer(jobs.Once("batch_start", batch=3, only=True))  # not known before step 3
    pipelines["sharded late"] = toy.pipeline().transform(late).distribute("fsdp", devices=2)
    declared = from_composer(jobs.Doubles(), safe_with=("fsdp",))
    pipelines["sharded declared"] = toy.pipeline().transform(declared).distribute("fsdp", devices=2)
    alone["declared"] = fit(toy.pipeline().transform(declared))
    for found in launch(fit_all, pipelines, devices=2, timeout=200):
        for name in pipelines:
            if name == "sharded late":
                assert "runs at Event.BATCH_START on shards of the model, which was not known" in found[name]
                continue
            assert not isinstance(found[name], str), (name, found[name])
            figures, weights = found[name]
            expected = alone[name.removeprefix("sharded ")]
            for one, two in zip(numbers(expected), figures, strict=True):
                assert two == pytest.approx(one, abs=1e-5), name
            torch.testing.assert_close(weights, expected.model.state_dict(), rtol=1e-5, atol=1e-5)


def test_what_has_no_place_is_refused_by_name(jobs: Any) -> None:
    made = jobs.algorithms
    for algorithm, message in [
        (nn.ReLU(), r"takes an algorithm of Composer's \(composer.core.Algorithm\), not ReLU"),
        (ours.MixUp(), "is a transform of Drivetrain's already"),
        (made.MixUp, r"not the class MixUp. Pass MixUp\(\)"),
        (jobs.Once("batch_checkpoint"), "Once runs at Event.BATCH_CHECKPOINT, which has no place"),
        (jobs.Once("after_load"), "Once runs at Event.AFTER_LOAD, which has no place"),
        (jobs.Once("before_dataloader", batch=1), "Once runs at Event.BEFORE_DATALOADER, which has no place"),
        (made.SAM(), r"SAM cannot run in Drivetrain.*Use drivetrain.transforms.SAM\(\)"),
        (made.RandAugment(), r"DataLoader.*Use drivetrain.transforms.RandAugment\(\)"),
        (made.ColOut(batch=False), r"DataLoader.*Use drivetrain.transforms.ColOut\(\)"),
        (made.LayerFreezing(), "removes parameters from the optimizer"),
        (made.NoOpModel(), "replaces the model itself. Leave it out"),
    ]:
        with pytest.raises(PlanError, match=message):
            from_composer(algorithm)
    with pytest.raises(PlanError, match="'ddp' is not one of"):
        from_composer(jobs.Doubles(), safe_with="ddp")
    handle = jobs.Doubles()
    handle.file = open(__file__)  # noqa: PTH123, SIM115
    with handle.file, pytest.raises(PlanError, match="Doubles cannot be copied"):
        from_composer(handle)


@pytest.mark.parametrize(
    ("event", "what", "message"),
    [
        ("batch_start", "state.schedulers[0].step()", "uses state.schedulers, which has no place.*It has: .*timestamp"),
        ("batch_start", "state.model = None", "replaces state.model, which Drivetrain's loop cannot take over"),
        ("batch_start", "state.batch = 3", "set the batch to 3, which is not a pair"),
        ("before_backward", "state.loss = 3", "set the loss to 3, which is not a tensor"),
        ("init", "state.model = torch.nn.Linear(1, 1)", "replaces state.model"),
        ("init", "state.model.module = torch.nn.Linear(1, 1)", "replaces the model itself, Sequential, at Event.INIT"),
        ("init", "state.max_duration", "uses state.max_duration at Event.INIT"),
        ("init", "state.model((torch.zeros(1, 3, 4, 4), None))", "state.model cannot compute at Event.INIT"),
        ("init", "logger.destinations", "logger.destinations has no place"),
        ("fit_end", "assert not hasattr(state, 'schedulers'); state.batch = (1,)", ""),
    ],
)  # fmt: skip
def test_what_its_state_lacks_is_named(event: str, what: str, message: str, jobs: Any, toy: Toy) -> None:
    pipeline = toy.pipeline().transform(from_composer(jobs.Once(event, what)))
    if not message:
        fit(pipeline, 1)
        return
    with pytest.raises(PlanError, match=message):
        fit(pipeline, 1)


def test_what_match_hides_until_a_run_is_found_in_it(jobs: Any, toy: Toy) -> None:
    late = from_composer(jobs.Once("epoch_checkpoint", batch=1000))
    fit(toy.pipeline().transform(late), 1)
    unsure = jobs.Once("before_dataloader", batch=100)
    with pytest.raises(PlanError, match="BEFORE_DATALOADER, which has no place"):
        fit(toy.pipeline(batch_size=2).transform(from_composer(unsure)), 2)


def test_the_plan_treats_what_is_undeclared_as_unsafe(jobs: Any, toy: Toy) -> None:
    made, doubles = jobs.algorithms, from_composer(jobs.Doubles())
    pipeline = toy.pipeline().transform(doubles, ours.ChannelsLast(), from_composer(made.BlurPool()))
    steps = {step.what: step.why for step in pipeline.plan().steps}
    assert "so how it interacts with the other steps is unknown: unsafe with compile" in steps[f"{doubles}"]
    assert "at before_forward, before_backward" in steps[f"{doubles}"]
    assert steps["from_composer(BlurPool())"] == "Composer's at init; Drivetrain's own is BlurPool()"
    order = list(steps)
    assert order.index("from_composer(BlurPool())") < order.index("ChannelsLast()")
    for strategy in ("fsdp", "deepspeed_stage_3", "fairscale_sharded_ddp"):
        refuses(r"Doubles\(\)\) runs when the strategy .* sharded", pipeline.distribute(strategy, devices=2))
    refuses(r"Doubles\(\)\) is not known to compile", pipeline.distribute("single", compile=True))
    alone = toy.pipeline().transform(from_composer(jobs.Doubles(), compile_safe=True, safe_with=("fsdp",)))
    alone.distribute("fsdp", devices=2, compile=True).plan()
    smoothing, mixing = from_composer(made.LabelSmoothing()), from_composer(made.MixUp())
    planned = [step.what for step in toy.pipeline().transform(smoothing, mixing).plan().steps]
    assert planned.index(f"{mixing}") < planned.index(f"{smoothing}")


def test_what_cannot_be_together_is_refused(jobs: Any, toy: Toy) -> None:
    made = jobs.algorithms
    mixing, plain = from_composer(made.MixUp()), toy.pipeline()
    refuses("are the same method", plain.transform(mixing, ours.MixUp()))
    refuses("both set the weights to evaluate", plain.transform(from_composer(made.EMA()), ours.SWA()))
    with pytest.raises(PlanError, match="ComposerMixUp appears 2 times"):
        plain.transform(mixing, from_composer(made.MixUp(0.5)))
    model_loss, itself = (
        plain.task(Classification(loss="model")),
        "but with loss='model' the model computes its loss",
    )
    for algorithm in (made.MixUp(), made.LabelSmoothing(), made.SelectiveBackprop(), jobs.Doubles()):
        refuses(itself, model_loss.transform(from_composer(algorithm)))
    model_loss.transform(from_composer(made.BlurPool()), from_composer(made.CutOut())).plan()
    clipping = plain.transform(from_composer(made.GradientClipping("norm", 1.0)))
    refuses("both clip the gradients", clipping.distribute("single", clip_norm=1.0))
    pruning = from_composer(jobs.Once("after_dataloader", "state.batch = tuple(t[:5] for t in state.batch)"))
    with pytest.raises(PlanError, match="cannot be split into accumulate=2"):
        fit(toy.pipeline().transform(pruning).distribute("single", accumulate=2), 1)


def test_targets_are_not_replaced_after_they_were_counted(jobs: Any, toy: Toy) -> None:
    made = jobs.algorithms
    weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0))
    weighted = toy.pipeline().task(Classification(loss=nn.CrossEntropyLoss(weights)))
    for algorithm in (made.MixUp(), made.CutMix(), made.LabelSmoothing(), made.MixUp(interpolate_loss=True)):
        name = type(algorithm).__name__
        message = rf"{name}\(.* replaces the targets .* CrossEntropyLoss weights .* Drivetrain's own {name}\(\)"
        refuses(message, weighted.transform(from_composer(algorithm)))
    weighted.transform(ours.MixUp(), ours.LabelSmoothing(), from_composer(made.CutOut())).plan()
    toy.pipeline().transform(from_composer(made.MixUp())).plan()
    changed, rolled = (
        weighted.transform(from_composer(jobs.Once("before_forward", f"state.batch = (state.batch[0], {targets})")))
        for targets in (f"(state.batch[1] + 1) % {CLASSES}", "state.batch[1].roll(1)")
    )
    with pytest.raises(PlanError, match="A transform replaced the targets of a microbatch, but the loss weights"):
        fit(changed, 1)
    fit(rolled, 1)


def test_selecting_needs_the_loss_of_each_sample(jobs: Any, toy: Toy) -> None:
    """Also of a module, which does not take `reduction` as an argument."""
    selecting = toy.pipeline().transform(from_composer(jobs.algorithms.SelectiveBackprop(0.0, 1.0)))
    fit(selecting.task(Classification(loss=nn.CrossEntropyLoss(torch.ones(CLASSES)))), 1)
    whole = Classification(loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets))
    refuses("SelectiveBackprop needs the loss of each sample", selecting.task(whole))


def test_samples_are_only_left_out_where_they_stay_apart(jobs: Any, toy: Toy) -> None:
    made, pruned = jobs.algorithms, toy.pipeline().transform(ours.InfoBatch())
    for algorithm in (made.MixUp(), made.CutMix(), made.SelectiveBackprop(), jobs.Doubles()):
        refuses(
            rf"InfoBatch scores single .*{type(algorithm).__name__} may mix or select",
            pruned.transform(from_composer(algorithm)),
        )
    pruned.transform(*map(from_composer, (made.CutOut(), made.LabelSmoothing(), made.BlurPool()))).plan()


def test_a_loop_of_ones_own_would_pass_over_its_events(jobs: Any, toy: Toy) -> None:
    with toy.pipeline().transform(from_composer(jobs.Doubles())).build() as built:
        built.begin(1)
        images, labels = next(iter(built.train))
        with pytest.raises(PlanError, match="follow the moments of train_epoch"):
            built.hooks.microbatches(built.engine, images, labels, built.loss)


def test_a_recipe_names_it(jobs: Any, toy: Toy) -> None:
    made = jobs.algorithms
    chosen = [
        made.MixUp(0.3), made.CutMix(uniform_sampling=True), made.EMA(half_life="30ba"),
        made.GradientClipping("value", 0.5), jobs.Doubles(penalty=0.5),
    ]  # fmt: skip
    pipeline = toy.pipeline().transform(*map(from_composer, chosen))
    recipe = pipeline.to_recipe()
    assert recipe["transforms"] == [
        {"name": "composer.algorithms:MixUp", "alpha": 0.3},
        {"name": "composer.algorithms:CutMix", "uniform_sampling": True},
        {"name": "composer.algorithms:EMA", "half_life": "30ba"},
        {"name": "composer.algorithms:GradientClipping", "clipping_type": "value", "clipping_threshold": 0.5},
        {"name": "composer_jobs:Doubles", "penalty": 0.5},
    ]
    assert Pipeline.from_recipe(recipe).transforms == pipeline.transforms
    declared = from_composer(jobs.Doubles(), safe_with=("fsdp",), compile_safe=True)
    entry = ours.to_dict(declared)
    assert entry == {"name": "composer_jobs:Doubles", "safe_with": ("fsdp",), "compile_safe": True}
    assert ours.get(**entry) == declared

    class Inner(jobs.Doubles):  # type: ignore[misc,name-defined]
        pass

    changed = jobs.Counts()
    changed.steps = 5
    for algorithm in (Inner(), changed):
        with pytest.raises(RecipeError, match="cannot be named in a recipe"):
            toy.pipeline().transform(from_composer(algorithm)).to_recipe()
    for entry, message in [
        ({"name": "composer.algorithms:MixUpp"}, "cannot be imported"),
        ({"name": "nowhere:MixUp"}, "cannot be imported"),
        ({"name": "torch.nn:ReLU"}, "nor of Composer's Algorithm"),
        ({"name": "composer.algorithms:MixUp", "alfa": 1}, "does not take"),
    ]:
        with pytest.raises(PlanError, match=message):
            ours.get(**entry)


def test_arrays_among_its_attributes(jobs: Any, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose comparison has many values."""

    class Shifts(jobs.Doubles):  # type: ignore[misc,name-defined]
        def __init__(self, by: Any = (0.5, 1.0, 2.0)) -> None:
            super().__init__()
            self.by = np.asarray(by)

    monkeypatch.setattr(jobs, "Shifts", Shifts, raising=False)
    Shifts.__module__, Shifts.__qualname__ = jobs.__name__, "Shifts"
    made = from_composer(Shifts())
    assert made == from_composer(Shifts())
    for by in ((0.5, 1.0, 3.0), (0.5, 1.0), np.float32((0.5, 1.0, 2.0))):
        assert made != from_composer(Shifts(by))
    assert repr(from_composer(Shifts((1, 2)))) == "from_composer(Shifts())"
    assert ours.to_dict(made) == {"name": "composer_jobs:Shifts"}
    assert fit(toy.named().transform(made), 1).history.epochs
    with pytest.raises(RecipeError, match="cannot be named in a recipe"):
        toy.named().transform(from_composer(Shifts((1, 2)))).to_recipe()


def test_only_surgery_is_handed_to_lightning(jobs: Any, toy: Toy) -> None:
    pytest.importorskip("lightning")
    pipeline = toy.pipeline(jobs.strided_model)
    surgery = pipeline.transform(from_composer(jobs.algorithms.BlurPool(min_channels=1)))
    assert "2.conv.weight" in surgery.to_lightning(epochs=1).module.model.state_dict()
    with pytest.raises(PlanError, match=r"from_composer\(MixUp\(\)\) works only in Drivetrain's loop"):
        pipeline.transform(from_composer(jobs.algorithms.MixUp())).to_lightning(epochs=1)


def test_the_package_does_not_import_composer() -> None:
    for path in (ROOT / "transforms").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) composer\b", path.read_text(), re.MULTILINE), path


def test_weights_of_a_run_have_their_names_before_it(jobs: Any, toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(jobs.strided_model)
    result = fit(pipeline.transform(from_composer(jobs.algorithms.BlurPool(min_channels=1))), 1, out=tmp_path)
    assert result.plain_state().keys() >= pipeline.build().engine.plain_model.state_dict().keys()
    began = fit(pipeline, 1, init_from=tmp_path)
    with pytest.raises(DrivetrainError, match="names='trained'"):
        plain_names(chosen(tmp_path, best=False))
    assert began.history.facts["init_from"]["loaded"] > 0


def test_the_guide_runs(jobs: Any, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/guide/composer.md`, as printed; and its tables are those of the code."""
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs/guide/composer.md").read_text()
    names = {"pipeline": toy.pipeline(jobs.strided_model), "plain": toy.pipeline(), "__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(block, "guide", "exec"), names)
    assert len(names["result"].history.epochs) == 2
    refused = {name for name, known in KNOWN.items() if known.refused}
    table = guide.partition("## Not run")[2].partition("All others run")[0].splitlines()
    assert refused == set(re.findall(r"`(\w+)", "".join(row.split("|")[1] for row in table if "| `" in row)))
    events = guide.partition("## Events")[2].partition("`state` has")[0]
    missing = [place for place in PLACES if place.upper() not in events]
    assert missing == ["after_forward", "before_loss", "after_loss", "before_backward"]  # between those named
