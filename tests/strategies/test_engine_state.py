"""State exported by one engine can be imported by any other: the next losses are those of an uninterrupted run."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import OptimizerState, launch
from drivetrain.strategies.engine import scalar_device
from parity_jobs import NAMES, OFTEN
from state_jobs import (
    BEFORE,
    ITSELF,
    OPTIMIZERS,
    QUICK,
    Exported,
    Stateful,
    everything,
    export_all,
    exported,
    factory,
    import_all,
    imported,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
Ranks = list[dict[str, Any]]
names = pytest.mark.parametrize("name", OFTEN)
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
pairs = pytest.mark.parametrize(("name", "kind"), QUICK)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Exported]:
    """One device's training."""
    return {("single", kind): exported("single", kind) for kind in OPTIMIZERS}


@pytest.fixture(scope="module")
def ranks(alone: dict[tuple[str, str], Exported]) -> Ranks:
    """Both ranks' exports and imports, from one launch."""
    return launch(everything, QUICK, alone, devices=2, timeout=280)


def same_state(found: Exported, expected: Exported, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=tolerance)
    assert found.optimizer.groups == expected.optimizer.groups
    torch.testing.assert_close(dict(found.optimizer.entries), dict(expected.optimizer.entries), rtol=0, atol=tolerance)


def goes_on(found: Exported, given: Exported, alone: Exported) -> None:
    """The state is exported again bit for bit, and training continues as on one device without interruption."""
    same_state(found, given)
    assert found.losses == pytest.approx(alone.losses, abs=1e-5)


@kinds
def test_the_state_is_plain_and_whole(alone: dict[tuple[str, str], Exported], kind: str) -> None:
    state = alone["single", kind]
    model = Stateful()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(state.state) == set(model.state_dict())
    assert "blocks.2.0.weight" not in trained  # its name is that of its first place
    assert {name for group in state.optimizer.groups for name in group["params"]} == trained
    assert [group["weight_decay"] > 0 for group in state.optimizer.groups] == [True, False]
    assert set(state.optimizer.entries) == (set() if kind == "plain sgd" else trained)
    assert state.state["seen"].dtype == torch.float64
    assert state.state["count"].dtype == torch.int64
    if kind == "adamw":
        assert all(entry["step"] == BEFORE for entry in state.optimizer.entries.values())


@pairs
def test_two_ranks_export_what_one_device_has(
    ranks: Ranks, alone: dict[tuple[str, str], Exported], name: str, kind: str
) -> None:
    for rank in ranks:
        found = rank["exported"][name, kind]
        expected = alone["single", kind]
        assert found.losses == pytest.approx(expected.losses, abs=1e-5)
        same_state(found, expected, 1e-5)
    same_state(*(rank["exported"][name, kind] for rank in ranks))


@pairs
def test_one_device_goes_on_with_what_two_ranks_exported(
    ranks: Ranks, alone: dict[tuple[str, str], Exported], name: str, kind: str
) -> None:
    given = ranks[1]["exported"][name, kind]
    goes_on(imported("single", kind, given), given, alone["single", kind])


@pairs
def test_two_ranks_go_on_with_what_one_device_exported(
    ranks: Ranks, alone: dict[tuple[str, str], Exported], name: str, kind: str
) -> None:
    for rank in ranks:
        goes_on(rank["imported"][name, kind], alone["single", kind], alone["single", kind])


@names
def test_two_ranks_go_on_with_their_own_export_bit_for_bit(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        given, found = rank["exported"][name, ITSELF], rank[f"{name} to itself"]
        same_state(found, given)
        assert found.losses == given.losses


@names
def test_what_has_not_stepped_has_no_entries(ranks: Ranks, name: str) -> None:
    """And clears those of the engine that takes it over."""
    expected = exported("single", "adamw", steps=0)
    for rank in ranks:
        found = rank["unstepped"][name]
        assert found.optimizer.entries == {}
        assert found.losses == pytest.approx(expected.losses, abs=1e-5)


@names
def test_a_rank_keeps_only_what_it_wants(ranks: Ranks, name: str) -> None:
    assert [rank["kept"][name] for rank in ranks] == [(["head.weight", "head.bias"],) * 2, ([], [])]


def test_state_of_another_model_is_refused(alone: dict[tuple[str, str], Exported]) -> None:
    engine = strategies.get("single", device="cpu").prepare(Stateful(), factory("adamw", 0.1))
    before, given = engine.export_state(), alone["single", "adamw"]
    with pytest.raises(StrategyError, match=r"'head\.bias' is only in the model"):
        engine.import_state({n: t for n, t in given.state.items() if n != "head.bias"})
    with pytest.raises(StrategyError, match=r"'odd' is only in the saved state"):
        engine.import_state({**given.state, "odd": torch.zeros(1)})
    torch.testing.assert_close(engine.export_state(), before, rtol=0, atol=0)
    with pytest.raises(StrategyError, match=r"'head\.weight' has shape \(2, 2\)"):
        engine.import_state({**given.state, "head.weight": torch.zeros(2, 2)})
    with pytest.raises(StrategyError, match=r"groups of .* parameters"):
        engine.import_optimizer(OptimizerState(given.optimizer.groups[:1]))


def test_hyperparameters_of_numpy_are_saved() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=np.float32(0.5), weight_decay=np.int64(0))

    model = torch.nn.Linear(2, 1)
    (group,) = strategies.get("single", device="cpu").prepare(model, make).export_optimizer().groups
    assert json.loads(json.dumps(group)) == group
    assert (group["lr"], group["weight_decay"]) == (0.5, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_strategy_to_every_other_on_1_2_and_4_ranks(alone: dict[tuple[str, str], Exported]) -> None:
    """To fewer and to more ranks. The tests above have one and two: each strategy exports there what one device has,
    and goes on with that; and `test_ranks.py` has whole runs."""
    for before, devices in ((4, 1), (4, 2), (2, 4)):
        exports = launch(export_all, NAMES, devices=before, timeout=300)[0]
        given: dict[tuple[object, str], Exported] = {
            ((name, before), kind): state for (name, kind), state in exports.items()
        }
        for rank in launch(import_all, NAMES, given, devices=devices, timeout=900):
            assert len(rank) == len(NAMES) * len(given)
            for (_, source, kind), found in rank.items():
                goes_on(found, given[source, kind], alone["single", kind])


@pytest.mark.parametrize(("group", "here"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")])
def test_numbers_of_the_optimizer_are_where_torch_keeps_them(group: dict[str, bool], here: str) -> None:
    """Read from a GPU, each would make the step wait."""
    weight = torch.empty(1, device="meta")
    assert {str(scalar_device(key, group, weight)) for key in ("step", "mu_product")} == {here}
    assert scalar_device("eta", {}, weight) == weight.device  # ASGD's
