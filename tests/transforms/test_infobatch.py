"""InfoBatch: a pipeline trains the numbers of a plain loop written from the paper, on any ranks, resumed or not."""

from __future__ import annotations

import copy
import functools
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from drivetrain import Callback, Classification, Pipeline, PlanError, RunView, Task, strategies
from drivetrain import transforms as t
from drivetrain.common.storage import shared
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.order.batches import LastBatch, Shares
from drivetrain.loaders.order.epoch import shuffled, unshuffled
from drivetrain.pipeline import Checkpoints, Regression, Segmentation
from drivetrain.pipeline.tasks.means import mean_of
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.transforms import infobatch
from own_transforms import GaussianNoise
from pipeline_data import CLASSES, SIDE, TRAIN, StopsAt, Toy, numbers, plain_model
from safetensors import safe_open
from torch import nn

RATIO, ANNEAL, EPOCHS, BATCH, SEED, LR = 0.5, 0.25, 6, 16, 0, 0.1
FULL = TRAIN // BATCH  # steps of an epoch with all samples
ALL = Checkpoints(every_steps=1, keep=1000)
METHOD = t.InfoBatch(RATIO, ANNEAL)


def pipeline_of(toy: Toy, method: t.Transform = METHOD, **load: Any) -> Pipeline:
    """Without augmentation, so that a plain loop has the same images."""
    made = toy.pipeline(plain_model, batch_size=BATCH, crop="random", **load).transform(method)
    return made.optimize("sgd", lr=LR, momentum=0.9, schedule="cosine", warmup=0.2)


@dataclass
class Reference:
    model: nn.Module
    losses: list[float]
    steps: list[int]  # of each epoch
    rates: list[float]
    scores: np.ndarray


def rate(progress: float) -> float:
    """The learning rate at a fraction of the epochs: a fifth of them is the warm-up."""
    total, warm = EPOCHS * FULL, 0.2 * EPOCHS * FULL
    step = progress * total
    rises = (step + 1) / (warm + 1) if step < warm else 1.0
    return LR * rises * 0.5 * (1 + math.cos(math.pi * max(step - warm, 0.0) / (total - warm)))


def by_hand(toy: Toy, model: nn.Module) -> Reference:
    """The paper's algorithm, in a loop over single samples; only the draws and the shuffling are ours."""
    whole: Any = {
        "batch_size": TRAIN,
        "image_size": SIDE,
        "crop": "random",
        "flip": False,
        "order": "sequential",
    }
    with FFCVLoader(toy.train, **whole) as loader:
        images, labels = next(iter(loader))
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    found = Reference(model, [], [], [], np.full(TRAIN, np.nan))
    for epoch in range(EPOCHS):
        gamma = dict.fromkeys(range(TRAIN), 1.0)
        if epoch > 0 and (epoch + 0.5) / EPOCHS < 1 - ANNEAL:
            mean = sum(found.scores) / TRAIN
            sequence = np.random.SeedSequence([SEED, epoch], spawn_key=(230304947,))
            draws = np.random.default_rng(sequence).random(TRAIN)
            for sample in range(TRAIN):
                if found.scores[sample] < mean and draws[sample] < RATIO:
                    del gamma[sample]
                elif found.scores[sample] < mean:
                    gamma[sample] = 1 / (1 - RATIO)
        order = shuffled(unshuffled(np.array(sorted(gamma))), seed=SEED, epoch=epoch)
        batches = Shares(order, BATCH, LastBatch(dropped=len(gamma) % BATCH), 0, 1)
        total = 0.0
        for number, batch in enumerate(batches):
            found.rates.append(rate((epoch + number / len(batches)) / EPOCHS))
            optimizer.param_groups[0]["lr"] = found.rates[-1]
            optimizer.zero_grad()
            loss = torch.zeros(())
            for sample in batch.tolist():
                own = F.cross_entropy(model(images[sample : sample + 1]), labels[sample : sample + 1])
                found.scores[sample] = own.item()
                loss = loss + gamma[sample] * own
            loss = loss / len(batch)
            loss.backward()
            optimizer.step()
            total += loss.item() / len(batches)
        found.steps.append(len(batches))
        found.losses.append(total)
    return found


class Ends(Callback):
    """Step and progress at the end of each epoch."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []

    def on_epoch_end(self, view: RunView) -> None:
        self.ends.append((view.step, view.progress))


@pytest.fixture(scope="module")
def reference(toy: Toy) -> Reference:
    with pipeline_of(toy).build() as built:
        model = built.engine.plain_model
    return by_hand(toy, model)


def fit(pipeline: Pipeline, **arguments: Any) -> Any:
    return pipeline.fit(**({"epochs": EPOCHS, "progress": False} | arguments))


def assert_close(result: Any, reference: Reference) -> None:
    losses = [epoch.loss for epoch in result.history.epochs]
    assert losses == pytest.approx(reference.losses, rel=1e-4)
    torch.testing.assert_close(result.model.state_dict(), reference.model.state_dict(), rtol=1e-4, atol=1e-5)


def test_it_trains_what_a_plain_loop_of_the_paper_does(toy: Toy, reference: Reference) -> None:
    """Losses, steps, learning rates and weights; the run ends with the schedule."""
    seen = Ends()
    result = fit(pipeline_of(toy), callbacks=[seen])
    assert_close(result, reference)
    assert reference.steps[0] == reference.steps[-2] == reference.steps[-1] == FULL  # unknown scores; annealing
    assert min(reference.steps) < FULL
    ends = np.cumsum(reference.steps)
    assert [epoch.lr for epoch in result.history.epochs] == pytest.approx([reference.rates[end - 1] for end in ends])
    assert [step for step, _ in seen.ends] == ends.tolist()
    assert [progress for _, progress in seen.ends] == pytest.approx([(e + 1) / EPOCHS for e in range(EPOCHS)])
    assert seen.ends[-1][1] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("how", [
    {"strategy": "single", "accumulate": 2}, {"strategy": "ddp", "devices": 2},
    pytest.param({"strategy": "fsdp", "devices": 2, "accumulate": 2}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_on_ranks_and_with_microbatches(toy: Toy, reference: Reference, how: dict[str, Any]) -> None:
    assert_close(fit(pipeline_of(toy).distribute(**how)), reference)


@pytest.mark.long
def test_resumed_anywhere_it_is_the_same_run(toy: Toy, tmp_path: Path, reference: Reference) -> None:
    """In the first epoch, at its end, in shorter epochs, at the end of one, and in those with all samples."""
    pipeline = pipeline_of(toy)
    whole = fit(pipeline, out=tmp_path, checkpoints=ALL)
    ends = np.cumsum(reference.steps)
    for step in (1, ends[0], ends[0] + 3, ends[3], ends[5] - 1):
        resumed = fit(pipeline, resume=tmp_path / "checkpoints" / f"step-{step:08d}")
        assert numbers(resumed) == numbers(whole), step
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("within", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_on_another_number_of_ranks(
    toy: Toy, tmp_path: Path, reference: Reference, before: int, within: int
) -> None:
    pipelines = [pipeline_of(toy), pipeline_of(toy).distribute("ddp", devices=2)]
    step = reference.steps[0] + reference.steps[1] + within
    fit(pipelines[before - 1], out=tmp_path, callbacks=[StopsAt(step)])
    resumed = fit(pipelines[-before], out=tmp_path, resume=True, continue_stopped=True)
    assert_close(resumed, reference)


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_resume_exactly(toy: Toy, tmp_path: Path, reference: Reference) -> None:
    pipeline = pipeline_of(toy).distribute("ddp", devices=2)
    whole = fit(pipeline, out=tmp_path / "whole")
    fit(pipeline, out=tmp_path, callbacks=[StopsAt(reference.steps[0] + 3)])
    resumed = fit(pipeline, out=tmp_path, resume=True, continue_stopped=True)
    assert numbers(resumed) == numbers(whole)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


class Maps(Callback):
    """The memory of the scores that each rank has, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, view: RunView) -> None:  # noqa: ARG002
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        nodes = sorted(line[4] for line in lines if "infobatch-" in line[-1] or "infobatch-" in line[-2])
        (self.folder / f"rank-{dist.get_rank()}").write_text(" ".join(nodes))


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux's /proc")
def test_ranks_of_a_machine_have_the_scores_together(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file, which is gone when they end; and once in a checkpoint, whatever the number of ranks."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = pipeline_of(toy).distribute("ddp", devices=2)
    fit(ranks, out=tmp_path / "run", callbacks=[Maps(tmp_path), StopsAt(2 * FULL)])
    first, second = ((tmp_path / f"rank-{rank}").read_text().split() for rank in range(2))
    assert len(first) == 2  # scores and kinds
    assert first == second
    assert not list(tmp_path.glob("drivetrain-*/infobatch-*"))
    step = max((tmp_path / "run/checkpoints").glob("step-*"))
    names = [name for file in step.glob("*.safetensors") for name in safe_open(file, "numpy").keys()]  # noqa: SIM118
    assert len([name for name in names if "InfoBatch" in name]) == 2


def test_machines_that_share_a_folder_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names, engine = [], SimpleNamespace(rank=0, world_size=2, reduce=lambda value, _="mean": value)

    def noted(name: str, length: int, dtype: type[Any]) -> np.ndarray:
        names.append(name)
        return np.empty(length, dtype)

    monkeypatch.setattr(infobatch, "joint_array", noted)
    monkeypatch.setattr(infobatch.secrets, "randbits", lambda _: 7)
    monkeypatch.setattr(infobatch, "forget_array", lambda _: None)
    for boot in ("one", "another", "one"):
        monkeypatch.setattr(shared, "boot_id", lambda boot=boot: boot)
        assert infobatch._together(engine, 3, np.uint8, 1).tolist() == [1, 1, 1]
    assert names[0] == names[2] != names[1]


def test_a_loop_of_ones_own(toy: Toy, reference: Reference) -> None:
    """As the documentation shows it."""
    with pipeline_of(toy).build() as built:
        model, loader = copy.deepcopy(built.engine.plain_model).train(), built.train
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        rates, steps = iter(reference.rates), []
        scores = np.full(len(loader.indices), np.nan)
        for epoch in range(EPOCHS):
            factors = np.ones(len(scores))
            if METHOD.prunes((epoch + 0.5) / EPOCHS):
                factors = METHOD.weights(scores, SEED, epoch)
            loader.keep(np.flatnonzero(factors))
            for (images, labels), own in zip(loader, loader.shares(epoch), strict=True):
                optimizer.param_groups[0]["lr"] = next(rates)
                losses = F.cross_entropy(model(images), labels, reduction="none")
                scores[own] = losses.detach()
                (losses * torch.from_numpy(factors[own])).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            steps.append(len(loader))
    assert steps == reference.steps
    expected = reference.model.state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)


def test_the_expected_factor_is_one() -> None:
    scores = np.concatenate([np.linspace(0, 1, 50), np.full(10, 9.0), np.full(5, np.nan)])
    drawn = np.stack([t.InfoBatch(0.3).weights(scores, 1, epoch) for epoch in range(4000)])
    low = scores < np.nanmean(scores)
    assert set(np.unique(drawn[:, low])) == {0, np.float32(1 / 0.7)}
    assert (drawn[:, ~low] == 1).all()
    np.testing.assert_allclose(drawn.mean(0), 1, atol=0.05)
    again = t.InfoBatch(0.3).weights(scores, 1, 7)
    assert (again == drawn[7]).all()
    assert (t.InfoBatch(0.3).weights(scores, 2, 7) != again).any()


def test_a_part_of_the_samples_at_a_time_changes_nothing(
    toy: Toy, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    scores = random.random(1000).astype(np.float32)
    scores[random.random(1000) < 0.2] = np.nan
    whole = METHOD.weights(scores, 3, 2)
    assert set(whole.tolist()) == {0, 1, 2}
    monkeypatch.setattr(infobatch, "_AT_ONCE", 7)
    assert (METHOD.weights(scores, 3, 2) == whole).all()
    assert_close(fit(pipeline_of(toy)), reference)


def test_a_checkpoint_of_0_2_0_has_the_factors_themselves() -> None:
    scores = np.array([0.1, np.nan, 0.1, 4.0], np.float32)
    session = METHOD.session(nn.Identity())
    tensors = {"scores": torch.from_numpy(scores), "factors": torch.tensor([0.0, 1.0, 2.0, 1.0])}
    session.load_state_dict({name: {".each": tensor} for name, tensor in tensors.items()})
    state = session.state_dict()
    assert np.array_equal(state["scores"][".each"].numpy().view(np.float32), scores, equal_nan=True)
    assert infobatch._factors(RATIO, state["kinds"][".each"].numpy()).tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("scores", [np.full(7, np.nan), np.full(7, 0.1, np.float32), np.array([np.nan, 2.0])])
def test_equal_and_unknown_scores_leave_nothing_out(scores: np.ndarray) -> None:
    assert (t.InfoBatch(0.9).weights(scores, 0, 1) == 1).all()


def test_the_last_epochs_use_all() -> None:
    whole = [[t.InfoBatch().prunes((e + 0.5) / n) for e in range(n)].count(False) for n in (4, 8, 20, 200)]
    assert whole == [1, 1, 3, 25]
    assert not t.InfoBatch(anneal=0.0).depends_on_length
    t.InfoBatch(anneal=0.0).check_epochs(1, SIDE)
    with pytest.raises(PlanError, match=r"epochs=3 none at the end would use all.*anneal to at least 0\.16"):
        t.InfoBatch().check_epochs(3, SIDE)


def test_samples_of_a_part_of_the_data(toy: Toy) -> None:
    """Samples that are held out are neither trained on nor scored."""
    pipeline = Pipeline(plain_model).load(toy.train, batch_size=BATCH, image_size=SIDE, val_split=0.25, workers=1)
    with pipeline.transform(t.InfoBatch(0.9, 0.0)).optimize("sgd", lr=0.05).build() as built:
        schedule = built.begin(3)
        lengths = []
        for _ in range(3):
            built.begin_epoch()
            assert np.isin(built.train.kept, built.train.indices).all()
            train_epoch(built.engine, built.train, built.loss, built.hooks, schedule)
            lengths.append(built.hooks.state.epoch_steps)
        state = built.hooks.state_dict()["InfoBatch"]
        scored = np.flatnonzero(~np.isnan(state["scores"][".each"].numpy().view(np.float32)))
        assert np.array_equal(scored, np.sort(built.train.indices))
    assert lengths[0] == 96 // BATCH > max(lengths[1:])


def test_less_than_a_batch_is_not_pruned(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model, batch_size=TRAIN).transform(t.InfoBatch(0.9, 0.0))
    seen = Ends()
    fit(pipeline, epochs=3, callbacks=[seen])
    assert [step for step, _ in seen.ends] == [1, 2, 3]


def test_scores_are_of_sams_first_pass(toy: Toy) -> None:
    """With a learning rate of 0, the losses of the first epoch are those of the first weights."""
    plain = toy.pipeline(plain_model, crop="random").transform(t.InfoBatch(anneal=0.0)).optimize("sgd", lr=0.0)
    found = []
    for pipeline in (plain, plain.transform(t.SAM(rho=0.5))):
        with pipeline.build() as built:
            schedule = built.begin(1)
            built.begin_epoch()
            train_epoch(built.engine, built.train, built.loss, built.hooks, schedule)
            found.append(built.hooks.state_dict()["InfoBatch"]["scores"][".each"].view(torch.float32))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_a_method_that_changes_the_batch_unseen_is_an_error(toy: Toy) -> None:
    class Halves(t.Session):
        def on_step_start(self, loop: t.Loop) -> None:
            loop.batch = tuple(part[: len(part) // 2] for part in loop.batch)

    @dataclass(frozen=True)
    class Half(t.Transform):
        kind = "loop"
        source = "a test"

        def session(self, model: nn.Module) -> t.Session:  # noqa: ARG002
            return Halves()

    with pytest.raises(PlanError, match="expects 32 samples of the loader in a microbatch, but got 16"):
        fit(toy.pipeline(plain_model).transform(t.InfoBatch(anneal=0.0), Half()))


def test_a_loop_that_it_does_not_follow_is_an_error(toy: Toy) -> None:
    with toy.pipeline(plain_model).transform(t.InfoBatch()).build() as built:
        built.begin(8)
        built.begin_epoch()
        with pytest.raises(PlanError, match=r"InfoBatch.* got no losses of a step: it follows train_epoch"):
            built.hooks.after_step()


def test_a_loss_per_batch_in_a_loop_of_ones_own(toy: Toy) -> None:
    engine = strategies.get("single", device="cpu").prepare(plain_model(), lambda p: torch.optim.SGD(p, lr=0.1))
    hooks = TrainingHooks([t.InfoBatch()])
    hooks.begin(engine, 8)
    with pytest.raises(PlanError, match="needs the training loader"):
        hooks._sessions["InfoBatch"].before_epoch(hooks.state)
    with FFCVLoader(toy.train, batch_size=32, image_size=SIDE, workers=1) as loader:
        hooks.begin_epoch(loader, SIDE)
        with pytest.raises(PlanError, match=r"returns one value per batch.*reduction='none'"):
            train_epoch(engine, loader, lambda outputs, targets: F.cross_entropy(outputs, targets), hooks)


@pytest.mark.parametrize("method", [t.InfoBatch(), t.ProgressiveResizing()], ids=str)
def test_another_loader_in_a_loop_of_ones_own_is_refused(method: t.Transform) -> None:
    engine = strategies.get("single", device="cpu").prepare(plain_model(), lambda p: torch.optim.SGD(p, lr=0.1))
    hooks = TrainingHooks([method])
    hooks.begin(engine, 8)
    loader: Any = [(torch.zeros(BATCH, 3, SIDE, SIDE), torch.zeros(BATCH).long())]
    with pytest.raises(PlanError, match=rf"{type(method).__name__}.* sets what the loader loads, but list is none of"):
        hooks.begin_epoch(loader, SIDE)


@pytest.mark.long
@pytest.mark.parametrize("loader", ["torch", pytest.param("ffcv_stock", marks=pytest.mark.slow)])
def test_other_loaders(toy: Toy, loader: str) -> None:
    more = {"workers": 0} if loader == "torch" else {}
    pipeline = toy.pipeline(plain_model, batch_size=BATCH, loader=loader, crop="resized", **more)
    seen = Ends()
    pipeline = pipeline.optimize("sgd", lr=0.01)  # losses have factor 10, which diverges with much more
    result = fit(pipeline.transform(t.InfoBatch(0.9, 0.25)), callbacks=[seen])
    assert result.history.epochs[-1].loss < result.history.epochs[0].loss
    assert FULL + 4 * FULL > seen.ends[3][0] >= FULL + 3


# ---- The loss of each sample ----

WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 8.0])
LOGITS, LABELS = (
    torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(0)),
    torch.arange(8) % CLASSES,
)
MASKS = torch.arange(8 * 9).reshape(8, 3, 3) % CLASSES
PER_PIXEL = torch.randn(8, CLASSES, 3, 3, generator=torch.Generator().manual_seed(1))
SMOOTHED = t.LabelSmoothing(0.1).loss
LOSSES: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {
    "cross entropy": (F.cross_entropy, LOGITS, LABELS),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHTS), LOGITS, LABELS),
    "weighted, ignored": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1), LOGITS, LABELS),
    "smoothed": (SMOOTHED(F.cross_entropy), LOGITS, LABELS),
    "weighted, smoothed": (SMOOTHED(nn.CrossEntropyLoss(weight=WEIGHTS)), LOGITS, LABELS),
    "binary": (t.BinaryCrossEntropy().loss(F.cross_entropy), LOGITS, LABELS),
    "binary, smoothed": (SMOOTHED(t.BinaryCrossEntropy().loss(F.cross_entropy)), LOGITS, LABELS),
    "labels": (F.binary_cross_entropy_with_logits, LOGITS, F.one_hot(LABELS, CLASSES).float()),
    "values": (Regression(loss="huber").move(torch.device("cpu")), LOGITS, LOGITS.flip(0)),
    "masks": (Segmentation(CLASSES).move(torch.device("cpu")), PER_PIXEL, MASKS.where(MASKS > 0, 255)),
    "masks, a module": (nn.CrossEntropyLoss(weight=WEIGHTS), PER_PIXEL, MASKS),
    "distributions": (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), LOGITS.flip(0).softmax(1)),
    "distributions, smoothed": (
        SMOOTHED(functools.partial(F.kl_div, reduction="batchmean")), LOGITS.log_softmax(1), LABELS,
    ),
    "a function": (functools.partial(F.cross_entropy, ignore_index=2), LOGITS, LABELS),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_terms_of_the_samples_are_those_of_the_mean(name: str) -> None:
    loss, outputs, targets = LOSSES[name]
    mean = mean_of(loss)
    each = mean.of_samples(outputs, targets)
    assert each.shape == (8,)
    torch.testing.assert_close(each.sum() / mean.denominator(targets), loss(outputs, targets))


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_weighted_loss(toy: Toy, accumulate: int) -> None:
    """The mean divides by the class weights, and so does that with factors, over all microbatches."""
    task = Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS))
    pipeline = pipeline_of(toy).task(task)
    one = fit(pipeline)
    split = fit(pipeline.distribute("single", accumulate=accumulate))
    torch.testing.assert_close(split.model.state_dict(), one.model.state_dict(), rtol=1e-4, atol=1e-5)


class Odd(Task):
    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets)


def of_the_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class Declared(GaussianNoise):
    keeps_samples = True


def test_what_has_no_meaning_is_refused(toy: Toy) -> None:
    plain = pipeline_of(toy)
    cases: list[tuple[Pipeline, str]] = [
        (plain.transform(t.MixUp()), "InfoBatch scores single samples, but MixUp may mix or select"),
        (plain.transform(t.CutMix()), "but CutMix may mix or select"),
        (plain.transform(t.SelectiveBackprop()), "but SelectiveBackprop may mix or select"),
        (plain.transform(GaussianNoise()), r"GaussianNoise may mix .* declare keeps_samples = True"),
        (pipeline_of(toy, balance="class"), "of which balance= set the shares. Leave one of the two out"),
        (
            plain.load({toy.train: 2, toy.val: 1}, batch_size=BATCH, image_size=SIDE),
            "of which the weights of a mix set the shares",
        ),
        (
            plain.optimize("sgd", lr=0.1, schedule=torch.optim.lr_scheduler.OneCycleLR,
                           schedule_options={"max_lr": 1, "total_steps": 48}),
            r"torch scheduler OneCycleLR counts steps\. Use a schedule by name",
        ),
        (plain.task(Classification(loss=of_the_batch)), r"of_the_batch returns one value per batch.*reduction='none'"),
        (plain.task(Classification(loss="model")), "InfoBatch changes targets, outputs or the loss, but with loss='m"),
    ]  # fmt: skip
    for pipeline, message in cases:
        with pytest.raises(PlanError, match=message):
            pipeline.plan()
    with pytest.raises(PlanError, match=r"epochs=1 none at the end would use all"):
        fit(plain, epochs=1)
    steps = plain.transform(t.LabelSmoothing(), t.CutOut(), t.ColOut(), t.ProgressiveResizing(), t.EMA(), Declared())
    (step,) = (step for step in steps.plan().steps if step.what.startswith("InfoBatch"))
    assert "left out with probability 0.5; the learning rate follows the fraction of epochs" in step.why


def test_with_others_that_follow_the_run(toy: Toy) -> None:
    """Sizes and averages move by fractions of the epochs, too."""
    seen = Ends()
    pipeline = toy.pipeline(plain_model, batch_size=BATCH).transform(
        METHOD, t.ProgressiveResizing(delay=0.2, finetune=0.4), t.SWA(0.5, 0.9), t.LabelSmoothing(0.1), t.CutOut(),
    )  # fmt: skip
    result = fit(pipeline, callbacks=[seen], eval_every_steps=3)
    steps, progress = seen.ends[-1]
    assert steps < EPOCHS * FULL
    assert progress == 1.0
    assert len(result.history.epochs) == EPOCHS
    ends = {step for step, _ in seen.ends}
    within = [step for step in range(3, steps, 3) if step not in ends]
    assert [each.step for each in result.history.evaluations] == within
