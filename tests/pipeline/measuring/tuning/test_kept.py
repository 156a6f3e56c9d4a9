"""Results kept per machine: the same tuning is answered from them, another one is not, and damage is ignored."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from drivetrain import Classification, DrivetrainError, LedgerError, Pipeline, PlanError
from drivetrain.pipeline import Tuned, TuneInterrupted
from drivetrain.pipeline.apps.cli.options import _plain_warnings
from drivetrain.pipeline.describe.config import FitOptions
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.measuring.tuning import tune as tune_module
from drivetrain.pipeline.measuring.tuning.candidates import Candidate
from drivetrain.pipeline.measuring.tuning.kept import Results
from drivetrain.pipeline.measuring.tuning.result import Tried
from drivetrain.pipeline.runs.facts import facts_of, stamp
from drivetrain.transforms import ChannelsLast, LabelSmoothing
from pipeline_data import TRAIN, Toy, batch_norm_model, plain_model
from range_server import serving

pytestmark = pytest.mark.usefixtures("own_cache")
OPTIONS: dict[str, Any] = {"allow": [], "target": None, "epochs": None}
ALL = "Every change was tried."


@pytest.fixture
def pipeline(toy: Toy) -> Pipeline:
    return Pipeline(plain_model).load(toy.train, toy.val, batch_size=16, image_size=8, workers=1)


def copy_of(data: str, folder: Path) -> Path:
    copy = folder / "copy.beton"
    for suffix in ("", ".json"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{data}{suffix}").read_bytes())
    return copy


def kept_of(pipeline: Pipeline) -> Results:
    return Results(None, facts_of(resolve(pipeline)) | OPTIONS, again=True)


def known(pipeline: Pipeline, trials: Sequence[Tried], stopped: str = ALL) -> Tuned:
    limits = {"training": 90.0, "loader": 900.0, "model": 100.0}
    return Tuned(pipeline, trials, limits, 80.0, stopped=stopped)


def keep(pipeline: Pipeline, seconds: float | None = None, stopped: str = ALL) -> Path:
    """Keep a result in which channels last is accepted."""
    results = kept_of(pipeline)
    trials = [
        Tried("ChannelsLast", "step", "accepted", 1.2, 1.1, 1.3, 4),
        Tried("compile=True", "step", "dropped", 0.8, 0.7, 0.9, 4),
    ]
    results.keep(known(pipeline, trials, stopped), seconds)
    return results.path


def test_the_same_tuning_is_answered_at_once_with_its_date(pipeline: Pipeline, tmp_path: Path) -> None:
    path = keep(pipeline)
    start = perf_counter()
    tuned = pipeline.tune(seconds=60, out=tmp_path / "tuned.json", progress=False)
    assert perf_counter() - start < 5
    assert [one.name for one in tuned.accepted] == ["ChannelsLast"]
    assert any(isinstance(one, ChannelsLast) for one in tuned.pipeline.transforms)
    assert (tuned.before, tuned.limits["model"]) == (80.0, 100.0)
    assert f"{ALL} Measured on this machine on 20" in tuned.stopped
    assert "again=True (--again) measures again." in " ".join(str(tuned).split())
    saved = json.loads((tmp_path / "tuned.json").read_text())
    assert [one["name"] for one in saved["trials"]] == ["ChannelsLast", "compile=True"]
    assert path.exists()


class Stop(Exception):
    """In place of a search."""


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the trials that each search begins with; it ends at once."""
    found: list[list[str]] = []

    def run(self: Any) -> None:
        found.append([one.name for one in self._known])
        raise Stop

    monkeypatch.setattr(tune_module.Tuner, "run", run)
    return found


def searches(pipeline: Pipeline, **options: Any) -> bool:
    try:
        pipeline.tune(**{"seconds": 60, "progress": False} | options)
    except Stop:
        return True
    return False


def test_it_is_measured_again_on_request_or_with_a_larger_budget(pipeline: Pipeline, searched: list[list[str]]) -> None:
    keep(pipeline, seconds=60, stopped="Stopped at the 60 s budget.")
    assert not searches(pipeline)
    assert not searches(pipeline, seconds=30)
    assert searches(pipeline, seconds=61)
    assert searched == [["ChannelsLast", "compile=True"]]
    assert searches(pipeline, again=True)
    assert searched[1] == []
    keep(pipeline, seconds=0, stopped="Interrupted.")
    assert searches(pipeline, seconds=1)


def test_another_pipeline_machine_or_file_is_not_answered(
    pipeline: Pipeline, toy: Toy, searched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep(pipeline)
    assert searches(pipeline.transform(LabelSmoothing(0.1)))
    assert searches(pipeline.replace(model=batch_norm_model))
    assert searches(pipeline, allow=("batch_size",))
    with monkeypatch.context() as other:
        other.setattr("drivetrain.common.machine.cores", lambda: 77)
        assert searches(pipeline)
    copy = copy_of(toy.train, tmp_path)
    copied = pipeline.load(copy, toy.val, batch_size=16, image_size=8, workers=1)
    keep(copied)
    assert not searches(copied)
    copy.touch()
    assert searches(copied)
    assert not any(searched)
    assert not searches(pipeline)


def test_a_file_continues_only_what_it_holds_for(
    pipeline: Pipeline, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allow` and the epochs of its short trainings, the data, and the code of the model."""
    monkeypatch.setattr(tune_module.Tuner, "run", lambda _: None)
    copy = copy_of(toy.train, tmp_path)

    def factory(width: int) -> Any:
        return lambda: plain_model(width)

    def tuned(epochs: int = 1, allow: Sequence[str] = ("resolution",), width: int = 4) -> None:
        one = pipeline.replace(model=factory(width)).load(copy, toy.val, batch_size=16, image_size=8, workers=1)
        one.tune(seconds=60, allow=allow, epochs=epochs, out=tmp_path / "tuned.json", progress=False)

    tuned()
    tuned()
    for other, name in (
        ({"epochs": 8}, "epochs"), ({"allow": ("precision", "resolution")}, "allow"), ({"width": 5}, "code"),
    ):  # fmt: skip
        with pytest.raises(LedgerError, match=f"is of another {name}: what it measured does not hold here"):
            tuned(**other)  # type: ignore[arg-type]
    copy.touch()
    with pytest.raises(LedgerError, match="is of another data:"):
        tuned()


def test_a_second_tuning_with_the_same_file_is_refused(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would replace the other's trials, and measure while the other one computes."""
    options: dict[str, Any] = {"seconds": 60, "out": tmp_path / "tuned.json", "progress": False}

    def second(_: Any) -> None:
        monkeypatch.setattr(tune_module.Tuner, "run", lambda _: None)
        with pytest.raises(DrivetrainError, match=r"Another tuning uses .*tuned\.json\. Wait until it ends"):
            pipeline.tune(**options)

    monkeypatch.setattr(tune_module.Tuner, "run", second)
    pipeline.tune(**options)
    pipeline.tune(**options)
    assert not [*tmp_path.glob(".*")]


def test_other_code_of_the_model_is_another_pipeline(pipeline: Pipeline) -> None:
    def factory(width: int) -> Any:
        return lambda: plain_model(width)

    paths = {kept_of(pipeline.replace(model=factory(width))).path for width in (4, 4, 5)}
    assert len(paths) == 2


SCALE = 1.0  # of the functions below, which have no closure


def own_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=SCALE)


def own_schedule(progress: float) -> float:
    return SCALE * progress


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return SCALE * torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.optimize(own_optimizer),
        lambda one: one.optimize("sgd", lr=0.1, schedule=own_schedule),
        lambda one: one.task(Classification(loss=own_loss)),
    ],
)
def test_other_code_of_an_optimizer_schedule_or_loss_is_another_pipeline(
    change: Any, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept_of(change(pipeline)).path
    assert kept_of(change(pipeline)).path == before
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert kept_of(change(pipeline)).path != before


def test_other_options_of_fit_and_other_weights_are_another_pipeline(pipeline: Pipeline, tmp_path: Path) -> None:
    start = tmp_path / "start.pth"
    start.write_bytes(b"one")
    paths = [kept_of(pipeline).path]
    for options in ({"eval_every": 2}, {"init_from": start}, {"init_from": start}):
        paths.append(kept_of(pipeline.replace(fit_options=FitOptions(**options))).path)  # type: ignore[arg-type]
        start.write_bytes(b"other")
    assert len({*paths}) == 4


@pytest.mark.parametrize(
    ("option", "before", "after"),
    [("indices", [*range(64)], [*range(100)]), ("balance", [1] * TRAIN, [10] * TRAIN)],
    ids=["indices", "balance"],
)
def test_other_values_in_a_file_that_selects_samples_are_another_pipeline(
    option: str, before: list[int], after: list[int], toy: Toy, tmp_path: Path
) -> None:
    chosen, paths = tmp_path / "chosen.json", list[Path]()
    for values in (before, after):
        chosen.write_text(json.dumps(values))
        pipeline = toy.pipeline(**{option: str(chosen)})
        paths += [kept_of(pipeline).path, kept_of(pipeline).path]
    assert (len({*paths[:2]}), len({*paths})) == (1, 2)


def test_data_in_a_folder_or_at_an_address_have_a_stamp(tmp_path: Path) -> None:
    picture = tmp_path / "train" / "cat" / "1.jpg"
    picture.parent.mkdir(parents=True)
    with serving(tmp_path) as server:
        names = (tmp_path / "train", server.address("train/cat/1.jpg"))
        stamps = []
        for content in (b"a", b"bc"):
            picture.write_bytes(content)
            stamps.append([stamp(name) for name in names])
    assert all(stamps[0])
    assert not any(one == other for one, other in zip(*stamps, strict=True))


def from_file(weights: str) -> torch.nn.Module:  # noqa: ARG001 - its content is no matter here
    return plain_model()


def test_other_weights_in_the_file_of_a_model_are_another_pipeline(pipeline: Pipeline, tmp_path: Path) -> None:
    file, paths = tmp_path / "start.pth", list[Path]()
    made = pipeline.replace(model=from_file, model_options={"weights": str(file)})
    for content in (b"one", b"other"):
        file.write_bytes(content)
        paths += [kept_of(made).path, kept_of(made).path]
    assert (len({*paths[:2]}), len({*paths})) == (1, 2)


def test_what_is_damaged_or_of_something_else_is_ignored_with_a_warning(
    pipeline: Pipeline, searched: list[list[str]]
) -> None:
    path = keep(pipeline)
    content = json.loads(path.read_text())
    for text, reason in (
        ("{", "it is not JSON"),
        (json.dumps(content | {"trials": 3}), "its trials: expected"),
        (json.dumps(content | {"facts": {}}), "it is of another tuning"),
        (json.dumps(content | {"format": 1}), "it is of another tuning"),
    ):
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"{path.name}.*is not used: {reason}"):
            assert searches(pipeline)
    assert not any(searched)


def test_a_folder_that_cannot_be_written_costs_no_result(pipeline: Pipeline, own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.warns(UserWarning, match="The next call will measure again"):
        keep(pipeline)
    assert kept_of(pipeline).read() is None


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_prints_the_warning_in_one_line_unless_it_is_quiet(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    keep(pipeline).write_text("{")
    with _plain_warnings(hidden=quiet):
        assert kept_of(pipeline).read() is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (not quiet)
    assert all(line.startswith("KeptWarning: ") and line.endswith("the file is replaced.") for line in lines)


def test_every_verdict_is_kept_when_it_is_known(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real trials, until the process would be killed in the second change: the next call has the first one's verdict,
    and measures the rest; the one after it is answered."""
    changes = [Candidate(name, "step", lambda spec: spec) for name in ("first", "second")]
    monkeypatch.setattr(tune_module, "candidates", lambda _: [*changes])
    killed = True

    def compared(self: Any, *contenders: Any) -> bool:
        """A single round, in which neither is faster."""
        if killed and self._trials[-1].name == "second":
            raise Stop
        own, other = self._arena.round(1, contenders[:2])
        self._note(outcome="dropped", ratio=own / other, rounds=1)
        return False

    monkeypatch.setattr(tune_module.Tuner, "_compare", compared)
    with pytest.raises(Stop):
        pipeline.tune(seconds=20, progress=False)
    kept = kept_of(pipeline).read()
    assert kept is not None
    assert [(one.name, one.outcome) for one in kept.trials] == [("first", "dropped"), ("second", "not tried")]
    assert not kept.answers(1)
    killed = False
    again = pipeline.tune(seconds=20, progress=False)
    assert again.trials[0] == kept.trials[0]
    assert again.trials[1].rounds > 0
    assert pipeline.tune(seconds=60, progress=False).trials == again.trials


def test_what_an_interrupt_leaves_is_not_counted_and_has_its_reason(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [Candidate(name, "step", lambda spec: spec) for name in ("first", "second", "third")]
    monkeypatch.setattr(tune_module, "candidates", lambda _: [*changes])

    def compared(self: Any, *contenders: Any) -> bool:
        if self._trials[-1].name == "second":
            raise KeyboardInterrupt
        own, other = self._arena.round(1, contenders[:2])
        self._note(outcome="dropped", reason="", ratio=own / other, rounds=1)
        return False

    monkeypatch.setattr(tune_module.Tuner, "_compare", compared)
    with pytest.raises(TuneInterrupted, match=r"after 1 trial\(s\)") as raised:
        pipeline.tune(seconds=20, progress=False)
    assert {one.name: one.reason for one in raised.value.tuned.trials} == {
        "first": "",
        "second": "the tuning ended before there was a verdict",
        "third": "the tuning was interrupted before it",
    }


def test_wrong_options_are_refused_before_anything_is_read(pipeline: Pipeline) -> None:
    keep(pipeline)
    with pytest.raises(PlanError, match="must be positive and finite"):
        pipeline.tune(seconds=0)
