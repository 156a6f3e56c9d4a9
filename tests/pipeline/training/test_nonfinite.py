"""Steps without an effect: losses that are not finite, detected at their step by all ranks or skipped by all, and steps
that the fp16 loss scale skips, which are no error, change no average, and are counted in the history."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import Callback, NonFiniteError, Pipeline, PlanError, RunView, strategies
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.runs.checkpoints.format import Checkpoint
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies import launch
from drivetrain.transforms import EMA, SAM, SWA, GradientClipping, Lookahead, Transform
from pipeline_data import BATCH, TRAIN, Loud, Toy, batch_norm_model, plain_model
from safetensors.torch import load_file
from strategy_jobs import norm_of
from torch import nn

STEPS = TRAIN // BATCH


class Bad(nn.Module):
    """Gives NaN in the training forwards of these numbers, counted from 1, on one rank."""

    def __init__(self, steps: tuple[int, ...], rank: int = 0, gradient: bool = False) -> None:
        super().__init__()
        self.layers, self.steps, self.rank, self.gradient = batch_norm_model(), steps, rank, gradient
        self.count = -1  # the check of the model's output trains once

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        bad = self.training and self.count in self.steps and here == self.rank
        if bad and not self.gradient:
            images = images * float("nan")  # and so BatchNorm's statistics become NaN, too
        logits: torch.Tensor = self.layers(images)
        if bad and self.gradient:
            logits = Infinite.apply(logits)
        return logits


class Infinite(torch.autograd.Function):
    """The same values, and an infinite gradient."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient * float("inf")


def fit(pipeline: Pipeline, **arguments: Any) -> Any:
    return pipeline.fit(epochs=3, progress=False, **arguments)


def skipped(result: Any) -> list[int]:
    return [epoch.skipped for epoch in result.history.epochs]


def test_raises_at_the_step_and_names_the_checkpoint(toy: Toy, tmp_path: Path) -> None:
    how = {"out": tmp_path, "checkpoints": Checkpoints(every_steps=2)}
    for step, words, options in (
        (7, r"The last good .*step-00000006\. L", how), (2, "There is no earlier checkpoint", {})
    ):  # fmt: skip
        with pytest.raises(NonFiniteError, match=f"At step {step} the loss is nan on rank 0. {words}"):
            fit(toy.pipeline(Bad((step,))), **options)
    # The checkpoint saved before is complete, and training continues from it once the cause is fixed.
    resumed = fit(toy.pipeline(Bad(())), out=tmp_path, resume="auto", changed_model=True)
    assert resumed.history.facts["resumed"][0]["step"] == 6
    assert len(resumed.history.epochs) == 3


def test_an_infinite_gradient(toy: Toy) -> None:
    """With a norm at its own step; without, when the weights that it spoiled give the next loss."""
    pipeline = toy.pipeline(Bad((3,), gradient=True))
    clipped = pipeline.distribute("single", clip_norm=1.0)
    with pytest.raises(NonFiniteError, match="At step 3 the gradient norm is nan, with a finite loss"):
        fit(clipped)
    with pytest.raises(NonFiniteError, match=r"At step 4 the loss is nan.*on_nonfinite='skip'"):
        fit(pipeline)


@pytest.mark.parametrize("second", [(), (SAM(0.1),)], ids=["", "SAM"])
def test_an_infinite_gradient_is_skipped(toy: Toy, second: tuple[SAM, ...]) -> None:
    """As if the batch had not been, whether its gradients are the first or those at the perturbed weights."""
    bad = (5, 6) if second else (3,)  # a forward each, and with SAM two
    pipeline = toy.pipeline(Bad(bad, gradient=True)).transform(*second)
    for one in (pipeline, pipeline.distribute("single", clip_norm=1.0)):
        result = fit(one, on_nonfinite="skip")
        assert skipped(result) == [1, 0, 0]
        assert result.accuracy > 0.8
    if second:
        perturbed = pipeline.replace(model=Bad((6,), gradient=True))
        assert skipped(fit(perturbed, on_nonfinite="skip")) == [1, 0, 0]


@pytest.mark.parametrize("averaged", [False, True], ids=["", "EMA"])
def test_nothing_finite_is_replaced(toy: Toy, tmp_path: Path, averaged: bool) -> None:
    """The last step of all: no later loss shows it, but neither the result nor a file has its weights."""
    bad = toy.pipeline(Bad((3 * STEPS,), gradient=True)).load(toy.train, batch_size=BATCH, image_size=16)
    pipeline = bad.transform(EMA(1.0)) if averaged else bad
    kept: dict[str, bytes] = {}

    class Keep(Callback):
        def on_epoch_end(self, view: RunView) -> None:  # noqa: ARG002
            kept["model"] = (tmp_path / "model.safetensors").read_bytes()

    words = f"After step {3 * STEPS} the weights are not finite; they were not saved"
    for checkpoints, place in ((Checkpoints(keep=9), r".*step-00000008\."), (None, "")):
        with pytest.raises(NonFiniteError, match=f"{words}{place}"):
            fit(pipeline, out=tmp_path, checkpoints=checkpoints, callbacks=[Keep()])
        assert (tmp_path / "model.safetensors").read_bytes() == kept["model"]
        if checkpoints is not None:
            assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    for options in ({}, {"on_nonfinite": "raise"}):
        with pytest.raises(NonFiniteError, match="were not saved"):
            fit(pipeline, **options)


def test_skipping(toy: Toy, tmp_path: Path) -> None:
    """Weights, statistics and optimizer are as if the batch had not been; the rates are those of the whole."""
    pipeline = toy.pipeline(Bad((2, 7))).optimize("sgd", lr=0.1, momentum=0.9)
    result = fit(pipeline, out=tmp_path, on_nonfinite="skip", checkpoints=Checkpoints(every_steps=1, keep=99))
    assert skipped(result) == [1, 1, 0]
    assert "1 steps skipped" in str(result.history.epochs[0])
    history = json.loads((tmp_path / "history.json").read_text(), parse_constant=pytest.fail)  # strict JSON
    assert history["epochs"][1]["skipped"] == 1
    skips = {round(step / STEPS, 4) for step in (2, 7)}
    assert {step[0] for step in history["steps"]} == {n / STEPS for n in range(1, 3 * STEPS + 1)} - skips
    whole = fit(pipeline.replace(model=Bad(())))
    assert [e.lr for e in result.history.epochs] == [e.lr for e in whole.history.epochs]
    assert result.accuracy > 0.9
    steps = (tmp_path / f"checkpoints/step-{step:08d}/model.safetensors" for step in (1, 2, 3))
    state = dict(enumerate(map(load_file, steps), 1))
    for name, value in state[1].items():
        assert torch.equal(state[2][name], value), name  # BatchNorm's counters, too
    assert not torch.equal(state[3]["layers.0.weight"], state[2]["layers.0.weight"])
    with pytest.raises(NonFiniteError, match="no step had a finite loss"):
        fit(toy.pipeline(Bad(tuple(range(100)))), on_nonfinite="skip")
    with pytest.raises(PlanError, match="on_nonfinite='ignore' is not known"):
        fit(pipeline, on_nonfinite="ignore")


def on_ranks(pipelines: dict[str, tuple[Pipeline, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (pipeline, how) in pipelines.items():
        try:
            result = fit(pipeline, on_nonfinite=how)
            found[name] = skipped(result), result.accuracy
        except NonFiniteError as error:
            found[name] = str(error)
    return found


@pytest.mark.process
def test_all_ranks_agree(toy: Toy) -> None:
    """One rank's loss is every rank's: none waits for another, whichever strategy."""
    made = toy.pipeline(Bad((3, 6), rank=1))
    infinite = toy.pipeline(Bad((3, 6), rank=1, gradient=True))
    jobs = {}
    for strategy in ("ddp", "fsdp"):
        for name, one in (("raise", made), ("skip", made), ("gradient", infinite)):
            how = "raise" if name == "raise" else "skip"
            jobs[f"{strategy} {name}"] = one.distribute(strategy, devices=2), how
    jobs["after it"] = toy.pipeline(plain_model).distribute("ddp", devices=2), "raise"
    ranks = launch(on_ranks, jobs, devices=2, timeout=120)
    for found in ranks:
        for strategy in ("ddp", "fsdp"):
            assert found[f"{strategy} raise"].startswith("At step 3 the loss is nan on rank 1. "), found
            for steps, accuracy in (found[f"{strategy} skip"], found[f"{strategy} gradient"]):
                assert steps == [1, 1, 0]
                assert accuracy > 0.8
        assert found["after it"][0] == [0, 0, 0]


def skipping_on_ranks(pipelines: dict[str, Pipeline]) -> dict[str, Any]:
    results = {name: fit(pipeline, on_nonfinite="skip") for name, pipeline in pipelines.items()}
    return {name: (skipped(result), result.model.state_dict()) for name, result in results.items()}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
def test_deepspeed_skips_as_ddp_does(toy: Toy) -> None:
    """A gradient of one rank is infinite: the weights and statistics are ddp's, and so is what momentum adds later."""
    made = toy.pipeline(Bad((3, 6), rank=1, gradient=True))
    jobs = {
        f"{name} {clip}": made.distribute(name, devices=2, clip_norm=clip)
        for name in ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
        for clip in (None, 1.0)
    }
    first, second = launch(skipping_on_ranks, jobs, devices=2, timeout=300)
    for name, (steps, state) in first.items():
        assert steps == second[name][0] == [1, 1, 0], name
        assert all(value.isfinite().all() for value in state.values()), name
        assert all(torch.equal(value, state[key]) for key, value in second[name][1].items()), name
        expected = first[f"ddp {name.split()[1]}"][1]
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
def test_on_cuda_one_step_late(toy: Toy) -> None:
    """Named by its own step, although it is looked at when the next is queued; also if it is the last."""
    pipeline = toy.pipeline(Bad((3,))).distribute("single", device="cuda")
    with pytest.raises(NonFiniteError, match="At step 3 the loss is nan on rank 0"):
        fit(pipeline)
    with pytest.raises(NonFiniteError, match=f"At step {STEPS} the loss is nan on rank 0"):
        fit(toy.pipeline(Bad((STEPS,))).distribute("single", device="cuda"))
    assert skipped(fit(pipeline, on_nonfinite="skip")) == [1, 0, 0]


def loud(toy: Toy, clip_norm: float | None = 1.0, strategy: str = "single", devices: int = 1) -> Pipeline:
    made = toy.pipeline(Loud).optimize("sgd", lr=1e-4, momentum=0.9, schedule="constant")
    return made.distribute(strategy, devices=devices, device="cpu", precision="fp16", clip_norm=clip_norm)


def engine_of(model: Any, *, precision: Any, clip_norm: float | None = None, **options: float) -> Any:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, **options)
    single = strategies.get("single", device="cpu")
    return single.prepare(model(), sgd, precision=precision, clip_norm=clip_norm)


@pytest.mark.long
@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_training_with_clip_norm_finds_its_loss_scale(toy: Toy, tmp_path: Path, how: Any) -> None:
    """As with the transform that clips by norm, number for number."""
    result = fit(loud(toy), out=tmp_path, on_nonfinite=how)
    expected = fit(loud(toy, None).transform(GradientClipping("norm", 1.0)), on_nonfinite=how)
    assert [e.loss for e in result.history.epochs] == [e.loss for e in expected.history.epochs]
    found = skipped(result)
    assert found == skipped(expected)
    assert found[0] > 0
    assert found[-1] < STEPS
    assert result.history.epochs[-1].val_loss < result.history.epochs[0].val_loss
    # Every step that was skipped has halved the scale, and none was left out of the count.
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    assert Checkpoint(newest).content.optimizer.loss_scale["scale"] == 65536 / 2 ** sum(found)


class FiniteGradients(Callback):
    """Notes of each step which gradients that it sees are finite."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
        return True

    def on_step_end(self, view: RunView) -> None:
        self.seen.append([bool(gradient.isfinite().all()) for _, gradient in view.named_gradients()])


def test_callbacks_see_no_gradients_of_a_step_that_overflowed(toy: Toy) -> None:
    callback = FiniteGradients()
    without = sum(skipped(fit(loud(toy), callbacks=[callback])))
    assert 0 < without < 3 * STEPS
    assert callback.seen.count([]) == without
    assert all(all(flags) for flags in callback.seen)


def test_a_scale_that_grows_too_far_again_and_again() -> None:
    """It doubles after each step that is taken, so that every few are skipped; the norm is never infinite."""
    engine = engine_of(Loud, precision="fp16", clip_norm=1.0, lr=1e-4)
    engine._scaler.set_growth_interval(1)  # type: ignore[attr-defined]
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    norms, missed = [], []
    for _ in range(40):
        with engine.forward_context():
            logits = engine.model(images)
        engine.backward(F.cross_entropy(logits.float(), labels))
        norms.append(norm_of(engine.step()))
        missed.append(engine.skipped)
    assert 5 < sum(missed) < 35
    assert [norm is None for norm in norms] == missed
    assert all(torch.tensor(norm).isfinite() for norm in norms if norm is not None)
    assert all(p.isfinite().all() for p in engine.model.parameters())


def overflows_on_class_0(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy; its gradients are infinite for a batch of nothing but class 0."""
    return F.cross_entropy(logits if labels.any() else Infinite.apply(logits), labels)


def trained(method: Transform, batches: list[Any], precision: Any) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A session's state, the weights, and the counts, after a batch each."""
    engine = engine_of(plain_model, precision=precision, lr=0.05, momentum=0.9)
    methods = TrainingHooks([method])
    methods.begin(engine, 100)
    guard = NonFiniteGuard(engine, "skip", str, scaled=precision == "fp16")
    stats = train_epoch(engine, batches, overflows_on_class_0, methods, observer=guard)
    state = methods.state_dict()[type(method).__name__]
    return state, engine.export_state(), (stats.overflowed, stats.skipped, methods.state.step)


@pytest.mark.parametrize("cause", ["overflow", "loss"])
@pytest.mark.parametrize(
    "method",
    [EMA(half_life=2), EMA(half_life=2, update_every=2), Lookahead(2), SWA(start=0.0, end=1.0)],
    ids=repr,
)
def test_averages_are_as_if_the_batch_had_not_been(method: Transform, cause: str) -> None:
    """Weights, averages and the count of steps to the next update, bit for bit; the clock counts every batch."""
    torch.manual_seed(1)
    good = [(torch.randn(8, 3, 16, 16), torch.arange(8) % 4) for _ in range(5)]
    if cause == "overflow":
        precision, bad = "fp16", (torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))
    else:
        precision, bad = "fp32", (torch.full((8, 3, 16, 16), torch.nan), torch.arange(8) % 4)
    state, weights, counts = trained(method, [*good[:3], bad, *good[3:]], precision)
    expected, expected_weights, expected_counts = trained(method, good, precision)
    assert counts == (cause == "overflow", cause == "loss", 6)
    assert expected_counts == (0, 0, 5)
    for name, value in expected_weights.items():
        assert torch.equal(weights[name], value), name
    for key, value in expected.items():
        if not isinstance(value, dict):
            assert state[key] == value, key
            continue
        for name, average in value.items():
            assert torch.equal(state[key][name], average), (key, name)


def test_gradients_that_overflow_at_every_scale_are_an_error(toy: Toy) -> None:
    """Else the weights would stay as they are to the end of the training."""
    made = toy.pipeline(Bad(tuple(range(1000)), gradient=True))
    made = made.distribute("single", device="cpu", precision="fp16")
    words = r"At step 50 the gradients overflowed in fp16 for the 50th consecutive step"
    with pytest.raises(NonFiniteError, match=words):
        made.fit(epochs=14, progress=False)


def test_overflows_are_counted_from_the_last_step_that_was_taken() -> None:
    """49, a step, and 50: only the last is an error."""
    torch.manual_seed(1)
    images = torch.randn(8, 3, 16, 16)
    bad, good = (images, torch.zeros(8, dtype=torch.long)), (images, torch.arange(8) % 4)
    engine = engine_of(plain_model, precision="fp16", lr=0.05)
    methods = TrainingHooks([])
    methods.begin(engine, 100)
    guard = NonFiniteGuard(engine, "raise", str, scaled=True)
    with pytest.raises(NonFiniteError, match=r"At step 100 .* for the 50th consecutive step"):
        train_epoch(engine, [*[bad] * 49, good, *[bad] * 50], overflows_on_class_0, methods, observer=guard)


def losses_on_ranks(pipelines: dict[str, Pipeline]) -> dict[str, Any]:
    results = {name: fit(pipeline) for name, pipeline in pipelines.items()}
    return {name: (skipped(result), result.history.epochs[-1].loss) for name, result in results.items()}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_ranks_skip_the_same_steps(toy: Toy) -> None:
    """And train on, with clip_norm, whichever strategy."""
    names = ("ddp", "fsdp", "zero_redundancy")
    jobs = {name: loud(toy, 1.0, name, 2) for name in names}
    first, second = launch(losses_on_ranks, jobs, devices=2, timeout=180)
    assert first == second
    for name in names:
        steps, loss = first[name]
        assert 0 < steps[0] <= STEPS, name
        assert steps[-1] < STEPS, name
        assert loss == pytest.approx(first["ddp"][1], rel=1e-2), name


def test_batch_norm_counts_a_batch_whose_step_was_skipped() -> None:
    """Its forward was finite: PyTorch keeps such statistics, and so does the engine."""
    engine = engine_of(batch_norm_model, precision="fp16", lr=0.1)
    labels = torch.zeros(8, dtype=torch.long)
    train_epoch(engine, [(torch.randn(8, 3, 16, 16), labels)], overflows_on_class_0)
    assert engine.skipped
    assert engine.export_state()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("overflow", [False, True])
def test_sam_updates_the_loss_scale_once_a_step(*, overflow: bool) -> None:
    """As torch's scaler does: halved once if the first pass overflows, which the second one would not show."""
    engine = engine_of(plain_model, precision="fp16", lr=0.01)
    scaler, calls = engine._scaler, []  # type: ignore[attr-defined]
    hooks = TrainingHooks([SAM()], precision="fp16")
    hooks.begin(engine, 4)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        first = overflow and len(calls) == 1
        return F.cross_entropy(Infinite.apply(logits) if first else logits.nan_to_num(), labels)

    before = engine.export_state()
    stats = train_epoch(engine, [(torch.randn(8, 3, 16, 16), torch.arange(8) % 4)], loss, hooks)
    assert stats.overflowed == overflow
    assert len(calls) == 2 - overflow
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == ((32768, 0) if overflow else (65536, 1))
    assert all(torch.equal(before[n], v) for n, v in engine.export_state().items()) == overflow
