"""Transforms that depend on the length of the training: each declares it, and its hooks are checked against that."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from drivetrain import strategies
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.transforms import (
    CHANGES_MODEL,
    EMA,
    SWA,
    TRANSFORMS,
    BatchContext,
    GyroDropout,
    LayerFreezing,
    Lookahead,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    SeqLengthWarmup,
    Session,
    Transform,
    declares_length,
    follows_length,
)
from pipeline_data import CLASSES, SIDE, Toy
from torch import nn
from torch.nn import functional as F

PER_EPOCH, EPOCHS = 2, 4  # of the shorter training; the longer one has three times as many epochs

CASES = [
    *(cls() for name, cls in TRANSFORMS.items() if name not in ("GyroDropout", "SeqLengthWarmup")),
    GyroDropout(sigma=4, tau=1), GyroDropout(sigma=4, tau=1, total_steps=20),
    Lookahead(2, power=2.0), Lookahead(2), EMA(half_life=2, update_every=3), SWA(0.0, 0.5, 2), SWA(0.0, 1.0),
    SelectiveBackprop(0.0, 1.0), SelectiveBackprop(0.0, 0.8, interrupt=0), SelectiveBackprop(0.3, 1.0),
    ProgressiveResizing(delay=0.0, finetune=1.0), ProgressiveResizing(0.5, 0.2, 0.2),
    LayerFreezing(0.0, 1.0), LayerFreezing(0.0, 0.0),
    SeqLengthWarmup(max_seq_length=40), SeqLengthWarmup(0.0, 8, 40), SeqLengthWarmup(0.5, 16, 16),
]  # fmt: skip


class Everything(nn.Module):
    """With a layer for each surgery to change; images `(B, 3, H, W)`, or tokens `(B, L)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2),
            nn.GroupNorm(2, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.5),
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.dim() == 2:
            inputs = self.embedding(inputs).transpose(1, 2)[:, :, None].repeat(1, 1, 8, 1)
        result: torch.Tensor = self.head(self.norm(self.body(inputs)))
        return result


def run(transform: Transform, epochs: int, train: str) -> list[Any]:
    """Return what the first `EPOCHS` epochs of a longer run see and produce."""
    torch.manual_seed(0)
    model = Everything()
    if transform.kind in CHANGES_MODEL:
        transform.apply(model)
    engine = strategies.get("single", device="cpu").prepare(
        model, transform.optimizer(lambda p: torch.optim.SGD(p, lr=0.1))
    )
    methods, seen = TrainingHooks([transform], seed=0, classes=CLASSES), list[Any]()
    loss = transform.loss(F.cross_entropy)
    tokens = torch.randint(10, (PER_EPOCH, 8, 40))
    labels = torch.arange(8) % CLASSES

    def looked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((logits.detach().clone(), targets.clone()))
        return loss(logits, targets)

    if isinstance(transform, SelectiveBackprop):
        looked = loss  # which it must know
    with ExitStack() as stack:
        loader: Any = [(torch.randn(8, 3, SIDE, SIDE), labels) for _ in range(PER_EPOCH)]
        if isinstance(transform, SeqLengthWarmup):
            loader = [(each, labels) for each in tokens]
        if isinstance(transform, ProgressiveResizing):  # whose work the loader does
            loader = FFCVLoader(train, batch_size=128 // PER_EPOCH, image_size=SIDE, workers=1, flip=False)
            stack.enter_context(loader)
        methods.begin(engine, epochs * PER_EPOCH)
        for _ in range(EPOCHS):
            methods.begin_epoch(loader, SIDE)
            train_epoch(engine, loader, looked, hooks=methods)
            seen.append([p.requires_grad for p in model.parameters()])
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
            with methods.evaluating():
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
    return seen


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::drivetrain.transforms.NothingChanged")
@pytest.mark.parametrize("transform", CASES, ids=repr)
def test_the_declaration_is_what_the_hooks_do(transform: Transform, toy: Toy) -> None:
    short, again = run(transform, EPOCHS, toy.train), run(transform, EPOCHS, toy.train)
    assert same(short, again)  # else a difference would prove nothing
    assert same(short, run(transform, 3 * EPOCHS, toy.train)) != follows_length(transform)


def test_every_transform_that_could_know_the_length_declares_it() -> None:
    for name, cls in TRANSFORMS.items():
        if cls.kind in ("batch", "loop", "schedule") or cls.begin is not Transform.begin:
            assert declares_length(cls()), name
        assert any(isinstance(case, cls) for case in CASES), f"{name} is in no case"


@dataclass(frozen=True)
class Bare(Transform):
    """Declares nothing."""

    source: ClassVar[str] = "this test"


class Shrinking(Bare):
    kind: ClassVar = "batch"

    def batch(self, images: Any, targets: Any, context: BatchContext) -> Any:
        return images * (1 - context.progress), targets


class Following(Bare):
    kind: ClassVar = "loop"

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        return Session()


class Beginning(Bare):
    kind: ClassVar = "surgery"

    def begin(self, model: nn.Module, total_steps: int) -> None: ...


class Scheduled(Bare):
    kind: ClassVar = "schedule"


class OwnLoss(Bare):
    kind: ClassVar = "loss"

    def loss(self, loss: Any) -> Any:
        return loss


class Declared(Shrinking):
    @property
    def depends_on_length(self) -> bool:
        return False


class DeclaredOnce(Shrinking):
    depends_on_length: ClassVar[bool] = False  # type: ignore[misc]


@dataclass(frozen=True)
class OtherDefault(MixUp):
    alpha: float = 0.4


class OtherLookahead(Lookahead):
    def stays(self, progress: float) -> float:
        return progress


class OtherFreezing(LayerFreezing):
    def level(self, progress: float) -> float:
        return progress


class Undone(Declared):
    def batch(self, images: Any, targets: Any, context: BatchContext) -> Any:
        return images * context.progress, targets


@pytest.mark.parametrize(("transform", "follows", "declares"), [
    (Shrinking(), True, False), (Following(), True, False), (Beginning(), True, False), (Scheduled(), True, False),
    (OwnLoss(), False, False), (Declared(), False, True), (DeclaredOnce(), False, True), (OtherDefault(), False, True),
    (OtherLookahead(), True, False), (OtherFreezing(freeze_level=0.0), True, False), (Undone(), True, False),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_a_custom_transform_is_taken_to_follow_the_length_unless_it_declares(
    transform: Transform, follows: bool, declares: bool
) -> None:
    """A subclass that changes a method does not inherit what was declared of the method before."""
    assert dataclasses.is_dataclass(transform)
    assert (follows_length(transform), declares_length(transform)) == (follows, declares)
