"""cifar10-fast as a plain PyTorch loop, the baseline of `fast.py`. All data is on the device from the start.

Network, batch size, augmentation, loss, optimizer, schedule, precision, weight averaging and epochs are the recipe's.
It uses nothing of Drivetrain but the network and the views in evaluation, which both must share to compare accuracies.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from drivetrain.pipeline.models import airbench_net
from drivetrain.transforms import TestTimeFlip
from torch import nn

BATCH, PADDING, SMOOTHING, WARM_UP = 1024, 2, 0.2, 0.23
RATE, MOMENTUM, DECAY = 1.5, 0.85, 1.33e-3
SMALL = (8, 8, 8)
"""The network's widths in a rehearsal."""
EVERY, STAYS, POWER = 5, 0.774, 3.0  # Lookahead
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


class Images:
    """A normalized split on the device.

    Args:
        images: uint8 (N, 32, 32, 3).
        labels: int64 (N,).
        device: the device that keeps them.
    """

    def __init__(self, images: Any, labels: Any, device: str) -> None:
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
        values = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 255
        self.images = ((values - mean) / std).contiguous(memory_format=torch.channels_last)
        self.labels = torch.from_numpy(labels).to(device)


def train(seed: int, epochs: int, batch: int, data: Images, val: Images, small: bool = False) -> list[dict[str, float]]:
    """Train, and return training seconds, accuracy and loss of each epoch; `small` rehearses in fp32."""
    torch.manual_seed(seed)
    device = data.images.device
    model = airbench_net(widths=SMALL if small else (64, 256, 256)).to(device)
    model = model.to(memory_format=torch.channels_last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    slow = [value.detach().clone() for value in floats(model)]
    steps = len(data.images) // batch
    padded = F.pad(data.images, (PADDING,) * 4, mode="constant", value=0.0)
    mirrored = torch.rand(len(data.images), device=device) < 0.5
    found, number = [], 0
    for epoch in range(epochs):
        synchronize(device)
        start = perf_counter()
        model.train()
        order = torch.randperm(len(data.images), device=device)
        images = augmented(padded, mirrored if epoch % 2 == 0 else ~mirrored)
        total = torch.zeros((), device=device)
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            for group in optimizer.param_groups:
                group["lr"] = RATE * factor(number, epochs * steps)
            with torch.autocast(device.type, torch.bfloat16, enabled=not small):
                logits = model(images[chosen].contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), data.labels[chosen], label_smoothing=SMOOTHING)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
            number += 1
            if number % EVERY == 0:
                look_ahead(model, slow, STAYS * (number / (epochs * steps)) ** POWER)
        synchronize(device)
        seconds = perf_counter() - start
        found.append({"seconds": seconds, "accuracy": accuracy(model, slow, val, small), "loss": total.item() / steps})
    return found


def factor(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, then linear decay to 0."""
    warm = WARM_UP * steps
    return (step + 1) / (warm + 1) if step < warm else 1 - (step - warm) / max(steps - warm, 1)


def augmented(padded: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Return each image shifted at random, and mirrored where `mirrored` is true, for a full epoch at once."""
    count, side = len(padded), padded.shape[-1] - 2 * PADDING
    result = torch.empty_like(padded[..., :side, :side])
    rows, columns = torch.randint(2 * PADDING + 1, (2, count), device=padded.device)
    for row in range(2 * PADDING + 1):
        for column in range(2 * PADDING + 1):
            chosen = (rows == row) & (columns == column)
            result[chosen] = padded[chosen][..., row : row + side, column : column + side]
    return torch.where(mirrored[:, None, None, None], result.flip(-1), result)


def floats(model: nn.Module) -> list[torch.Tensor]:
    """Return the floating-point parameters and buffers."""
    return [value for value in model.state_dict().values() if value.is_floating_point()]


@torch.no_grad()
def look_ahead(model: nn.Module, slow: list[torch.Tensor], stays: float) -> None:
    """Move the slow weights towards the model's, and set the model's to them."""
    fast = floats(model)
    torch._foreach_lerp_(slow, fast, 1 - stays)
    torch._foreach_copy_(fast, slow)


@torch.no_grad()
def accuracy(model: nn.Module, slow: list[torch.Tensor], val: Images, small: bool) -> float:
    """Return the top-1 accuracy of the slow weights, over the recipe's six views."""
    fast = [value.clone() for value in floats(model)]
    torch._foreach_copy_(floats(model), slow)
    model.eval()
    views, right = TestTimeFlip(shift=1), 0
    pairs = zip(val.images.split(2000), val.labels.split(2000), strict=True)
    with torch.autocast(val.images.device.type, torch.bfloat16, enabled=not small):
        for images, labels in pairs:
            right += int((views.predict(model, images).argmax(1) == labels).sum())
    torch._foreach_copy_(floats(model), fast)
    return right / len(val.labels)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_to(target: float, epochs: list[dict[str, float]]) -> float | None:
    """Return the training seconds until the end of the first epoch with that accuracy; None if there is none."""
    reached = [number for number, epoch in enumerate(epochs) if epoch["accuracy"] >= target]
    return math.fsum(epoch["seconds"] for epoch in epochs[: reached[0] + 1]) if reached else None
