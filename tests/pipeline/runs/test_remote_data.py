"""A pipeline on data at an address: the numbers of local files, in recipes, on ranks, and when it resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import call
from drivetrain import DataError, Pipeline
from drivetrain.common.storage.cache import Mirror
from drivetrain.pipeline.runs.preflight import digest
from drivetrain.pipeline.training.build import source_files
from pipeline_data import Toy, numbers
from range_server import serving


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
        assert [Mirror.at(file) is None for file in cache.glob("*/*.beton")] == [False, False]
        before = server.bytes
        shared = remote.distribute("ddp", devices=2).fit(epochs=1, progress=False)
        np.testing.assert_allclose(numbers(shared), numbers(first)[:1], atol=2e-6)
        assert server.bytes == before  # the ranks share the copy
        source = Path(str(source_files(remote.data, train)))
        assert digest(source) == f"{source.stat().st_size:,} bytes, {Mirror(source).version}"
        assert remote.evaluate(out) == pytest.approx(local.evaluate(out))


def test_a_recipe_and_the_command_line(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path / "default"))
    recipe, out = tmp_path / "remote.yaml", tmp_path / "run"
    with serving(Path(toy.train).parent) as server:
        address = server.address(Path(toy.train).name)
        recipe.write_text(
            f"model: cifar_resnet\nmodel_options: {{num_classes: 4, width: 4}}\ntrain: {address}\nbatch_size: 32\n"
            f"cache: {tmp_path / 'cache'}\nimage_size: 16\noptimizer: {{name: sgd, lr: 0.1}}\nepochs: 1\nworkers: 1\n"
        )
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
