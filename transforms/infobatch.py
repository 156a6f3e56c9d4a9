"""InfoBatch: leave out samples that are already learned, without changing the expected gradient."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..common.errors import PlanError
from ..common.storage.shared import forget_array, joint_array, key_of
from ..common.transfer import to_device
from .base import FractionBelowOne, Loop, ProperFraction, Session, Transform
from .common.moments import LoopEngine, least_share

_KEY = 2303_04947  # of the draws: no other use of (seed, epoch) spawns it
_NAME = ".each"  # of the tensors in a checkpoint: no weight's name begins with a dot
_AT_ONCE = 1 << 22  # samples: more need no more memory
_OUT, _FULL, _SCALED = range(3)  # what happens to a sample in an epoch


@dataclass(frozen=True)
class InfoBatch(Transform):
    """Leave out samples with a low loss at random, and scale the losses of those that stay, for an unbiased gradient.

    A sample's score H is its last training loss, with all that changes the loss in training (LabelSmoothing). In each
    epoch, samples with H below the mean of all scores are left out with probability r; the losses of those that stay
    are multiplied by 1 / (1 - r). The others have factor 1::

        loss of a batch = 1 / B · Σ factor_i · loss_i

    It divides by the B samples of the batch (of a weighted mean, by their class weights or pixels), as the paper does,
    not by the sum of the factors: an epoch's expected sum of losses is that of all samples. So steps of a shorter epoch
    are larger, and the history's loss is higher, than without it. The last epochs, by their middles the fraction
    `anneal` of the run, use all samples with factor 1, and so does the first, whose scores are not known.

    A sample that had no loss yet (as `drop_last` left it out) has no score: it stays, and does not count in the mean
    (in the paper all scores begin as 1). If less than a batch would stay, all do. Of masks, a sample's loss is the sum
    over its pixels. SAM's second pass has the same factors; scores are those of the first.

    Draws depend only on the seed, the epoch and the sample; the ranks exchange scores once per epoch, those of one
    machine keep them together, 5 bytes a sample, in the folder for temporary files, and checkpoints contain them once,
    so that a run resumes exactly, also within an epoch. Epochs have fewer steps: learning rate, warm-up
    and all that follows the run's progress move by fractions of the epochs (`Loop.position`), so they end with the run;
    EMA's half-life and `eval_every_steps` count optimizer steps.

    In a pipeline, it needs a loss with a value per sample, and batches of single samples: it is rejected with `MixUp`,
    `CutMix`, `SelectiveBackprop`, `balance`, mixes with weights, and torch's learning-rate schedulers, which count
    steps. Trials of the ledger and tuning are shorter than an epoch, and train without it. In a loop of your own::

        scores = np.full(loader.samples, np.nan)
        for epoch in range(epochs):
            factors = np.ones(len(scores))
            if infobatch.prunes((epoch + 0.5) / epochs):
                factors = infobatch.weights(scores, seed, epoch)
            loader.keep(factors > 0)
            for (images, labels), own in zip(loader, loader.shares(epoch)):
                losses = F.cross_entropy(model(images), labels, reduction="none")
                scores[own] = losses.detach()
                (losses * torch.from_numpy(factors[own])).mean().backward()
                ...

    Attributes:
        ratio: probability r of leaving out a sample with a low loss. Number in (0, 1). Default 0.5, as in the paper.
        anneal: fraction of the epochs at the end that use all samples; 1 - delta of the paper. Number in [0, 1).
            Default 0.125, as in the paper.

    Raises:
        PlanError: from a run of so few epochs that none of them would use all samples at the end.

    Source: Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024,
    arXiv:2303.04947.

    Example::

        >>> import numpy as np
        >>> scores = np.array([0.1, 0.2, 0.1, 4.0])  # the mean is 1.1
        >>> InfoBatch(ratio=0.5).weights(scores, seed=0, epoch=1).tolist()
        [0.0, 2.0, 2.0, 1.0]
        >>> pipeline = pipeline.transform(InfoBatch())
    """

    ratio: ProperFraction = 0.5
    anneal: FractionBelowOne = 0.125

    kind = "schedule"
    tried_by_tune = "methods"
    source = "Qin et al. 2024, arXiv:2303.04947"
    targets = ("class indices", "labels", "values", "masks")
    prunes_samples = True

    @property
    def depends_on_length(self) -> bool:
        return self.anneal > 0

    @property
    def caution(self) -> str:
        return (
            f"(samples with a loss below the mean are left out with probability {self.ratio:g}; the learning rate "
            "follows the fraction of epochs)"
        )

    def check_epochs(self, epochs: int, image_size: int | tuple[int, int]) -> None:  # noqa: ARG002
        if self.anneal and self.prunes(1 - 0.5 / epochs):
            raise PlanError(
                f"{self} sets the samples per epoch, and with epochs={epochs} none at the end would use all. Train for "
                f"more epochs, or set anneal to at least {least_share(epochs):g}, or to 0."
            )

    def prunes(self, progress: float) -> bool:
        """Return whether to leave samples out of an epoch whose middle is at `progress` (0 to 1)."""
        # Slightly less than the fraction, which a progress of k/n may miss by the last bit.
        return progress < 1 - self.anneal - 1e-9

    def weights(self, scores: NDArray[Any], seed: int, epoch: int) -> NDArray[np.float32]:
        """Return the factor of each sample's loss in an epoch, `(N,)`: 0 for those that are left out.

        Args:
            scores: the last loss of each sample `(N,)`; NaN: it had none.
            seed, epoch: of the draws, integers ≥ 0.
        """
        kinds = np.empty(len(scores), np.uint8)
        _set_kinds(kinds, self.ratio, scores, seed, epoch)
        return _factors(self.ratio, kinds)

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        return _Pruning(self)


def _set_kinds(kinds: NDArray[np.uint8], ratio: float, scores: NDArray[Any], seed: int, epoch: int) -> None:
    """Set what happens to each sample in an epoch, `(N,)`; see `InfoBatch.weights`."""
    draws = np.random.default_rng(np.random.SeedSequence([seed, epoch], spawn_key=(_KEY,)))
    parts = [slice(start, start + _AT_ONCE) for start in range(0, len(scores), _AT_ONCE)]
    values = (scores[part] for part in parts)
    known = (own[~np.isnan(own)].astype(np.float64) for own in values)  # in which equal scores have exactly their mean
    total, count = np.sum([(own.sum(), len(own)) for own in known], axis=0)
    for part in parts:
        low = scores[part] < (total / count if count else -np.inf)
        out = draws.random(len(low)) < ratio
        kinds[part] = np.where(low, np.where(out, _OUT, _SCALED), _FULL)


def _factors(ratio: float, kinds: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.array([0, 1, 1 / (1 - ratio)], np.float32)[kinds]


class _Pruning(Session):
    def __init__(self, infobatch: InfoBatch) -> None:
        self._own = infobatch
        # Of all samples of the data set `(N,)`, the same on every rank; None: there was no epoch yet.
        self._scores: NDArray[np.float32] | None = None
        self._kinds: NDArray[np.uint8] | None = None
        self._together = False  # whether the ranks of a machine have one copy of both, which each writes alike
        self._epoch: _Epoch | None = None
        self._active = False

    def before_epoch(self, loop: Loop) -> None:
        loader, own = loop.loader, self._own
        if loader is None:
            raise PlanError(f"{own} needs the training loader. Pass it to TrainingHooks.begin_epoch.")
        middle = loop.progress_at(loop.epoch_start + loop.steps_per_epoch / 2)
        self._active, self._epoch = own.prunes(middle), None
        known = self._kinds is not None and loop.step_in_epoch > 0  # within an epoch, the checkpoint has them
        scores, kinds = self._placed(loop.engine, loader.samples)
        if not known:
            _wait_for_all(loop.engine)  # until no rank reads those of the epoch before
            if self._active:
                _set_kinds(kinds, own.ratio, scores, loop.seed, loop.epoch)
                _wait_for_all(loop.engine)  # which write to the same memory
            if not self._active or loader.count(kinds != _OUT) < loader.settings.batch_size:
                _wait_for_all(loop.engine)
                kinds[:] = _FULL
            _wait_for_all(loop.engine)
        kept = kinds != _OUT
        loader.keep(None if kept.all() else kept)

    def _placed(self, engine: LoopEngine, samples: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return scores and kinds, in memory that the ranks of a machine share. Every rank must call it."""
        if self._scores is None or self._kinds is None or not self._together:
            self._scores = _together(engine, samples, np.float32, np.nan if self._scores is None else self._scores)
            self._kinds = _together(engine, samples, np.uint8, _FULL if self._kinds is None else self._kinds)
            self._together = True
        return self._scores, self._kinds

    def on_epoch_start(self, loop: Loop) -> None:
        if self._active and self._kinds is not None:
            self._epoch = _Epoch(loop, self._own, self._kinds)

    def before_loss(self, loop: Loop) -> None:
        if self._epoch is not None:
            loop.weights = self._epoch.factors[self._epoch.here(loop, self._own)]

    def before_backward(self, loop: Loop) -> None:
        if self._epoch is not None and loop.losses is not None:
            own = self._epoch.losses[self._epoch.here(loop, self._own)]
            own.copy_(torch.where(own.isnan(), loop.losses, own))  # not those of SAM's second pass

    def after_step(self, progress: float) -> None:  # noqa: ARG002
        if self._active and self._epoch is None:
            raise PlanError(
                f"{self._own} got no losses of a step: it follows train_epoch. In another loop, use its methods "
                "weights and prunes; its documentation shows how."
            )

    def after_epoch(self, loop: Loop) -> None:  # noqa: ARG002
        self._collect()
        self._active, self._epoch = False, None

    def _collect(self) -> None:
        """Set the scores of all samples that had a loss in this epoch on any rank. Every rank must call it."""
        if self._epoch is None or self._scores is None:
            return
        self._epoch.collect(self._scores)

    def state_dict(self) -> dict[str, Any]:
        if self._scores is None or self._kinds is None:
            return {}
        self._collect()
        # As integers, of which no mean is taken: the ranks' are equal, and rank 0 writes a copy for all.
        scores, kinds = torch.from_numpy(self._scores.view(np.int32)), torch.from_numpy(self._kinds)
        return {"scores": {_NAME: scores}, "kinds": {_NAME: kinds}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "scores" not in state:
            return
        self._together = False
        self._scores = state["scores"][_NAME].cpu().numpy().copy().view(np.float32)  # up to 0.2.0 they were floats
        if "kinds" in state:
            self._kinds = state["kinds"][_NAME].cpu().numpy().copy()
        else:  # checkpoints of 0.2.0 have the factors
            factors = state["factors"][_NAME].cpu().numpy()
            self._kinds = np.where(factors > 1, _SCALED, factors > 0).astype(np.uint8)


def _together(engine: LoopEngine, samples: int, dtype: type[Any], values: Any) -> NDArray[Any]:
    """Return the values `(N,)`, or one for all, which every rank has alike, as an array that those of a machine share.
    Every rank must call it."""
    if engine.world_size == 1:
        return np.full(samples, values, dtype)
    drawn = torch.tensor(secrets.randbits(62) if engine.rank == 0 else 0)
    # With the machine's boot in it: in a folder that machines share, each has its own file.
    name = f"infobatch-{key_of(int(engine.reduce(drawn, 'sum')))}"
    array = joint_array(name, samples, dtype)
    array[:] = values
    _wait_for_all(engine)
    forget_array(name)
    return array


def _wait_for_all(engine: LoopEngine) -> None:
    if engine.world_size > 1:
        engine.reduce(torch.zeros(1)).item()  # read, because the default device may be a GPU


class _Epoch:
    """The samples of this rank in one epoch, in order, with the factors and losses of each on the device."""

    def __init__(self, loop: Loop, own: InfoBatch, kinds: NDArray[np.uint8]) -> None:
        self._engine = loop.engine
        batches: list[NDArray[np.int64]] = loop.loader.shares(loop.epoch)
        self._sizes = [len(batch) for batch in batches]
        self._starts = [0, *np.cumsum(self._sizes).tolist()]
        self._samples = np.concatenate(batches)
        self.factors = to_device(torch.from_numpy(_factors(own.ratio, kinds[self._samples])), self._engine.device)
        self.losses = torch.full_like(self.factors, torch.nan)

    def here(self, loop: Loop, own: InfoBatch) -> slice:
        """Return where the microbatch is."""
        batch, accumulate = loop.step_in_epoch, self._engine.accumulate
        count = self._sizes[batch] if batch < len(self._sizes) else 0
        number = loop.microbatch - self._engine.rank * accumulate
        each, more = divmod(count, accumulate)  # as tensor_split
        start = self._starts[min(batch, len(self._sizes))] + number * each + min(number, more)
        size = each + (number < more)
        if size != len(loop.batch[1]):
            raise PlanError(
                f"{own} expects {size} samples of the loader in a microbatch, but got {len(loop.batch[1])}: another "
                "transform changes the batch, or it is not from the loader. Leave one of the two out."
            )
        return slice(start, start + size)

    def collect(self, scores: NDArray[np.float32]) -> None:
        """Set the scores `(N,)` of all samples that had a finite loss, on any rank: the mean of their losses."""
        losses: NDArray[np.float32] = self.losses.cpu().numpy()
        seen = np.flatnonzero(np.isfinite(losses))
        seen = seen[np.argsort(self._samples[seen], kind="stable")]
        samples = self._samples[seen]
        for start in range(0, len(scores), _AT_ONCE):
            part = scores[start : start + _AT_ONCE]
            first, end = np.searchsorted(samples, (start, start + len(part)))
            found = np.zeros((2, len(part)), np.float32)  # the sum and the number of each sample's losses
            np.add.at(found[0], samples[first:end] - start, losses[seen[first:end]])
            np.add.at(found[1], samples[first:end] - start, 1)
            total: Tensor = self._engine.reduce(torch.from_numpy(found), "sum")
            sums, counts = total.cpu().numpy()
            part[counts > 0] = sums[counts > 0] / counts[counts > 0]
