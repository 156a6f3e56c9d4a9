"""Muon and AdaMuon: momentum whose matrices are orthogonalized, and AdamW for all other parameters."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial: its slope at 0 is steep, so that small singular values grow quickly. It does not converge
to 1: singular values end between about 0.7 and 1.2, which trains as well."""
EPSILON = 1e-7
_LARGE = 1 << 18  # elements
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factors of the learning rate by shape: Jordan's; and that of Liu et al. 2025, arXiv:2502.16982, with which the update
has the size of AdamW's, so that its learning rate and weight decay can be used."""
MUON, ADAMW = "muon", "adamw"


class Muon(torch.optim.Optimizer):
    """Muon for matrices and convolutions, AdamW for biases, norms and whatever `orthogonalize=False` excludes: the
    updates of `torch.optim.Muon` and `torch.optim.AdamW`.

    The momentum of each matrix is replaced by the nearest semi-orthogonal matrix, approximated by `ns_steps`
    Newton–Schulz iterations, batched over matrices of equal shape. A convolution's weight is the matrix (output
    channels, rest). Parameters with fewer than two rows or columns (class tokens, layer scales), and complex ones, are
    AdamW's. Every parameter group becomes up to two, with `lr` and `adamw_lr`; a schedule scales both. A group's own
    `lr` scales its `adamw_lr` by the same factor, unless it sets that, too; with `orthogonalize=False`, it is that of
    AdamW. Jordan trains embeddings and the last layer with AdamW: `groups={"fc.*": {"orthogonalize": False}}`.

    Parameters sharded by FSDP2 are gathered for the iterations, which every rank computes for all matrices; the
    momentum stays sharded. DeepSpeed, which flattens parameters, is rejected.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/.
    """

    needs_whole_matrices = True  # read by the strategies that flatten parameters

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,  # Jordan's, like those of momentum, adamw_lr and betas
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,  # decoupled: each step multiplies by 1 - lr · weight_decay
        ns_steps: int = 5,
        adjust_lr: str = "original",
        precision: str | None = None,  # of the iterations; None: bf16 on CUDA, else fp32
        orthogonalize: bool = True,
        adamw_lr: float | None = 3e-4,  # None: that of the matrices
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        for name, value in (("lr", lr), ("adamw_lr", adamw_lr), ("weight_decay", weight_decay), ("eps", eps)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value!r} must be 0 or more")
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} must be in [0, 1)")
        if not isinstance(ns_steps, int) or ns_steps < 1:
            raise ValueError(f"ns_steps={ns_steps!r} must be a positive integer")
        if adjust_lr not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr={adjust_lr!r} must be one of {', '.join(ADJUSTMENTS)}")
        if precision is not None and precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}, or None")
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "ns_steps": ns_steps,
            "adjust_lr": adjust_lr, "precision": precision, "orthogonalize": orthogonalize, "adamw_lr": adamw_lr,
            "betas": betas, "eps": eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        members = param_group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        param_group = {**param_group, **self.derived(param_group, self.defaults)}
        options = {**self.defaults, **param_group}
        matrices = [member for member in members if options["orthogonalize"] and _is_matrix(member)]
        chosen = set(map(id, matrices))
        others = [member for member in members if id(member) not in chosen]
        if matrices:
            super().add_param_group({**param_group, "params": matrices, "algorithm": MUON})
        if others:
            rate = options["lr"] if options["adamw_lr"] is None else options["adamw_lr"]
            super().add_param_group({**param_group, "params": others, "lr": rate, "algorithm": ADAMW})

    @staticmethod
    def derived(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that follow from those of a group."""
        rate = defaults["adamw_lr"]
        if "lr" not in group or "adamw_lr" in group or rate is None:
            return {}
        if not {**defaults, **group}["orthogonalize"]:
            return {"adamw_lr": group["lr"]}
        return {"adamw_lr": rate * group["lr"] / defaults["lr"] if defaults["lr"] else rate}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                (self._step_matrices if group["algorithm"] == MUON else self._step_others)(group, parameters)
        return loss

    def _step_matrices(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        lr, momentum, gradients = group["lr"], group["momentum"], [_gradient(p) for p in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        updates = buffers
        if group["nesterov"]:
            updates = [g.lerp(buffer, momentum) for g, buffer in zip(gradients, buffers, strict=True)]
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        alike: dict[Any, list[int]] = {}
        for number, parameter in enumerate(parameters):
            # On a CPU, torch divides a batch of large matrices among its threads as wholes: three take two threads as
            # long as four. One by one, those of a ResNet-18 take four fifths of the time.
            alone = number if parameter.device.type == "cpu" and parameter.numel() >= _LARGE else None
            alike.setdefault((_matrix_shape(parameter), parameter.dtype, parameter.device, alone), []).append(number)
        for (shape, _, device, _), numbers in alike.items():
            precision = group["precision"] or ("bf16" if device.type == "cuda" else "fp32")
            stacked = torch.stack([self._before(_whole(updates[number])).reshape(shape) for number in numbers])
            directions = orthogonalized(stacked, group["ns_steps"], PRECISIONS[precision])
            rate = lr * ADJUSTMENTS[group["adjust_lr"]](*shape)
            for number, direction in zip(numbers, directions, strict=True):
                parameter = parameters[number]
                self._update(group, parameter, _part(direction.reshape(parameter.shape), parameter), rate)

    def _before(self, update: torch.Tensor) -> torch.Tensor:
        return update

    def _update(self, group: dict[str, Any], parameter: Any, direction: Any, rate: float) -> None:  # noqa: ARG002
        """Step with an orthogonalized direction, sharded as the parameter is."""
        parameter.add_(direction, alpha=-rate)

    def _step_others(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(step=torch.zeros(()), **zeros)
        averages, squares, steps = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        (beta1, beta2), gradients = group["betas"], [_gradient(parameter) for parameter in parameters]
        adamw(
            parameters, gradients, averages, squares, [], steps, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            has_complex=any(parameter.is_complex() for parameter in parameters),
        )  # fmt: skip


class AdaMuon(Muon):
    """Muon whose orthogonalized directions are divided by the root of their mean squares, as Adam's are.

    With M the momentum of a matrix of n elements, O the orthogonalized sign(M), V = momentum · V + (1 - momentum) · O²
    and U = O / (√V + eps), a step is -lr · 0.2 · √n · U / ‖U‖. Its root mean square, 0.2 · lr, is that of AdamW's, so
    AdamW's learning rate and weight decay can be used, and all parameters have the same `lr`, unless `adamw_lr` is set.
    All else is as in Muon, sharded parameters included: V is sharded, too, and each norm is one more sum over ranks. A
    momentum near 0 may change its sign by rounding, so ranks agree with one device less closely than with Muon.

    Source: Si, Zhang and Shen, "AdaMuon: Adaptive Muon Optimizer", 2025, arXiv:2507.11005. `nesterov=True` is timm's
    `nadamuon`; timm does not take the sign.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,  # torch's for AdamW, whose steps are as large
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        precision: str | None = None,
        orthogonalize: bool = True,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params, lr, momentum, nesterov, weight_decay, ns_steps, "original", precision, orthogonalize, adamw_lr,
            betas, eps,
        )  # fmt: skip

    def _before(self, update: torch.Tensor) -> torch.Tensor:
        return update.sign()

    def _update(self, group: dict[str, Any], parameter: Any, direction: Any, rate: float) -> None:  # noqa: ARG002
        state = self.state[parameter]
        if "direction_sq" not in state:
            state["direction_sq"] = torch.zeros_like(parameter)
        squares = state["direction_sq"].lerp_(direction.square(), 1 - group["momentum"])
        step = direction / squares.sqrt().add_(group["eps"])
        norm = _whole(torch.linalg.vector_norm(step)).to(step.device)
        parameter.sub_(step * (group["lr"] * 0.2 * math.sqrt(step.numel()) / norm.clamp(min=EPSILON)))


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return what the closure of an optimizer's step returns, which computes the gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def orthogonalized(matrices: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return matrices, `(B, rows, columns)` of `dtype`, with the same singular vectors, and singular values near 1.

    Each iteration multiplies X by a polynomial of X Xᵀ from the left. In fp32, the polynomials of wide matrices are
    multiplied first, which takes matrices of (rows, rows) only, and X last: a third of the operations for 3 × 3
    convolutions, with the same precision. In bf16, the squares of small singular values would be lost.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    # At most 1 in the Frobenius norm, and thus in the spectral one.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    if dtype is torch.bfloat16 or x.shape[2] < 2 * x.shape[1]:
        for _ in range(steps):
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    else:
        gram = torch.bmm(x, x.mT)
        product = polynomial = _polynomial(gram)
        for _ in range(steps - 1):
            gram = polynomial @ gram @ polynomial  # of the next X: all of these commute
            polynomial = _polynomial(gram)
            product = torch.bmm(polynomial, product)
        x = torch.bmm(product, x)
    return x.mT if tall else x


def _polynomial(gram: torch.Tensor) -> torch.Tensor:
    """Return a + b G + c G²."""
    a, b, c = COEFFICIENTS
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=1, dim2=2).add_(a)
    return result


def _is_matrix(member: Any) -> bool:
    parameter = member[1] if isinstance(member, tuple) else member
    return parameter.dim() >= 2 and min(_matrix_shape(parameter)) > 1 and not parameter.is_complex()


def _matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _whole(value: Any) -> torch.Tensor:
    """On the mesh's device; every rank calls it in the same order."""
    if not hasattr(value, "full_tensor"):
        return value  # type: ignore[no-any-return]
    whole: torch.Tensor = value.to(value.device_mesh.device_type).full_tensor()
    return whole


def _part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    whole = whole.to(like.dtype)
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the same values: none are sent.
    part = distribute_tensor(whole.contiguous(), like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)
