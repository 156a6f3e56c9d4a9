"""Random runs of a pipeline, and a plain loop of PyTorch on one device that every strategy must equal.

A draw is a model, a loss, an optimizer, a precision and a division of the batch over ranks and microbatches. The last
batch of the evaluation is almost always uneven. A module, because ranks import it.
"""

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed_methods import STAGES
from drivetrain import Pipeline
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.tasks.standard import Classification
from drivetrain.transforms import LabelSmoothing
from parity_jobs import NAMES, options_of, quiet
from pipeline_data import CLASSES, SIDE
from torch import nn

WIDTH = 8
WEIGHTS = (1.0, 3.0, 0.5, 8.0)
LR = 0.05


@dataclass(frozen=True)
class Draw:
    """One run. `micro` is the number of images of a microbatch."""

    strategy: str
    accumulate: int
    micro: int
    loss: str
    optimizer: str
    precision: str
    clip_norm: float | None
    norm: str
    non_persistent: bool
    complex_parameter: bool
    tied: bool
    double: bool
    seed: int

    def batch(self, ranks: int) -> int:
        return self.micro * self.accumulate * ranks

    @property
    def model(self) -> dict[str, Any]:
        names = ("norm", "non_persistent", "complex_parameter", "tied", "double")
        return {name: value for name, value in asdict(self).items() if name in names}


class Drawn(nn.Module):
    """A network with the parts that a draw switches on."""

    def __init__(self, *, norm: str, non_persistent: bool, complex_parameter: bool, tied: bool, double: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, bias=norm == "none")
        norms = {"batch": nn.BatchNorm2d, "group": lambda n: nn.GroupNorm(2, n), "none": nn.Identity}
        self.norm = norms[norm](WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        if norm == "batch":
            # A large eps: the features differ little, and 1 / their deviation would multiply what sums round.
            norm_1d = nn.BatchNorm1d(WIDTH, eps=0.1, momentum=None)
            self.blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm_1d))
        if tied:
            self.blocks[1][0].weight = self.blocks[0][0].weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)) if complex_parameter else None
        if non_persistent:
            self.register_buffer("scale", torch.zeros(1), persistent=False)
        self.non_persistent = non_persistent
        if double:
            self.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, H, W) to logits (B, C). In evaluation, the buffer of the last training step is used."""
        # GELU, not ReLU: rounding that moves a value over the kink would change the gradient by more than rounding.
        x = F.gelu(self.norm(self.stem(images.to(self.stem.weight.dtype)))).mean((2, 3))
        for block in self.blocks:
            x = x + block(x)
        if self.phase is not None:
            x = (x.to(self.phase.dtype) * self.phase).real.to(x.dtype)
        if self.non_persistent:
            if self.training:
                with torch.no_grad():  # of the weights, which are the same in every microbatch of a step
                    self.scale.copy_(self.stem.weight.abs().mean().view(1))
            else:
                x = x * self.scale
        return self.head(x)


def soft(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy with soft targets: each class a little like its neighbours."""
    hot = F.one_hot(labels.long(), CLASSES).to(outputs.dtype)
    return F.cross_entropy(outputs, 0.8 * hot + 0.1 * hot.roll(1, 1) + 0.1 * hot.roll(-1, 1))


NON_PERSISTENT = (False, True)
LOSSES: dict[str, Any] = {
    "plain": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS)),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "weighted and ignored": nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS), ignore_index=1),
    "soft": soft,
    "smoothed": nn.CrossEntropyLoss(),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": LR, "momentum": 0.9, "weight_decay": 1e-3},
    # With a small eps it makes a full step of a gradient that is rounding only.
    "adamw": {"lr": LR / 5, "eps": 1e-3},
}


def draws(number: int, ranks: int, seed: int, strategies: Sequence[str] = (*NAMES, *STAGES)) -> list[Draw]:
    """Return so many valid draws, the same for the same arguments."""
    random = np.random.default_rng([seed, ranks])

    def one(values: Sequence[Any]) -> Any:
        return values[int(random.integers(len(values)))]

    among = ["single", *strategies] if ranks == 1 else strategies
    found: list[Draw] = []
    while len(found) < number:
        has_complex = one((False, False, True))
        draw = Draw(
            strategy=one([name for name in among if not has_complex or name in COMPLEX]),
            accumulate=one((1, 1, 2, 3, 4)), micro=int(random.integers(1, 33)), loss=one([*LOSSES]),
            optimizer=one([*OPTIMIZERS]), precision=one(("fp32", "fp32", "fp32", "bf16")),
            clip_norm=one((None, None, 0.3)), norm=one(("batch", "batch", "group", "none")),
            non_persistent=one(NON_PERSISTENT), complex_parameter=has_complex, tied=one((False, True)),
            double=one((False, True)), seed=int(random.integers(1000)),
        )  # fmt: skip
        if 12 <= draw.batch(ranks) <= 64 and _valid(draw):
            found.append(draw)
    return found


def _valid(draw: Draw) -> bool:
    """Whether the combination is one that Drivetrain accepts; those that it refuses have tests of their own."""
    if draw.norm == "batch" and draw.accumulate > 1:
        return False  # the exact statistics of microbatches are refused
    if draw.double and (draw.precision != "fp32" or draw.complex_parameter):
        return False
    if draw.complex_parameter and draw.precision != "fp32":
        return False
    return not (draw.double and draw.strategy in STAGES)  # DeepSpeed's weights are fp32


COMPLEX = ("single", "ddp")
"""Strategies that train complex parameters; the others' backends want one dtype, or have no collectives for them."""


@dataclass
class Numbers:
    loss: float
    val_loss: float
    state: dict[str, torch.Tensor]


def pipeline_of(draw: Draw, ranks: int, train: str, val: str) -> Pipeline:
    load = {"batch_size": draw.batch(ranks), "image_size": SIDE, "workers": 1}
    made = Pipeline(Drawn, seed=draw.seed, **draw.model).load(train, val, **load)
    made = made.task(Classification(loss=LOSSES[draw.loss])).optimize(
        draw.optimizer, schedule="constant", **OPTIMIZERS[draw.optimizer]
    )
    if draw.loss == "smoothed":
        made = made.transform(LabelSmoothing(0.2))
    return made.distribute(
        draw.strategy, devices=ranks, device="cpu", precision=draw.precision, accumulate=draw.accumulate,
        clip_norm=draw.clip_norm, sync_batchnorm=draw.norm == "batch", **options_of(draw.strategy),
    )  # fmt: skip


def on_ranks(drawn: list[Draw], train: str, val: str) -> list[Numbers | str]:
    quiet()
    return [_fitted(draw, train, val) for draw in drawn]


def _fitted(draw: Draw, train: str, val: str) -> Numbers | str:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    try:
        result = pipeline_of(draw, ranks, train, val).fit(epochs=1, progress=False)
    except Exception:
        return traceback.format_exc(limit=-4)
    epoch = result.history.epochs[0]
    return Numbers(epoch.loss, epoch.val_loss, everything(result.model))


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, also those that a state dict leaves out."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def reference(draw: Draw, ranks: int, train: str, val: str) -> Numbers:
    """The same epoch in plain PyTorch on one device, each batch as a whole."""
    torch.manual_seed(draw.seed)
    model, loss = Drawn(**draw.model), LOSSES[draw.loss]
    training = nn.CrossEntropyLoss(label_smoothing=0.2) if draw.loss == "smoothed" else loss
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[draw.optimizer]
    optimizer = kind(model.parameters(), **OPTIMIZERS[draw.optimizer])
    half = torch.autocast("cpu", torch.bfloat16, enabled=draw.precision == "bf16")
    batch, losses, counts = draw.batch(ranks), [], []
    load = {"image_size": SIDE, "workers": 1}
    with FFCVLoader(train, batch_size=batch, seed=draw.seed, drop_last=True, **load) as loader:
        for images, labels in loader:
            with half:
                outputs = model(images)
            value = training(outputs.float(), labels)
            value.backward()
            if draw.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), draw.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
            counts.append(counted(draw, labels))
    model.eval()
    with FFCVLoader(val, batch_size=1000, train=False, **load) as loader, torch.no_grad(), half:
        ((images, labels),) = list(loader)
        judged = loss(model(images).float(), labels).item()
    return Numbers(float(np.average(losses, weights=counts)), judged, everything(model))


def counted(draw: Draw, labels: torch.Tensor) -> float:
    """The denominator of a batch's mean: each label's weight, 0 if it is ignored."""
    weights = torch.tensor(WEIGHTS if "weighted" in draw.loss else (1.0,) * CLASSES)
    ignored = {"ignored": 2, "weighted and ignored": 1}.get(draw.loss)
    if ignored is not None:
        weights[ignored] = 0
    return weights[labels.long()].sum().item()


def differences(draw: Draw, found: Numbers | str, expected: Numbers) -> list[str]:
    if isinstance(found, str):
        return [found]
    near = 3e-2 if draw.precision == "bf16" else 5e-6
    said = [
        f"{name} {getattr(found, name)!r} is not {getattr(expected, name)!r}"
        for name in (field.name for field in fields(Numbers) if field.name != "state")
        if not abs(getattr(found, name) - getattr(expected, name)) <= near
    ]
    if found.state.keys() != expected.state.keys():
        return [*said, f"names {sorted(found.state.keys() ^ expected.state.keys())}"]
    for name, value in expected.state.items():
        apart = (found.state[name] - value).abs().max().item()
        if not apart <= near * max(1.0, value.abs().max().item()):
            said.append(f"{name} is {apart:.2e} apart")
    return said
