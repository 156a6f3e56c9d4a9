"""Checkpoints saved under any strategy and world size, resumed under any other: the remaining training is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Dropping, outcome, resume_all, train_all, train_and_move, train_and_resume
from deepspeed_methods import options_of
from drivetrain import Classification, Pipeline
from drivetrain.pipeline.runs.checkpoints.format import Checkpoint
from drivetrain.pipeline.runs.checkpoints.remote import STATE
from drivetrain.strategies import launch
from drivetrain.transforms import EMA, SAM
from pipeline_data import Toy, plain_model
from safetensors.torch import load_file
from torch import nn

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]

STRATEGIES = ("single", "ddp", "fsdp")
ON_RANKS = [name for name in STRATEGIES if name != "single"]


def pipelines(toy: Toy, ranks: int, chosen: tuple[str, ...] = STRATEGIES) -> dict[str, Pipeline]:
    """Model and strategy: a model whose numbers do not depend on the ranks; on two, also one that draws and counts."""
    plain = toy.pipeline(plain_model).optimize("adamw", lr=0.01, warmup=0.2).transform(EMA(half_life=3))
    drawing = toy.pipeline(Dropping).transform(EMA(half_life=3))
    strategies = [name for name in chosen if ranks == 1 or name != "single"]
    made = {f"plain {name}": plain.distribute(name, devices=ranks) for name in strategies}
    if ranks != 2:
        return made
    # A rank's share of a microbatch has 8 labels: how many of them count differs.
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5, 8.0]), ignore_index=1)
    weighted = toy.pipeline(Dropping).task(Classification(loss=loss)).transform(SAM(), EMA(half_life=3))
    made |= {f"drawing {name}": drawing.distribute(name, devices=ranks) for name in strategies}
    return made | {"weighted ddp": weighted.distribute("ddp", devices=ranks, accumulate=2)}


def run(
    toy: Toy, ranks: int, folder: Path, sources: dict[str, Path], how: str = "resumed",
    chosen: tuple[str, ...] = STRATEGIES,
) -> list[dict[str, Any]]:  # fmt: skip
    jobs = pipelines(toy, ranks, chosen)
    if ranks == 1:
        return [train_and_resume(jobs, sources, folder, how)]
    return launch(train_and_resume, jobs, sources, folder, how, devices=ranks, timeout=240)


def places(folder: Path, toy: Toy, ranks: int) -> dict[str, Path]:
    """Where the checkpoints of the model that is the same everywhere are."""
    names = [name for name in pipelines(toy, ranks) if name.startswith("plain")]
    return {f"{name} {ranks}": folder / name / "checkpoints" for name in names}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(toy: Toy, root: Path) -> dict[str, Any]:
    return run(toy, 1, root / "1", {}, "whole")[0]


@pytest.fixture(scope="module")
def two(toy: Toy, root: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """From the checkpoints of "single": on one rank, the other strategies are that one, and for `make test-all`."""
    assert one
    alone = {name: place for name, place in places(root / "1", toy, 1).items() if name == "plain single 1"}
    return run(toy, 2, root / "2", alone)


@pytest.fixture(scope="module")
def back(toy: Toy, root: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    """On one rank, from two."""
    assert two
    return run(toy, 1, root / "back", places(root / "2", toy, 2), chosen=("single",))[0]


def assert_nearly(one: Any, whole: Any, place: object) -> None:
    assert not isinstance(one, str), (place, one)
    for left, right in zip(one[0], whole[0], strict=True):
        assert left == pytest.approx(right, abs=1e-5), place
    torch.testing.assert_close(one[1], whole[1], rtol=1e-4, atol=1e-5, msg=lambda text: f"{place}: {text}")


def assert_all_plain_are(whole: Any, found: dict[str, dict[str, Any]], sources: int, ends: bool = False) -> None:
    """Every resumed training of the plain model has the numbers and weights of `whole`, nearly."""
    compared = 0
    for name, outcomes in found.items():
        for label, one in outcomes.items() if name.startswith("plain") else ():
            assert_nearly(one, whole, (name, label))
            compared += 1
    names = sum(name.startswith("plain") for name in found)
    assert compared == names * (1 + (2 if ends else 1) * sources + 2 * names)


def test_from_one_rank_to_two(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert_all_plain_are(one["plain single"]["whole"], two[0], sources=1)


def test_from_two_ranks_to_one(one: dict[str, Any], back: dict[str, Any]) -> None:
    assert_all_plain_are(one["plain single"]["whole"], back, sources=len(ON_RANKS))


SAME_RANKS = ["plain ddp", "plain fsdp", "drawing ddp", "drawing fsdp", "weighted ddp"]


@pytest.mark.parametrize("name", SAME_RANKS)
def test_the_same_ranks_go_on_bit_for_bit(name: str, two: list[dict[str, Any]]) -> None:
    whole = two[0][name]["whole"]
    assert not isinstance(whole, str), whole
    for label in (name, f"{name}, next epoch"):
        assert two[0][name][label][0] == whole[0], label
        torch.testing.assert_close(two[0][name][label][1], whole[1], rtol=0, atol=0)


def test_ddp_and_fsdp_draw_alike(two: list[dict[str, Any]]) -> None:
    """Each rank's random numbers and statistics follow a checkpoint to another strategy of as many ranks."""
    found = two[0]["drawing fsdp"]
    for label in ("drawing ddp", "drawing ddp, next epoch"):
        for left, right in zip(found[label][0], found["whole"][0], strict=True):
            assert left == pytest.approx(right, abs=1e-4)


def test_each_rank_writes_its_rows(root: Path, two: list[dict[str, Any]]) -> None:
    whole = two[0]["plain fsdp"]["whole"][1]
    folder = root / "2" / "plain fsdp" / "checkpoints" / "step-00000008"
    checkpoint = Checkpoint(folder)
    assert checkpoint.content.shards is not None
    assert checkpoint.content.shards.files == 2
    assert "flat" not in json.loads((folder / STATE).read_text())["shards"]  # which older versions do not know
    shapes = checkpoint.content.shards.shapes
    assert shapes["model"] == {name: list(value.shape) for name, value in whole.items()}
    assert not list(folder.glob("*.index.json"))
    assert sorted(checkpoint.content.files) == sorted(path.name for path in folder.iterdir() if path.name != STATE)
    averages = [load_file(folder / f"methods-0000{number}-of-00002.safetensors") for number in (1, 2)]
    for name, value in whole.items():  # what was evaluated
        rows = [each[f"EMA.averages::{name}"] for each in averages]
        assert [len(each) for each in rows] == [len(each) for each in value.chunk(2)]
        assert torch.equal(torch.cat(rows), value)
    for kind in ("model", "optimizer"):
        sizes = [
            sum(each.nbytes for each in load_file(folder / f"{kind}-0000{number}-of-00002.safetensors").values())
            for number in (1, 2)
        ]
        assert min(sizes) > 0.45 * sum(sizes)
    assert not any(name.endswith("::step") for name in load_file(folder / "optimizer-00002-of-00002.safetensors"))
    replicated = root / "2" / "plain ddp" / "checkpoints" / "step-00000003"
    assert (replicated / "model.safetensors").exists()
    assert "shards" not in json.loads((replicated / STATE).read_text())


@pytest.mark.slow
def test_four_ranks(toy: Toy, root: Path, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    sources = places(root / "1", toy, 1) | places(root / "2", toy, 2)
    four = run(toy, 4, root / "4", sources, "ends")[0]
    assert two
    assert_all_plain_are(one["plain single"]["whole"], four, sources=len(sources), ends=True)
    back = run(toy, 2, root / "4 to 2", places(root / "4", toy, 4), "ends")[0]
    assert_all_plain_are(one["plain single"]["whole"], back, sources=len(ON_RANKS), ends=True)


SHARDING = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fairscale_oss"]
AVERAGED = ["averaged deepspeed_stage_2", "averaged fairscale_oss"]
"""With averages of the weights, which the third stage cannot keep; those of ddp and fsdp move elsewhere."""
MIDDLE = "checkpoints/step-00000003"
"""Of the first of two epochs of four steps."""


def pipeline(toy: Toy, name: str, ranks: int) -> Pipeline:
    model, _, strategy = name.rpartition(" ")
    made = toy.pipeline(plain_model).optimize("adamw", lr=0.01, warmup=0.2)
    if model == "averaged":
        made = made.transform(EMA(half_life=3))
    return made.distribute(strategy, devices=ranks, device="cpu", **options_of(strategy))


def on_ranks(job: Any, toy: Toy, names: list[str], ranks: int, *given: Any, timeout: float) -> dict[Any, Any]:
    """Rank 0's outcomes, for only its model has the trained weights; their numbers are of all ranks."""
    asked = {name: pipeline(toy, name, ranks) for name in names}
    return launch(job, asked, *given, devices=ranks, timeout=timeout)[0]


def assert_all_are(found: dict[Any, Any], whole: dict[str, Any], count: int) -> None:
    """`whole` by model."""
    assert len(found) == count
    for move, one in found.items():
        name = move[0] if isinstance(move, tuple) else move
        assert_nearly(one, whole[name.rpartition(" ")[0]], move)


@pytest.fixture(scope="module")
def whole(toy: Toy, root: Path) -> dict[str, Any]:
    """One device's outcomes, uninterrupted; its checkpoints are in `root / "1" / name`."""
    found = train_all({name: pipeline(toy, name, 1) for name in ("single", "averaged single")}, root / "1")
    return {name.rpartition(" ")[0]: one for name, one in found.items()}


@pytest.mark.slow
def test_to_every_strategy_and_back(toy: Toy, root: Path, whole: dict[str, Any]) -> None:
    """One device to each strategy on two ranks, each to the next one, and each to one device."""
    names = [*SHARDING, *AVERAGED]
    alone = {name: f"{name.rpartition(' ')[0]} single".strip() for name in names}
    moves = [(name, "one device", root / "1" / alone[name] / MIDDLE) for name in names]
    for own in (SHARDING, AVERAGED):
        moves += [(to, at, root / "2" / at / MIDDLE) for at, to in zip(own, [*own[1:], own[0]], strict=True)]
    trained, moved = on_ranks(train_and_move, toy, names, 2, root / "2", moves, timeout=290)
    assert_all_are(trained, whole, len(names))
    assert_all_are(moved, whole, len(moves))
    back = {name: outcome(pipeline(toy, alone[name], 1), resume=root / "2" / name / MIDDLE) for name in names}
    assert_all_are(back, whole, len(names))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_strategy_on_1_2_and_4_ranks_to_every_other(toy: Toy, root: Path, whole: dict[str, Any]) -> None:
    names = {1: ["single", *SHARDING], 2: SHARDING, 4: SHARDING}
    for ranks, own in names.items():
        trained = on_ranks(train_all, toy, own, ranks, root / f"from {ranks}", timeout=280)
        assert_all_are(trained, whole, len(own))
    for ranks, before in ((1, 4), (2, 4), (4, 2)):  # the test above has one and two
        sources = {f"{name} {before}": root / f"from {before}" / name / MIDDLE for name in names[before]}
        moves = [(name, label, place) for name in names[ranks] for label, place in sources.items()]
        assert_all_are(on_ranks(resume_all, toy, names[ranks], ranks, moves, timeout=1200), whole, len(moves))
