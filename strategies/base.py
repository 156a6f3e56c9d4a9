"""The interface of stage three: a `Strategy` prepares a model, an `Engine` trains it.

It rules out known silent mistakes: a factory builds the optimizer when the backend needs it, and `Engine.step()` clips,
steps *and* zeroes the gradients, so that differences between backends do not leak into the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Unpack

import torch
from torch import nn

from .common.optimizer_state import Keep, OptimizerState
from .options import PrepareOptions

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Builds an optimizer over parameters (or parameter groups): `lambda params: SGD(params, lr=0.1)`."""


@dataclass(frozen=True)
class Held:
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    optimizer: Sequence[torch.Tensor]
    count: int  # parameters of the full model


class Engine(Protocol):
    """A model ready to train on this rank. One optimizer step is::

        for i, (images, targets) in enumerate(microbatches):
            with engine.forward_context():
                loss = criterion(engine.model(images), targets)
            engine.backward(loss, last_microbatch=i == len(microbatches) - 1)
        grad_norm = engine.step()

    If parameters are sharded, every forward, `step` and `export_state` communicates: all ranks must make the same calls
    in the same order, also in evaluation, if necessary with an empty batch.

    Example::

        >>> engine = strategies.get("single").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> with engine.forward_context():
        ...     loss = nn.functional.cross_entropy(engine.model(images), labels)
        >>> engine.backward(loss, last_microbatch=True)
        >>> grad_norm = engine.step()
    """

    model: nn.Module
    """The model to call in the training loop, with the strategy's wrapper if there is one."""
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    accumulate: int
    shards: int
    """Over how many ranks each parameter is sharded as by `torch.chunk`, its rows (DTensors) or its elements
    (`rows.FlatShard`): ranks write such shards to checkpoints as they are. 0 if they are not: then rank 0 writes full
    tensors."""
    skipped: bool
    """Whether the last `step` changed neither weights nor optimizer, because fp16 gradients overflowed."""
    note: str
    """A sentence for the user about how the engine was made, such as what `auto` chose and why; empty if none."""

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, without the strategy's wrapper."""

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, so that no rank has the full model."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the precision's autocast context; empty for fp32. Use it in evaluation too.

        A training forward must run inside it even in fp32: DDP decides there whether this backward communicates.
        """

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """Accumulate the gradients of `loss / accumulate`; ranks synchronize only on the last microbatch.

        Raises `StrategyError` unless `last_microbatch` is True for exactly the `accumulate`-th call since the last
        step: any other number of microbatches would silently train wrong.
        """

    def step(self) -> torch.Tensor | None:
        """Clip the gradients, step the optimizer, and zero the gradients. Return the total norm of the gradients before
        clipping, `()`, the same on every rank, on the gradients' device; None without clipping, and for a skipped step.

        If fp16 gradients overflow, weights and optimizer do not change on any rank: `skipped` is then True, and the
        loss scale decreases. Only fp16 synchronizes with the device here, to find out; reading the norm does, too.
        Raises `StrategyError` if called before `accumulate` microbatches.
        """

    def zero_grad(self) -> None:
        """Discard the gradients accumulated since the last step, for methods with a second backward pass (SAM)."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return copies of the gradients that the next `step` will use, before its clipping, by plain parameter names.

        Every rank must call it, between the last `backward` and `step`. Gradients are full, except those of sharded
        parameters that are DTensors, which `gather` makes full. Parameters without a gradient are left out.
        """

    def group_names(self) -> list[list[str]]:
        """Return the plain names of the parameters in each of the optimizer's groups, the same on every rank."""

    def reshard(self) -> None:
        """Free the gathered copies of sharded parameters; the next forward gathers them again.

        Call it if the weights were changed in place between two forwards without a `step`, e.g. to evaluate averages.
        """

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """Return `value` reduced over all ranks, the same on each; a new tensor."""

    def sync_buffers(self) -> None:
        """Set the floating-point and complex buffers to values pooled over all ranks: their means, and for BatchNorm's
        variances the variance of all ranks' samples; see `engine.pool_buffers`.

        Between two calls, BatchNorm's running statistics are each rank's own, of its shard of the batches, just as it
        normalizes with those in training. Call it before an evaluation and before reading the weights; `Pipeline.fit`
        does so at the end of each epoch and for each checkpoint. With `sync_batchnorm`, all ranks already have the
        running statistics of the global batches, and nothing changes here. Integer buffers (`num_batches_tracked`) do
        not change: they count the same steps on each rank, unless the ranks skip different branches (StochasticDepth).
        """

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies or averages of buffers, by the buffers' names, pooled as by `sync_buffers`; every rank must
        call it. Only floating-point and complex ones are returned."""

    def export_state(self, keep: Keep | None = None) -> dict[str, torch.Tensor]:
        """Return all tensors of the model by plain names: full, contiguous copies on the CPU. Those are its state dict
        and what that leaves out, non-persistent buffers; `model_state.split_state` separates them.

        Every rank must call it: tensors are gathered one at a time, and each rank keeps those whose name its own `keep`
        accepts (None: all). With `optimizer_state.as_held`, nothing is gathered or copied. Raises `StrategyError` if a
        module has an extra state that is not a tensor.
        """

    def import_state(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Overwrite the model's state with that of any engine, in place. Non-persistent buffers may be missing; without
        `strict`, any tensor, which keeps its values.

        Every rank must call it, with a mapping that has all tensors in full; each takes its shard. Tensors are read one
        at a time, so a mapping that reads a file need not hold them all; of `Tensors`, sharded engines (`shards`)
        read only what this rank holds. Raises `StrategyError` if names or shapes differ from the model's: nothing has
        changed if names differ; a shape is checked when its tensor is loaded.
        """

    def export_optimizer(self, keep: Keep | None = None) -> OptimizerState:
        """Return the optimizer's state by plain parameter names, gathered and kept as by `export_state`. Raises
        `StrategyError` for state that is neither a tensor nor a number."""

    def import_optimizer(self, state: OptimizerState) -> None:
        """Load any engine's `export_optimizer`. Raises `StrategyError` if it belongs to other parameters."""

    def gather(self, value: torch.Tensor, home: int | None = None) -> torch.Tensor:
        """Return the full `value`: itself, unless it is sharded (a DTensor, a `FlatShard`, a parameter of DeepSpeed's
        third stage); then all ranks must call it.

        With `home`, a rank, the result may be empty on the others: they send their shards, and receive none.
        """

    def held(self) -> Held:
        """Return the tensors this rank holds for training; see `memory.held_bytes`."""

    def barrier(self) -> None:
        """Wait until every rank has called it."""


class Strategy(Protocol):
    """A way to train a model on one or more ranks. Its options are its constructor's arguments.

    Example::

        >>> strategy = strategies.get("single", device="cpu")
        >>> strategy.check(devices=1)
        >>> engine = strategy.prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
    """

    name: str
    summary: str
    """One line for `strategies.available()`."""

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if it cannot run here with that many devices."""

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **options: Unpack[PrepareOptions]
    ) -> Engine:
        """Move `model` to this rank's device, wrap it, and build the optimizer, in the order the backend requires.

        Args:
            model: on the CPU, after all surgery; for FSDP2 and DeepSpeed also on the meta device.
            optimizer_factory: called once, with the parameters to train.
            options: `precision`, `clip_norm`, `accumulate` and others; see `options.Options`.

        Raises:
            StrategyError: if an argument is invalid, or this rank's device or environment is unsuitable.
        """
