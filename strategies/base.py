"""The interface of stage three: a `Strategy` prepares a model, an `Engine` trains it.

The interface makes the known silent mistakes impossible: the optimizer is built by a factory at the
moment the backend needs it, and `Engine.step()` clips, steps *and* zeroes, so that no backend's own
habit of doing one of these leaks into the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Unpack

import torch
from torch import nn

from .common.memory import Held
from .common.optimizer_state import Keep, OptimizerState
from .options import PrepareOptions

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Builds an optimizer over parameters (or parameter groups): `lambda params: SGD(params, lr=0.1)`."""


class Engine(Protocol):
    """A model ready to train on this rank. One optimizer step is::

    for i, (images, targets) in enumerate(microbatches):
        with engine.forward_context():
            loss = criterion(engine.model(images), targets)
        engine.backward(loss, last_microbatch=i == len(microbatches) - 1)
    grad_norm = engine.step()

    Where parameters are divided among the ranks, every forward, `step` and `export_state` communicates: all ranks
    must make the same calls in the same order, in evaluation too, if only with a batch of no images.
    """

    model: nn.Module
    """What the loop calls; wrapped where the strategy wraps."""
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    accumulate: int
    skipped: bool
    """Whether the last `step` left the weights and the optimizer as they were: fp16's gradients overflowed."""
    note: str
    """What a user should know of how it was made, one sentence: what `auto` chose, and why; else empty."""

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, without the strategy's wrapper."""
        ...

    @property
    def divided(self) -> bool:
        """Whether parameters are divided among the ranks, so that no rank has the model whole."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor that `export_state` gives, by name; the same on every rank."""
        ...

    def forward_context(self) -> AbstractContextManager[Any]:
        """The precision's autocast, or nothing for fp32. For evaluation too.

        A training forward must run inside it also in fp32: DDP decides in the forward whether this
        microbatch's backward communicates.
        """
        ...

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """Adds the gradients of `loss / accumulate`; ranks synchronise on the last microbatch only.

        Raises:
            StrategyError: if `last_microbatch` is not true for exactly the `accumulate`-th call since
                the last step, because the loss would be divided by the wrong number.
        """
        ...

    def step(self) -> torch.Tensor | None:
        """Clips, steps and zeroes.

        With fp16, gradients that overflow leave the weights and the optimizer as they were, on all ranks: `skipped`
        is then true, and the next step has a lower loss scale. fp16 alone waits for the device here, to learn it.

        Returns:
            The gradients' total norm before clipping, `()`, the same on every rank, where the gradients are: to read
            it waits for the device. None without clipping, and for a step that was skipped, which has no norm.
        """
        ...

    def zero(self) -> None:
        """Throws away the gradients added since the last step, for methods that need a second backward (SAM)."""
        ...

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """`value` reduced over all ranks, the same on each; a new tensor."""
        ...

    def sync_buffers(self) -> None:
        """Gives each rank the floating-point buffers of all ranks together: their means, and of BatchNorm's variances
        the variance of all ranks' samples; see `statistics.pool_buffers`.

        Between two calls BatchNorm's statistics are each rank's own, of its shard of the batches, as in training it
        normalises with those. Call it before an evaluation and before the weights are taken; `Pipeline.fit` does, at
        the end of each epoch and for each checkpoint. The training itself is not that of one device where a model has
        BatchNorm: its batches are smaller.

        Integer buffers (`num_batches_tracked`) stay as they are: they count the same steps on each rank, unless the
        ranks skip different branches (StochasticDepth).
        """
        ...

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `sync_buffers` would make of `values`, by the names of the model's buffers; every rank must call it.

        For copies and averages of buffers. Others than floating-point ones are left out.
        """
        ...

    def export_state(self, keep: Keep | None = None) -> dict[str, torch.Tensor]:
        """The model's state by plain parameter names: whole, contiguous copies on the CPU.

        Every rank must call it: tensors are gathered one at a time, and each rank keeps those whose name its own
        `keep` accepts (None: all).
        """
        ...

    def import_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the model's state with that of any engine, in place.

        Every rank must call it, with a mapping that has all tensors, whole: each takes its part. They are looked
        up one at a time, so that a mapping which reads a file need not hold them.
        """
        ...

    def export_optimizer(self, keep: Keep | None = None) -> OptimizerState:
        """The optimizer's state by plain parameter names, gathered and kept as by `export_state`."""
        ...

    def import_optimizer(self, state: OptimizerState) -> None:
        """Gives the optimizer the state that any engine's `export_optimizer` gave; as `import_state`."""
        ...

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """`value` whole: itself, unless ranks hold parts of it (a DTensor), which all ranks then gather."""
        ...

    def held(self) -> Held:
        """The tensors this rank holds for training; see `memory.held_bytes`."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        ...


class Strategy(Protocol):
    """A way to train a model on one or more ranks. Its options are its constructor's arguments."""

    name: str
    summary: str
    """One line for `strategies.available()`."""

    def check(self, devices: int) -> None:
        """Raises StrategyError if it cannot run here with that many devices."""
        ...

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **options: Unpack[PrepareOptions]
    ) -> Engine:
        """Moves `model` to this rank's device, wraps it, builds the optimizer, in the order it needs.

        Args:
            model: on the CPU, after all surgery.
            optimizer_factory: called once, with the parameters to train.
            options: `precision`, `clip_norm`, `accumulate`; see `options.Options`.

        Raises:
            StrategyError: if an argument, or this rank's surroundings, make it impossible.
        """
        ...
