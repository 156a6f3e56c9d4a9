"""The FSDP2 family on real CPU ranks, held to `Single` on the same global batches."""

from __future__ import annotations

from typing import Any

import fsdp_models as models
import pytest
import torch
from drivetrain import strategies
from drivetrain.errors import StrategyError
from drivetrain.strategies import FSDP, HSDP, FSDPCPUOffload, launch
from drivetrain.strategies.memory import ADAMW_BYTES
from fsdp_jobs import BF16, CASES, FAMILY, KINDS, Case, Run, everything, on_meta, surgeries, train
from strategy_jobs import make_optimizer
from torch import nn

Ranks = list[dict[str, Any]]
names = pytest.mark.parametrize("name", FAMILY)


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Both ranks' results of every case, from one launch."""
    return launch(everything, devices=2, timeout=240)


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Without the statistics: a device that accumulates moves them once for each microbatch."""
    return {n: t for n, t in run.state.items() if "running" not in n and "num_batches" not in n}


def same_run(found: Run, expected: Run, tolerance: float) -> None:
    """Losses, norms and final weights, to `tolerance`; the state is plain."""
    assert list(found.state) == list(expected.state)
    for name, tensor in found.state.items():
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (
            expected.state[name].shape, expected.state[name].dtype, "cpu"
        )  # fmt: skip
    assert found.losses == pytest.approx(expected.losses, abs=tolerance)
    if expected.norms[0] is None:
        assert found.norms == expected.norms
    else:
        assert found.norms == pytest.approx(expected.norms, abs=10 * tolerance)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=tolerance)


def check_cases(ranks: Ranks, name: str) -> None:
    """All cases of one strategy, on every rank."""
    for case in CASES:
        single = train("single", case, parts=len(ranks))
        for rank in ranks:
            same_run(rank[f"{name} {case.name}"], single, 1e-5)
        first, last = (rank[f"{name} {case.name}"].state for rank in (ranks[0], ranks[-1]))
        torch.testing.assert_close(first, last, rtol=0, atol=0)


@names
def test_two_ranks_train_like_one_device(ranks: Ranks, name: str) -> None:
    check_cases(ranks, name)


def test_one_rank_trains_like_one_device() -> None:
    [rank] = launch(everything, False, devices=1, timeout=180)
    for name in FAMILY:
        check_cases([rank], name)
    assert sum(rank["held"]["fsdp"]) == pytest.approx(ADAMW_BYTES, rel=0.05)


@pytest.mark.slow
def test_four_ranks_train_like_one_device() -> None:
    ranks = launch(everything, False, devices=4, timeout=280)
    for name in FAMILY:
        check_cases(ranks, name)
    for rank in ranks:
        totals = {name: sum(held) / ADAMW_BYTES for name, held in rank["held"].items()}
        assert totals == pytest.approx(
            {"ddp": 1, "fsdp": 1 / 4, "fsdp_grad_op": 1 / 4, "fsdp_cpu_offload": 1 / 4, "hsdp": 1 / 2},
            rel=0.05,
        )


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_other_models_train_like_one_device(ranks: Ranks, case: Case) -> None:
    """Tied weights and a block that runs twice, frozen parameters, a single layer, channels-last weights."""
    for rank in ranks:
        same_run(rank[f"fsdp {case.name}"], train("single", case, parts=2), 1e-5)


@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_bf16_trains_like_autocast_on_one_device(ranks: Ranks, case: Case) -> None:
    """bf16 rounds at 2^-8; the weights that are trained, and exported, are fp32."""
    for rank in ranks:
        run = rank[f"fsdp {case.name}"]
        same_run(run, train("single", case, parts=2), 2e-2)
        assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
@pytest.mark.parametrize("case", surgeries(), ids=lambda case: case.name)
def test_changed_models_train_like_one_device(ranks: Ranks, name: str, case: Case) -> None:
    single = train("single", case, parts=2)
    for rank in ranks:
        same_run(rank[f"{name} {case.name}"], single, 1e-5)


def test_statistics_and_evaluation_are_those_of_ddp(ranks: Ranks) -> None:
    """`sync_buffers` reduces BatchNorm's statistics, in the middle of training and at its end."""
    for rank in ranks:
        ddp = rank[f"ddp {CASES[0].name}"]
        for name in FAMILY:
            run = rank[f"{name} {CASES[0].name}"]
            torch.testing.assert_close(run.state, ddp.state, rtol=1e-5, atol=1e-5)
            assert run.evaluated == pytest.approx(ddp.evaluated, rel=1e-4)


def test_ranks_communicate_on_the_last_microbatch_only(ranks: Ranks) -> None:
    """Rank r feeds r + 1 twice, and the loss is halved: 1.5 in the end; no sharded gradient before."""
    for rank in ranks:
        first, last = rank["gradients"]
        assert first is None
        assert last.tolist() == [[1.5, 1.5]]


def test_an_evaluation_before_the_step_leaves_no_stale_weights(ranks: Ranks) -> None:
    for rank in ranks:
        found, expected = rank["stale"]
        torch.testing.assert_close(found, expected)


def test_activations_are_channels_last_if_the_weights_were(ranks: Ranks) -> None:
    assert len(ranks[0]["layouts"]) == 6
    assert all(ranks[0]["layouts"].values())


@names
def test_blocks_are_freed_after_their_forward_except_by_grad_op(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        block, root = rank["gathered"][name]
        assert block == (name == "fsdp_grad_op")
        assert root


def test_the_optimizer_is_made_of_shards(ranks: Ranks) -> None:
    assert [rank["optimizer"] for rank in ranks] == [["DTensor"]] * 2


def test_a_model_on_the_meta_device_begins_with_rank_0s_random_numbers(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = on_meta().state_dict()
    for rank in ranks:
        torch.testing.assert_close(rank["meta"], dict(expected), rtol=0, atol=0)


def test_bytes_per_parameter(ranks: Ranks) -> None:
    """4 for parameters, 4 for gradients, 8 for AdamW, over the ranks that divide them; hsdp: groups of one."""
    for rank in ranks:
        for name, divided in {
            "ddp": 1,
            "fsdp": 2,
            "fsdp_grad_op": 2,
            "fsdp_cpu_offload": 2,
            "hsdp": 1,
        }.items():
            expected = [each / divided for each in (4, 4, 8)]
            assert rank["held"][name] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scalar", "'fsdp': the parameter 'scale' has no dimension"),
        ("sharded twice", "'hsdp': the model is wrapped in FSDPLinear already"),
        ("wrapped", "'fsdp_grad_op': the model is wrapped in DistributedDataParallel already"),
        ("lazy", "'fsdp_cpu_offload': the parameter '0.weight' has no shape"),
        ("sync batch norm", "'fsdp': 1 is a SyncBatchNorm"),
        ("untrainable", "Linear has no parameter that requires a gradient"),
        (
            "meta",
            "0, a Transformer, is on the meta device and has no reset_parameters() to give values to position",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(ranks: Ranks, what: str, words: str) -> None:
    assert words in ranks[0]["refusals"][what]


@pytest.mark.parametrize("name", ["fsdp", "fsdp_grad_op", "hsdp"])
def test_alone_in_a_process_it_is_single(name: str) -> None:
    case = CASES[1]
    same_run(train(name, case), train("single", case), 0)


def test_alone_in_a_process_nothing_can_be_offloaded() -> None:
    with pytest.raises(StrategyError, match="no process group"):
        FSDPCPUOffload("cpu").prepare(nn.Linear(2, 1), make_optimizer("sgd"))


def test_alone_a_model_on_the_meta_device_gets_its_values() -> None:
    with torch.device("meta"):
        model = on_meta()
    torch.manual_seed(0)
    state = FSDP("cpu").prepare(model, make_optimizer("sgd")).export_state()
    torch.manual_seed(0)
    torch.testing.assert_close(state, dict(on_meta().state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(("devices", "size"), [(4, 3), (2, 4), (2, -1), (2, 0)])
def test_hsdp_wants_groups_of_one_size(devices: int, size: int) -> None:
    with pytest.raises(StrategyError, match=f"shard_size={size} must be 1 or more and divide the {devices}"):
        HSDP("cpu", shard_size=size).check(devices)


@names
def test_the_family_checks_its_devices(name: str) -> None:
    with pytest.raises(StrategyError, match=f"'{name}': devices=0 must be 1 or more"):
        strategies.get(name, device="cpu").check(0)
    with pytest.raises(StrategyError, match=f"'{name}': device='cuda:1' is not one for all ranks"):
        strategies.get(name, device="cuda:1").check(2)


def test_clipping_matters_in_the_cases() -> None:
    for case in (case for case in CASES if case.clip_norm):
        norms = [norm for norm in train("single", case).norms if norm is not None]
        assert max(norms) > case.clip_norm


def test_the_models_are_built_of_several_units() -> None:
    """Else the cases above would not see a block gathered by itself."""
    from drivetrain.strategies.blocks import find_blocks

    assert [len(find_blocks(make())) for make in (models.resnet, models.Transformer)] == [2, 2]
