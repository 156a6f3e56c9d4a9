"""The learning-rate range test: its rates, where it ends, what it suggests, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain import DataError, PlanError
from drivetrain.pipeline.measuring.tuning.lr_range import LRRange
from drivetrain.transforms import InfoBatch, ProgressiveResizing
from pipeline_data import Toy, batch_norm_model, numbers, plain_model


def test_rates_grow_by_equal_factors_and_divergence_ends_it(toy: Toy, tmp_path: Path) -> None:
    found = toy.pipeline(batch_norm_model).lr_range(lowest=1e-4, highest=1e4, steps=60)
    assert found.diverged
    assert 10 <= len(found.lrs) < 60
    np.testing.assert_allclose(found.lrs, np.geomspace(1e-4, 1e4, 60)[: len(found.lrs)], rtol=1e-9)
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < found.lrs[int(np.argmin(found.smoothed))]
    assert found.save(tmp_path / "lr.png").stat().st_size > 5_000
    with pytest.raises(DataError, match="must end in"):
        found.save("lr.txt")


def test_the_suggestion_is_where_a_known_curve_falls_fastest() -> None:
    lrs = np.geomspace(1e-6, 1, 100)
    losses = 2.0 - np.tanh(2 * np.log10(lrs / 1e-3))
    found = LRRange(tuple(lrs), tuple(losses), tuple(losses), False)
    assert found.suggestion == pytest.approx(1e-3, rel=0.15)
    assert "falls fastest at 0.00093" in repr(found)
    flat = LRRange(tuple(lrs), tuple(lrs), tuple(lrs), False)
    assert flat.suggestion is None
    assert "does not fall" in repr(flat)


def test_groups_keep_their_ratio_and_nothing_is_changed(toy: Toy) -> None:
    model = plain_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = toy.pipeline(model).optimize("sgd", lr=0.1, schedule="cosine")
    expected = numbers(pipeline.fit(epochs=1, progress=False))
    random = torch.get_rng_state()
    pipeline.lr_range(steps=10)
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert numbers(pipeline.fit(epochs=1, progress=False)) == expected


def test_a_pipeline_without_a_number_of_epochs_is_not_too_short(toy: Toy) -> None:
    """As most pipelines in Python, which `fit` gives one. With one epoch, these methods would be refused."""
    for method in (ProgressiveResizing(), InfoBatch()):
        pipeline = toy.pipeline().transform(method)
        assert len(pipeline.lr_range(lowest=1e-4, highest=1e-2, steps=10).lrs) == 10
        with pytest.raises(PlanError, match="with epochs=1 none"):
            pipeline.replace(epochs=1).lr_range(steps=10)


@pytest.mark.process
def test_ranks_find_the_same(toy: Toy) -> None:
    alone = toy.pipeline().lr_range(steps=10)
    ranks = toy.pipeline().distribute("ddp", devices=2, device="cpu").lr_range(steps=10)
    np.testing.assert_allclose(ranks.losses, alone.losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lowest": 0}, "above 0"), ({"lowest": 1.0, "highest": 0.1}, "must be below"), ({"steps": 3}, "steps")],
)
def test_what_is_refused(toy: Toy, options: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        toy.pipeline().lr_range(**options)  # type: ignore[arg-type]
