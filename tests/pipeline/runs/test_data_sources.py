"""Pipelines on several files, on mixes, and on data at an address: training, resuming, ranks, recipes, command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import call
from drivetrain import CheckpointError, DataError, Pipeline, PlanError
from drivetrain.common.storage.cache import Mirror
from drivetrain.common.storage.stream import mirror_at
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline import load_run
from drivetrain.pipeline.runs.preflight import digest
from drivetrain.pipeline.training.build import source_files
from pipeline_data import Toy, numbers
from range_server import serving


@pytest.fixture(scope="module")
def parts(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The toy data set in three files."""
    folder = tmp_path_factory.mktemp("parts")
    with FFCVLoader(toy.train, batch_size=1, image_size=16, train=False) as loader:
        beton = loader.beton
        assert beton is not None
        samples = [beton.locate(index) for index in range(len(beton))]
        pixels = np.stack([np.asarray(file.image(at)) for file, at in samples])
        convert((pixels, beton.labels), folder / "train-{0..2}.beton", classes=beton.classes, progress=False)
    return str(folder / "train-{0..2}.beton")


@pytest.mark.process
def test_parts_train_as_the_whole_and_a_mix_resumes(toy: Toy, parts: str, tmp_path: Path) -> None:
    whole = toy.pipeline()
    _, options = whole.data.arguments()
    expected = numbers(whole.fit(epochs=2, progress=False))
    assert numbers(whole.load(parts, toy.val, **options).fit(epochs=2, progress=False)) == expected
    mix = whole.load({parts: 3, toy.train: 1}, toy.val, **options)
    assert mix.plan().steps[0].what == f"load 3 × {parts} + 1 × {toy.train}"
    undisturbed = mix.fit(epochs=3, progress=False)
    mix.fit(epochs=2, out=tmp_path / "run", progress=False)
    on_ranks = mix.distribute("ddp", devices=2).fit(epochs=3, out=tmp_path / "run", resume="auto", progress=False)
    np.testing.assert_allclose(numbers(on_ranks), numbers(undisturbed), atol=2e-6)
    other = whole.load({parts: 2, toy.train: 1}, toy.val, **options)
    with pytest.raises(CheckpointError, match="weights of the training data"):
        other.fit(epochs=4, out=tmp_path / "run", resume="auto", progress=False)
    assert digest(parts).startswith("3 files, CRC ")
    assert digest({parts: 3, toy.train: 1}).endswith("weights 3, 1")
    assert digest({parts: 2, toy.train: 1}) != digest({parts: 3, toy.train: 1})


def test_a_mix_in_a_recipe_and_on_the_command_line(toy: Toy, parts: str, tmp_path: Path) -> None:
    recipe, out = tmp_path / "mix.yaml", tmp_path / "run"
    content = toy.named().replace(epochs=1).to_recipe() | {"train": {parts: 3, toy.train: 1}, "val": None}
    recipe.write_text(yaml.safe_dump(content))
    ended = call("train", str(recipe), "--out", str(out))
    assert ended.code == 0, ended.err
    assert yaml.safe_load((out / "recipe.yaml").read_text())["train"] == {parts: 3, toy.train: 1}
    ended = call(
        "train", str(recipe), f"train={json.dumps({toy.train: 1, parts: 1})}", "--out",
        str(tmp_path / "other"),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    ended = call("train", str(recipe), "--train", parts, "--out", str(tmp_path / "third"))
    assert ended.code == 0, ended.err
    for wrong, message in (
        ('train={"a.beton": 0}', "a dict of sources and their weights"),
        ("train={}", "is empty"),
        (f"val={json.dumps({toy.train: 1})}", "val="),
        (f"train={parts.replace('..2', '..3')}", "train-3.beton"),
    ):
        assert message in call("train", str(recipe), wrong).err


def test_evaluation_on_several_files(toy: Toy, parts: str, tmp_path: Path) -> None:
    """Also on a part of the files that are trained on, and of a run that is loaded."""
    whole = toy.named()
    _, options = whole.data.arguments()
    expected = whole.load(toy.val, toy.train, **options).fit(epochs=1, progress=False)
    several = whole.load(toy.val, parts, **options).fit(epochs=1, progress=False)
    assert numbers(several) == numbers(expected)
    assert several.evaluate() == pytest.approx(several.metrics)
    result = whole.load(parts, val_split=0.25, **options).fit(epochs=1, out=tmp_path, progress=False)
    assert load_run(tmp_path).evaluate() == pytest.approx(result.metrics)


def test_evaluation_is_not_a_mix(toy: Toy) -> None:
    with pytest.raises(PlanError, match="val, not a dict"):
        toy.pipeline().load(toy.train, {toy.train: 1.0}, batch_size=8, image_size=16)  # type: ignore[arg-type]


def test_commands_take_each_file(parts: str) -> None:
    for command in ("inspect", "verify"):
        shown = call(command, parts)
        assert (shown.code, shown.out.count("train-")) == (0, 3), shown


def test_quasi_random_order_of_a_pipeline(toy: Toy, tmp_path: Path) -> None:
    random = toy.pipeline()
    _, options = random.data.arguments()
    quasi = random.load(toy.train, toy.val, **options, order="quasi_random")
    assert "order=quasi_random" in str(quasi.plan())
    assert quasi.to_recipe()["order"] == "quasi_random"
    with quasi.build() as built:
        assert built.val is not None
        assert (built.train.settings.order, built.val.settings.order) == ("quasi_random", "sequential")
    quasi.fit(epochs=1, out=tmp_path / "run", progress=False)
    with pytest.raises(CheckpointError, match="order"):
        random.fit(epochs=2, out=tmp_path / "run", resume="auto", progress=False)
    with pytest.raises(PlanError, match="order='sequential' is not known"):
        random.load(toy.train, **options, order="sequential")


@pytest.mark.process
def test_it_trains_as_on_local_files(toy: Toy, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "run"
    local = toy.pipeline()
    expected = numbers(local.fit(epochs=2, progress=False))
    with serving(Path(toy.train).parent) as server:
        train, val = (server.address(Path(file).name) for file in (toy.train, str(toy.val)))
        _, options = local.data.arguments()
        remote = local.load(train, val, **options, cache=str(cache), cache_limit=1)
        assert f"load {train}" in str(remote.plan())
        first = remote.fit(epochs=2, out=out, progress=False)
        assert numbers(first) == expected
        assert [mirror_at(file) is None for file in cache.glob("*/*.beton")] == [False, False]
        before = server.bytes
        shared = remote.distribute("ddp", devices=2).fit(epochs=1, progress=False)
        np.testing.assert_allclose(numbers(shared), numbers(first)[:1], atol=2e-6)
        assert server.bytes == before  # the ranks share the copy
        source = Path(str(source_files(remote.data, train)))
        assert digest(source) == f"{source.stat().st_size:,} bytes, {Mirror(source).version}"
        assert remote.evaluate(out) == pytest.approx(local.evaluate(out))


class Notes:
    """A logger that keeps the hyperparameters."""

    def __init__(self) -> None:
        self.params: dict[str, object] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep nothing."""

    def log_params(self, values: dict[str, object]) -> None:
        self.params = values


def test_loggers_and_results_name_the_address(toy: Toy, tmp_path: Path) -> None:
    """Not the local copy."""
    base, notes = toy.named(), Notes()
    _, options = base.data.arguments()
    with serving(Path(toy.train).parent) as server:
        train, val = (server.address(Path(file).name) for file in (toy.train, str(toy.val)))
        remote = base.load(train, val, **options, cache=str(tmp_path / "cache"))
        result = remote.fit(epochs=1, out=tmp_path / "run", logger=notes, progress=False)
        assert (notes.params["train"], notes.params["val"]) == (train, val)
        assert Pipeline.compare(tmp_path / "run", result).differences == {}
        assert result.errors().source == val


def test_a_recipe_and_the_command_line(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path / "default"))
    recipe, out = tmp_path / "remote.yaml", tmp_path / "run"
    with serving(Path(toy.train).parent) as server:
        address = server.address(Path(toy.train).name)
        content = toy.named().replace(epochs=1).to_recipe() | {"train": address, "val": None}
        recipe.write_text(yaml.safe_dump(content | {"cache": str(tmp_path / "cache")}))
        ended = call("train", str(recipe), "--out", str(out))
        assert ended.code == 0, ended.err
        written = yaml.safe_load((out / "recipe.yaml").read_text())
        assert (written["train"], written["cache"]) == (address, str(tmp_path / "cache"))
        again = call("train", str(out / "recipe.yaml"), "--out", str(out), "--resume")
        assert again.code == 0, again.err
        assert "the training was finished" in again.out
        for command in ("inspect", "verify"):
            shown = call(command, address)
            assert (shown.code, "samples" in shown.out) == (0, True), shown
        missing = call("train", str(recipe), "--train", server.address("missing.beton"))
        assert "missing.beton does not exist" in missing.line


@pytest.mark.parametrize("limit", [0, -1, "1", float("inf"), True])
def test_a_limit_is_a_positive_number(toy: Toy, limit: object) -> None:
    with pytest.raises(DataError, match="cache_limit="):
        Pipeline("cifar_resnet").load(toy.train, batch_size=8, image_size=16, cache_limit=limit)  # type: ignore[arg-type]
