"""The model card: the facts of the run's folder, and nothing else."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from drivetrain import CheckpointError, Classification
from drivetrain.pipeline import Ledger, export, load_run
from drivetrain.pipeline.apps.exports.card import CARD
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, Trial, in_turn
from drivetrain.transforms import EMA, LabelSmoothing
from pipeline_data import CLASSES, SIDE, TRAIN, Toy, batch_norm_model
from torchmetrics import MeanMetric

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "run"
    pipeline = toy.named(0.05, mean=(0.5, 0.4, 0.3)).transform(LabelSmoothing(0.1), EMA(half_life=2))
    pipeline.fit(epochs=3, out=folder, progress=False)
    return folder


def test_it_has_the_facts_of_the_run(run: Path, toy: Toy, tmp_path: Path) -> None:
    card = export(run, tmp_path / "own.safetensors", best=True).card
    assert card == tmp_path / CARD
    text = card.read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head == {"pipeline_tag": "image-classification", "tags": ["drivetrain", "pytorch"]}
    history = json.loads((run / "history.json").read_text())
    best = max(history["epochs"], key=lambda epoch: (epoch["metrics"]["top1"], -epoch["epoch"]))
    assert f"after {best['epoch']} of 3 epochs" in text
    for fact in (
        "# own.safetensors",
        f"float32 `(N, 3, {SIDE}, {SIDE})`, RGB",
        "minus the mean (0.5, 0.4, 0.3)",
        f"{CLASSES} classes: a, b, c, d.",
        f"| training data | {toy.train} |",
        f"| training samples | {TRAIN} |",
        "LabelSmoothing(smoothing=0.1), EMA(",
        "| strategy | single, 1 process(es) |",
        f"{best['metrics']['top1']:.2%}",
        f"{best['val_loss']:.4f}",
        f"torch {history['provenance']['versions']['torch']}",
        history["provenance"]["hardware"]["processor"],
    ):
        assert fact in text, (fact, text)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    whole = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe == {key: value for key, value in whole.items() if key != "trained"}
    assert "Speed of training" not in text  # it has no ledger
    for left in ("{", "@"):  # of a template
        assert left not in text.split("## Recipe")[0], left


def test_it_has_the_ledgers_figures(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    speeds = {PLAIN: 100.0, in_turn("FFCV loader"): 200.0, LOADER: 900.0, MODEL: 300.0}
    trials = {name: Trial(1000, 1000 / speed, 0.1) for name, speed in speeds.items()}
    ledger = Ledger([trials, trials], {"recipe": None}, left_out={in_turn("BlurPool"): "there was no time for it"})
    ledger.save(copied / "ledger.json")
    text = export(copied, tmp_path / "own.safetensors").card.read_text()
    assert ledger.bound in text
    for row in ledger.rows:
        assert (f"| {row.name} |" in text) == (row.images_per_s is not None), row.name
    assert len(ledger.rows) == 3
    (copied / "ledger.json").write_text("{}")
    assert "Speed of training" not in export(copied, tmp_path / "own.safetensors").card.read_text()


def test_what_was_trained_on_is_no_validation(toy: Toy, tmp_path: Path) -> None:
    toy.pipeline().load(toy.train, toy.train, batch_size=32, image_size=SIDE, workers=1, eval_ratio=1.0).fit(
        epochs=1, out=tmp_path / "run", progress=False
    )
    text = export(tmp_path / "run", tmp_path / "own.safetensors", names="trained").card.read_text()
    assert "## Results on the training data" in text
    assert "how it does on new images is not known" in text
    assert "Of each picture, the largest central square, resized to" in text
    assert f"images = torch.zeros((1, 3, {SIDE}, {SIDE}))  # yours, as below" in text


class Late(MeanMetric):
    """Undefined in the first evaluation."""

    evaluations = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]  # noqa: ARG002
        super().update(7.0)

    def compute(self) -> torch.Tensor:
        type(self).evaluations += 1  # each evaluation has a copy; before the first, the metric is tried
        return super().compute() if self.evaluations > 2 else torch.tensor(math.nan)


def test_a_metric_that_an_epoch_does_not_have_is_an_empty_cell(toy: Toy, tmp_path: Path) -> None:
    task = Classification(metrics={"late": Late(), "top1": "top1"}, monitor="top1")
    pipeline = toy.pipeline().task(task).optimize("sgd", lr=1e-9, schedule="constant")  # the first is best
    history = pipeline.fit(epochs=2, out=tmp_path / "run", progress=False).history
    first, last = history.epochs
    text = export(tmp_path / "run", tmp_path / "own.safetensors", names="trained").card.read_text()
    assert f"| {last.val_loss:.4f} | 7 | {last.accuracy:.2%} |" in text
    assert f"| {first.val_loss:.4f} |  | {first.accuracy:.2%} |" in text


def test_of_a_checkpoint_alone_it_has_what_that_knows(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step-*12")
    alone = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    text = export(alone, tmp_path / "own.safetensors").card.read_text()
    assert f"| training samples | {TRAIN} |" in text
    assert "training data |" not in text
    assert "## Recipe" not in text


def test_a_file_of_the_users_is_never_replaced(toy: Toy, run: Path, tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("# Mine\n")
    with pytest.raises(CheckpointError, match=f"{CARD} was not written by Drivetrain"):
        export(run, tmp_path / "own.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == [CARD]
    assert (tmp_path / CARD).read_text() == "# Mine\n"
    other = tmp_path / "other"
    other.mkdir()
    export(run, other / "a.safetensors")
    toy.pipeline(batch_norm_model).fit(epochs=1, out=tmp_path / "run", progress=False)
    export(tmp_path / "run", other / "b.safetensors", names="trained")
    assert "# b.safetensors" in (other / CARD).read_text()
    assert "# of the model after surgery" in (other / CARD).read_text()


def test_the_weights_of_a_run_are_never_replaced(run: Path, tmp_path: Path) -> None:
    """By those of its best epoch, for example: the result of the run could not be opened any more."""
    copied = shutil.copytree(run, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has the weights of a run.*Pass another name"):
        export(copied, copied / "model.safetensors", best=True)
    assert not (copied / CARD).exists()
    assert load_run(copied).metrics
    export(copied, copied / "best.safetensors", best=True)
