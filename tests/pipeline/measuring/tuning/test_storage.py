"""Other storage formats as changes to try: which keep the pixels, when they are converted, and what is left of them."""

import re
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain import Pipeline
from drivetrain.common import machine
from drivetrain.loaders import convert, open_beton
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.measuring.tuning import storage
from drivetrain.pipeline.measuring.tuning import tune as tune_module
from drivetrain.pipeline.measuring.tuning.candidates import Candidate, allowed, candidates
from drivetrain.pipeline.measuring.tuning.kept import Kept
from drivetrain.pipeline.measuring.tuning.result import FORMAT, Tried, Tuned
from drivetrain.pipeline.training.build import make_loader
from drivetrain.transforms import ProgressiveResizing
from loader_pictures import jpeg_folder
from pipeline_data import Toy, plain_model

pytestmark = pytest.mark.usefixtures("own_cache")
RAW = "storage=raw pixels"
SECONDS = 50  # enough on a busy machine; what is tried here takes less
SIDE = 48  # of loaded images; the pictures have 70 to 110 pixels


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    convert(jpeg_folder(folder / "pictures", per_class=16), folder / "photos.beton", progress=False)
    return folder / "photos.beton"


def pipeline_of(photos: Path, model: Any = plain_model, **load: Any) -> Pipeline:
    options = {"batch_size": 16, "image_size": SIDE, "workers": 1, **load}
    made = Pipeline(model).load(photos, photos, **options).optimize("sgd", lr=0.01)
    return made.replace(model_options={"classes": 3})


def stored_as(pipeline: Pipeline, *, on_request: bool = False) -> list[str]:
    plan = resolve(pipeline)
    changes = allowed(plan, ("storage",)) if on_request else candidates(plan)
    return [one.name for one in changes if one.storage is not None]


def only_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tune_module.candidates
    monkeypatch.setattr(tune_module, "candidates", lambda plan: [one for one in known(plan) if one.storage is not None])


@pytest.mark.parametrize(
    ("load", "kept"),
    [
        ({}, True),
        ({"interpolation": "bicubic", "image_size": 16}, True),
        ({"interpolation": "nearest", "image_size": 16}, True),
        ({"image_size": 24}, False),  # some crops are decoded at half their size
        ({"interpolation": "area"}, False),  # with a faster inverse DCT
    ],
)
def test_raw_pixels_are_those_of_the_jpegs_where_that_is_claimed(
    photos: Path, tmp_path: Path, load: dict[str, Any], kept: bool
) -> None:
    pipeline = pipeline_of(photos, **load)
    assert (stored_as(pipeline) == [RAW]) is kept
    (raw,) = (one for one, _ in storage.storages(resolve(pipeline)) if one.name == "raw pixels")
    raw.folder = tmp_path
    convert(raw, raw.path, write_mode="raw", classes=["ant", "bee", "cat"], progress=False)
    before, after = (_images(one) for one in (pipeline, raw.change(pipeline)))
    assert [torch.equal(*pair) for pair in zip(before[1], after[1], strict=True)] == [True, True]
    assert torch.equal(before[0], after[0]) is kept
    given, made = open_beton(photos), open_beton(raw.path)
    assert (made.classes, made.fields) == (given.classes, given.fields)
    assert set(made.modes.tolist()) == {1}


def _images(spec: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All images of two epochs, and their labels."""
    plan = resolve(spec)
    with make_loader(plan, plan.data.train, train=True, device=torch.device("cpu")) as loader:
        epochs = [list(loader), list(loader)]
    images = torch.cat([images for epoch in epochs for images, _ in epoch])
    return images, [torch.cat([labels for _, labels in epoch]) for epoch in epochs]


def test_what_changes_pixels_is_tried_on_request_only(photos: Path, toy: Toy) -> None:
    pipeline = pipeline_of(photos, image_size=24)
    assert stored_as(pipeline) == []
    assert stored_as(pipeline, on_request=True) == [
        RAW, "storage=JPEG, longest side 54", "storage=JPEG, longest side 43",
        "storage=raw pixels, shortest side 27", "storage=JPEG, shortest side 27",
    ]  # fmt: skip
    assert RAW not in stored_as(pipeline_of(photos), on_request=True)
    assert stored_as(pipeline_of(photos).transform(ProgressiveResizing())) == []
    assert stored_as(pipeline_of(photos, crop="fit", image_size=52)) == []  # a letterbox has fewer pixels
    for other in (toy.pipeline(), pipeline_of(photos, loader="torch"), pipeline_of(photos, val_split=0.25)):
        assert stored_as(other) == []


def test_nothing_is_converted_for_a_model_that_is_slower_than_the_loader(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real trials, with speeds that are given: a busy machine has others."""
    only_storage(monkeypatch)
    limits = {"training": 98.0, "loader": 1000.0, "model": 100.0}
    monkeypatch.setattr(tune_module.Arena, "limits", lambda *_: limits)
    tuned = pipeline_of(photos).tune(seconds=SECONDS, out=tmp_path / "tuned.json", progress=False)
    (row,) = tuned.trials
    assert (row.name, row.outcome) == (RAW, "not tried")
    assert row.reason.startswith("the loader is faster than the model, and training reaches 98%")
    assert row.reason.endswith("of the model alone: nothing is converted for less than 5%")
    assert [one.name for one in tmp_path.iterdir() if one.name != "cache"] == ["tuned.json"]


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader counts as the bottleneck, and only storage formats are tried."""
    only_storage(monkeypatch)
    monkeypatch.setattr(tune_module.Tuner, "_bottleneck", lambda _: "data")
    monkeypatch.setattr(tune_module.Tuner, "_pointless", lambda *_: "")


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("FREE", 0.0, "it takes about .*, and .* has 0 bytes"),
        ("SHARE", 0.0, r"to convert it takes about \d+ s, more than a third of the time left \(--seconds\)"),
        ("WORTH", 1e9, r"of 48 images, the loader alone is [\d.]+ times as fast: nothing else is converted"),
    ],
)
def test_what_does_not_fit_or_pay_is_not_converted(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float, reason: str
) -> None:
    monkeypatch.setattr(storage, name, value)
    (row,) = pipeline_of(photos).tune(seconds=SECONDS, out=tmp_path / "tuned.json", progress=False).trials
    assert row.outcome == "not tried"
    assert re.fullmatch(reason, row.reason)
    assert not [*tmp_path.glob("*.beton*"), *tmp_path.glob(".drivetrain*")]


@pytest.mark.usefixtures("hopeful")
def test_raw_pixels_that_exceed_the_memory_are_not_converted(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw,) = (one for one, _ in storage.storages(resolve(pipeline_of(photos))) if one.name == "raw pixels")
    assert raw.convert() == "converted data need a folder to stay in: pass out= (--out)"
    raw.folder, raw.end = tmp_path, float("inf")
    monkeypatch.setattr(storage, "machine", SimpleNamespace(free_memory=lambda: 1, rank_cores=machine.rank_cores))
    assert "do not fit into the free memory, 1 bytes" in raw.convert()
    monkeypatch.undo()
    raw.path.write_text("of the user")
    assert raw.convert() == f"{raw.path} exists already: delete it, or pass it to load()"
    assert raw.path.read_text() == "of the user"


@pytest.mark.parametrize(
    ("name", "value", "answers"), [("FREE", 0.0, False), ("SHARE", 0.0, False), ("WORTH", 1e9, True)]
)
def test_what_did_not_fit_is_tried_in_a_call_with_more_room_or_time(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float, answers: bool
) -> None:
    """Its reason asks for another folder, or more seconds: the kept one is no answer to that."""
    pipeline = pipeline_of(photos)
    (raw,) = (one for one, _ in storage.storages(resolve(pipeline)) if one.name == "raw pixels")
    raw.folder, raw.end = tmp_path, perf_counter() + 1000
    change = Candidate(RAW, "data", raw.change, storage=raw)

    def is_answered(reason: str) -> bool:
        tried = Tried(RAW, "data", "not tried", reason=reason)
        kept = Kept(FORMAT, {}, "", None, "Every change was tried.", [tried], {})
        return tune_module.answered(pipeline, kept, [change], {}, None) is not None

    monkeypatch.setattr(storage, name, value)
    assert is_answered(raw.convert()) is answers
    raw.path.write_text("of the user")
    assert not is_answered(raw.convert())


@pytest.mark.usefixtures("hopeful")
def test_data_that_have_changed_are_converted_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WORTH", 0.0)
    source = tmp_path / "photos.beton"

    def given(original: Path) -> storage.Storage:
        for suffix in ("", ".json"):
            Path(f"{source}{suffix}").write_bytes(Path(f"{original}{suffix}").read_bytes())
        (raw,) = (one for one, _ in storage.storages(resolve(pipeline_of(source))) if one.name == "raw pixels")
        raw.folder, raw.end = tmp_path / "out", float("inf")
        raw.folder.mkdir(exist_ok=True)
        return raw

    raw = given(photos)
    assert raw.convert() == ""
    assert raw.exists
    before = raw.path.stat()
    assert raw.convert() == ""  # again=True: it is measured again, but not converted
    assert raw.path.stat() == before
    convert(jpeg_folder(tmp_path / "other", per_class=8), tmp_path / "other.beton", progress=False)
    raw = given(tmp_path / "other.beton")
    assert not raw.exists
    assert raw.convert() == ""
    assert raw.exists
    assert len(open_beton(raw.path)) == 24
    raw.path.write_text("of the user")
    assert not raw.exists
    assert "exists already" in raw.convert()
    raw.discard()
    assert not [*raw.folder.iterdir()]  # type: ignore[union-attr]


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("faster", [True, False])
def test_what_is_accepted_is_in_the_recipe_and_what_is_not_is_removed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """The loaders' speeds are real, the verdict is given, after one real round."""

    def compared(self: Any, *contenders: Any) -> bool:
        own, other = self._arena.round(1, contenders[:2])
        outcome = "accepted" if faster else "dropped"
        self._note(outcome=outcome, ratio=own / other, rounds=1)
        return faster

    monkeypatch.setattr(storage, "WORTH", 0.0)
    monkeypatch.setattr(storage, "SHARE", 1e9)
    monkeypatch.setattr(tune_module.Tuner, "_compare", compared)
    out = tmp_path / "run" / "tuned.json"
    pipeline = pipeline_of(photos, "cifar_resnet").replace(model_options={"num_classes": 3, "width": 4})
    tuned = pipeline.tune(seconds=SECONDS, out=out, progress=False)
    assert [one.name for one in tuned.accepted] == ([RAW] if faster else [])
    made = tmp_path / "run" / "photos-raw-pixels.beton"
    assert made.exists() is faster
    assert Path(f"{made}.json").exists() is faster
    tuned.save(tmp_path / "tuned.yaml")
    data = resolve(Pipeline.from_recipe(tmp_path / "tuned.yaml")).data
    assert (data.train, data.val) == (str(made if faster else photos), str(photos))
    before, after = (one.fit(epochs=1, progress=False).history.epochs[0].loss for one in (pipeline, tuned.pipeline))
    assert after == pytest.approx(before, rel=1e-5)
    out.unlink()
    again = pipeline.tune(seconds=SECONDS, out=out, progress=False)  # from what is kept
    assert again.trials == tuned.trials
    assert isinstance(again, Tuned)
    assert again.pipeline.data == tuned.pipeline.data
    if faster:  # the converted data are gone: they are not trained on
        out.unlink()
        made.unlink()
        monkeypatch.setattr(storage, "WORTH", 1e9)
        assert not pipeline.tune(seconds=SECONDS, out=out, progress=False).accepted


def test_what_a_tuning_has_accepted_no_other_one_removes_or_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same data, and of others whose file has the same name."""
    monkeypatch.setattr(storage, "WORTH", 0.0)

    def raw(name: str) -> storage.Storage:
        plan = resolve(pipeline_of(tmp_path / name / "train.beton"))
        (one,) = (each for each, _ in storage.storages(plan) if each.name == "raw pixels")
        one.folder, one.end = tmp_path / "tuned", float("inf")
        one.folder.mkdir(exist_ok=True)
        return one

    for name, count in (("a", 16), ("b", 8)):
        convert(jpeg_folder(tmp_path / name / "of", per_class=count), tmp_path / name / "train.beton", progress=False)
    first = raw("a")
    assert first.convert() == ""
    raw("a").discard()  # not accepted
    assert not first.path.exists()
    assert first.convert() == ""
    first.accept()
    assert first.exists
    again = raw("a")
    assert again.convert() == ""
    again.discard()
    assert first.exists
    assert "accepted by a tuning of other data" in raw("b").convert()
    assert len(open_beton(first.path)) == 48


@pytest.mark.usefixtures("hopeful")
def test_a_folder_that_was_missing_is_used_once_it_is_given(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tune_module.candidates
    same = Candidate("same", "step", lambda spec: spec)
    monkeypatch.setattr(tune_module, "candidates", lambda plan: [same, *found(plan)])

    def dropped(self: Any, *contenders: Any) -> bool:
        own, other = self._arena.round(1, contenders[:2])
        self._note(outcome="dropped", ratio=own / other, rounds=1)
        return False

    monkeypatch.setattr(tune_module.Tuner, "_compare", dropped)
    monkeypatch.setattr(storage, "WORTH", 1e9)
    pipeline = pipeline_of(photos)
    first = {one.name: one for one in pipeline.tune(seconds=SECONDS, progress=False).trials}
    assert first[RAW].reason == storage.NO_FOLDER
    again = pipeline.tune(seconds=SECONDS, out=tmp_path / "tuned.json", progress=False).trials
    assert {one.name: one for one in again}[RAW].reason.startswith("of 48 images, the loader alone is")
    assert first["same"] in again  # not measured again
