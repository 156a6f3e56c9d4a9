"""Losses that are weighted means, what trains with them inside ranks, and the same in plain PyTorch on one process."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from drivetrain import Classification, MultiLabel, Segmentation, Task, strategies
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.telemetry.observer import Observer
from drivetrain.pipeline.telemetry.state import TrainState
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import evaluate, train_epoch
from drivetrain.transforms import LabelSmoothing
from torch import nn

CLASSES, SIDE = 5, 6
TRAIN, VAL = (16, 16, 16, 11, 5, 2), (9, 7, 3)
"""Sizes of the global batches; the last ones cannot be split evenly, and not at all among more than two."""
WEIGHTS = torch.tensor([1.0, 1.0, 8.0, 0.0, 20.0])
Batch = tuple[torch.Tensor, torch.Tensor]


class Focal(nn.Module):
    """A loss of a user's: a weighted mean that declares its denominator, and is NaN where that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", WEIGHTS)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logs = F.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
        return -((1 - logs.exp()) ** 2 * logs * self.weights[targets]).sum() / self.denominator(targets)

    def denominator(self, targets: torch.Tensor) -> torch.Tensor:
        return self.weights[targets].sum()


class Rare(Task):
    """A task of a user's: only images of classes 2 and 4 count."""

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(outputs, targets, reduction="none")
        return (each * self.counts(targets)).sum() / self.denominator(targets)

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets % 2 == 0) & (targets > 0)

    def denominator(self, targets: torch.Tensor) -> torch.Tensor:
        return self.counts(targets).sum()


def indices(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(CLASSES, (size,), generator=generator)


def some_ignored(generator: torch.Generator, size: int) -> torch.Tensor:
    """A whole share may be ignored, the first samples."""
    found = indices(generator, size)
    found[: size // 2 + 1] = -100
    return found


def probabilities(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.rand(size, CLASSES, generator=generator).softmax(1)


def labels(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(2, (size, CLASSES), generator=generator).float()


def masks(generator: torch.Generator, size: int) -> torch.Tensor:
    """Class indices of pixels; those of the first half of the images are not counted, and some others."""
    found = torch.randint(CLASSES, (size, SIDE, SIDE), generator=generator)
    found[torch.rand(found.shape, generator=generator) < 0.3] = 255
    found[: size // 2] = 255
    return found.to(torch.uint8)


def weighted_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS)


def pixels(outputs: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    total = F.cross_entropy(outputs, targets.long(), weight, ignore_index=255, reduction="sum")
    return total / denominator_of_pixels(targets, weight)


def denominator_of_pixels(targets: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    known = targets[targets != 255].long()
    return torch.tensor(float(len(known))) if weight is None else weight[known].sum()


@dataclass(frozen=True)
class Case:
    """A loss, as users give it, and by hand: the mean of a batch, and what it divides by."""

    loss: Any
    targets: Callable[[torch.Generator, int], torch.Tensor]
    mean: Callable[[Any, torch.Tensor], torch.Tensor]
    divisor: Callable[[torch.Tensor], Any] = len
    smoothing: float = 0.0


def weights_of(targets: torch.Tensor) -> torch.Tensor:
    return WEIGHTS[targets].sum()


def kept(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


CASES: dict[str, Case] = {
    "unweighted": Case(Classification(), indices, F.cross_entropy),
    "class weights": Case(
        Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS)), indices, weighted_cross_entropy, weights_of
    ),
    "class weights, smoothed": Case(
        Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS)), indices,
        lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, label_smoothing=0.1), weights_of, 0.1,
    ),
    "ignored": Case(F.cross_entropy, some_ignored, F.cross_entropy, kept),
    "ignored, of a user's": Case(
        Classification(loss=nn.CrossEntropyLoss(ignore_index=3)), indices,
        lambda x, y: F.cross_entropy(x, y, ignore_index=3), lambda y: (y != 3).sum(),
    ),
    "class weights, soft": Case(
        Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS)), probabilities, weighted_cross_entropy
    ),
    "nll": Case(
        Classification(loss=nn.NLLLoss(weight=WEIGHTS)), indices, lambda x, y: F.nll_loss(x, y, WEIGHTS), weights_of
    ),
    "labels": Case(
        MultiLabel(loss=nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS + 1)), labels,
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, WEIGHTS, pos_weight=WEIGHTS + 1),
    ),
    "pixels": Case(Segmentation(CLASSES), masks, pixels, denominator_of_pixels),
    "pixels with weights": Case(
        Segmentation(CLASSES, loss=nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=255)), masks,
        lambda x, y: pixels(x, y, WEIGHTS), lambda y: denominator_of_pixels(y, WEIGHTS),
    ),
    "a module of a user's": Case(Classification(loss=Focal()), indices, Focal(), weights_of),
    "a task of a user's": Case(Rare(), indices, Rare().loss, Rare().denominator),
}  # fmt: skip


def net(case: Case) -> nn.Module:
    torch.manual_seed(3)
    if isinstance(case.loss, Segmentation):
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, CLASSES, 1))
    end: list[nn.Module] = [nn.LogSoftmax(1)] if "NLL" in repr(case.loss) else []
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES), *end
    )


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def batches(case: Case, sizes: tuple[int, ...], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, SIDE, SIDE, generator=generator), case.targets(generator, size)) for size in sizes]


@dataclass
class Run:
    """What came out of a training run: the loss of each step and of the epoch, `val_loss` after it, the weights."""

    steps: list[float] = field(default_factory=list)
    epoch: float = 0.0
    val: float = 0.0
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def by_hand(name: str) -> Run:
    """In plain PyTorch, each global batch at once; nothing of Drivetrain's is used but the value of the loss."""
    case, run = CASES[name], Run()
    model = net(case)
    steps = optimizer(model.parameters())
    numerators, divisors = 0.0, 0.0
    for images, targets in batches(case, TRAIN, 1):
        divisor = float(case.divisor(targets))
        loss = case.mean(model(images), targets) if divisor else (model(images) * 0).sum()
        loss.backward()
        steps.step()
        steps.zero_grad()
        run.steps.append(loss.item())
        numerators, divisors = numerators + loss.item() * divisor, divisors + divisor
    run.epoch = numerators / divisors
    with torch.no_grad():
        whole = [torch.cat(parts) for parts in zip(*batches(case, VAL, 2), strict=True)]
        run.val = evaluation_of(case)(model(whole[0]), whole[1]).item()
    run.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def evaluation_of(case: Case) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Without smoothing."""
    return weighted_cross_entropy if case.smoothing else case.mean


class Losses(Observer):
    """Keeps the loss of each step, over all ranks, as the logged ones are."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.found = engine, list[float]()

    def on_step_end(self, state: TrainState) -> None:
        self.found.append(self.engine.reduce(state.step_loss).item())


def trained(strategy: str, name: str, accumulate: int, **options: Any) -> Run:
    """In Drivetrain's loop, on this rank's shares of the same global batches."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    case = CASES[name]
    chosen = strategies.get(strategy, device="cpu", **options)
    engine = chosen.prepare(net(case), optimizer, accumulate=accumulate)

    def shares(sizes: tuple[int, ...], seed: int) -> list[Any]:
        whole = batches(case, sizes, seed)
        return [tuple(each.tensor_split(engine.world_size)[engine.rank] for each in batch) for batch in whole]

    task = case.loss if isinstance(case.loss, Task) else Classification()
    loss = case.loss
    if isinstance(loss, Task):
        loss = task.move(engine.device)
        loss = TaskLoss(task, LabelSmoothing(case.smoothing).loss(loss) if case.smoothing else loss)
    observer = Losses(engine)
    stats = train_epoch(engine, shares(TRAIN, 1), loss, observer=observer)
    metrics = evaluate(engine, shares(VAL, 2), task=task)
    return Run(observer.found, stats.loss, metrics["val_loss"], engine.export_state())


def all_trained(wanted: list[tuple[str, str, int]]) -> list[Run]:
    return [trained(*each) for each in wanted]


def evaluation_order(file: str, strategy: str) -> list[tuple[float, list[float], int]]:
    """Loss, a bias and the images of an epoch of a loader without augmentation and in order, with a loss of
    the user's own; without hooks, and with those of a run that has begun with a loader for training."""
    torch.set_num_threads(1)
    return [_in_order(file, strategy, begun=begun) for begun in (False, True)]


def statistics_of_evaluation(strategy: str) -> tuple[list[float], float]:
    """BatchNorm's means after an evaluation, and its loss; each rank has trained on samples of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
    engine = strategies.get(strategy, device="cpu").prepare(model, lambda p: torch.optim.SGD(p, lr=0.1))
    images, labels = torch.randn(4, 3, SIDE, SIDE) + 10 * engine.rank, torch.zeros(4, dtype=torch.long)
    train_epoch(engine, [(images, labels)], F.cross_entropy)
    loss = evaluate(engine, [(images, labels)])["val_loss"]
    return engine.plain_model[0].running_mean.tolist(), loss


def _in_order(file: str, strategy: str, *, begun: bool) -> tuple[float, list[float], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
    engine = strategies.get(strategy, device="cpu").prepare(model, lambda p: torch.optim.SGD(p, lr=0.5))
    hooks = TrainingHooks(())
    if begun:
        with FFCVLoader(file, batch_size=4, image_size=SIDE, workers=1) as loader:
            hooks.begin(engine, len(loader), loader)
    with FFCVLoader(file, batch_size=4, image_size=SIDE, train=False, eval_ratio=1.0, workers=1) as loader:
        stats = train_epoch(engine, loader, lambda outputs, labels: F.cross_entropy(outputs, labels), hooks)
    return stats.loss, engine.export_state()["1.bias"].tolist(), stats.images
