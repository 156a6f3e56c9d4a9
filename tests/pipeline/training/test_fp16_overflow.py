"""Steps that the fp16 loss scale skips: no error, no norm, no effect on averages, and counted in the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import NonFiniteError, Pipeline, strategies
from drivetrain.pipeline.checkpoints.format import Checkpoint
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies import launch
from drivetrain.transforms import EMA, SWA, GradientClipping, Lookahead, Transform
from pipeline_data import BATCH, TRAIN, Toy, batch_norm_model, plain_model
from strategy_jobs import norm_of
from test_nonfinite import Bad, Infinite
from torch import nn

STEPS = TRAIN // BATCH


class Loud(nn.Module):
    """Its gradients overflow at the first loss scale, 65536, and not at a sixteenth of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain_model()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images * 30)
        return logits


def loud(toy: Toy, clip_norm: float | None = 1.0, strategy: str = "single", devices: int = 1) -> Pipeline:
    made = toy.pipeline(Loud).optimize("sgd", lr=1e-4, momentum=0.9, schedule="constant")
    return made.distribute(strategy, devices=devices, device="cpu", precision="fp16", clip_norm=clip_norm)


@pytest.mark.long
@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_training_with_clip_norm_finds_its_loss_scale(toy: Toy, tmp_path: Path, how: Any) -> None:
    """As with the transform that clips by norm, number for number."""
    result = loud(toy).fit(epochs=3, out=tmp_path, progress=False, on_nonfinite=how)
    other = loud(toy, None).transform(GradientClipping("norm", 1.0))
    expected = other.fit(epochs=3, progress=False, on_nonfinite=how)
    assert [e.loss for e in result.history.epochs] == [e.loss for e in expected.history.epochs]
    skipped = [epoch.skipped for epoch in result.history.epochs]
    assert skipped == [epoch.skipped for epoch in expected.history.epochs]
    assert skipped[0] > 0
    assert skipped[-1] < STEPS
    assert result.history.epochs[-1].val_loss < result.history.epochs[0].val_loss
    # Every step that was skipped has halved the scale, and none was left out of the count.
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    assert Checkpoint(newest).content.optimizer.loss_scale["scale"] == 65536 / 2 ** sum(skipped)


def test_a_scale_that_grows_too_far_again_and_again() -> None:
    """It doubles after each step that is taken, so that every few are skipped; the norm is never infinite."""
    torch.manual_seed(0)
    engine = strategies.get("single", device="cpu").prepare(
        Loud(), lambda p: torch.optim.SGD(p, lr=1e-4), precision="fp16", clip_norm=1.0
    )
    engine._scaler.set_growth_interval(1)  # type: ignore[attr-defined]
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    norms, skipped = [], []
    for _ in range(40):
        with engine.forward_context():
            logits = engine.model(images)
        engine.backward(F.cross_entropy(logits.float(), labels))
        norms.append(norm_of(engine.step()))
        skipped.append(engine.skipped)
    assert 5 < sum(skipped) < 35
    assert [norm is None for norm in norms] == skipped
    assert all(torch.tensor(norm).isfinite() for norm in norms if norm is not None)
    assert all(p.isfinite().all() for p in engine.model.parameters())


def overflows_on_class_0(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy; its gradients are infinite for a batch of nothing but class 0."""
    return F.cross_entropy(logits if labels.any() else Infinite.apply(logits), labels)


def trained(
    method: Transform, batches: list[Any], precision: Any
) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A session's state, the weights, and the counts, after a batch each."""
    torch.manual_seed(0)
    engine = strategies.get("single", device="cpu").prepare(
        plain_model(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), precision=precision
    )
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
    made = toy.pipeline(Bad(tuple(range(1000)), gradient=True)).distribute(
        "single", device="cpu", precision="fp16"
    )
    with pytest.raises(
        NonFiniteError, match=r"At step 50 the gradients overflowed in fp16 for the 50th consecutive step"
    ):
        made.fit(epochs=14, progress=False)


def on_ranks(pipelines: dict[str, Pipeline]) -> dict[str, Any]:
    found = {}
    for name, pipeline in pipelines.items():
        result = pipeline.fit(epochs=3, progress=False)
        found[name] = [epoch.skipped for epoch in result.history.epochs], result.history.epochs[-1].loss
    return found


@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_ranks_skip_the_same_steps(toy: Toy) -> None:
    """And train on, with clip_norm, whichever strategy."""
    names = ("ddp", "fsdp", "zero_redundancy")
    jobs = {name: loud(toy, 1.0, name, 2) for name in names}
    first, second = launch(on_ranks, jobs, devices=2, timeout=180)
    assert first == second
    for name in names:
        skipped, loss = first[name]
        assert 0 < skipped[0] <= STEPS, name
        assert skipped[-1] < STEPS, name
        assert loss == pytest.approx(first["ddp"][1], rel=1e-2), name


def test_batch_norm_counts_a_batch_whose_step_was_skipped() -> None:
    """Its forward was finite: PyTorch keeps such statistics, and so does the engine."""
    torch.manual_seed(0)
    model = batch_norm_model()
    engine = strategies.get("single", device="cpu").prepare(
        model, lambda p: torch.optim.SGD(p, lr=0.1), precision="fp16"
    )
    labels = torch.zeros(8, dtype=torch.long)
    train_epoch(engine, [(torch.randn(8, 3, 16, 16), labels)], overflows_on_class_0)
    assert engine.skipped
    assert engine.export_state()["1.num_batches_tracked"] == 1
