"""What is specific to the FSDP2 family, on real CPU ranks; test_parity.py compares training with one device."""

from typing import Any

import fsdp_models as models
import pytest
import torch
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import FSDP, HSDP, FSDPCPUOffload, launch
from fsdp_jobs import FAMILY, WRAPS, changed, everything, on_meta, surgeries
from parity_jobs import CASES, Case, same_run, train
from strategy_jobs import make_optimizer
from torch import nn

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
Ranks = list[dict[str, Any]]
names = pytest.mark.parametrize("name", FAMILY)


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Both ranks' results of every case, from one launch."""
    return launch(everything, devices=2, timeout=240)


@pytest.mark.parametrize("case", surgeries(), ids=lambda case: case.name)
def test_changed_models_train_like_one_device(ranks: Ranks, case: Case) -> None:
    """Under DDP every fifth; all are in the slow test."""
    single = train("single", case, parts=2)
    for rank in ranks:
        for name in ("fsdp", "ddp"):
            if f"{name} {case.name}" in rank:
                same_run(rank[f"{name} {case.name}"], single, 1e-5)


@pytest.mark.slow
def test_changed_models_train_like_one_device_under_ddp() -> None:
    for rank in launch(changed, "ddp", devices=2, timeout=280):
        for case in surgeries():
            same_run(rank[f"ddp {case.name}"], train("single", case, parts=2), 1e-5)


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


@pytest.mark.parametrize("name", WRAPS)
def test_wrap_chooses_what_is_gathered_by_itself(ranks: Ranks, name: str) -> None:
    assert [rank["units"][name] for rank in ranks] == [WRAPS[name][2]] * 2


def test_units_inside_each_other_train_like_one_device(ranks: Ranks) -> None:
    single = train("single", CASES[1], parts=2)
    for rank in ranks:
        same_run(rank["nested"], single, 1e-5)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["BasicBlok"], r"'fsdp': wrap: \['BasicBlok'\] selects no module.*Did you mean 'BasicBlock'"),
        (lambda *_: False, "'fsdp': wrap: the function selects no module"),
        (["ReLU"], "none of which has parameters that only it holds"),
        (lambda name, _: name == "", "wrap selects the model, none of which"),
        (lambda name, _: name == "list", "wrap selects list, a ModuleList, which has no forward"),
        ("BasicBlock", "'fsdp': wrap='BasicBlock' must be a list"),
    ],
)
def test_a_wrap_that_cannot_be_is_refused(wrap: Any, message: str) -> None:
    model = models.resnet()
    model.list = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(StrategyError, match=message):
        FSDP("cpu", wrap=wrap).prepare(model, make_optimizer("sgd"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scalar", "'fsdp': the parameter 'scale' has no dimension"),
        ("sharded twice", "'hsdp': the model is already wrapped in FSDPLinear"),
        ("wrapped", "'fsdp_grad_op': the model is already wrapped in DistributedDataParallel"),
        ("lazy", "'fsdp_cpu_offload': the parameter '0.weight' has no shape"),
        ("sync batch norm", "'fsdp': 1 is a SyncBatchNorm"),
        ("untrainable", "Linear has no parameter that requires a gradient"),
        (
            "meta",
            "0, a Transformer, is on the meta device and has no reset_parameters() to initialize position",
        ),
        (
            "forgetful",
            "0.1, a Forgetful, is on the meta device and its reset_parameters() does not initialize scale",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(ranks: Ranks, what: str, words: str) -> None:
    assert words in ranks[0]["refusals"][what]


@names
def test_alone_in_a_process_it_is_single(name: str) -> None:
    case = CASES[1]
    same_run(train(name, case), train("single", case), 0)


def test_alone_a_gpu_cannot_be_offloaded() -> None:
    with pytest.raises(StrategyError, match="no process group"):
        FSDPCPUOffload()._check_alone(torch.device("cuda", 0))


def test_alone_a_model_on_the_meta_device_gets_its_values() -> None:
    with torch.device("meta"):
        model = on_meta()
    torch.manual_seed(0)
    state = FSDP("cpu").prepare(model, make_optimizer("sgd")).export_state()
    torch.manual_seed(0)
    torch.testing.assert_close(state, dict(on_meta().state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(("devices", "size"), [(4, 3), (2, 4), (2, -1), (2, 0), (4, 2.0), (4, "2")])
def test_hsdp_wants_groups_of_one_size(devices: int, size: Any) -> None:
    words = f"shard_size={size!r} must be a positive integer that divides the {devices}"
    with pytest.raises(StrategyError, match=words):
        HSDP("cpu", shard_size=size).check(devices)


@names
def test_the_family_checks_its_devices(name: str) -> None:
    with pytest.raises(StrategyError, match=f"'{name}': devices=0 must be a positive integer"):
        strategies.get(name, device="cpu").check(0)
    with pytest.raises(StrategyError, match=f"'{name}': device='cuda:1' cannot be the same for all ranks"):
        strategies.get(name, device="cuda:1").check(2)


def test_the_models_are_built_of_several_units() -> None:
    """Otherwise the cases above would not see a block that is gathered separately."""
    from drivetrain.strategies.common.blocks import find_blocks

    assert [len(find_blocks(make())) for make in (models.resnet, models.Transformer)] == [2, 2]


def test_a_tensor_is_gathered_only_where_it_is_kept(ranks: Ranks) -> None:
    for rank, found in enumerate(each["gathered to each"] for each in ranks):
        sizes = [30, 5, 5, 1]
        expected = [(size, True) if home == rank else (0, False) for size in sizes for home in range(2)]
        assert found == expected
