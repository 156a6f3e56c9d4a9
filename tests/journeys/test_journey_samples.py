"""Job 5: hold-out, folds, a few of each class, classes of unequal size."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call
from drivetrain import Pipeline
from journey_models import photos


def of(**load: Any) -> Pipeline:
    return photos(val=None, **{"batch_size": 6} | load)


def seen(pipeline: Pipeline) -> Counter[int]:
    """How many images of each class an epoch has."""
    with pipeline.build() as built:
        return Counter(int(label) for _, labels in built.train for label in labels)


@pytest.mark.long
def test_a_hold_out_is_the_same_for_every_seed() -> None:
    pipeline = of(val_split=0.25)
    assert seen(pipeline) == {0: 6, 1: 6, 2: 6}
    result = pipeline.fit(epochs=1, progress=False)
    held = set(result.errors().samples.tolist())
    assert len(held) == 6
    again = dataclasses.replace(pipeline, seed=1)
    assert set(again.fit(epochs=1, progress=False).errors().samples.tolist()) == held
    assert "18" in str(pipeline.plan())
    rest = [index for index in range(24) if index not in held]
    only = of(indices=rest).fit(epochs=1, progress=False)
    assert only.history.epochs[0].loss == pytest.approx(result.history.epochs[0].loss)


@pytest.mark.long
def test_folds() -> None:
    found = of().cross_validate(folds=3, epochs=1, progress=False)
    assert sorted(found.errors.samples.tolist()) == [*range(24)]
    assert found.mean["top1"] == pytest.approx(np.mean([metrics["top1"] for metrics in found.metrics]))
    assert found.mean["top1"] == pytest.approx((found.errors.predictions == found.errors.targets).mean())
    end = call("folds", "mine.yaml", "--folds", "2", "epochs=1", "--out", "runs/folds", "--json")
    assert end.code == 0, end
    assert json.loads(end.out)
    assert Path("runs/folds/fold-1/model.safetensors").exists()


def test_a_few_of_each_class_and_classes_of_unequal_size() -> None:
    assert seen(of(per_class=2)) == {0: 2, 1: 2, 2: 2}
    unequal = [*range(8), 8, 16]  # eight of the first class, one of the others
    np.save("some.npy", np.array(unequal))
    assert seen(of(indices="some.npy", batch_size=10)) == {0: 8, 1: 1, 2: 1}
    counts = seen(of(indices=unequal, balance="class", batch_size=9))
    assert max(counts.values()) - min(counts.values()) <= 1
    end = call("plan", "mine.yaml", "val=null", "val_split=0.25", "balance=class")
    assert end.code == 0, end
    assert "18" in end.out
