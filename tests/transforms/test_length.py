"""Transforms that depend on the length of the training: each declares it, and its hooks are checked against that."""

import dataclasses
import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from drivetrain import strategies
from drivetrain import transforms as t
from drivetrain.common.errors import PlanError
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from pipeline_data import CLASSES, SIDE, Toy
from torch import Tensor, nn
from torch.nn import functional as F

PER_EPOCH, EPOCHS = 2, 4  # of the shorter training; the longer one has three times as many epochs

WITH_OPTIONS = (
    "EfficientTrain",
    "GyroDropout",
    "SeqLengthWarmup",
)  # their defaults do not change such images
CASES = [
    *(cls() for name, cls in t.TRANSFORMS.items() if name not in WITH_OPTIONS),
    t.EfficientTrain(size_increment=4),
    t.GyroDropout(sigma=4, tau=1), t.GyroDropout(sigma=4, tau=1, total_steps=20),
    t.Lookahead(2, power=2.0), t.Lookahead(2), t.EMA(half_life=2, update_every=3), t.SWA(0.0, 0.5, 2), t.SWA(0.0, 1.0),
    t.SelectiveBackprop(0.0, 1.0), t.SelectiveBackprop(0.0, 0.8, interrupt=0), t.SelectiveBackprop(0.3, 1.0),
    t.ProgressiveResizing(delay=0.0, finetune=1.0), t.ProgressiveResizing(0.5, 0.2, 0.2),
    t.LayerFreezing(0.0, 1.0), t.LayerFreezing(0.0, 0.0), t.InfoBatch(0.9, 0.0),
    t.SeqLengthWarmup(max_seq_length=40), t.SeqLengthWarmup(0.0, 8, 40), t.SeqLengthWarmup(0.5, 16, 16),
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

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 2:
            inputs = self.embedding(inputs).transpose(1, 2)[:, :, None].repeat(1, 1, 8, 1)
        return self.head(self.norm(self.body(inputs)))


def run(transform: t.Transform, epochs: int, train: str) -> list[Any]:
    """Return what the first `EPOCHS` epochs of a longer run see and produce."""
    torch.manual_seed(0)
    model = Everything()
    if transform.kind in t.CHANGES_MODEL:
        transform.apply(model)
    engine = strategies.get("single", device="cpu").prepare(
        model, transform.optimizer(lambda p: torch.optim.SGD(p, lr=0.1))
    )
    methods, seen = TrainingHooks([transform], seed=0, classes=CLASSES), list[Any]()
    loss = transform.loss(F.cross_entropy)
    tokens = torch.randint(10, (PER_EPOCH, 8, 40))
    labels = torch.arange(8) % CLASSES

    def looked(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append((logits.detach().clone(), targets.clone()))
        return loss(logits, targets)

    if isinstance(transform, t.SelectiveBackprop | t.InfoBatch):
        looked = loss  # which it must know
    with ExitStack() as stack:
        loader: Any = [(torch.randn(8, 3, SIDE, SIDE), labels) for _ in range(PER_EPOCH)]
        if isinstance(transform, t.SeqLengthWarmup):
            loader = [(each, labels) for each in tokens]
        if isinstance(transform, t.ProgressiveResizing | t.InfoBatch):  # whose work the loader does
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
    if isinstance(left, Tensor):
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::drivetrain.transforms.NothingChanged")
@pytest.mark.parametrize("transform", CASES, ids=repr)
def test_the_declaration_is_what_the_hooks_do(transform: t.Transform, toy: Toy) -> None:
    short, again = run(transform, EPOCHS, toy.train), run(transform, EPOCHS, toy.train)
    assert same(short, again)  # else a difference would prove nothing
    assert same(short, run(transform, 3 * EPOCHS, toy.train)) != t.follows_length(transform)


def test_every_transform_that_could_know_the_length_declares_it() -> None:
    for name, cls in t.TRANSFORMS.items():
        if cls.kind in ("batch", "loop", "schedule") or cls.begin is not t.Transform.begin:
            assert t.declares_length(cls()), name
        assert any(isinstance(case, cls) for case in CASES), f"{name} is in no case"


@dataclass(frozen=True)
class Bare(t.Transform):
    """Declares nothing."""

    source: ClassVar[str] = "this test"


@dataclass(frozen=True)
class OtherDefault(t.MixUp):
    alpha: float = 0.4


def derived(base: type[t.Transform], **members: Any) -> type[t.Transform]:
    """A subclass with these attributes and methods."""
    return type("Derived", (base,), members)


Shrinking = derived(Bare, kind="batch", batch=lambda _, x, y, context: (x * (1 - context.progress), y))
Declared = derived(Shrinking, depends_on_length=property(lambda _: False))


@pytest.mark.parametrize(
    ("transform", "follows", "declares"),
    [
        pytest.param(Shrinking(), True, False, id="Shrinking"),
        pytest.param(derived(Bare, kind="loop", session=lambda *_: t.Session())(), True, False, id="Following"),
        pytest.param(derived(Bare, kind="surgery", begin=lambda *_: None)(), True, False, id="Beginning"),
        pytest.param(derived(Bare, kind="schedule")(), True, False, id="Scheduled"),
        pytest.param(derived(Bare, kind="loss", loss=lambda _, loss: loss)(), False, False, id="OwnLoss"),
        pytest.param(Declared(), False, True, id="Declared"),
        pytest.param(derived(Shrinking, depends_on_length=False)(), False, True, id="DeclaredOnce"),
        pytest.param(OtherDefault(), False, True, id="OtherDefault"),
        pytest.param(derived(t.Lookahead, stays=lambda _, p: p)(), True, False, id="OtherLookahead"),
        pytest.param(derived(t.LayerFreezing, level=lambda _, p: p)(0.5, 0.0), True, False, id="OtherFreezing"),
        pytest.param(derived(Declared, batch=lambda _, x, y, c: (x * c.progress, y))(), True, False, id="Undone"),
    ],
)
def test_a_custom_transform_is_taken_to_follow_the_length_unless_it_declares(
    transform: t.Transform, follows: bool, declares: bool
) -> None:
    """A subclass that changes a method does not inherit what was declared of the method before."""
    assert dataclasses.is_dataclass(transform)
    assert (t.follows_length(transform), t.declares_length(transform)) == (follows, declares)


@pytest.mark.parametrize("epochs", [1, 3, 8, 11, 13, 59])
def test_what_errors_of_too_few_epochs_advise_is_enough(epochs: int) -> None:
    """Also of 11 epochs: half of one is 0.04545…, which was rounded down."""
    with pytest.raises(PlanError, match="none at the end would use all") as caught:
        t.InfoBatch(anneal=0.001).check_epochs(epochs, 30)
    (share,) = re.findall(r"anneal to at least (0\.\d+)", str(caught.value))
    t.InfoBatch(anneal=float(share)).check_epochs(epochs, 30)
    for delay in (0.5, 0.995):
        with pytest.raises(PlanError, match="none would have full size") as caught:
            t.ProgressiveResizing(delay=delay, finetune=0.001).check_epochs(epochs, 30)
        ((share, earlier),) = re.findall(
            r"finetune to at least (0\.\d+)(?:, and delay to at most (0\.\d+))?", str(caught.value)
        )
        t.ProgressiveResizing(delay=float(earlier or delay), finetune=float(share)).check_epochs(epochs, 30)
