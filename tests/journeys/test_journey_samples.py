"""Job 5: hold-out, folds, a few of each class, classes of unequal size."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import done
from journey_models import photos

pytestmark = pytest.mark.long


def seen(**load: Any) -> Counter[int]:
    """How many images of each class an epoch has."""
    with photos(val=None, **load).build() as built:
        return Counter(int(label) for _, labels in built.train for label in labels)


def test_a_hold_out_is_the_same_for_every_seed() -> None:
    assert seen(val_split=0.25, batch_size=6) == {0: 6, 1: 6, 2: 6}
    pipeline = photos(val=None, val_split=0.25, batch_size=6)
    assert "18 of 24 samples trained on, 6 evaluated" in " ".join(step.why for step in pipeline.plan().steps)
    result = pipeline.fit(epochs=1, progress=False)
    held = set(result.errors().samples.tolist())
    assert len(held) == 6
    other = dataclasses.replace(pipeline, seed=1).fit(epochs=1, progress=False)
    assert set(other.errors().samples.tolist()) == held
    rest = photos(val=None, batch_size=6, indices=[index for index in range(24) if index not in held])
    only = rest.fit(epochs=1, progress=False)
    assert only.history.epochs[0].loss == pytest.approx(result.history.epochs[0].loss)


def test_folds() -> None:
    found = photos(val=None).cross_validate(folds=3, epochs=1, progress=False)
    assert sorted(found.errors.samples.tolist()) == [*range(24)]
    right = found.errors.predictions == found.errors.targets
    assert found.mean["top1"] == pytest.approx(np.mean([each["top1"] for each in found.metrics]))
    assert found.mean["top1"] == pytest.approx(right.mean(), abs=0.1)  # folds have 9, 9 and 6 samples
    printed = done("folds", "mine.yaml", "--folds", "2", "epochs=1", "--out", "runs/folds", "--json")
    assert json.loads(printed)
    assert Path("runs/folds/fold-1/model.safetensors").exists()


def test_a_few_of_each_class_and_classes_of_unequal_size() -> None:
    assert seen(per_class=2, batch_size=6) == {0: 2, 1: 2, 2: 2}
    np.save("some.npy", [*range(8), 8, 16])  # eight of the first class, one of each other
    assert seen(indices="some.npy", batch_size=10) == {0: 8, 1: 1, 2: 1}
    counts = seen(indices="some.npy", balance="class", batch_size=10)  # a smaller batch would leave some out
    assert max(counts.values()) - min(counts.values()) <= 1
    assert "18 of 24" in done("plan", "mine.yaml", "val=null", "val_split=0.25", "balance=class")
