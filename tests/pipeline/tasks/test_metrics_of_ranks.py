"""`compute` on two ranks: each reduction that a metric can declare, also where one rank saw no sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain import PlanError
from drivetrain.pipeline.tasks.metrics import compute, pool, state_of
from drivetrain.strategies import launch
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMaxMetric, PearsonCorrCoef, SumMetric


def product(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.prod(0)


class Reduced(Metric):
    """Keeps `fold(state, values)`, reduced over ranks by `reduction`; its value is `total(state)`."""

    full_state_update = True

    def __init__(
        self,
        reduction: Any,
        fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        start: float | Sequence[float] = 0.0,
        total: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
    ) -> None:
        super().__init__()
        self.add_state("kept", torch.tensor(start), dist_reduce_fx=reduction)
        self.kept: torch.Tensor
        self.fold, self.total = fold, total

    def update(self, values: torch.Tensor) -> None:
        self.kept = self.fold(self.kept, values)

    def compute(self) -> torch.Tensor:
        return self.total(self.kept)


class Listed(Metric):
    """Keeps all values in a list, with or without a reduction."""

    full_state_update = False

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=reduction)
        self.kept: Any

    def update(self, values: torch.Tensor) -> None:
        self.kept.append(values)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.kept).std() if isinstance(self.kept, list) else self.kept.std()


def plus(state: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return state + values.sum()


def meters() -> dict[str, Metric]:
    return {
        "sum": Reduced("sum", plus),
        "mean": Reduced("mean", plus),
        "max": Reduced("max", lambda state, values: torch.maximum(state, values.max()), -9.0),
        "min": Reduced("min", lambda state, values: torch.minimum(state, values.min()), 9.0),
        "function": Reduced(product, plus),
        "none": Reduced(None, plus, total=lambda state: state.max()),
        "cat of tensors": Reduced("cat", lambda state, values: torch.cat([state, values]), (), torch.std),
        "cat": Listed("cat"),
        "list": Listed(None),
        "torchmetrics' sum": SumMetric(),
        "combined": SumMetric() * 2.0 + MaxMetric(),
        "wrapped": MinMaxMetric(MeanMetric()),
    }


BATCHES: dict[int, list[list[list[float]]]] = {
    2: [[[1.0, 5.0], [2.0]], [[4.0, 3.0]]],
    1: [[], [[1.0, 5.0], [4.0]]],
}
"""By the number of ranks that see samples: the updates of each rank."""


def updated(made: dict[str, Metric], batches: list[list[float]]) -> dict[str, Metric]:
    for batch in batches:
        for metric in made.values():
            metric.update(torch.tensor(batch))
    return made


def of_this_rank() -> dict[str, Any]:
    """The values over both ranks, those of torchmetrics' own synchronization, and an error."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for seen, batches in BATCHES.items():
        made = updated(meters(), batches[rank])
        made.pop("wrapped")
        found[str(seen)] = compute(made, 2)
    made = updated({"wrapped": meters()["wrapped"]}, BATCHES[2][rank])
    pooled = [state_of(made["wrapped"])]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, pooled[0])
    pool("wrapped", made["wrapped"], gathered)
    found["wrapped"] = made["wrapped"].compute()["raw"].item()
    theirs = updated(meters(), BATCHES[2][rank])
    for name in ("cat of tensors", "list", "wrapped"):  # torchmetrics needs as many values on each rank
        del theirs[name]
    found["theirs"] = {name: metric.compute().item() for name, metric in theirs.items()}
    x = torch.arange(6.0)[rank * 2 : rank * 2 + 4]
    correlation = PearsonCorrCoef()
    correlation.update(x, x.square())
    found["correlation"] = compute({"r": correlation}, 2)["r"]
    unlike = Reduced("sum", lambda _, values: values)
    unlike.update(torch.zeros(2 + rank))
    try:
        compute({"unlike": unlike}, 2)
    except PlanError as error:
        found["error"] = str(error)
    return found


@pytest.mark.process
@pytest.mark.usefixtures("one_thread")
def test_each_reduction_over_two_ranks() -> None:
    first, second = launch(of_this_rank, devices=2, device="cpu", timeout=120)
    assert first == second
    as_one = ["sum", "max", "min", "cat of tensors", "cat", "list", "torchmetrics' sum", "combined"]
    for seen, batches in BATCHES.items():
        whole = updated(meters(), [batch for of_rank in batches for batch in of_rank])
        names = as_one if seen == 2 else [*as_one, "mean", "function", "none"]
        for name in names:
            assert first[str(seen)][name] == pytest.approx(whole[name].compute().item(), abs=1e-6), (
                seen,
                name,
            )
    assert first["2"] == pytest.approx(first["2"] | first["theirs"], abs=1e-6)
    assert (first["2"]["mean"], first["2"]["function"], first["2"]["none"]) == (7.5, 56, 8)
    assert first["wrapped"] == pytest.approx(3.0)
    x = torch.cat([torch.arange(4.0), torch.arange(2.0, 6.0)])
    assert first["correlation"] == pytest.approx(
        torch.corrcoef(torch.stack([x, x.square()]))[0, 1].item(), abs=1e-5
    )
    assert "The metric 'unlike' (Reduced) cannot be merged over ranks" in first["error"]
