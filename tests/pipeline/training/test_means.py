"""A loss is one mean over microbatches, ranks and batches: losses and weights are those of plain PyTorch, which sees
each batch as a whole."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from drivetrain import Classification, Task, strategies
from drivetrain.common.errors import DataError, PlanError
from drivetrain.pipeline.tasks.means import mean_of
from drivetrain.pipeline.training.loop import evaluate, train_epoch
from drivetrain.pipeline.training.step_loss import StepLoss
from drivetrain.strategies import launch
from host_syncs import HostSyncs, SimulatedCuda
from means_jobs import CASES, WEIGHTS, Focal, Run, all_trained, by_hand, trained
from pipeline_data import CLASSES, Toy, plain_model
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-6
expected = cache(by_hand)


def same(found: Run, name: str) -> None:
    wanted = expected(name)
    assert found.steps == pytest.approx(wanted.steps, rel=TOLERANCE, abs=TOLERANCE)
    assert found.epoch == pytest.approx(wanted.epoch, rel=TOLERANCE, abs=TOLERANCE)
    assert found.val == pytest.approx(wanted.val, rel=TOLERANCE, abs=TOLERANCE)
    torch.testing.assert_close(found.state, wanted.state, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_microbatches_train_like_the_whole_batch(name: str, accumulate: int) -> None:
    same(trained("single", name, accumulate), name)


def check_ranks(wanted: list[tuple[str, str, int]], devices: int) -> None:
    for rank in launch(all_trained, wanted, devices=devices, device="cpu", timeout=280):
        for (_, name, _), run in zip(wanted, rank, strict=True):
            same(run, name)


@pytest.mark.process
@pytest.mark.long
def test_ranks_train_like_the_whole_batch() -> None:
    wanted = [("ddp", name, 1 + number % 2) for number, name in enumerate(CASES)]
    few = ("class weights", "a module of a user's")
    wanted += [(strategy, name, 2) for strategy in ("fsdp", "zero_redundancy") for name in few]
    check_ranks(wanted, 2)


FEW = ("class weights", "ignored", "pixels with weights", "a module of a user's")


def matrix(full: list[str], few: list[str]) -> list[tuple[str, str, int]]:
    """Each of the strategies with 1, 2 and 4 microbatches: all losses, or a few."""
    pairs = [(strategy, name) for strategy in full for name in CASES] + [
        (s, name) for s in few for name in FEW
    ]
    return [(*pair, accumulate) for pair in pairs for accumulate in (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_strategy_trains_like_the_whole_batch(devices: int) -> None:
    few = ["zero_redundancy", "fsdp_grad_op", "fairscale_oss", "fairscale_sharded_ddp"]
    check_ranks(matrix(["ddp", "fsdp"], few), devices)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("devices", [2, 4])
def test_deepspeed_trains_like_the_whole_batch(devices: int) -> None:
    check_ranks(matrix(["deepspeed_stage_2"], ["deepspeed_stage_1", "deepspeed_stage_3"]), devices)


@pytest.fixture(scope="module")
def weighted(toy: Toy) -> Any:
    """A pipeline whose classes have weights, without a layer that depends on the batch."""
    weight = torch.arange(1.0, CLASSES + 1) ** 2
    return toy.pipeline(plain_model).task(Classification(loss=nn.CrossEntropyLoss(weight=weight)))


@pytest.mark.process
@pytest.mark.long
def test_a_pipeline_with_class_weights_does_not_depend_on_the_split(weighted: Any) -> None:
    one = weighted.distribute("single", device="cpu").fit(epochs=2, progress=False)
    others = [weighted.distribute("single", device="cpu", accumulate=number) for number in (2, 4)]
    others += [weighted.distribute("ddp", devices=2, device="cpu", accumulate=2)]
    for other in others:
        found = other.fit(epochs=2, progress=False)
        for mine, theirs in zip(one.history.epochs, found.history.epochs, strict=True):
            assert theirs.loss == pytest.approx(mine.loss, rel=TOLERANCE)
            assert theirs.metrics == pytest.approx(mine.metrics, rel=TOLERANCE)
        torch.testing.assert_close(found.model.state_dict(), one.model.state_dict(), rtol=0, atol=TOLERANCE)


def test_a_batch_of_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    ours = linear(accumulate=2)
    before = ours.export_state()
    batches = [
        (torch.randn(4, 3), torch.full((4,), -100)),
        (torch.randn(4, 3), torch.tensor([-100, -100, -100, 1])),
    ]
    stats = train_epoch(ours, batches[:1], functional.cross_entropy)
    assert stats.loss == 0
    torch.testing.assert_close(ours.export_state(), before, rtol=0, atol=0)
    with torch.no_grad():
        value = functional.cross_entropy(ours.model(batches[1][0][3:]), torch.tensor([1])).item()
    # The epoch's loss is over the one target that counts.
    assert train_epoch(ours, batches, functional.cross_entropy).loss == pytest.approx(value, rel=TOLERANCE)


def linear(accumulate: int = 1) -> Any:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return strategies.get("single", device="cpu").prepare(nn.Linear(3, 5), sgd, accumulate=accumulate)


def test_validation_data_of_which_nothing_counts_is_an_error() -> None:
    task = Classification(loss=nn.CrossEntropyLoss(ignore_index=1), metrics=())
    with pytest.raises(DataError, match="val_loss: none of the validation data's targets counts"):
        evaluate(linear(), [(torch.randn(4, 3), torch.ones(4, dtype=torch.long))], task=task)


def test_val_loss_does_not_depend_on_the_batch_size(weighted: Any) -> None:
    found = []
    for size in (3, 7, 50):
        data = weighted.load(*(weighted.data.train, weighted.data.val), batch_size=size, image_size=16)
        with data.build() as built:
            found.append(evaluate(built.engine, built.val, built.hooks, data.goal)["val_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=TOLERANCE)


class Two:
    """The first of two ranks, of which the other has the same."""

    world_size, exchanged = 2, 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reduce(self, value: torch.Tensor, op: str = "mean") -> torch.Tensor:
        self.exchanged += 1
        return 2 * value if op == "sum" else value


def test_equal_denominators_cost_nothing() -> None:
    """Neither an operation nor an exchange, also on several ranks; without that knowledge, one sum."""

    ranks, images, targets = Two(torch.device("cpu")), torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    mean, parts = mean_of(functional.cross_entropy, checked=True), [(images, targets)] * 2
    outputs = torch.randn(4, 5)
    for equal, exchanges in ((True, 0), (False, 1)):
        step = StepLoss(mean, parts, ranks, equal=equal)
        assert step.share(1, outputs, targets).item() == pytest.approx(mean.loss(outputs, targets).item())
        assert (ranks.exchanged, float(step.weight)) == (exchanges, 16)


def test_a_weighted_loss_never_makes_the_host_wait() -> None:
    """Nor does it copy anything to the device, also with a denominator that is a number."""
    targets, outputs = torch.tensor([0, 1, 2, 3]), torch.randn(4, 5)
    with HostSyncs() as syncs:
        for loss in (nn.CrossEntropyLoss(weight=WEIGHTS), Focal()):
            step = StepLoss(mean_of(loss), [(outputs, targets)] * 2, linear(), equal=False)
            step.share(1, outputs, targets)
    assert syncs.found == []
    with SimulatedCuda() as copies:
        ranks, parts = Two(torch.device("cuda")), [(outputs.to("cuda"), targets.to("cuda"))] * 2
        before = len(copies.found)
        StepLoss(mean_of(nn.MSELoss()), parts, ranks, equal=False)
        StepLoss(mean_of(nn.CrossEntropyLoss()), parts, ranks, equal=False)
        assert copies.found[before:] == []


def test_the_denominators_of_known_losses() -> None:
    targets = torch.tensor([0, 2, 2, 4])
    for loss, number in (
        (functional.cross_entropy, 4), (nn.CrossEntropyLoss(weight=WEIGHTS), 37), (nn.NLLLoss(ignore_index=2), 2),
        (nn.MSELoss(), 4), (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), 4),
    ):  # fmt: skip
        assert float(mean_of(loss).denominator(targets)) == number
        assert mean_of(loss).known
    assert float(Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS)).denominator(targets)) == 37
    assert Classification().denominator(targets) == 4
    assert Task().denominator(targets) == 4


def test_a_loss_that_returns_a_sum_is_rejected() -> None:
    with pytest.raises(PlanError, match="returns a sum, which depends on how a batch is split"):
        Classification(loss=nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize("count", [None, "3", -1.0, float("nan"), True, torch.ones(2)])
def test_a_denominator_is_a_number(toy: Toy, count: Any) -> None:
    class Wrong(Classification):
        def denominator(self, targets: torch.Tensor) -> Any:  # noqa: ARG002
            return count

    with pytest.raises(PlanError, match=r"The loss's denominator returns .* but must return a finite scalar"):
        toy.pipeline(plain_model).task(Wrong()).fit(epochs=1, progress=False)


def mine(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, weight=WEIGHTS)


def test_the_plan_says_what_it_assumes_of_an_unknown_loss(toy: Toy) -> None:
    own, assumed = (
        toy.pipeline(plain_model).task(Classification(loss=mine)),
        "taken as the mean over the samples",
    )
    assert assumed not in repr_of(own)
    assert assumed in repr_of(own.distribute("single", accumulate=2))
    assert assumed in repr_of(own.distribute("ddp", devices=2, device="cpu"))
    known = Classification(loss=nn.CrossEntropyLoss(weight=torch.ones(CLASSES)))
    assert assumed not in repr_of(own.task(known).distribute("single", accumulate=2))


def repr_of(pipeline: Any) -> str:
    return " ".join(step.why for step in pipeline.plan().steps)


def test_a_subclass_of_a_task_trains_with_its_own_loss(toy: Toy) -> None:
    class Doubled(Classification):
        def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            return 2 * super().loss(outputs, targets)

    plain = toy.pipeline(plain_model).fit(epochs=1, progress=False)
    doubled = toy.pipeline(plain_model).task(Doubled()).optimize("sgd", lr=0.0).fit(epochs=1, progress=False)
    one = toy.pipeline(plain_model).optimize("sgd", lr=0.0).fit(epochs=1, progress=False)
    assert doubled.history.epochs[0].loss == pytest.approx(2 * one.history.epochs[0].loss, rel=TOLERANCE)
    assert doubled.metrics["val_loss"] == pytest.approx(2 * one.metrics["val_loss"], rel=TOLERANCE)
    assert plain.metrics["val_loss"] != one.metrics["val_loss"]
