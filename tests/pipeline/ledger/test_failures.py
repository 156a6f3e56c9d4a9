"""A variant of the ledger that fails is a row with the reason, wherever it fails; the others are measured."""

import gc
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drivetrain import DrivetrainError, LedgerError, NonFiniteError, Pipeline, StrategyError
from drivetrain.pipeline import Ledger, compare
from drivetrain.pipeline.ledger.picture import caption, picture
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, in_turn, without
from drivetrain.pipeline.measuring import ledger as ledger_module
from drivetrain.pipeline.measuring.runner import describe_error
from drivetrain.transforms import GradientClipping, LabelSmoothing, Report, Transform
from ledgers import BATCH, Acting, in_process
from pipeline_data import Toy
from process_state import running_children
from torch import nn


class Fragile(Acting):
    """A model that raises in its forwards of whole training batches from number `fails_at` on; None: never. It is the
    bottleneck, whatever the noise."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at

    def act(self, _: torch.Tensor) -> None:
        time.sleep(0.012)
        if self.fails_at is not None and self.forwards >= self.fails_at > 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@dataclass(frozen=True)
class Breaks(Transform):
    """A surgery after which the model runs out of memory at its forward `at`."""

    at: int = 1
    kind: ClassVar[Any] = "surgery"
    source: ClassVar[str] = "here"

    def apply(self, model: nn.Module) -> Report:
        assert isinstance(model, Fragile)
        model.fails_at = self.at
        return Report(type(self).__name__, ("",))


@dataclass(frozen=True)
class Mends(Breaks):
    """A surgery that undoes it: only the variants without this one fail."""

    at: int = 0


def measured(pipeline: Pipeline) -> Ledger:
    return pipeline.ledger(seconds=95, within=0.95, progress=False)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what fails here, no interval matters."""
    monkeypatch.setattr(ledger_module, "TIGHT_ROUNDS", 2)


def assert_shown_everywhere(ledger: Ledger, name: str, reason: str, folder: Path) -> None:
    """In rows, table, HTML, JSON, picture and comparison."""
    (row,) = (row for row in ledger.rows if row.name == name)
    assert (row.images_per_s, row.ratio, row.gain) == (None, None, None)
    assert row.note.startswith("failed: ")
    assert reason in row.note
    flat = " ".join(str(ledger).split())
    assert re.search(rf"Failed: [^:]*{re.escape(name)}[,:]", flat)  # perhaps with others of the same reason
    assert reason in flat
    assert reason in ledger._repr_html_()
    drawn = [text.get_text() for text in picture(ledger).axes[0].texts]
    assert any("failed: out of memory" in text for text in drawn)
    below = " ".join(caption(ledger).split())
    assert all(" ".join(caveat.split()) in below for caveat in ledger.caveats)
    ledger.save(folder / "one.json")
    ledger.save(folder / "ledger.png")
    written = json.loads((folder / "one.json").read_text())
    (saved,) = (one for one in written["rows"] if one["name"] == name)
    assert (saved["ratio"], saved["note"]) == (None, row.note)
    assert Ledger.load(folder / "one.json").rows == ledger.rows
    found = compare(folder / "one.json", folder / "one.json")
    assert name not in [one.name for one in found.rows]
    assert f"{name} failed: out of memory" in " ".join(repr(found).split())


@pytest.mark.long
@pytest.mark.usefixtures("few_rounds")
def test_a_variant_that_cannot_warm_up(toy: Toy, tmp_path: Path) -> None:
    """In turn and alone it fails; the full pipeline, in which it is undone, is measured."""
    ledger = measured(in_process(toy, Fragile).transform(Breaks(), Mends(), LabelSmoothing(0.1)))
    assert {in_turn("Breaks")} <= set(ledger.failed) <= {in_turn("Breaks"), without("Mends")}
    assert [row.name for row in ledger.rows] == [str(PLAIN), "+ Breaks", "+ Mends", "+ LabelSmoothing"]
    reason = "out of memory (OutOfMemoryError): CUDA out of memory."
    assert_shown_everywhere(ledger, "+ Breaks", reason, tmp_path)
    mends = ledger.rows[2]
    assert mends.ratio is not None
    assert mends.gain is None  # there is nothing before it to compare with
    table = str(ledger)
    assert "needs + Breaks" in table
    assert ledger.compound == ""
    assert "bottleneck" in ledger.bound  # whose it is, depends on its few times
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: not enough: out of memory")
    assert "out of memory" in describe_error(error)


@pytest.mark.slow
@pytest.mark.long
def test_a_variant_that_fails_in_a_later_round_leaves_all_of_them(toy: Toy, tmp_path: Path) -> None:
    """After warm-up and its first trial, at most four batches each, and after a round or more."""
    ledger = measured(in_process(toy, Fragile).transform(Breaks(13), Mends(), LabelSmoothing(0.1)))
    assert re.search(r"\(after [1-9] rounds?\)$", ledger.failed[in_turn("Breaks")])
    assert len(ledger.rounds) > 4
    assert len({tuple(trials) for trials in ledger.rounds}) == 1
    assert in_turn("Breaks") not in ledger.rounds[0]
    assert_shown_everywhere(ledger, "+ Breaks", "CUDA out of memory", tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_the_full_pipeline_fails_and_nothing_of_the_failed_is_kept_alive(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(Fragile).transform(Breaks(3))  # the FFCV loader comes first
    ledger = measured(pipeline)
    assert set(ledger.failed) >= {in_turn("Breaks"), LOADER, MODEL}
    assert ledger.rows[1].ratio is not None
    failed = "+ Breaks failed, loader alone failed, model alone failed"
    assert ledger.bound == f"The bottleneck is not known: {failed}."
    assert ledger.waiting is None
    assert_shown_everywhere(ledger, "+ Breaks", "CUDA out of memory", tmp_path)
    gc.collect()
    assert not [one for one in Fragile.alive if isinstance(one, Fragile)]


def test_plain_pytorch_fails(toy: Toy) -> None:
    """At once; and in a later round, where the rounds before are kept."""

    def failing(forward: int) -> Pipeline:
        made = Pipeline(Fragile, fails_at=forward)
        return made.load(toy.train, toy.val, batch_size=BATCH, image_size=16, loader="torch", workers=0)

    with pytest.raises(LedgerError, match=r"Plain PyTorch failed.*out of memory") as caught:
        failing(1).ledger(seconds=30, progress=False)
    assert caught.value.ledger is None
    # Two warm-up batches, the one that shows how long it takes, a first trial of at most four, then rounds of four.
    with pytest.raises(LedgerError, match=r"Plain PyTorch failed.*out of memory") as caught:
        failing(18).transform(Mends()).ledger(seconds=60, within=0.01, progress=False)
    found = caught.value.ledger
    assert isinstance(found, Ledger)
    assert len(found.rounds) >= 1
    assert [row.ratio is None for row in found.rows] == [False, False]
    assert found.caveats[0].startswith("Stopped because plain PyTorch failed after ")


@pytest.mark.long
@pytest.mark.usefixtures("few_rounds")
def test_one_training_that_diverges_is_a_row(toy: Toy) -> None:
    """With a rate at which all but the clipped variants diverge."""
    pipeline = (
        in_process(toy)
        .optimize("sgd", lr=1e30, schedule="constant")
        .transform(LabelSmoothing(0.1), GradientClipping("norm", 1e-30))
    )
    with pytest.raises(NonFiniteError):
        pipeline.replace(transforms=()).fit(epochs=1, progress=False)
    ledger = pipeline.ledger(seconds=25, within=0.95, accuracy=True, epochs=1, progress=False)
    assert ledger.accuracy is not None
    rows = ledger.accuracy.rows
    assert rows[PLAIN].accuracy is None
    assert "NonFiniteError" in rows[PLAIN].failed
    assert rows[in_turn("GradientClipping")].accuracy is not None
    assert ledger.accuracy.target is None
    flat = " ".join(str(ledger).split())
    assert f"Training failed: {PLAIN}" in flat
    assert "NonFiniteError" in ledger._repr_html_()
    assert all(" ".join(one.split()) in " ".join(caption(ledger).split()) for one in ledger.caveats)


class DiesOnRanks(Acting):
    """A model whose process is killed in its first forward with two or more ranks."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_a_row(toy: Toy) -> None:
    pipeline = in_process(toy, DiesOnRanks).transform(LabelSmoothing(0.1))
    ledger = pipeline.distribute("ddp", devices=2).ledger(seconds=95, within=0.9, progress=False)
    assert "was killed by SIGKILL" in ledger.failed[in_turn("ddp × 2")]
    assert ledger.rows[1].ratio is not None
    assert "failed" in str(ledger)
    assert not running_children("rank_main")
    assert len(running_children("rank_server")) <= 1  # its ranks have its command


def test_a_reason_is_one_line_with_its_kind() -> None:
    cause = NonFiniteError("At step 3 the loss is nan.\nmore")
    error = StrategyError("launch: rank 0 of 2 raised NonFiniteError.\n\nTraceback of rank 0: …")
    assert describe_error(error) == "StrategyError: launch: rank 0 of 2 raised NonFiniteError."
    error.__cause__ = cause
    assert describe_error(error) == "NonFiniteError: At step 3 the loss is nan."
    assert describe_error(MemoryError()) == "out of memory (MemoryError)"
    assert len(describe_error(RuntimeError("x " * 1000))) <= 300
    assert issubclass(LedgerError, DrivetrainError)
