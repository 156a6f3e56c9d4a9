"""Schedule-Free SGD and AdamW: an average of the iterates takes the place of a learning rate schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...transforms import Session
from ...transforms.common.averaging import Averages, averaged_names
from .muon import loss_of


class ScheduleFree(torch.optim.Optimizer):
    """With z the iterates of a base optimizer, x their average, and y = (1 - momentum) · z + momentum · x, where the
    gradients are computed: the model holds y in training and x in evaluation, which `ScheduleFreeSession` installs.
    The average weights each step by the square of the largest learning rate so far, so that warm-up counts little.

    Source: Defazio et al., "The Road Less Scheduled", 2024, arXiv:2405.15682; as in the authors' package
    `schedulefree`, y and z are kept, from which x follows.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], momentum: float) -> None:
        for name in ("lr", "weight_decay"):
            if not defaults[name] >= 0:
                raise ValueError(f"{name}={defaults[name]!r} must be 0 or more")
        if not 0 < momentum < 1:
            raise ValueError(f"momentum={momentum!r} must be in (0, 1)")
        super().__init__(params, defaults | {"steps": 0, "largest_lr": 0.0, "sum_of_weights": 0.0})

    def session(self, model: nn.Module, calibrate: Callable[[], None]) -> Session:
        """Return what the loop follows for it, beside the transforms' sessions."""
        return ScheduleFreeSession(model, self, calibrate)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), self._momentum(group)
            group["steps"] += 1
            group["largest_lr"] = max(group["largest_lr"], lr)
            weight = group["largest_lr"] ** 2
            group["sum_of_weights"] += weight
            share = weight / group["sum_of_weights"] if weight else 0.0
            ys = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not ys:
                continue
            for y in ys:
                if "z" not in self.state[y]:
                    self.state[y]["z"] = y.detach().clone()
            zs = [self.state[y]["z"] for y in ys]
            directions = self._directions(group, ys, [y.grad for y in ys])
            if group["weight_decay"]:
                directions = torch._foreach_add(directions, ys, alpha=group["weight_decay"])
            # y = (1 - momentum) · (z - lr · d) + momentum · ((1 - share) · x + share · (z - lr · d)), without x
            torch._foreach_lerp_(ys, zs, share)
            torch._foreach_add_(ys, directions, alpha=lr * (momentum * (1 - share) - 1))
            torch._foreach_add_(zs, directions, alpha=-lr)
        return loss

    def averages(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield each parameter's y and z, and what x = y + extent · (z - y) needs; nothing of frozen ones:
        the layers after them, and the statistics of their BatchNorm, were trained with their y."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and "z" in self.state[parameter]:
                    yield parameter, self.state[parameter]["z"], 1 - 1 / self._momentum(group)

    def _momentum(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    def _directions(self, group: dict[str, Any], ys: list[Tensor], gradients: list[Any]) -> Any:
        raise NotImplementedError


class ScheduleFreeSGD(ScheduleFree):
    """Schedule-Free SGD. `lr` 1.0 and `momentum` 0.9 are the authors'; the best `lr` is often 10 to 50 times SGD's."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, momentum)

    def _momentum(self, group: dict[str, Any]) -> float:
        return float(group["momentum"])

    def _directions(self, group: dict[str, Any], ys: list[Tensor], gradients: list[Any]) -> Any:  # noqa: ARG002
        return gradients


class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-Free AdamW. Defaults are the authors'; betas[0] is the momentum. Weights decay at y."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= betas[1] < 1:
            raise ValueError(f"betas[1]={betas[1]!r} must be in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, betas[0])

    def _momentum(self, group: dict[str, Any]) -> float:
        return float(group["betas"][0])

    def _directions(self, group: dict[str, Any], ys: list[Tensor], gradients: list[Any]) -> Any:
        for y in ys:
            if "exp_avg_sq" not in self.state[y]:
                self.state[y]["exp_avg_sq"] = torch.zeros_like(y)
        # As torch's AdamW: of complex numbers, real and imaginary parts are numbers of their own.
        squares, beta = [_real(self.state[y]["exp_avg_sq"]) for y in ys], group["betas"][1]
        own = [_real(gradient) for gradient in gradients]
        torch._foreach_mul_(squares, beta)
        torch._foreach_addcmul_(squares, own, own, 1 - beta)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta ** group["steps"]))
        torch._foreach_add_(roots, group["eps"])
        directions = zip(ys, torch._foreach_div(own, roots), strict=True)
        return [torch.view_as_complex(each) if y.is_complex() else each for y, each in directions]


def _real(tensor: Any) -> Any:
    """Return a complex tensor as pairs of real numbers, sharing memory; a real one itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class ScheduleFreeSession(Session):
    """Installs x, with BatchNorm statistics that `calibrate` computes for it, in evaluation and at the end; in
    checkpoints, x is beside y and z."""

    def __init__(self, model: nn.Module, optimizer: ScheduleFree, calibrate: Callable[[], None]) -> None:
        self._model, self._optimizer, self._calibrate = model, optimizer, calibrate
        self._averaged = averaged_names(model)

    @torch.no_grad()
    def _averages(self) -> Averages:
        averages = Averages(self._model, self._averaged)
        names: dict[Any, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        values = averages.state_dict()
        for parameter, z, extent in self._optimizer.averages():
            value: Any = values[names[parameter]]
            value.lerp_(z.to(value.dtype), extent)
        return averages

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._averages().installed():
            self._calibrate()
            yield

    def finish(self) -> None:
        self._averages().install()
        self._calibrate()

    def state_dict(self) -> dict[str, Any]:
        averages = self._averages()
        with averages.installed():
            self._calibrate()
            buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        return {"averages": averages.state_dict() | buffers}
