"""No transform synchronizes with a CUDA device in a step, and its numbers there equal those of the CPU."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import transforms as t
from drivetrain.pipeline.telemetry.state import TrainState
from host_syncs import OnCuda, SimulatedCuda, put_on_cuda
from surgery_cases import CASES
from surgery_models import bottlenecks, resnet, small
from torch import Tensor, nn
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[[Callable[[Any], Any]], Any]
"""What a transform does in a step; it is given a function that puts tensors or a model on the device."""

IMAGES, LABELS = torch.randn(6, 3, 20, 16), torch.tensor([0, 4, 2, 3, 1, 1])
SOFT = torch.rand(6, 5)
LOGITS = torch.randn(6, 5)


def context(**options: Any) -> t.BatchContext:
    return t.BatchContext(torch.Generator().manual_seed(3), classes=5, **options)


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def batch(transform: t.Transform, **options: Any) -> Step:
    def step(on: Callable[[Any], Any]) -> Any:
        return [transform.batch(on(IMAGES), on(targets), context(**options)) for targets in (LABELS, SOFT)]

    return step


def selecting(transform: t.SelectiveBackprop) -> Step:
    def step(on: Callable[[Any], Any]) -> Any:
        model = on(small())
        given = context(model=model, loss=F.cross_entropy, step=2, progress=0.6)
        images, targets = transform.batch(on(IMAGES), on(LABELS), given)
        assert len(images) == 3
        return images, targets, list(model.buffers())

    return step


def tokens(transform: t.SeqLengthWarmup) -> Step:
    return lambda on: transform.batch(on(torch.arange(60).view(3, 20)), on(torch.arange(3)), context())


def of_the_loader(transform: t.Transform) -> Step:
    assert transform.loader_settings
    return lambda on: transform.batch(on(IMAGES), on(LABELS), context())


def loss(transform: t.Transform, base: Callable[..., Tensor] = F.cross_entropy) -> Step:
    return lambda on: [transform.loss(base)(on(LOGITS), on(targets)) for targets in (LABELS, SOFT)]


def forward(transform: t.Transform, factory: Callable[[], nn.Module]) -> Step:
    def step(on: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = factory().train()
        assert transform.apply(model).changed
        transform.begin(model, 40)
        torch.manual_seed(1)
        images = torch.rand(4, 3, 32, 32)
        model = on(model)
        return [model(on(images)) for _ in range(2)], list(model.buffers())

    return step


def session(transform: t.Transform) -> Step:
    def step(on: Callable[[Any], Any]) -> Any:
        model = on(small())
        followed = transform.session(model)
        if isinstance(on, OnDevice):
            on.device.found.clear()  # a training begins once
        for number in range(1, 9):
            for parameter in model.parameters():
                parameter.add_(0.1)
            followed.after_step(number / 8)
        return list(model.state_dict().values())

    return step


class Loader:
    """Four batches of six samples, in order."""

    samples, indices, settings = 24, torch.arange(24).numpy(), SimpleNamespace(batch_size=6)

    def count(self, mask: Any) -> int:
        return int(mask.sum())

    def keep(self, indices: Any) -> None:
        assert indices is None  # no sample has a score yet

    def shares(self, epoch: int) -> list[Any]:  # noqa: ARG002
        return [self.indices[at : at + 6] for at in range(0, 24, 6)]


def pruning(on: Callable[[Any], Any]) -> Any:
    device = torch.device("cuda", 0) if isinstance(on, OnDevice) else torch.device("cpu")
    loop: Any = TrainState(total_steps=40, steps_per_epoch=4, epoch_steps=4, loader=Loader())
    loop.engine = SimpleNamespace(device=device, rank=0, world_size=1, accumulate=2)
    followed = t.InfoBatch().session(nn.Identity())
    followed.before_epoch(loop)
    followed.on_epoch_start(loop)
    for loop.microbatch, part in enumerate(LABELS.tensor_split(2)):
        loop.batch, loop.losses = (None, on(part)), on(part.float())
        followed.before_loss(loop)
        followed.before_backward(loop)
    return loop.weights, followed._epoch.losses.nan_to_num()


def clipping(transform: t.GradientClipping, on: Callable[[Any], Any]) -> Any:
    parameters = with_gradients(on(small()))
    return transform.clip(parameters), [p.grad for p in parameters]


def perturbing(on: Callable[[Any], Any]) -> Any:
    parameters = with_gradients(on(small()))
    restore = t.SAM().perturb(parameters)
    moved = [p.detach().clone() for p in parameters]
    restore()
    return moved, parameters


def freezing(on: Callable[[Any], Any]) -> Any:
    model = on(small())
    t.LayerFreezing().freeze(model, 0.9)
    return list(model.parameters())


def decay(on: Callable[[Any], Any]) -> Any:
    parameters = with_gradients(on(small()))
    t.NoWeightDecay().optimizer(partial(torch.optim.SGD, lr=0.1, weight_decay=0.1))(parameters).step()
    return parameters


def momentum_none() -> nn.Module:
    model = resnet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    return model


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.log_softmax(1) * (1 - logits.softmax(1))).sum(1).mean()


SURGERIES = {name.split("-")[0]: name for name in reversed(CASES)}.values()
"""Each surgery on one model."""

STEPS: dict[str, Step] = {
    "MixUp": batch(t.MixUp()), "CutMix": batch(t.CutMix()), "CutOut": batch(t.CutOut(2)), "ColOut": batch(t.ColOut()),
    "ProgressiveResizing": batch(t.ProgressiveResizing()),
    "EfficientTrain": batch(t.EfficientTrain(size_increment=2)),
    "SelectiveBackprop": selecting(t.SelectiveBackprop()),
    "SelectiveBackprop, smaller": selecting(t.SelectiveBackprop(scale_factor=0.5)),
    "SeqLengthWarmup": tokens(t.SeqLengthWarmup()), "SeqLengthWarmup, divided": tokens(t.SeqLengthWarmup()),
    "LabelSmoothing": loss(t.LabelSmoothing()), "LabelSmoothing, of a loss": loss(t.LabelSmoothing(), focal),
    "LabelSmoothing, of BCE": loss(t.LabelSmoothing(), t.BinaryCrossEntropy().loss(F.cross_entropy)),
    "BinaryCrossEntropy": loss(t.BinaryCrossEntropy()),
    "GradientClipping": partial(clipping, t.GradientClipping()),
    "GradientClipping, value": partial(clipping, t.GradientClipping("value", 0.1)),
    "GradientClipping, adaptive": partial(clipping, t.GradientClipping("adaptive", 0.1)),
    "InfoBatch": pruning, "SAM": perturbing, "LayerFreezing": freezing, "NoWeightDecay": decay,
    "EMA": session(t.EMA()), "Lookahead": session(t.Lookahead(2)), "SWA": session(t.SWA(0.3, 0.9)),
    "TestTimeFlip": lambda on: t.TestTimeFlip(1).predict(on(small()), on(IMAGES)),
    "RandAugment": of_the_loader(t.RandAugment()), "TrivialAugment": of_the_loader(t.TrivialAugment()),
    "AugMix": of_the_loader(t.AugMix()), "ThreeAugment": of_the_loader(t.ThreeAugment()),
    "ChannelsLast": forward(t.ChannelsLast(), resnet),
    "GhostBatchNorm, momentum=None": forward(t.GhostBatchNorm(2), momentum_none),
    "StochasticDepth, often": forward(t.StochasticDepth(drop_rate=0.9), bottlenecks),
    **{name: forward(*CASES[name][:2]) for name in SURGERIES},
}  # fmt: skip


MODELS = {
    *SURGERIES, "ChannelsLast", "GhostBatchNorm, momentum=None", "StochasticDepth, often", "TestTimeFlip",
    "SelectiveBackprop", "SelectiveBackprop, smaller",
}  # fmt: skip
"""Steps that run a model."""


class OnDevice:
    """Puts tensors and models on the CUDA device that is not there."""

    def __init__(self, device: SimulatedCuda) -> None:
        self.device = device

    def __call__(self, value: Any) -> Any:
        return put_on_cuda(value) if isinstance(value, nn.Module) else OnCuda(value.clone())


def test_every_transform_has_a_step() -> None:
    assert {name.split(",")[0].split("-")[0] for name in STEPS} == set(t.TRANSFORMS)


@torch.no_grad()
@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_nothing(name: str) -> None:
    expected = STEPS[name](copy.copy)
    with SimulatedCuda() as device:
        given = STEPS[name](OnDevice(device))
        assert device.found == []
    given = tree_map(lambda value: value.host if isinstance(value, OnCuda) else value, given)
    # A model's layers run as other kernels there: convolutions with a bias, attention in parts.
    rtol, atol = (1e-4, 1e-5) if name in MODELS else (0, 0)
    torch.testing.assert_close(given, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("outside", [-100, -1, 5])
def test_a_class_that_is_none_makes_the_loss_nan_there(outside: int) -> None:
    """On the CPU it is an error, which on a device would wait for it."""
    targets = torch.tensor([0, 4, outside, 3, 1, 1])
    with SimulatedCuda() as device:
        logits, labels = OnCuda(LOGITS), OnCuda(targets)
        for mixer in (t.MixUp(), t.CutMix()):
            _, soft = mixer.batch(OnCuda(IMAGES), labels, context())
            assert soft.host.isnan().any(1).sum() in (1, 2)
            assert F.cross_entropy(logits, soft).host.isnan()
        assert t.LabelSmoothing().loss(focal)(logits, labels).host.isnan()
        assert device.found == []


def test_what_waits_is_found() -> None:
    with SimulatedCuda() as device:
        x = torch.arange(4.0, device="cuda")
        for number, wait in enumerate(
            [
                x[1].item, lambda: float(x.sum()), x.cpu, lambda: x[x > 1], lambda: x.nonzero(),
                lambda: bool((x > 1).any()),
                lambda: torch.ones(2).to("cuda"), lambda: torch.ones(2).to("cuda", non_blocking=True),
                lambda: torch.ones(2).pin_memory().to("cuda"), lambda: x.index_fill_(0, torch.tensor([1]), 0),
                lambda: x.masked_select(x > 1), lambda: torch.equal(x, x), lambda: x.copy_(torch.ones(4)),
            ],
            1,
        ):  # fmt: skip
            wait()
            assert len(device.found) == number, device.found
        copied = torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        assert (len(device.found), device.copies) == (13, 1)
        assert copied.device.type == "cuda"
        x = x[:2] * 0 + copied + 1
        assert (len(device.found), x.host.tolist()) == (13, [2, 2])
