"""Schedule-Free: the paper's three sequences, what is evaluated and kept, resumed runs, ranks, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import group_jobs
import pytest
import torch
from drivetrain import PlanError, strategies
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline import export
from drivetrain.pipeline.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from drivetrain.pipeline.training import calibration
from drivetrain.strategies import launch
from drivetrain.transforms import EMA, LayerFreezing
from pipeline_data import CLASSES, SIDE, Toy, batch_norm_model, evaluated, numbers, plain_model
from safetensors.torch import load_file
from same_runs import assert_resumes
from torch import Tensor, nn

STEPS = 6
KINDS = pytest.mark.parametrize("kind", [ScheduleFreeSGD, ScheduleFreeAdamW])


def gradient(weight: Tensor, step: int) -> Tensor:
    """That of a quadratic with noise: it depends on where it is computed."""
    return weight * 0.3 + torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))


def rate(step: int) -> float:
    return 0.05 * min((step + 1) / 3, 1)


def reference(kind: Any, start: Tensor, beta: float, decay: float) -> tuple[Tensor, Tensor]:
    """The paper's algorithm 1, with explicit x, y and z: x and y after the last step."""
    x, z, squares, total = start.clone(), start.clone(), torch.zeros_like(start), 0.0
    for step in range(STEPS):
        y = (1 - beta) * z + beta * x
        direction = gradient(y, step)
        if kind is ScheduleFreeAdamW:
            squares = 0.99 * squares + 0.01 * direction**2
            direction = direction / ((squares / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
        lr = rate(step)
        total += lr**2
        z = z - lr * (direction + decay * y)
        x = (1 - lr**2 / total) * x + lr**2 / total * z
    return x, (1 - beta) * z + beta * x


def stepped(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        weight.grad = gradient(weight.detach(), step)
        optimizer.step()


def options_of(kind: Any) -> dict[str, Any]:
    return {"momentum": 0.8} if kind is ScheduleFreeSGD else {"betas": (0.8, 0.99)}


@KINDS
def test_the_papers_numbers(kind: Any) -> None:
    weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(9)).double())
    x, y = reference(kind, weight.detach(), 0.8, 0.1)
    optimizer = kind([weight], lr=0.05, weight_decay=0.1, **options_of(kind))
    stepped(optimizer, weight)
    torch.testing.assert_close(weight.detach(), y)
    ((found, z, extent),) = optimizer.averages()
    torch.testing.assert_close(found.lerp(z, extent).detach(), x)


@KINDS
def test_complex_numbers_are_pairs_of_real_ones(kind: Any) -> None:
    """As in torch's optimizers."""
    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(9)).double()
    real, pairs = nn.Parameter(start), nn.Parameter(torch.view_as_complex(start.clone()))
    optimizers = [kind([each], lr=0.05, weight_decay=0.1, **options_of(kind)) for each in (real, pairs)]
    for step in range(STEPS):
        real.grad = gradient(real.detach(), step)
        pairs.grad = torch.view_as_complex(real.grad.clone())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(pairs.detach()), real.detach())


@KINDS
def test_the_numbers_of_the_authors_package(kind: Any) -> None:
    package = pytest.importorskip("schedulefree", reason="pip install schedulefree")
    theirs = {ScheduleFreeSGD: "SGDScheduleFree", ScheduleFreeAdamW: "AdamWScheduleFree"}[kind]
    weights = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    other = getattr(package, theirs)([weights[1]], lr=0.05, weight_decay=0.1, **options_of(kind))
    other.train()
    stepped(kind([weights[0]], lr=0.05, weight_decay=0.1, **options_of(kind)), weights[0])
    stepped(other, weights[1])
    torch.testing.assert_close(weights[0], weights[1])


def schedule_free(toy: Toy, model: Any = batch_norm_model, name: str = "schedulefree_sgd", lr: float = 0.5) -> Any:
    return toy.pipeline(model).optimize(name, lr=lr, schedule="constant", warmup=0.2)


@pytest.mark.parametrize("model", [plain_model, batch_norm_model])
def test_what_is_evaluated_is_kept(model: Any, toy: Toy, tmp_path: Path) -> None:
    """The average, with its own BatchNorm statistics, in the history, the result and the saved weights."""
    result = schedule_free(toy, model).fit(epochs=3, progress=False, out=tmp_path)
    last = result.history.epochs[-1]
    assert evaluated(result.model, toy.val) == pytest.approx((last.val_loss, last.accuracy), abs=1e-5)
    export(tmp_path, tmp_path / "weights.safetensors", names="trained")
    kept = load_file(tmp_path / "weights.safetensors")
    torch.testing.assert_close(kept, dict(result.model.state_dict()), rtol=0, atol=0)
    assert last.accuracy > 0.5


def test_evaluation_leaves_the_training_alone(toy: Toy) -> None:
    """y, BatchNorm's statistics and the random numbers are those of a run that is never evaluated."""
    pipeline = schedule_free(toy)
    plain = pipeline.fit(epochs=2, progress=False, eval_every=2)
    often = pipeline.fit(epochs=2, progress=False, eval_every_steps=1)
    assert plain.history.epochs[-1].loss == often.history.epochs[-1].loss
    assert numbers(plain)[-1] == numbers(often)[-1]


def test_statistics_are_those_of_the_average(toy: Toy) -> None:
    with schedule_free(toy).build() as built:
        schedule = built.begin(1)
        built.begin_epoch()
        for images, labels in built.train:
            schedule.set_lr(built.hooks.state.step)
            built.engine.backward(built.loss(built.engine.model(images), labels))
            built.engine.step()
            built.hooks.after_step()
        model = built.engine.plain_model.eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with built.hooks.evaluating():
            assert not any(module.training for module in model.modules()), "as the caller has set it"
            norm, conv = model[1], model[0]
            with torch.no_grad(), schedule_free(toy).build() as other:
                means = torch.stack([conv(images).mean((0, 2, 3)) for images, _ in other.train])
            torch.testing.assert_close(norm.running_mean, means.mean(0))
            assert not torch.equal(conv.weight, before["0.weight"])
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("name", ["schedulefree_adamw", pytest.param("schedulefree_sgd", marks=pytest.mark.slow)])
def test_resuming_goes_on_bit_for_bit(name: str, toy: Toy, tmp_path: Path) -> None:
    assert_resumes(schedule_free(toy, name=name, lr=0.05), tmp_path)


def test_what_is_refused(toy: Toy) -> None:
    with pytest.raises(PlanError, match=r"schedule='cosine' lowers it. Pass schedule='constant'; warmup"):
        toy.pipeline().optimize("schedulefree_adamw", lr=0.01)

    class Switched(torch.optim.SGD):
        """As the optimizers of the authors' package."""

        def train(self) -> None: ...

        def eval(self) -> None: ...

    with pytest.raises(PlanError, match=r"Switched must be switched between training.*Use 'schedulefree_sgd'"):
        toy.pipeline().optimize(Switched, lr=0.1)
    with pytest.raises(PlanError, match=r"momentum=1.0 must be in \(0, 1\)"):
        toy.pipeline().optimize("schedulefree_sgd", momentum=1.0, schedule="constant")
    with pytest.raises(PlanError, match="EMA and schedulefree_sgd both set the weights to evaluate"):
        schedule_free(toy).transform(EMA()).plan()
    for strategy in ("deepspeed_stage_1", "zero_redundancy", "fairscale_sharded_ddp"):
        with pytest.raises(PlanError, match=f"'{strategy}' keeps elsewhere than the weights"):
            schedule_free(toy).distribute(strategy, devices=2, device="cpu").plan()
    hidden = toy.pipeline().optimize(lambda parameters: ScheduleFreeSGD(parameters, lr=0.5), schedule="constant")
    with pytest.raises(PlanError, match=r"got a factory of ScheduleFreeSGD.* optimize\(ScheduleFreeSGD, lr=…"):
        hidden.fit(epochs=1, progress=False)
    pytest.importorskip("lightning")
    with pytest.raises(PlanError, match="needs Drivetrain's loop"):
        schedule_free(toy).to_lightning(epochs=1)


def test_frozen_layers_are_evaluated_as_they_were_trained() -> None:
    """Those after them, and the statistics of their BatchNorm, belong to y."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.5)
    session = optimizer.session(model, lambda: None)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    LayerFreezing(freeze_start=0.0).freeze(model, 1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with session.evaluating():
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) == (not name.startswith("2.")), name


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_ranks_have_one_devices_numbers() -> None:
    expected = group_jobs.all_of([("single", "schedulefree")])["single", "schedulefree"]
    pairs = [(name, "schedulefree") for name in ("ddp", "fsdp", "fsdp_cpu_offload")]
    (first, _) = launch(group_jobs.all_of, pairs, devices=2, timeout=250)
    for (strategy, _), found in first.items():
        group_jobs.assert_nearly(found, expected, strategy)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_on_two_ranks(strategy: str, toy: Toy, tmp_path: Path) -> None:
    alone = schedule_free(toy, plain_model).fit(epochs=2, progress=False)
    pipeline = schedule_free(toy, plain_model).distribute(strategy, devices=2, device="cpu")
    both = pipeline.fit(epochs=2, progress=False, out=tmp_path)
    assert numbers(both)[-1] == pytest.approx(numbers(alone)[-1], abs=1e-4)


def test_calibration_waits_for_the_device(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows may change weights on the CPU, which forwards on a GPU still copy."""
    waited: list[torch.device] = []
    monkeypatch.setattr(calibration, "wait_for", waited.append)
    schedule_free(toy, batch_norm_model).fit(epochs=1, progress=False)
    assert set(waited) == {torch.device("cpu")}


def test_calibration_takes_the_first_batches_of_the_epoch(toy: Toy) -> None:
    """Sixteen of 32, which seed and epoch decide. BatchNorm's statistics are their means; nothing else changes."""
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=0.3), nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES))
    engine: Any = strategies.get("single", device="cpu").prepare(model, partial(torch.optim.SGD, lr=0.1))
    make = partial(FFCVLoader, toy.train, batch_size=4, image_size=SIDE, workers=1)
    norm, seen = engine.plain_model[0], list[Tensor]()
    for epoch in (0, 3):
        calibration.calibrate(engine, make, nn.functional.cross_entropy, epoch)
        with make() as loader:
            loader.set_epoch(epoch)
            batches = [images for _, (images, _) in zip(range(16), loader, strict=False)]
        for found, of_batch in ((norm.running_mean, torch.mean), (norm.running_var, torch.var)):
            expected = torch.stack([of_batch(images, (0, 2, 3)) for images in batches]).mean(0)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (norm.momentum, norm.training, norm.num_batches_tracked.item()) == (0.3, True, 16)
        seen.append(norm.running_mean.clone())
    assert not torch.equal(seen[0], seen[1])
