"""Every strategy on real CPU ranks, compared with `Single` on the same global batches."""

from functools import cache
from typing import Any

import fsdp_models as models
import pytest
import torch
from drivetrain import strategies
from drivetrain.strategies import Single, launch, registry
from drivetrain.strategies.common.memory import ADAMW_BYTES, adamw_bytes
from parity_jobs import (
    BF16,
    CASES,
    FEW,
    KINDS,
    NAMES,
    OFTEN,
    SYNC,
    WHOLE,
    Case,
    Run,
    longer,
    parity,
    same_run,
    train,
    weights,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
Ranks = list[dict[str, Any]]
names = pytest.mark.parametrize("name", OFTEN)
MORE = [*WHOLE, "fsdp"]
"""Strategies that train the other kinds of models, too, in `make test-all`; in `make test` three of them do."""
MOST = ["ddp", "fairscale_sharded_ddp", "fsdp"]
QUICK = {
    name: [*FEW, *(SYNC if name == "fsdp" else SYNC[:1]), *((*KINDS, *BF16) if name in MOST else ())] for name in OFTEN
}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Both ranks' results of every case, from one launch."""
    strategies.register("of_the_launcher", Single)
    try:
        return launch(parity, QUICK, devices=2, timeout=280)
    finally:
        del registry.REGISTERED["of_the_launcher"]


@cache  # each is compared with many
def on_one_device(case: Case, parts: int) -> Run:
    return train("single", case, parts=parts)


def check(ranks: Ranks, name: str, cases: list[Case], tolerance: float = 1e-5) -> None:
    """All cases of one strategy, on every rank; with BatchNorm, N ranks are N microbatches."""
    for case in cases:
        for rank in ranks:
            same_run(rank[f"{name} {case.name}"], on_one_device(case, 1 if case.sync else len(ranks)), tolerance)
        first, last = (rank[f"{name} {case.name}"].state for rank in (ranks[0], ranks[-1]))
        torch.testing.assert_close(first, last, rtol=0, atol=0)


def formula(name: str, ranks: int) -> tuple[float, float, float]:
    """Bytes per parameter of a rank; the groups of `hsdp` are half of the ranks here."""
    return adamw_bytes(name, max(1, ranks // 2) if name == "hsdp" else ranks)


def check_bytes(ranks: Ranks, name: str) -> None:
    """At most 5 % above the formula on any rank; a rank whose share is small has less."""
    totals = [sum(rank[f"{name} held"]) for rank in ranks]
    expected = formula(name, len(ranks))
    assert max(totals) <= 1.05 * sum(expected)
    assert sum(totals) / len(totals) == pytest.approx(sum(expected), rel=0.05)
    for part, bytes_ in enumerate(expected):
        held = [rank[f"{name} held"][part] for rank in ranks]
        assert sum(held) / len(held) == pytest.approx(bytes_, rel=0.05)


@names
def test_two_ranks_train_like_one_device(ranks: Ranks, name: str) -> None:
    check(ranks, name, FEW)


@names
def test_synchronized_batch_norm_trains_like_one_device_with_the_whole_batch(ranks: Ranks, name: str) -> None:
    """Losses, norms, weights, and the running statistics, which are the same on all ranks before any pooling."""
    cases = [case for case in QUICK[name] if case.sync]
    check(ranks, name, cases)
    for case in cases:
        expected = on_one_device(case, 1)
        for rank in ranks:
            run = rank[f"{name} {case.name}"]
            torch.testing.assert_close(run.state, expected.state, rtol=1e-5, atol=1e-5)
            assert run.evaluated == pytest.approx(expected.evaluated, rel=1e-4)


@pytest.mark.parametrize("name", MOST)
def test_other_models_train_like_one_device(ranks: Ranks, name: str) -> None:
    """Tied weights and a block that runs twice, frozen parameters, a single layer, channels-last weights, groups."""
    check(ranks, name, KINDS)


@pytest.mark.parametrize("name", MOST)
def test_bf16_trains_like_autocast_on_one_device(ranks: Ranks, name: str) -> None:
    """bf16 rounds at 2^-8; the weights that are trained, and exported, are fp32."""
    check(ranks, name, BF16, 2e-2)
    for case in BF16:
        for rank in ranks:
            tensors = weights(rank[f"{name} {case.name}"]).values()
            assert all(tensor.dtype == torch.float32 for tensor in tensors)


@names
def test_statistics_and_evaluation_are_those_of_ddp(ranks: Ranks, name: str) -> None:
    """`sync_buffers` reduces BatchNorm's statistics, in the middle of training and at its end."""
    for rank in ranks:
        ddp, run = rank[f"ddp {FEW[0].name}"], rank[f"{name} {FEW[0].name}"]
        torch.testing.assert_close(run.state, ddp.state, rtol=1e-5, atol=1e-5)
        assert run.evaluated == pytest.approx(ddp.evaluated, rel=1e-4)


@names
def test_bytes_per_parameter(ranks: Ranks, name: str) -> None:
    check_bytes(ranks, name)


def test_a_parameter_that_comes_late_is_clipped_with_the_others(ranks: Ranks) -> None:
    """FairScale's own clipping remembers from its first call which parameters have a gradient."""
    for rank in ranks:
        same_run(rank["late"], rank["late under ddp"], 1e-5)
        assert rank["late"].norms[0] > 0.5


def test_gradients_are_exchanged_after_an_error(ranks: Ranks) -> None:
    """Ranks feed 1 and 2; the mean is on the weight's owner alone."""
    assert sorted(rank["after an error"] for rank in ranks) == [[], [[1.5, 1.5]]]


def test_parameters_of_two_dtypes_are_refused_by_oss(ranks: Ranks) -> None:
    assert "'fairscale_oss': the parameter '1.weight' is torch.float64" in ranks[0]["dtypes"]


def test_state_made_at_once_is_left_on_its_owner(ranks: Ranks) -> None:
    count = len(list(models.resnet().parameters()))
    for name in ("zero_redundancy", "fairscale_oss"):
        parts = [rank["adagrad"][name] for rank in ranks]
        assert sum(parts) == count
        assert min(parts) > 0


def test_no_backend_leaves_a_log_handler(ranks: Ranks) -> None:
    assert [rank["handlers"] for rank in ranks] == [0, 0]


def test_what_was_registered_before_the_launch_is_known_on_ranks(ranks: Ranks) -> None:
    assert [rank["registered"] for rank in ranks] == [True, True]


def test_auto_chooses_the_same_on_every_rank_and_trains(ranks: Ranks) -> None:
    """By the rank with the least memory, which can hold a share but not all."""
    for rank in ranks:
        why, run = rank["auto"]
        assert why.startswith("The strategy 'auto' chose 'fsdp': 0.0 M parameters need")
        assert "but not all" in why
        same_run(run, on_one_device(CASES[0], 2), 1e-5)


def test_the_formulas_are_those_of_the_papers() -> None:
    assert sum(formula("ddp", 4)) == ADAMW_BYTES
    assert sum(formula("zero_redundancy", 4)) == 8 + 8 / 4
    assert sum(formula("fairscale_sharded_ddp", 4)) == 4 + 12 / 4
    assert sum(formula("fsdp", 4)) == ADAMW_BYTES / 4
    assert formula("fairscale_sharded_ddp", 4) == (4, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_more_and_fewer_ranks_train_like_one_device(devices: int) -> None:
    cases = {name: longer([*CASES, *SYNC, *(KINDS if name in MORE else ())]) for name in NAMES}
    ranks = launch(parity, cases, devices=devices, timeout=290)
    for name in NAMES:
        check(ranks, name, cases[name])
        check_bytes(ranks, name)


def test_clipping_matters_in_the_cases() -> None:
    for case in (case for case in CASES if case.clip_norm):
        norms = [norm for norm in on_one_device(case, 1).norms if norm is not None]
        assert max(norms) > case.clip_norm
