"""The training loop: its overhead per step, counted in operations, because times depend on the machine; and its loss, a
mean over microbatches, ranks and batches, as in plain PyTorch, which sees each batch as a whole."""

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import means_jobs
import pytest
import torch
from drivetrain import Classification, DataError, PlanError, Task, strategies
from drivetrain.pipeline.tasks.means import Mean, mean_of
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.loop import StepLoss, evaluate, train_epoch
from drivetrain.strategies import launch
from drivetrain.transforms import CutMix, LabelSmoothing, Loss, MixUp, Transform
from host_syncs import HostSyncs, SimulatedCuda
from means_jobs import (
    CASES,
    WEIGHTS,
    Focal,
    Run,
    all_trained,
    evaluation_order,
    statistics_of_evaluation,
    trained,
)
from own_transforms import First12, Own, WithoutTheFirstClass, by_image, hard
from parity_draws import COMPLEX, LOSSES, Draw, differences, draws, on_ranks, reference
from parity_jobs import NAMES as PARITY_NAMES
from pipeline_data import BATCH, CLASSES, SIDE, Toy, batch_norm_model, crcs, own_loops, plain_model, write_toy
from process_state import free_port
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(TorchDispatchMode):
    """Counts what reaches a kernel, in the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))) for _ in range(steps)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand() -> Callable[[int], object]:
    """An epoch of a typical hand-written loop."""
    model = batch_norm_model()
    optimizer = sgd(model.parameters())

    def train(steps: int) -> None:
        total = torch.zeros(())
        for images, labels in batches(steps):
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()

    return train


def ours(*, guarded: bool, accumulate: int = 1) -> Callable[[int], object]:
    engine = strategies.get("single", device="cpu").prepare(batch_norm_model(), sgd, accumulate=accumulate)
    guard = NonFiniteGuard(engine, "raise", str) if guarded else None
    loss = TaskLoss(Classification(), functional.cross_entropy, checked=True)  # as in a pipeline
    return lambda steps: train_epoch(engine, batches(steps), loss, observer=guard)


def in_a_step(train: Callable[[int], object]) -> Counter[str]:
    """The operations of one step more."""
    found = []
    train(1)  # makes the momentum
    for steps in (2, 3):
        with Counting() as counting:
            train(steps)
        found.append(counting.found)
    return found[1] - found[0]


def test_a_step_is_that_of_a_loop_by_hand() -> None:
    expected = in_a_step(by_hand())
    assert expected["aten.convolution_backward.default"] == 1
    assert in_a_step(ours(guarded=False)) == expected


def test_the_guard_reads_the_loss_and_does_nothing_else() -> None:
    bare, guarded = in_a_step(ours(guarded=False)), in_a_step(ours(guarded=True))
    assert guarded - bare == {"aten.view.default": 1}  # that it reads is no operation


def test_what_is_waited_for_is_the_data_of_each_batch_and_not_its_step() -> None:
    def late() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in batches(3):
            time.sleep(0.03)
            yield batch

    def slow(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return functional.cross_entropy(outputs, labels)

    stats = train_epoch(strategies.get("single", device="cpu").prepare(batch_norm_model(), sgd), late(), slow)
    assert 0.09 <= stats.data_wait_s <= stats.seconds - 0.09


TOLERANCE = 1e-6
expected = cache(means_jobs.by_hand)


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


def test_a_microbatch_without_images_leaves_the_statistics_alone() -> None:
    """Of a batch of one image in two microbatches; the next batch trains as usual."""
    torch.manual_seed(0)
    model, images, labels = batch_norm_model(), torch.randn(2, 3, SIDE, SIDE), torch.tensor([0, 1])
    by_image = [(images[:1], labels[:1]), (images[1:], labels[1:])]
    expected = copy.deepcopy(model)
    losses = [functional.cross_entropy(expected(image), label).item() for image, label in by_image]
    still = partial(torch.optim.SGD, lr=0.0)
    engine = strategies.get("single", device="cpu").prepare(model, still, accumulate=2)
    stats = train_epoch(engine, by_image, functional.cross_entropy)
    assert stats.loss == pytest.approx(sum(losses) / 2, abs=1e-6)
    torch.testing.assert_close(engine.export_state(), dict(expected.state_dict()))


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
    pairs = [*product(full, CASES), *product(few, FEW)]
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
    batches = [(torch.randn(4, 3), torch.tensor([-100, -100, -100, last])) for last in (-100, 1)]
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


@dataclass
class Two:
    """The first of two ranks, of which the other has the same."""

    device: torch.device
    world_size = 2
    exchanged = 0

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
    unchecked = StepLoss(mean_of(functional.cross_entropy), parts, linear(), equal=False)  # of one process
    assert torch.equal(unchecked.share(1, outputs, targets), mean.loss(outputs, targets))
    assert unchecked.weight == 8


def test_ranks_with_different_numbers_of_boxes() -> None:
    """Equally many images on each rank do not make the denominators equal; those that count images cost nothing."""
    ranks, outputs = Two(torch.device("cpu")), torch.ones(2, 4)
    targets: Any = torch.zeros(2), [torch.zeros(3, 4), torch.zeros(1, 4)]
    boxes = Mean(lambda outputs, _: outputs.mean(), lambda targets: sum(map(len, targets[1])))
    step = StepLoss(boxes, [(outputs, targets)], ranks, equal=True)
    assert (ranks.exchanged, float(step.weight)) == (1, 8)
    assert step.share(1, outputs, targets).item() == pytest.approx(1)
    StepLoss(mean_of(lambda outputs, _: outputs.mean()), [(outputs, targets)], ranks, equal=True)
    assert ranks.exchanged == 1


@pytest.mark.process
@pytest.mark.parametrize("method", [First12(), WithoutTheFirstClass()], ids=repr)
def test_ranks_that_take_different_numbers_of_samples_from_their_batches(toy: Toy, method: Transform) -> None:
    """Each sample weighs the same, in the gradients and in the loss."""
    alone = toy.pipeline(plain_model, batch_size=16).transform(method)
    both = (each.fit(epochs=1, progress=False) for each in (alone, alone.distribute("ddp", devices=2, device="cpu")))
    one, two = ({"loss": result.history.epochs[0].loss, **result.model.state_dict()} for result in both)
    torch.testing.assert_close(two, one, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_weighted_loss_never_makes_the_host_wait() -> None:
    """Nor does it copy anything to the device, also with a denominator that is a number."""
    targets, outputs = torch.tensor([0, 1, 2, 3]), torch.randn(4, 5)
    with HostSyncs() as syncs:
        for loss in (nn.CrossEntropyLoss(weight=WEIGHTS), Focal()):
            step = StepLoss(mean_of(loss), [(outputs, targets)] * 2, Two(torch.device("cpu")), equal=False)
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
    own = toy.pipeline(plain_model).task(Classification(loss=mine))
    known = own.task(Classification(loss=nn.CrossEntropyLoss(weight=torch.ones(CLASSES))))
    for pipeline, assumed in (
        (own, False), (own.distribute("single", accumulate=2), True),
        (own.distribute("ddp", devices=2, device="cpu"), True), (known.distribute("single", accumulate=2), False),
    ):  # fmt: skip
        why = " ".join(pipeline.plan().cautions)
        assert ("taken as the mean over the samples" in why) is assumed


def test_a_subclass_of_a_task_trains_with_its_own_loss(toy: Toy) -> None:
    class Doubled(Classification):
        def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            return 2 * super().loss(outputs, targets)

    pipeline = toy.pipeline(plain_model)
    still = pipeline.optimize("sgd", lr=0.0)
    three = (pipeline, still.task(Doubled()), still)
    plain, doubled, one = (each.fit(epochs=1, progress=False) for each in three)
    assert doubled.history.epochs[0].loss == pytest.approx(2 * one.history.epochs[0].loss, rel=TOLERANCE)
    assert doubled.metrics["val_loss"] == pytest.approx(2 * one.metrics["val_loss"], rel=TOLERANCE)
    assert plain.metrics["val_loss"] != one.metrics["val_loss"]


def no_tensor(logits: torch.Tensor, targets: torch.Tensor) -> Any:  # noqa: ARG001
    return 1.0


def test_it_trains_as_cross_entropy_does(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model, loader="torch", workers=0)
    both = (one.fit(epochs=2, progress=False).history for one in (pipeline.transform(Own(hard)), pipeline))
    own, plain = ([epoch.loss for epoch in history.epochs] for history in both)
    assert own == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(
    ("function", "others", "words"),
    [
        (hard, [LabelSmoothing(0.1)], r"does not accept logits \(2, 4\) and class indices .*with LabelSmoothing"),
        (hard, [MixUp()], r"not accept logits \(2, 4\) and probabilities \(2, 4\): .*MixUp or CutMix, probabilities"),
        (hard, [CutMix()], r"probabilities \(2, 4\)"), (no_tensor, [], "returns float for 2 images"),
        (by_image, [], r"returns \(2,\) for 2 images, but must return their mean"),
    ],
)  # fmt: skip
def test_what_it_cannot_take_is_told_before_training(
    toy: Toy, function: Loss, others: list[Transform], words: str
) -> None:
    pipeline = toy.pipeline(loader="torch", workers=0).transform(Own(function), *others)
    with pytest.raises(PlanError, match=words):
        pipeline.fit(epochs=1, progress=False)


class Scaled(nn.Module):
    """Cross entropy of logits that it scales for each class."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"scale": nn.Parameter(torch.ones(CLASSES), trained)})

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits * self.inner["scale"], targets)


class OwnTask(Task):
    """A task whose loss is that of a module in it."""

    def __init__(self) -> None:
        self.module = Scaled()

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.module(outputs, targets)
        return value


class Distilled(nn.Module):
    """Cross entropy, with a teacher of the logits which is not trained, and of which nothing was frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(CLASSES, CLASSES)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(logits).softmax(1)
        return functional.cross_entropy(logits, targets) + functional.cross_entropy(logits, wanted)


def test_trainable_parameters_of_a_loss_are_refused(toy: Toy) -> None:
    """The optimizer would not have them."""
    pipeline = toy.pipeline(plain_model, loader="torch", workers=0)
    held = Scaled()
    words = r"parameters of its own: {}\. .* \(loss='model'\), or freeze them with requires_grad_\(False\)"
    for refused, name in (
        (pipeline.task(Classification(loss=Scaled())), r"inner\.scale"),
        (pipeline.task(Classification(loss=Scaled())).transform(LabelSmoothing(0.1)), r"inner\.scale"),
        (pipeline.task(Classification(loss=lambda x, y: held(x, y))), r"a tensor \(4,\)"),
        (pipeline.task(OwnTask()), r"a tensor \(4,\)"),
        (pipeline.transform(Own(Scaled())), r"inner\.scale"),
    ):
        with pytest.raises(PlanError, match=words.format(name)):
            refused.fit(epochs=1, progress=False)
    for loss in (Scaled(trained=False), Distilled()):
        assert pipeline.task(Classification(loss=loss)).fit(epochs=1, progress=False).history.epochs


SEED = int(os.environ.get("DRIVETRAIN_PARITY_SEED", "0"))
"""Another one draws other cases."""


def check_draws(drawn: list[Draw], ranks: int, toy: Toy, timeout: float) -> None:
    """Rank 0 has the results; a failure names each draw that differs, and what differs."""
    found = launch(on_ranks, drawn, toy.train, toy.val, devices=ranks, timeout=timeout)[0]
    assert len(found) == len(drawn)
    wrong = [
        f"{draw}: {'; '.join(said)}"
        for draw, one in zip(drawn, found, strict=True)
        if (said := differences(draw, one, reference(draw, ranks, toy.train, toy.val)))
    ]
    assert not wrong, f"{len(wrong)} of {len(drawn)} on {ranks} ranks:\n" + "\n".join(wrong)


@pytest.mark.process
@pytest.mark.long
def test_a_few_random_runs_on_two_ranks_equal_plain_pytorch(toy: Toy) -> None:
    check_draws(draws(6, 2, SEED, PARITY_NAMES), 2, toy, 120)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_two_hundred_random_runs_equal_plain_pytorch(toy: Toy, ranks: int) -> None:
    check_draws(draws(50, ranks, SEED + 1), ranks, toy, 800)


@pytest.mark.process
def test_the_draws_have_every_part() -> None:
    """No part of the generator is switched off by its conditions."""
    drawn = [draw for ranks in (1, 2, 3, 4) for draw in draws(50, ranks, SEED + 1)]
    assert len(drawn) == 200
    assert {draw.loss for draw in drawn} == set(LOSSES)
    assert {draw.accumulate for draw in drawn} == {1, 2, 3, 4}
    assert {draw.norm for draw in drawn} == {"batch", "group", "none"}
    assert {draw.precision for draw in drawn} == {"fp32", "bf16"}
    assert {draw.strategy for draw in drawn} >= {"single", *PARITY_NAMES}
    assert {draw.strategy for draw in drawn if draw.complex_parameter} == set(COMPLEX)
    for part in ("complex_parameter", "tied", "double"):
        assert sum(getattr(draw, part) for draw in drawn) > 10
    assert draws(5, 2, SEED) == draws(5, 2, SEED)


@pytest.mark.process
def test_an_evaluation_in_a_loop_of_ones_own_has_the_statistics_of_all_ranks() -> None:
    first, second = launch(statistics_of_evaluation, "ddp", devices=2, device="cpu")
    assert first == second
    assert first[0] == pytest.approx([0.5] * 3, abs=0.2)  # a tenth of the mean of 0 and 10


def test_a_share_without_samples_adds_nothing_to_an_evaluation() -> None:
    """As of fewer samples than ranks."""
    engine = strategies.get("single", device="cpu").prepare(batch_norm_model(), sgd)
    first, second = batches(2)
    nothing = first[0][:0], first[1][:0]
    assert evaluate(engine, [nothing, first, nothing, second]) == evaluate(engine, [first, second])


@pytest.mark.process
def test_a_loop_of_ones_own_under_torchrun_loads_the_shares_of_its_ranks(toy: Toy) -> None:
    """Also with devices=1, where `ddp` joins them only when it wraps the model."""
    both = [toy.pipeline().distribute("ddp", device="cpu", devices=devices, timeout=77) for devices in (2, 1)]
    with toy.pipeline().distribute("single", device="cpu").build() as built:
        alone = crcs(built.train)
    first, second = launch(own_loops, both, [free_port(), free_port()], devices=2, device="cpu", timeout=120)
    for (one, _), (other, _) in zip(first, second, strict=True):
        assert [own + more for own, more in zip(one, other, strict=True)] == alone
    assert first[0][1] == second[0][1] == 77


@pytest.mark.process
def test_the_uneven_last_batch_of_a_loader_in_evaluation(tmp_path: Path) -> None:
    """Eleven samples in batches of 4: of the last batch, one rank has two samples and the other one."""
    file = str(write_toy(tmp_path / "eleven.beton", 11, seed=1, side=means_jobs.SIDE))
    wanted = evaluation_order(file, "single")
    assert [images for *_, images in wanted] == [11, 11]
    for rank in launch(evaluation_order, file, "ddp", devices=2, device="cpu"):
        for found, (loss, bias, images) in zip(rank, wanted, strict=True):
            assert found[0] == pytest.approx(loss, abs=1e-5)
            assert found[1] == pytest.approx(bias, abs=1e-5)
            assert found[2] == images


@pytest.mark.parametrize("cut", [6, 4])
def test_factors_of_samples_divide_by_the_class_weights(cut: int) -> None:
    """InfoBatch's loss by hand, of one microbatch and of two of different sizes."""
    outputs, targets = torch.randn(6, 5), torch.tensor([0, 1, 2, 4, 2, 0])
    factors = torch.tensor([1.0, 2.0, 2.0, 1.0, 1.0, 2.0])
    parts = [one for one in (slice(0, cut), slice(cut, 6)) if len(targets[one])]
    mean = mean_of(nn.CrossEntropyLoss(weight=WEIGHTS))
    step = StepLoss(mean, [(outputs[one], targets[one]) for one in parts], linear(), equal=False)
    shares = [step.weighted(n, outputs[one], targets[one], factors[one])[0] for n, one in enumerate(parts, 1)]
    each = functional.cross_entropy(outputs, targets, reduction="none")
    weights = WEIGHTS[targets]
    torch.testing.assert_close(torch.stack(shares).mean(), (factors * weights * each).sum() / weights.sum())
