"""Checkpoints by shard: ranks write the rows that they hold, and read those that they need; damage is a typed error."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_methods import options_of
from drivetrain import CheckpointError, Pipeline, StrategyError
from drivetrain.common.rows import chunk
from drivetrain.common.storage.tensors import Tensors, elements_of, open_tensors, rows_of, save_weights
from drivetrain.pipeline import Checkpoints, CheckpointWarning, export
from drivetrain.pipeline.runs.checkpoints.directory import find
from drivetrain.pipeline.runs.checkpoints.format import SHARED, UNLISTED, Checkpoint, _digest, _measure
from drivetrain.pipeline.runs.checkpoints.shards import open_shards
from drivetrain.strategies import launch
from drivetrain.transforms import EMA
from pipeline_data import Toy, numbers, plain_model
from safetensors.torch import load_file, save_file
from sharded_checkpoint_jobs import (
    FAMILY,
    FLAT,
    Odd,
    denied,
    flat_jobs,
    gone_on,
    outcome_of,
    resumed,
    round_trips,
    train_until_killed,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
STEP = "step-00000006"


def test_ranks_write_their_rows_and_read_only_these(tmp_path: Path) -> None:
    ranks = launch(round_trips, tmp_path, [*FAMILY], devices=4, timeout=120)
    rows = {
        "fsdp": [(2, 1, 1), (2, None, 1), (2, None, None), (1, None, None)],
        "hsdp in pairs": [(4, 1, 1), (3, None, 1)] * 2,
        "hsdp alone": [()] * 4,
    }
    for name in FAMILY:
        for number, rank in enumerate(ranks):
            own, together, loaded = rank[name]
            assert together, (name, number)
            assert loaded, (name, number)
            if name in rows and rows[name][number]:
                names = ("first.weight", "second.weight::exp_avg", "last.weight")
                assert tuple(own.get(each) for each in names) == rows[name][number], (name, number)


def pipeline(toy: Toy, strategy: str = "single", ranks: int = 1) -> Pipeline:
    made = toy.pipeline(plain_model).optimize("adamw", lr=0.01, warmup=0.2).transform(EMA(half_life=3))
    return made.distribute(strategy, devices=ranks, device="cpu")


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks with FSDP, a checkpoint after every second step."""
    out = tmp_path_factory.mktemp("shards")
    pipeline(toy, "fsdp", 2).fit(epochs=2, out=out, progress=False, checkpoints=Checkpoints(every_steps=2, keep=9))
    return out


def copy_of(run: Path, folder: Path) -> Path:
    return shutil.copytree(run / "checkpoints" / STEP, folder / STEP)


def rewrite_state(place: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Change `state.json`, with digests that are right."""
    state = json.loads((place / "state.json").read_text())
    del state["sha256"]
    change(state)
    state["files"] = {path.name: _measure(path) for path in place.iterdir() if path.name != "state.json"}
    (place / "state.json").write_text(json.dumps({**state, "sha256": _digest(state)}))


def test_a_run_at_the_end_is_what_the_ranks_had(toy: Toy, run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out.safetensors", names="trained")
    exported, kept = load_file(tmp_path / "out.safetensors"), load_file(run / "model.safetensors")
    torch.testing.assert_close(exported, kept, rtol=0, atol=0)
    again = pipeline(toy).fit(epochs=2, resume=run, progress=False)
    torch.testing.assert_close(again.model.state_dict(), kept, rtol=0, atol=0)


def test_shards_of_older_versions_resume_alike(toy: Toy, run: Path, tmp_path: Path) -> None:
    """Those had full tensors in each file, and Hugging Face's index."""
    place = copy_of(run, tmp_path)
    checkpoint = Checkpoint(place)
    for kind in SHARED[:3]:
        tensors = dict(checkpoint.tensors(kind))
        names = [f"{kind}-0000{number}-of-00002.safetensors" for number in (1, 2)]
        homes = {key: names[number % 2] for number, key in enumerate(sorted(tensors))}
        own = {name: {key: tensors[key].clone() for key, home in homes.items() if home == name} for name in names}
        for name in names:
            (place / name).unlink()
            save_file(own[name], place / name)
        (place / f"{kind}.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    rewrite_state(place, lambda state: state.pop("shards"))
    old, new = (
        pipeline(toy).fit(epochs=2, resume=each, progress=False) for each in (place, run / "checkpoints" / STEP)
    )
    assert numbers(old) == numbers(new)
    torch.testing.assert_close(old.model.state_dict(), new.model.state_dict(), rtol=0, atol=0)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def test_a_shard_that_is_damaged_or_missing(toy: Toy, run: Path, tmp_path: Path) -> None:
    place = copy_of(run, tmp_path)
    data = (place / SECOND).read_bytes()
    (place / SECOND).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{STEP} is damaged: {SECOND} has .* Use an older checkpoint"):
        pipeline(toy).fit(epochs=2, resume=place, progress=False)
    (place / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{STEP} is damaged: {SECOND}: .* Use an older checkpoint"):
        pipeline(toy).fit(epochs=2, resume=place, progress=False)


def test_the_checkpoint_before_a_damaged_one_is_found(run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(run, tmp_path / "run")
    (out / "checkpoints" / "step-00000008" / SECOND).unlink()
    with pytest.warns(CheckpointWarning, match=SECOND):
        assert find(out).path.name == STEP


@pytest.fixture(scope="module")
def passed_over(toy: Toy, run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each damaged file: what both ranks found as they resumed, one run after the other in one launch."""
    outs = {}
    for damaged in (FIRST, SECOND):
        out = shutil.copytree(run, tmp_path_factory.mktemp("damaged") / "run")
        newest = out / "checkpoints" / "step-00000008"
        data = (newest / damaged).read_bytes()
        (newest / damaged).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        outs[damaged] = out
    ranks = launch(resumed, pipeline(toy, "fsdp", 2), [*outs.values()], devices=2, timeout=120)
    return dict(zip(outs, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("damaged", [FIRST, SECOND])
def test_ranks_verify_together_and_skip_what_any_of_them_finds_damaged(
    damaged: str, passed_over: dict[str, Any], run: Path
) -> None:
    first, second = passed_over[damaged]
    assert first[0] == second[0] == 6
    assert damaged in first[1][0]
    assert second[1] == []
    files = Checkpoint(run / "checkpoints" / STEP).content.files
    assert len(first[2]) + len(second[2]) == 2 * len(files)  # of two checkpoints


def test_ranks_do_not_pass_over_what_one_of_them_may_not_open(toy: Toy, run: Path, tmp_path: Path) -> None:
    out = shutil.copytree(run, tmp_path / "run")
    first, second = launch(denied, pipeline(toy, "fsdp", 2), out, devices=2, timeout=120)
    assert first == second
    assert "step-00000008 could not be read" in first
    assert "Permission denied" in first


def without_rows(place: Path) -> None:
    tensors = load_file(place / SECOND)
    save_file({key: value for key, value in tensors.items() if key != "4.weight"}, place / SECOND)


def with_fewer_rows(place: Path) -> None:
    tensors = load_file(place / SECOND)
    save_file(tensors | {"4.weight": tensors["4.weight"][1:].clone()}, place / SECOND)


def of_another_dtype(place: Path) -> None:
    tensors = load_file(place / SECOND)
    save_file(tensors | {"4.weight": tensors["4.weight"].double()}, place / SECOND)


def of_another_shape(state: dict[str, Any]) -> None:
    state["shards"]["shapes"]["model"]["4.weight"] = [3, 128]


def of_a_name(state: dict[str, Any]) -> None:
    state["shards"]["shapes"]["model"]["surprise"] = [3, 128]


WORDS = r"4.weight.*rows 2 to 4, torch.float32 of shape \(2, 128\)\. Use another checkpoint"


@pytest.mark.parametrize(("files", "state", "message"), [
    (without_rows, None, f"{SECOND} has nothing of '{WORDS}"),
    (with_fewer_rows, None, rf"{SECOND} has torch.float32 of shape \(1, 128\) of '{WORDS}"),
    (of_another_dtype, None, rf"{SECOND} has torch.float64 of shape \(2, 128\) of '{WORDS}"),
    (None, of_another_shape, r"'4.weight' has shape \(3, 128\) in the saved state but \(4, 128\)"),
    (None, of_a_name, f"{FIRST} does not have 'surprise'.*Use another checkpoint"),
    (None, lambda state: state["shards"].update(files=1), "its shards.files: expected `int` >= 2"),
    (None, lambda state: state["shards"].update(files=10**12), "its shards.files: 1000000000000 files of 2 ranks"),
    (None, lambda state: state["shards"]["shapes"]["model"].update({"4.weight": []}), "its shards.shapes.*length"),
])  # fmt: skip
def test_other_shards_than_the_state_lists(
    files: Callable[[Path], None] | None, state: Any, message: str, toy: Toy, run: Path, tmp_path: Path
) -> None:
    """Although all digests are right."""
    place = copy_of(run, tmp_path)
    if files is not None:
        files(place)
    rewrite_state(place, state or (lambda _: None))
    with pytest.raises(CheckpointError, match=message):
        pipeline(toy).fit(epochs=2, resume=place, progress=False)


KILLED = [("fsdp", 0, "before optimizer"), ("fsdp", 1, "after rank"), ("ddp", 0, "after model")]
"""The strategy, the rank that is killed as it writes a checkpoint, and when; `test_kill.py` kills at any moment."""
Kill = tuple[str, int, str]


def after_kills(toy: Toy, folder: Path, kills: list[Kill]) -> dict[Kill, Any]:
    """For each: what there is of the run that went on, and of one that nobody killed, of the same strategy. All of a
    strategy go on in one launch."""
    found: dict[Kill, Any] = {}
    for strategy in dict.fromkeys(strategy for strategy, *_ in kills):
        made, outs = pipeline(toy, strategy, 2), dict[Kill, Path]()
        for kill in (each for each in kills if each[0] == strategy):
            _, victim, moment = kill
            out = outs[kill] = folder / f"{strategy}-{victim}-{moment.replace(' ', '-')}"
            with pytest.raises(StrategyError, match=f"rank {victim} of 2 was killed by SIGKILL"):
                launch(train_until_killed, made, out, victim, 5, moment, devices=2, timeout=120)
            assert (out / "checkpoints" / ".step-00000005.partial").exists()
            assert find(out).path.name == "step-00000004"
        gone, _ = launch(gone_on, made, [*outs.values(), folder / strategy], devices=2, timeout=120)
        found |= {kill: (one, gone[-1]) for kill, one in zip(outs, gone[:-1], strict=True)}
    return found


def same_as_undisturbed(killed: Any, whole: Any) -> None:
    assert killed[0]["resumed"][0]["step"] == 4
    assert "resumed" not in whole[0]
    assert killed[1] == whole[1]
    torch.testing.assert_close(killed[2], whole[2], rtol=0, atol=0)


@pytest.fixture(scope="module")
def gone(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[Kill, Any]:
    return after_kills(toy, tmp_path_factory.mktemp("killed"), KILLED)


@pytest.mark.parametrize("kill", KILLED, ids=str)
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(kill: Kill, gone: dict[Kill, Any]) -> None:
    same_as_undisturbed(*gone[kill])


@pytest.mark.slow
def test_other_ranks_and_moments(toy: Toy, tmp_path: Path) -> None:
    for found in after_kills(toy, tmp_path, [("fsdp", 1, "after model"), ("ddp", 1, "after rank")]).values():
        same_as_undisturbed(*found)


COUNTS = {
    2: [(11, 4, 1, 1), (10, 3, 1, None)],
    3: [(7, 3, 1, 1), (7, 3, 1, None), (7, 1, None, None)],
}
"""By the number of ranks, the elements on each of tensors of 21, 7, 2 elements and 1 element."""


def assert_elements(ranks: Sequence[dict[str, Any]]) -> None:
    names = ("first.weight", "second.weight::exp_avg", "last.weight", "second.bias")
    for name in FLAT:
        for number, rank in enumerate(ranks):
            own, together, loaded = rank[name]
            assert together, (name, number)
            assert loaded, (name, number)
            assert tuple(own.get(each) for each in names) == COUNTS[len(ranks)][number], (name, number)


@pytest.mark.slow  # on two ranks below, with the other runs of DeepSpeed, whose import takes each rank seconds
def test_three_ranks_write_their_elements_and_read_only_these(tmp_path: Path) -> None:
    assert_elements(launch(round_trips, tmp_path, [*FLAT], devices=3, timeout=240))


def shard_files(folder: Path, value: torch.Tensor, count: int, flat: bool) -> Tensors:
    paths = [folder / f"{flat} {count} {number}.safetensors" for number in range(count)]
    parts: list[Any] = [*(value.flatten() if flat else value).chunk(count)]
    for path, part in zip_longest(paths, parts):
        save_weights({} if part is None else {"value": part}, path)
    return open_shards(paths, {"value": list(value.shape)}, flat)


@pytest.mark.parametrize("shape", [(7,), (1, 5), (5, 3, 2), (2, 1)])
def test_elements_and_rows_of_any_shards(shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.arange(float(math.prod(shape))).view(shape)
    save_weights({"value": value}, tmp_path / "whole.safetensors")
    sources: list[Mapping[str, torch.Tensor]] = [{"value": value}, open_tensors(tmp_path / "whole.safetensors")]
    sources += [shard_files(tmp_path, value, count, flat) for count in (2, 3, 4) for flat in (False, True)]
    for source in sources:
        assert torch.equal(source["value"], value)
        for ranks in (1, 2, 3, 4):
            spans = [chunk(len(value), ranks, rank) for rank in range(ranks)]
            assert torch.equal(torch.cat([rows_of(source, "value", *span) for span in spans]), value)
            spans = [chunk(value.numel(), ranks, rank) for rank in range(ranks)]
            assert torch.equal(torch.cat([elements_of(source, "value", *span) for span in spans]), value.flatten())


@pytest.fixture(scope="module")
def elements(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """Rank 0's outcomes of `flat_runs`, with one device's; the folder of all runs; and each rank's `round_trips`."""
    out = tmp_path_factory.mktemp("flat")
    made = toy.pipeline(Odd).optimize("adamw", lr=0.01, warmup=0.2)
    alone = made.distribute("single", device="cpu")
    often = Checkpoints(every_steps=2, keep=9)
    found: dict[str, Any] = {"single": outcome_of(alone, out=out / "single", checkpoints=often)}
    names = ("deepspeed_stage_3", "fsdp")
    on_ranks = {name: made.distribute(name, devices=2, device="cpu", **options_of(name)) for name in names}
    ranks = launch(flat_jobs, on_ranks, out, out / "single", STEP, devices=2, timeout=240)
    found |= ranks[0][0]
    for name in on_ranks:
        found[f"single from {name}"] = outcome_of(alone, resume=out / name / "checkpoints" / STEP)
    return found, out, [round_trip for _, round_trip in ranks]


@pytest.fixture(scope="module")
def flat(elements: Any) -> tuple[dict[str, Any], Path]:
    return elements[0], elements[1]


def test_ranks_write_their_elements_and_read_only_these(elements: Any) -> None:
    assert_elements(elements[2])


def test_deepspeeds_shards_are_saved_and_loaded_without_gathering(flat: tuple[dict[str, Any], Path]) -> None:
    for name, counts in flat[0].items():
        if name.startswith("deepspeed") and name.endswith("sent"):
            assert counts[0] > 0, name
            assert counts[1] == 0, name


def test_deepspeeds_shards_are_what_is_gathered(flat: tuple[dict[str, Any], Path]) -> None:
    found, out = flat
    weights = found["deepspeed_stage_3"][1]
    checkpoint = Checkpoint(out / "deepspeed_stage_3" / "checkpoints" / "step-00000008")
    assert checkpoint.content.shards is not None
    assert checkpoint.content.shards.flat
    torch.testing.assert_close(dict(checkpoint.tensors("model")), dict(weights), rtol=0, atol=0)
    kept = load_file(out / "deepspeed_stage_3" / "model.safetensors")  # streamed
    torch.testing.assert_close(kept, dict(weights), rtol=0, atol=0)
    first, second = (load_file(checkpoint.path / name) for name in (FIRST, SECOND))
    sizes = {name: tuple(each[name].numel() if name in each else 0 for each in (first, second)) for name in weights}
    assert sizes == {
        "layers.0.weight": (95, 94), "layers.0.bias": (4, 3), "layers.4.weight": (126, 126), "scale": (1, 0),
        "fixed": (2, 1), "steps": (1, 0),
    }  # fmt: skip
    assert checkpoint.tensors(UNLISTED)["last"].tolist() == [8.0] * 3


def test_deepspeeds_shards_move(flat: tuple[dict[str, Any], Path]) -> None:
    """From it to itself bit for bit; to FSDP and one device, and back, nearly."""
    found, _ = flat
    same = found["deepspeed_stage_3 from deepspeed_stage_3"]
    assert same[0] == found["deepspeed_stage_3"][0]
    torch.testing.assert_close(same[1], found["deepspeed_stage_3"][1], rtol=0, atol=0)
    for name, (reached, weights) in ((n, each) for n, each in found.items() if not n.endswith("sent")):
        for left, right in zip(reached, found["single"][0], strict=True):
            assert left == pytest.approx(right, abs=1e-5), name
        torch.testing.assert_close(weights, found["single"][1], rtol=1e-4, atol=1e-5)


def test_elements_that_are_missing(flat: tuple[dict[str, Any], Path], toy: Toy, tmp_path: Path) -> None:
    place = copy_of(flat[1] / "deepspeed_stage_3", tmp_path)
    tensors = load_file(place / SECOND)
    save_file({key: value for key, value in tensors.items() if key != "layers.0.weight"}, place / SECOND)
    rewrite_state(place)
    words = rf"{SECOND} has nothing of 'layers.0.weight'.* its elements 95 to 189, torch.float32 of shape \(94,\)"
    with pytest.raises(CheckpointError, match=words):
        toy.pipeline(Odd).optimize("adamw", lr=0.01, warmup=0.2).fit(epochs=2, resume=place, progress=False)
