"""Before a run, two ranks compare what they are about to train, and both say in one sentence what differs."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cluster_jobs import Case, compare_before_training
from drivetrain import EarlyStopping, Pipeline, PlanError, Regression, StrategyError, strategies
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs import run
from drivetrain.pipeline.runs.artifacts import FitJob
from drivetrain.pipeline.runs.checkpoints.fingerprint import fingerprint
from drivetrain.pipeline.runs.preflight import facts
from drivetrain.transforms import LabelSmoothing, MixUp
from pipeline_data import TRAIN, Toy, batch_norm_model, write_toy


def after_another_look(pipeline: Pipeline, bare: Pipeline) -> list[str]:
    """As if rank 1's machine had looked at files at addresses before some were replaced; then with `bare` on rank 1."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(run, "fingerprint", lambda *others: fingerprint(*others) | {"training samples": 1})
        with pytest.raises(StrategyError) as error:
            pipeline.fit(epochs=1, progress=False)
        said.append(str(error.value))
    with pytest.raises(StrategyError) as error:
        (bare if dist.get_rank() == 1 else pipeline).fit(epochs=1, progress=False)
    return [*said, str(error.value)]


def test_ranks_that_know_other_data_do_not_train(toy: Toy, tmp_path: Path) -> None:
    base, same = toy.pipeline(), tmp_path / "same.beton"
    same.write_bytes(Path(toy.train).read_bytes())  # without its manifest
    bare = base.replace(data=dataclasses.replace(base.data, train=str(same)))
    two, other = (each.distribute("ddp", devices=2, device="cpu") for each in (base, bare))
    first, second = strategies.launch(after_another_look, two, other, devices=2, device="cpu")
    assert first == second
    for said in first:
        assert said.startswith("The ranks have other data")
        assert "Copy each manifest with its file" in said


def with_a_file_of_its_own(pipeline: Pipeline, folder: Path) -> str:
    """As on two machines, each of which has its own file of that name."""
    with contextlib.chdir(folder / str(dist.get_rank())), pytest.raises(StrategyError) as error:
        pipeline.fit(epochs=1, progress=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "contents"),
    [("indices", [[*range(64)], [*range(64, TRAIN)]]), ("balance", [[1] * TRAIN, [*range(1, TRAIN + 1)]])],
    ids=["indices", "balance"],
)
def test_ranks_that_select_other_samples_do_not_train(
    option: str, contents: list[list[int]], toy: Toy, tmp_path: Path
) -> None:
    for rank, values in enumerate(contents):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "chosen.json").write_text(json.dumps(values))
    pipeline = toy.pipeline(**{option: "chosen.json"}).distribute("ddp", devices=2, device="cpu")
    first, second = strategies.launch(with_a_file_of_its_own, pipeline, tmp_path, devices=2, device="cpu")
    assert first == second
    assert first.startswith("The ranks have other data")
    assert "another file of indices= or balance=" in first


@pytest.mark.process
def test_both_ranks_name_what_differs(toy: Toy, tmp_path: Path) -> None:
    def case(other: Any = None, **fit: Any) -> Case:
        own = toy.pipeline().distribute("ddp", devices=2, timeout=20)
        return own, own if other is None else other, {}, fit

    def ddp(pipeline: Any, **options: Any) -> Any:
        return pipeline.distribute("ddp", devices=2, timeout=20, **options)

    base, shared = toy.pipeline(), tmp_path / "shared"
    (tmp_path / "own").mkdir()
    shared.mkdir()
    other, same = write_toy(tmp_path / "train.beton", 128, seed=9), tmp_path / "same.beton"
    same.write_bytes(Path(toy.train).read_bytes())
    own = case()[0]
    cases: dict[str, Case] = {
        "nothing": case(),
        "a copy elsewhere": case(ddp(base.replace(data=base.data.__class__(str(same), toy.val, **rest(base))))),
        "samples": case(ddp(base.replace(data=base.data.__class__(str(other), toy.val, **rest(base))))),
        "the learning rate": case(ddp(base.optimize("sgd", lr=0.5, momentum=0.9, schedule="constant"))),
        "the seed": case(ddp(base.replace(seed=3))),
        "a transform": case(ddp(base.transform(LabelSmoothing(0.1)))),
        "the task": case(ddp(base.task(Regression()))),
        "a model without a name": case(ddp(toy.pipeline(batch_norm_model()).transform(MixUp(0.1)))),
        "precision": case(ddp(base, precision="bf16")),
        "epochs": case(epochs=2),
        "checkpoints": case(checkpoints=Checkpoints(every_steps=3)),
        "callbacks": case(callbacks=[EarlyStopping("val_loss")]),
        "a shared folder": (own, own, {"out": str(shared)}, {"out": str(shared)}),
        "a folder of its own": (own, own, {"out": str(shared)}, {"out": str(tmp_path / "own")}),
        "no folder": (own, own, {"out": str(shared)}, {}),
        "rank 0 without its folder": (own, own, {"out": str(tmp_path / "gone")}, {"out": str(shared)}),
        "a stopped run": (
            own, own, {"out": str(shared), "resume": "auto"},
            {"out": str(shared), "resume": "auto", "continue_stopped": True},
        ),
        "a changed model": (
            own, own, {"out": str(shared), "resume": "auto"},
            {"out": str(shared), "resume": "auto", "changed_model": True},
        ),
    }  # fmt: skip
    first, second = strategies.launch(compare_before_training, cases, devices=2, device="cpu")
    assert first == second
    expected = {
        "nothing": "", "a copy elsewhere": "", "a shared folder": "",
        "samples": "training data = ", "the learning rate": "optimizer.lr = 0.5", "the seed": "seed = 3",
        "a transform": "transforms = ", "the task": "task.name = 'Regression'", "a model without a name": "has ",
        "precision": "precision = 'bf16'", "epochs": "fit(epochs) = 2", "checkpoints": "every_steps=3",
        "callbacks": "fit(callbacks) = EarlyStopping", "a folder of its own": "does not see what rank 0",
        "no folder": "fit(out) = none",
        "rank 0 without its folder": "cannot train: FileNotFoundError",
        "a stopped run": "fit(continue_stopped) = True", "a changed model": "fit(changed_model) = True",
    }  # fmt: skip
    for name, words in expected.items():
        assert words in first[name], (name, first[name])
        guilty = "rank 0 (" if "without its" in name else "rank 1 ("
        assert guilty in first[name].lower() or not words, (name, first[name])
    assert list(shared.iterdir()) == []


def test_a_copy_of_the_data_elsewhere_with_a_model_that_no_recipe_names(toy: Toy, tmp_path: Path) -> None:
    base, same = toy.pipeline(batch_norm_model()), tmp_path / "same.beton"
    same.write_bytes(Path(toy.train).read_bytes())
    other = base.replace(data=dataclasses.replace(base.data, train=str(same)))
    first, second = (facts(resolve(each), FitJob(epochs=1)) for each in (base, other))
    assert first == second


def test_options_of_callbacks_are_compared_but_not_their_files(toy: Toy) -> None:
    """Ranks that decide by other options might wait for each other."""

    def compared(*callbacks: dict[str, Any]) -> str:
        options: dict[str, Any] = {"epochs": 1, "callbacks": [*callbacks]}
        pipeline = Pipeline.from_recipe(toy.pipeline("cifar_resnet").to_recipe() | options)
        return facts(resolve(pipeline), FitJob(**options))["fit(callbacks)"]

    every_5 = {"name": "GradientNorms", "every": 5}
    assert compared({"name": "EarlyStopping"}, every_5) == "EarlyStopping, GradientNorms(every=5)"
    one, other = ({"name": "Profile", "out": f"{name}.json", "steps": 2} for name in "ab")
    assert compared(one) == compared(other) == "Profile(steps=2)"
    assert compared({"name": "callback_jobs:OnRankOne", "stop": 3}) == "OnRankOne(stop=3)"
    assert compared({"name": "callback_jobs:OnRankOne", "stop": "/here/3"}) == "OnRankOne"


def rest(pipeline: Any) -> dict[str, Any]:
    """The options of `load` but the files."""
    changed = pipeline.data.changed()
    return {name: value for name, value in changed.items() if name not in ("train", "val")}


def test_tasks_of_slurm_without_torchrun_are_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    toy.pipeline().fit(epochs=1, progress=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(StrategyError, match=r"task 2 of 4 of a SLURM step.*--ntasks-per-node=1 torchrun"):
        toy.pipeline().fit(epochs=1, progress=False)


@pytest.mark.parametrize(
    ("accumulate", "words"),
    [
        (1, r"devices=3 × accumulate=1 = 3. With this batch size, devices can be 1, 2, 4; .*batch_size=30"),
        (5, r"devices=3 × accumulate=5 = 15. Pass batch_size=30"),
    ],
)
def test_a_batch_that_does_not_divide(toy: Toy, accumulate: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        toy.pipeline(batch_size=32).distribute("ddp", devices=3, accumulate=accumulate).plan()


def test_automatic_devices(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a GPU; under torchrun its world size; the recipe keeps the word."""
    pipeline = toy.pipeline("cifar_resnet").distribute("ddp", devices="auto", device="cpu")
    assert '1 device(s) ("auto")' in str(pipeline.plan()).replace("\n", " ")
    assert pipeline.to_recipe()["devices"] == "auto"
    assert Pipeline.from_recipe(pipeline.to_recipe()).distributed == pipeline.distributed
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert pipeline.distributed.ranks == 4
    for wrong in ("Auto", 0, True, 1.5, None):
        with pytest.raises(PlanError, match="devices="):
            pipeline.distribute("ddp", devices=wrong)  # type: ignore[arg-type]
