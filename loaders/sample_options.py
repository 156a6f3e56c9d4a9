"""Options that select samples of the training data. NumPy is not imported; `selection` computes what they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ..common.checks import is_number
from ..common.options.config import IN_WORDS, NONE, Config, Kind, Natural, PathText, Positive, Seed, Whole, Within

FILE = Kind(lambda value: isinstance(value, str | Path) and str(value) != "", "the path of a file")
INDICES = Kind(
    lambda value: (
        isinstance(value, tuple | list) and len(value) > 0 and all(type(each) in (int, bool) for each in value)
    ),
    "a list of indices or of true and false",
)
WEIGHTS = Kind(
    lambda value: isinstance(value, tuple | list) and len(value) > 0 and all(is_number(each) for each in value),
    "a list of weights",
)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Config):
    """Which samples of the training data are trained on, how often, and which are held out for evaluation."""

    val_split: Annotated[float | None, Within("(0, 1)", ", a share of the samples"), IN_WORDS] = None
    """Share of the training data's samples that is held out and evaluated, instead of `val`; None: none. Each class
    has its share, rounded to a sample, and keeps at least one to train on. Which samples these are depends on
    `split_seed` and their numbers alone, not on the seed of the training, ranks or batch size."""
    folds: Annotated[int | None, Whole(2), IN_WORDS] = None
    """Number of parts of the training data for cross-validation, of which `fold` is held out and evaluated, instead of
    `val`; None: none. Each class is divided evenly; the only sample of a class is always trained on."""
    fold: Annotated[Natural, IN_WORDS] = 0
    """The part that is held out with `folds`, from 0."""
    split_seed: Annotated[Seed, IN_WORDS] = 0
    """Seed of `val_split`, `folds`, `per_class` and `limit`. It is not that of the training, so that several seeds
    train and evaluate on the same samples."""
    indices: Annotated[PathText | Path | Sequence[int] | None, FILE, INDICES, NONE, IN_WORDS] = None
    """The samples of the training data to use, before it is split: indices, a Boolean mask of all samples (also
    arrays), or a file with them (.npy; .json; .txt, one a line); None: all."""
    per_class: Annotated[Positive | None, IN_WORDS] = None
    """Samples of each class to train on (few-shot), of those not held out; None: all."""
    limit: Annotated[Positive | None, IN_WORDS] = None
    """Samples to train on, at most, of those not held out, of each class its share; None: all."""
    balance: Annotated[Literal["class"] | PathText | Path | Sequence[float] | None, FILE, WEIGHTS, NONE, IN_WORDS] = (
        None
    )
    """How often each sample is trained on: "class", so that each class has the same share of every epoch, in
    quasi-random order only nearly; or one weight per sample of the training data, as a list, an array or a file (as
    `indices`), in proportion to which each is drawn: in every epoch its share, rounded up or down, and over the epochs
    the share itself. An epoch has as many samples as without it; a repeated sample has its own augmentation each time.
    None: once."""

    def __post_init__(self) -> None:
        for name in ("indices", "balance"):
            value = getattr(self, name)
            if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1:  # an array or a tensor
                object.__setattr__(self, name, tuple(value.tolist()))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        super().__post_init__()
        if self.folds is None and self.fold:
            raise self.error(f"fold={self.fold} is one of folds=…, which is missing. Pass folds=, too.")
        if self.folds is not None and self.fold >= self.folds:
            raise self.error(f"fold={self.fold} must be from 0 to folds - 1 = {self.folds - 1}.")
        if self.folds is not None and self.val_split is not None:
            raise self.error(f"val_split={self.val_split:g} and folds={self.folds} both hold out data. Leave one out.")

    @property
    def splits(self) -> bool:
        """Whether a part of the training data is held out."""
        return self.val_split is not None or self.folds is not None

    @property
    def selects(self) -> bool:
        """Whether not simply all samples are trained on, each once in an epoch."""
        return self.splits or any(
            value is not None for value in (self.indices, self.per_class, self.limit, self.balance)
        )

    @property
    def value_files(self) -> tuple[str, ...]:
        """The files from which the values of `indices` and `balance` are read."""
        given = (self.indices, None if self.balance == "class" else self.balance)
        return tuple(str(value) for value in given if isinstance(value, str | Path))

    def describe(self) -> str:
        """Return what is selected, for the plan; empty if nothing is."""
        chosen = []
        if self.indices is not None:
            known = f"in {self.indices}" if isinstance(self.indices, str | Path) else "of indices="
            chosen.append(f"only the samples {known}")
        if self.val_split is not None:
            chosen.append(f"{self.val_split:.4g} of them held out and evaluated, of each class its share")
        if self.folds is not None:
            chosen.append(f"fold {self.fold} of {self.folds} held out and evaluated, of each class its share")
        if self.per_class is not None:
            chosen.append(f"{self.per_class} of each class trained on")
        if self.limit is not None:
            chosen.append(f"at most {self.limit} trained on")
        if self.balance is not None:
            share = "the same share" if self.balance == "class" else "its share by weight"
            chosen.append(f"each {'class' if self.balance == 'class' else 'sample'} with {share} of every epoch")
        return "".join(f"; {each}" for each in chosen)


class SampleKeywords(TypedDict, total=False):
    """The options of `SampleOptions` as keywords, for type checkers."""

    # keywords of SampleOptions
    val_split: float | None
    folds: int | None
    fold: int
    split_seed: int
    indices: str | Path | Sequence[int] | None
    per_class: int | None
    limit: int | None
    balance: Literal["class"] | str | Path | Sequence[float] | None
    # end
