"""What both loaders share: epochs, the position in one, and the interface that swaps them freely."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError
from .order import check_batch_size, epoch_batches, rank_slice
from .settings import Settings, check_indices, is_whole

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images `(B, 3, H, W)` and labels `(B,)`."""


class EpochLoader(ABC):
    """A loader that counts its epochs. Each `for` over it is one; the next moves on by itself.

    The sample order depends on (seed, epoch) alone, so a subclass that loads the same file gives the
    same samples in the same batches.
    """

    device: torch.device

    def __init__(self, settings: Settings, indices: Any, samples: int) -> None:
        self.settings, self.samples = settings, samples
        self.set_indices(indices)
        self._next_epoch, self._resume_at = 0, 0
        self._epoch, self._position = 0, 0
        self._running = 0  # number of the iteration that may go on; a new one, or close(), ends the older

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """This rank's batches of an epoch, from number `start` on."""

    @abstractmethod
    def _release(self) -> None:
        """Gives back threads and processes, and waits until they are gone."""

    def close(self) -> None:
        """Gives back threads and processes. The loader may be iterated again; it then starts new ones."""
        self._running += 1
        self._release()

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes of the data set."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.indices), self.settings.batch_size)
        return full + (rest > 0 and not self.settings.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        self._epoch, start = self._next_epoch, self._resume_at
        self._next_epoch, self._resume_at = self._epoch + 1, 0
        self._position = start
        self._running += 1
        return self._counted(self._epoch, start, self._running)

    def _counted(self, epoch: int, start: int, iteration: int) -> Iterator[Batch]:
        for batch in self._batches(epoch, start):
            self._position += 1
            yield batch
            if self._running != iteration:
                raise DataError(
                    f"The loader was closed, or iterated anew, during this loop over epoch {epoch}. Use one "
                    "loop at a time, or two loaders."
                )

    def _shares(self, epoch: int) -> list[NDArray[np.int64]]:
        """This rank's sample indices of each batch of an epoch."""
        own = self.settings
        batches = epoch_batches(
            self.indices, order=own.order, seed=own.seed, epoch=epoch,
            batch_size=own.batch_size, drop_last=own.drop_last,
        )  # fmt: skip
        return [rank_slice(batch, own.rank, own.world_size) for batch in batches]

    def set_indices(self, indices: Any) -> None:
        """Chooses the samples of the next epochs; None: all of the data set.

        Raises:
            DataError: if one is out of range, or they are too few for a batch.
        """
        chosen = check_indices(indices, self.samples)
        check_batch_size(
            self.settings.batch_size,
            len(chosen),
            full=self.settings.train or self.settings.drop_last,
            world_size=self.settings.world_size,
        )
        self.indices: NDArray[np.int64] = chosen

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`, from its first batch."""
        if not is_whole(epoch, 0):
            raise DataError(f"epoch={epoch!r} must be an integer from 0 on.")
        epoch = int(epoch)
        self._next_epoch, self._resume_at = epoch, 0
        self._epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the epoch, and how many of its global batches it has given out."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": int(self.settings.seed),
            "batch_size": int(self.settings.batch_size),
            "samples": len(self.indices),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues exactly after the last batch of `state`, also with another number of ranks.

        Raises:
            DataError: if the state is of another seed, batch size or data set.
        """
        own = self.state_dict()
        for key in own:
            if not isinstance(state.get(key), int) or state[key] < 0:
                raise DataError(f"The loader's state has {key}={state.get(key)!r}; it is no state_dict().")
        for key in ("seed", "batch_size", "samples"):
            if state[key] != own[key]:
                raise DataError(
                    f"The loader's state has {key}={state[key]}, this loader {own[key]}. Make the loader "
                    "as it was, or start a new epoch with set_epoch."
                )
        finished = state["position"] >= len(self)
        self.set_epoch(state["epoch"] + finished)
        self._resume_at = self._position = 0 if finished else state["position"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
