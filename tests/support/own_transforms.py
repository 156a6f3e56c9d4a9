"""Custom transforms and losses, in a module that a recipe can name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from drivetrain.transforms import Loop, Loss, Report, Session, Transform
from torch import nn


@dataclass(frozen=True)
class GaussianNoise(Transform):
    std: float = 0.1
    kind = "batch"
    source = "custom"
    depends_on_length = False

    def batch(self, images: Any, targets: Any, context: Any) -> Any:
        noise = torch.randn(images.shape, generator=context.generator)
        return images + self.std * noise.to(images), targets


@dataclass(frozen=True)
class Smooth(Transform):
    kind = "surgery"
    source = "custom"

    def apply(self, model: nn.Module) -> Report:
        places = [name for name, module in model.named_children() if isinstance(module, nn.ReLU)]
        for name in places:
            setattr(model, name, nn.Softplus())
        return Report("Smooth", changed=tuple(places))


@dataclass(frozen=True)
class FadingDropout(Transform):
    """A schedule: dropout falls to 0 over the epochs."""

    kind = "schedule"
    source = "custom"
    depends_on_length = True

    def session(self, model: nn.Module) -> Session:
        return _Fading([module for module in model.modules() if isinstance(module, nn.Dropout)])


class _Fading(Session):
    def __init__(self, layers: list[nn.Dropout]) -> None:
        self._layers = layers

    def before_epoch(self, loop: Loop) -> None:
        for layer in self._layers:
            layer.p = 0.5 * (1 - loop.progress_at(loop.epoch_start))


@dataclass(frozen=True)
class Upside(Transform):
    """An evaluation: the mean over each image and its upside-down one."""

    kind = "evaluation"
    source = "custom"

    def predict(self, model: Callable[[torch.Tensor], Any], images: torch.Tensor) -> Any:
        return (model(images) + model(images.flip(-2))) / 2


@dataclass(frozen=True)
class First12(Transform):
    """Of a batch of 16, its first 12 samples: on two ranks 8 and 4."""

    kind = "optimizer"
    source = "custom"

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        return _First12()


class _First12(Session):
    def on_step_start(self, loop: Loop) -> None:
        images, targets = loop.batch
        kept = 12 if loop.engine.world_size == 1 else 8 - 4 * loop.engine.rank
        loop.batch = images[:kept], targets[:kept]


@dataclass(frozen=True)
class WithoutTheFirstClass(Transform):
    """A batch method that keeps as many samples as it finds: on two ranks different numbers."""

    kind = "batch"
    source = "custom"
    depends_on_length = False

    def batch(self, images: Any, targets: Any, context: Any) -> Any:  # noqa: ARG002
        kept = targets > 0
        return images[kept], targets[kept]


@dataclass(frozen=True)
class SignMomentum(Transform):
    """A gradient method: adds the sign of a running mean of the gradients."""

    share: float = 0.1
    kind = "optimizer"
    source = "custom"
    depends_on_length = False

    def session(self, model: nn.Module) -> Session:
        return _SignMomentum(self.share, dict(model.named_parameters()))


class _SignMomentum(Session):
    def __init__(self, share: float, parameters: dict[str, nn.Parameter]) -> None:
        self._share, self._parameters = share, parameters
        self._means = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def before_step(self, loop: Loop) -> None:
        for name, parameter in self._parameters.items():
            self._means[name].lerp_(parameter.grad, 0.5)
            parameter.grad.add_(self._means[name].sign(), alpha=self._share * (1 - loop.progress))

    def state_dict(self) -> dict[str, Any]:
        return {"means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["means"].items():
            self._means[name].copy_(value)


def hard(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy that accepts only class indices."""
    return -logits.log_softmax(1).gather(1, targets[:, None]).mean()


def by_image(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


@dataclass(frozen=True)
class Own(Transform):
    function: Loss

    kind: ClassVar[Any] = "loss"
    source: ClassVar[str] = "here"

    def loss(self, loss: Loss) -> Loss:  # noqa: ARG002
        return self.function
