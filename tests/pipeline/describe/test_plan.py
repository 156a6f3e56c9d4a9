"""The plan's order, the builder as a value, and what is rejected before any work, with value and remedy: files by
`plan()`; epochs, folder and model by `train`."""

import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
import torch
import torchvision
from command_line import call, toy_values
from drivetrain import BetonError, DataError, DrivetrainError, Pipeline, PlanError, RecipeError, StrategyError
from drivetrain.loaders import convert
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.describe.pipeline_spec import sort_transforms
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.strategies import DDP
from drivetrain.transforms import (
    EMA,
    TRANSFORMS,
    BlurPool,
    ChannelsLast,
    GyroDropout,
    Kind,
    LabelSmoothing,
    Report,
    Transform,
)
from drivetrain.transforms import ProgressiveResizing as Resizing
from pipeline_data import BATCH, CLASSES, SIDE, Toy, batch_norm_model, plain_model, toy_arrays, write_toy
from places import ROOT
from torch import nn


def steps(pipeline: Pipeline) -> list[str]:
    return [step.what for step in pipeline.plan().steps]


def test_the_order_is_the_plans(toy: Toy) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    ordered = steps(pipeline.transform(BlurPool(), ChannelsLast(), LabelSmoothing(0.1)))
    assert ordered == steps(pipeline.transform(LabelSmoothing(0.1)).transform(ChannelsLast(), BlurPool()))
    heads = [what.split("(")[0].split(":")[0].split()[0] for what in ordered]
    assert heads == [
        "load", "build", "BlurPool", "ChannelsLast", "check", "wrap", "optimizer", "loss", "LabelSmoothing"
    ]  # fmt: skip


def test_the_order_reaches_the_model(toy: Toy) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)
        )

    with toy.pipeline(factory).transform(ChannelsLast(), BlurPool(min_channels=0)).build() as built:
        assert [report.transform for report in built.reports] == ["BlurPool", "ChannelsLast"]
        assert all(
            p.is_contiguous(memory_format=torch.channels_last)
            for p in built.engine.plain_model.parameters()
            if p.dim() == 4
        )


@dataclass(frozen=True)
class First(Transform):
    kind: ClassVar[Kind] = "surgery"
    source: ClassVar[str] = "this test"

    def apply(self, model: nn.Module) -> Report:  # noqa: ARG002
        return Report("First")


class Second(First):
    after = ("First",)


class Format(First):
    kind = "memory_format"


class Stubborn(First):
    after = ("Obstinate",)


class Obstinate(First):
    after = ("Stubborn",)


def test_declared_facts_decide_the_order(toy: Toy) -> None:
    """Kinds first; within a kind what a transform follows; else the order of the user."""
    sort = sort_transforms
    assert sort((Format(), Second(), First(), BlurPool())) == (First(), Second(), BlurPool(), Format())
    assert sort((Second(), BlurPool())) == (Second(), BlurPool())
    with pytest.raises(PlanError, match=r"Obstinate and Stubborn must each follow the other\. Remove one"):
        toy.pipeline().transform(Stubborn(), Obstinate())


def test_methods_of_the_batch_whose_order_is_the_users() -> None:
    """As the docs list them. ProgressiveResizing is done by the loader, and SeqLengthWarmup is not for pipelines."""
    batch = [
        cls()
        for cls in TRANSFORMS.values()
        if cls.kind == "batch" and cls.size is Transform.size and not cls.takes_tokens
    ]
    kept = {pair for pair in permutations(batch, 2) if sort_transforms(pair) == pair}
    free = {type(one).__name__ for one, other in kept if (other, one) in kept}
    assert free == {"MixUp", "CutMix", "CutOut", "ColOut"}
    assert all(pair in kept for pair in permutations([each for each in batch if type(each).__name__ in free], 2))
    listed = "but for `MixUp`, `CutMix`, `CutOut` and `ColOut`"
    assert listed in " ".join((ROOT / "docs" / "transforms.md").read_text().split())


def test_a_plan_prints_and_shows_every_step(toy: Toy) -> None:
    plan = toy.pipeline().transform(LabelSmoothing(0.1)).plan()
    page = plan._repr_html_()
    for number, step in enumerate(plan.steps, 1):
        assert f">{number}</td>" in page
        assert step.what.split()[0] in str(plan)
    assert [step["what"] for step in plan.to_dict()["steps"]] == [step.what for step in plan.steps]


def test_the_builder_is_a_value(toy: Toy) -> None:
    base = toy.pipeline(batch_norm_model)
    described, seen = repr(base), dict(vars(base))
    left = base.transform(LabelSmoothing(0.1)).distribute("single", precision="bf16")
    right = base.optimize("adamw", lr=0.01)
    assert (repr(base), vars(base)) == (described, seen)
    assert (left.transforms, right.transforms) == ((LabelSmoothing(0.1),), ())
    assert (left.distributed.precision, right.distributed.precision) == ("bf16", "fp32")
    with pytest.raises(AttributeError):
        base.seed = 3  # type: ignore[misc]
    for module in (pickle, cloudpickle):
        again = module.loads(module.dumps(left))
        assert repr(again) == repr(left)
        assert again.fit(epochs=1, progress=False).history.epochs[0].loss == pytest.approx(
            left.fit(epochs=1, progress=False).history.epochs[0].loss, abs=0
        )


Make = Callable[[Toy], Any]
REFUSED_AT_ONCE: dict[str, tuple[Make, type[DrivetrainError], str]] = {
    "model name": (lambda _: Pipeline("resnet5O"), RecipeError, "'resnet5O'.*Did you mean 'resnet50'"),
    "model of another kind": (lambda _: Pipeline(3), PlanError, "not 3"),  # type: ignore[arg-type]
    "options for a module": (lambda _: Pipeline(plain_model(), classes=3), PlanError, r"\['classes'\].*factory"),
    "seed": (lambda _: Pipeline(plain_model, seed=-1), PlanError, "seed=-1"),
    "loader": (lambda toy: toy.pipeline(loader="fcv"), PlanError, "'fcv'.*Did you mean 'ffcv'"),
    "loader setting": (lambda toy: toy.pipeline(pading=3), PlanError, "'pading'.*Did you mean 'padding'"),
    "a setting of the pipeline's": (lambda toy: toy.pipeline(drop_last=True), PlanError, "'drop_last'"),
    "setting of another type": (lambda toy: toy.pipeline(scale=0.5), DrivetrainError, "scale.*0.5"),
    "image size": (lambda toy: toy.pipeline(image_size=0), DataError, "image_size=0 must be a positive integer"),
    "batch size": (lambda toy: toy.pipeline(batch_size=0), DataError, "batch_size=0 must be a positive integer"),
    "threads": (lambda toy: toy.pipeline(workers=0), PlanError, "workers=0 must be a positive integer"),
    "processes": (lambda toy: toy.pipeline(workers=-1, loader="torch"), PlanError, "workers=-1.*an integer, 0 or more"),
    "data that is no file": (
        lambda _: Pipeline(plain_model).load([1, 2], batch_size=1, image_size=8),  # type: ignore[arg-type]
        PlanError, "not a list. Convert a data set first",
    ),
    "transform class": (lambda toy: toy.pipeline().transform(BlurPool), PlanError, r"Did you mean BlurPool\(\)"),
    "transform of another kind": (lambda toy: toy.pipeline().transform("BlurPool"), PlanError, "not 'BlurPool'"),
    "transform twice": (
        lambda toy: toy.pipeline().transform(BlurPool()).transform(BlurPool()), PlanError, "2 times.*Keep only one"
    ),
    "optimizer": (lambda toy: toy.pipeline().optimize("sdg"), PlanError, "'sdg'.*Did you mean 'sgd'"),
    "optimizer option": (
        lambda toy: toy.pipeline().optimize("sgd", momentm=1), PlanError, "'momentm'.*Did you mean 'momentum'"
    ),
    "optimizer value": (lambda toy: toy.pipeline().optimize("sgd", lr=-1), PlanError, "Invalid learning rate: -1"),
    "optimizer value that is none": (
        lambda toy: toy.pipeline().optimize("sgd", lr=float("nan")), PlanError, "lr=nan must be finite"
    ),
    "optimizer value without end": (
        lambda toy: toy.pipeline().optimize("adamw", betas=(0.9, float("inf"))), PlanError, r"betas=.*must be finite"
    ),
    "optimizer value below 0": (
        lambda toy: toy.pipeline().optimize("sgdw", lr=0.1, momentum=-1), PlanError, "[Mm]omentum.*-1"
    ),
    "optimizer option of other libraries": (
        lambda toy: toy.pipeline().optimize("sgd", learning_rate=1), PlanError, "Did you mean 'lr'"
    ),
    "resume": (lambda toy: toy.pipeline().fit(epochs=1, resume=5), PlanError, "resume=5 must be 'auto'"),
    "resume without a folder": (lambda toy: toy.pipeline().fit(epochs=1, resume=True), PlanError, "resume='auto'"),
    "checkpoints": (
        lambda toy: toy.pipeline().fit(epochs=1, checkpoints="yes"), PlanError, r"checkpoints='yes' must.*Checkpoints\("
    ),
    "checkpoints without a folder": (
        lambda toy: toy.pipeline().fit(epochs=1, checkpoints=Checkpoints(every_steps=1)),
        PlanError, r"Checkpoints\(every_steps=1, .*Pass fit\(out=…\), too"
    ),
    "optimizer value as text": (
        lambda toy: toy.pipeline().optimize("sgd", lr="fast"), PlanError, r"\('sgd'\): lr='fast' must be a number\.$"
    ),
    "optimizer value for a truth": (
        lambda toy: toy.pipeline().optimize("sgd", lr=0.1, nesterov="yes"), PlanError, "'yes' must be True or False"
    ),
    "one number for two": (
        lambda toy: toy.pipeline().optimize("adamw", betas=0.9), PlanError, "betas=0.9 must be 2 numbers"
    ),
    "text among numbers": (
        lambda toy: toy.pipeline().optimize("adamw", betas=[0.9, "b"]), PlanError, "'b'.* must be 2 numbers"
    ),
    "an implementation": (
        lambda toy: toy.pipeline().optimize("adamw", foreach="on"), PlanError, "'on' must be True, False or None"
    ),
    "built optimizer": (
        lambda toy: toy.pipeline().optimize(torch.optim.SGD(plain_model().parameters(), lr=1)),
        PlanError, "already built.*lambda params",
    ),
    "optimizer of another kind": (lambda toy: toy.pipeline().optimize(3), PlanError, "not 3"),
    "factory and options": (
        lambda toy: toy.pipeline().optimize(lambda p: torch.optim.SGD(p), lr=1),
        PlanError, "'lr': 1.*Set them in the factory"
    ),
    "schedule": (
        lambda toy: toy.pipeline().optimize("sgd", schedule="cosin"), PlanError, "'cosin'.*Did you mean 'cosine'"
    ),
    "warm-up": (lambda toy: toy.pipeline().optimize("sgd", warmup=5), PlanError, "warmup=5 must be a finite number in"),
    "warm-up as text": (lambda toy: toy.pipeline().optimize("sgd", warmup="1"), PlanError, "warmup='1'"),
    "strategy": (lambda toy: toy.pipeline().distribute("dpd"), StrategyError, "'dpd'.*Did you mean 'dp'"),
    "strategy option": (
        lambda toy: toy.pipeline().distribute("ddp", devise="cpu"), StrategyError, "'devise'.*Did you mean 'device'"
    ),
    "strategy class": (lambda toy: toy.pipeline().distribute(DDP), StrategyError, "DDP is a class"),
    "devices": (lambda toy: toy.pipeline().distribute("ddp", devices=0), PlanError, "devices=0 must"),
    "devices as yes": (lambda toy: toy.pipeline().distribute("ddp", devices=True), PlanError, "devices=True"),
    "accumulate": (lambda toy: toy.pipeline().distribute("single", accumulate=0), StrategyError, "accumulate=0"),
    "precision": (
        lambda toy: toy.pipeline().distribute("single", precision="bf61"), StrategyError, "'bf61'.*Did you mean 'bf16'"
    ),
    "clip_norm": (lambda toy: toy.pipeline().distribute("single", clip_norm=0), StrategyError, "clip_norm=0 must"),
    "clip_norm as text": (
        lambda toy: toy.pipeline().distribute("single", clip_norm="1"), StrategyError, "clip_norm='1' must"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_refused_where_it_is_written(name: str, toy: Toy) -> None:
    make, error, message = REFUSED_AT_ONCE[name]
    with pytest.raises(error, match=f"(?s){message}"):
        make(toy)


def files_of(toy: Toy, train: str | Path | None = None, val: str | Path | None = None) -> Pipeline:
    return Pipeline(plain_model).load(train or toy.train, val or toy.val, batch_size=BATCH, image_size=SIDE, workers=1)


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")


class Pair(nn.Module):
    """Gives features before the logits, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, self.head(images.flatten(1))


def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 16, 1, 1, 8, 8, num_classes=CLASSES)


REFUSED_BEFORE_TRAINING: dict[str, tuple[Callable[[Toy, Path], Pipeline], type[DrivetrainError], str]] = {
    "no data": (lambda *_: Pipeline(plain_model), PlanError, "no data. Add .load"),
    "batch that does not divide": (
        lambda toy, _: toy.pipeline().distribute("single", accumulate=5),
        PlanError, r"batch_size=32 is global.*devices=1 × accumulate=5 = 5. Pass batch_size=30",
    ),
    "devices of single": (
        lambda toy, _: toy.pipeline().distribute("single", devices=2), StrategyError, "1 device, not 2. Use 'ddp'"
    ),
    "batch larger than the data": (
        lambda toy, _: toy.pipeline(batch_size=512), DataError, "512 is larger than the data set of 128 samples"
    ),
    "missing file": (lambda toy, _: files_of(toy, "no.beton"), BetonError, "does not exist in the.*Create it with"),
    "missing file for torch": (lambda *_: of("no.beton", loader="torch"), DataError, "no.beton does not exist"),
    "missing validation file": (lambda toy, _: files_of(toy, val="no.beton"), BetonError, "no.beton does not exist"),
    "unknown data": (lambda toy, _: files_of(toy, "cifar10:tain"), DataError, "Did you mean 'cifar10:train'"),
    "folder": (lambda toy, tmp: files_of(toy, tmp), DataError, "is a folder. Convert it first"),
    "empty file": (lambda toy, tmp: files_of(toy, written(tmp, b"")), BetonError, "has 0 bytes"),
    "foreign file": (lambda toy, tmp: files_of(toy, written(tmp, b"\x89PNG" * 99)), BetonError,
        r"not a .beton file of version 2: it begins with b'.x89PNG'.*drivetrain convert SOURCE OUT.beton",
    ),
    "other classes": (
        lambda toy, tmp: files_of(toy, val=write_toy(tmp / "o.beton", 40, 0, "abcx")),
        PlanError, "Class 3 is 'd' in .*train.beton and 'x' in .*o.beton",
    ),
    "other number of classes": (
        lambda toy, tmp: files_of(toy, val=write_toy(tmp / "o.beton", 40, 0, "abcde")),
        PlanError, "train.beton has 4 classes, .*o.beton has 5",
    ),
    "a class that training lacks": (
        lambda toy, tmp: files_of(toy, write_toy(tmp / "t.beton", 64, 0, None), labeled(tmp, [0, 1, 7])),
        PlanError, "has 4 classes, .* has the label 7",
    ),
    "float labels": (
        lambda toy, tmp: files_of(toy, labeled(tmp, [0.5, 1.0] * 32), labeled(tmp, [0.5])),
        PlanError, "has float labels.*needs class indices. Convert",
    ),
    "output of a factory": (
        lambda toy, _: toy.pipeline(lambda: plain_model(5)),
        PlanError, r"returns \(2, 5\).*has 4 classes. Build it with num_classes=4.*model_options.num_classes=4",
    ),
    "output of a module": (lambda toy, _: toy.pipeline(plain_model(3)), PlanError, r"returns \(2, 3\).*num_classes=4"),
    "no logits": (
        lambda toy, _: toy.pipeline(nn.Sequential(nn.Conv2d(3, 4, 3))),
        PlanError, r"returns \(2, 4, 14, 14\)",
    ),
    "a tuple": (lambda toy, _: toy.pipeline(Pair), PlanError, r"returns \(2, 3, 16, 16\) for 2 images"),
    "images of another size": (lambda toy, _: toy.pipeline(vit), PlanError, "does not accept images of 16 × 16.*32"),
    "further outputs in training": (
        lambda toy, _: toy.pipeline(
            lambda: torchvision.models.googlenet(num_classes=CLASSES, init_weights=False), image_size=64
        ),
        PlanError, "returns a GoogLeNetOutputs in training.*aux_logits=False",
    ),
    "factory without a module": (lambda toy, _: toy.pipeline(lambda: 3), PlanError, "returned a int, not a module"),
    "factory's option": (
        lambda toy, _: toy.pipeline().replace(model_options={"clases": 4}),
        PlanError, r"plain_model\(clases=4\) cannot be built: .*clases",
    ),
    "module that cannot be copied": (
        lambda toy, _: toy.pipeline(NotCopied(2, 2)), PlanError, "cannot be copied.*Pass its factory"
    ),
    "divergence": (
        lambda toy, _: toy.pipeline(batch_norm_model).optimize("sgd", lr=1e30),
        DrivetrainError, r"At step [0-9]+ the loss is .*Lower the learning rate \(sgd \(lr=1e\+30\)",
    ),
}  # fmt: skip


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file.beton"
    path.write_bytes(content)
    return path


def labeled(folder: Path, labels: list[Any]) -> Path:
    path = folder / f"labels{len(labels)}.beton"
    convert((toy_arrays(len(labels), 0)[0], np.array(labels)), path, progress=False)
    return path


@pytest.mark.parametrize("name", REFUSED_BEFORE_TRAINING)
def test_refused_before_training(name: str, toy: Toy, tmp_path: Path) -> None:
    make, error, message = REFUSED_BEFORE_TRAINING[name]
    pipeline, out = make(toy, tmp_path), tmp_path / "run"
    with pytest.raises(error, match=f"(?s){message}") as caught:
        pipeline.fit(epochs=1, out=out, progress=False)
    assert isinstance(caught.value, DrivetrainError)
    left = {path.name for path in out.iterdir()} if out.exists() else set()
    begun = {"plan.txt", "recipe.yaml", "checkpoints"} if name == "divergence" else set()
    assert left <= begun


@pytest.mark.parametrize("epochs", [0, -1, None, True, 2.5, "3"])
def test_epochs_that_mean_nothing(epochs: Any, toy: Toy) -> None:
    with pytest.raises(PlanError, match=r"fit\(epochs=…\)" if epochs is None else f"epochs={epochs!r} must"):
        toy.pipeline().fit(epochs=epochs)


def test_a_folder_that_cannot_be_written_fails_before_training(toy: Toy, tmp_path: Path) -> None:
    built = []

    def factory() -> nn.Module:
        built.append(1)
        return plain_model()

    file = tmp_path / "file"
    file.write_text("mine")
    pipeline = toy.pipeline(factory)
    for out, message in (
        (file, "is a file"), (file / "run", "is a file"), (Path("/proc/self"), "is not writable"),
    ):  # fmt: skip
        with pytest.raises(DrivetrainError, match=message):
            pipeline.fit(epochs=1, out=out, progress=False)
    assert built == []
    assert file.read_text() == "mine"


def test_classes_are_counted_by_names_where_only_one_file_has_them(toy: Toy, tmp_path: Path) -> None:
    """Validation data without names may lack the last class; its names count those of nameless training data."""
    lacking, nameless = labeled(tmp_path, [0, 1, 2, 0]), labeled(tmp_path, [0, 1, 2, 0] * 16)
    for pipeline in (files_of(toy, val=lacking), files_of(toy, nameless)):
        assert pipeline.fit(epochs=1, progress=False).accuracy is not None


class Moody(nn.Module):
    """Draws random numbers in evaluation, too, counts its forward passes in a buffer, and infers its width."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(images + 0.01 * torch.randn(images.shape))
        return result


def test_the_check_of_the_output_leaves_no_trace(toy: Toy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules are "under heavy development"
        torch.manual_seed(3)
        before = torch.get_rng_state()
        pipelines = [toy.pipeline(Moody), toy.pipeline(Moody)]
        with pipelines[0].build() as built:
            norm = built.engine.plain_model.layers[1]  # type: ignore[index]
            assert torch.equal(norm.running_mean, torch.zeros(4))
            assert int(norm.num_batches_tracked) == 0
            assert built.engine.plain_model.training
        assert torch.equal(torch.get_rng_state(), before)
        one, two = (pipeline.fit(epochs=1, progress=False) for pipeline in pipelines)
    assert one.history.epochs[0].loss == two.history.epochs[0].loss


def test_a_bf16_model_is_checked_as_it_trains(toy: Toy) -> None:
    pipeline = toy.pipeline(lambda: plain_model().to(torch.bfloat16))
    assert pipeline.distribute("single", precision="bf16").fit(epochs=1, progress=False).accuracy is not None
    with pytest.raises(PlanError, match="does not accept images of 16 × 16 pixels"):
        pipeline.fit(epochs=1, progress=False)


def test_evaluation_has_a_size_of_its_own(toy: Toy) -> None:
    pipeline = toy.pipeline(eval_image_size=SIDE + 8)
    assert f"{SIDE} px ({SIDE + 8} px in evaluation)" in pipeline.plan().steps[0].why
    with pipeline.build() as built:
        assert built.val is not None
        assert next(iter(built.train))[0].shape[2:] == (SIDE, SIDE)
        assert next(iter(built.val))[0].shape[2:] == (SIDE + 8, SIDE + 8)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
    with pytest.raises(PlanError, match=rf"does not accept images of {SIDE + 8} × {SIDE + 8} pixels"):
        toy.pipeline(flat, eval_image_size=SIDE + 8).build()
    with pytest.raises(PlanError, match=r"eval_image_size=0 must be a positive integer"):
        toy.pipeline(eval_image_size=0)


def of(train: object, val: object = None, loader: str = "ffcv") -> Pipeline:
    files = [None if name is None else str(name) for name in (train, val)]
    return Pipeline(plain_model).load(*files, batch_size=BATCH, image_size=SIDE, loader=loader)


FILES = (
    "missing file", "missing validation file", "missing file for torch", "unknown data", "folder", "empty file",
    "batch larger than the data",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_plan_looks_at_the_files(name: str, toy: Toy, tmp_path: Path) -> None:
    make, error, message = REFUSED_BEFORE_TRAINING[name]
    pipeline = make(toy, tmp_path)
    assert resolve(pipeline, files=False).steps  # the rules have nothing against it
    with pytest.raises(error, match=message):
        pipeline.plan()


def test_a_plan_fetches_and_makes_nothing(
    no_network: None,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path))
    assert of("cifar10:train", "cifar10:test").plan().steps
    assert of(tmp_path, loader="torch").plan().steps  # a folder, which the baseline reads as it is
    assert list(tmp_path.iterdir()) == []


def test_a_plan_checks_the_epochs_that_the_pipeline_has(toy: Toy) -> None:
    resizing = toy.pipeline(plain_model).transform(Resizing())
    assert resizing.plan().steps  # fit(epochs=…) may be anything yet
    short = resizing.replace(epochs=1)
    for refused in (short.plan, short.build, lambda: short.fit(progress=False), short.ledger):
        with pytest.raises(PlanError, match="epochs=1 none would have full size"):
            refused()
    with pytest.raises(PlanError, match="epochs=1 none would have full size"):
        resizing.fit(epochs=1, progress=False)
    with pytest.raises(PlanError, match="epochs=0 must be a positive integer"):
        resizing.replace(epochs=0).plan()
    assert len(short.fit(epochs=3, progress=False).history.epochs) == 3  # another number is another matter


class SevenBillion(nn.Module):
    """The blocks of a language model of 7 billion parameters, in 202 million each, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4096, 16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4096, 24_640, bias=False), nn.Linear(24_640, 4096, bias=False)) for _ in range(32)
        )
        self.last = nn.Linear(4096, CLASSES)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "what", "why"),
    [
        # 6.46e9 · 16 / 8, and gathered in bf16: the layers around the blocks, three blocks, and a buffer in fp32
        (
            "fsdp",
            "adamw",
            "14.9 GB",
            "3.23 GB, 3.23 GB, 6.46 GB of .* up to 2.02 GB gathered .* take 77.5 GB on",
        ),
        ("fsdp", "sgd", "11.7 GB", "3.23 GB, 3.23 GB, 3.23 GB of .* each rank copies 6.46 GB to the host's"),
        ("fsdp_grad_op", "adamw", "27.1 GB", "up to 14.1 GB gathered"),
        ("hsdp", "adamw", "27.9 GB", "6.46 GB, 6.46 GB, 12.9 GB of"),
        ("deepspeed_stage_3", "adamw", "16.2 GB", "9.69 GB of weights, .* rank copies 9.69 GB to .* in 25.8 GB"),
    ],
)
def test_the_memory_of_a_rank(toy: Toy, strategy: str, optimizer: str, what: str, why: str) -> None:
    """Of seven billion parameters, by hand; nothing of this size is built."""
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    pipeline = toy.pipeline(SevenBillion, batch_size=8).optimize(optimizer, lr=1e-4, **options)
    own = {"shard_size": 4} if strategy == "hsdp" else {}
    row = pipeline.distribute(strategy, devices=8, precision="bf16", **own).plan().steps[-1]
    assert row.what == f"memory of a rank: {what} and activations"
    assert re.search(why, row.why), row.why


@pytest.mark.parametrize(
    ("strategy", "options", "parts"),
    [
        ("fsdp", {}, "3.23 GB, 25.8 GB, 6.46 GB"),  # gradients in full, until the last microbatch
        ("deepspeed", {"stage": 3}, "3.23 GB, 3.23 GB, 9.69 GB"),  # sharded with each
    ],
)
def test_the_memory_of_a_rank_with_microbatches(toy: Toy, strategy: str, options: dict[str, Any], parts: str) -> None:
    pipeline = toy.pipeline(SevenBillion, batch_size=16).optimize("adamw", lr=1e-4)
    row = pipeline.distribute(strategy, devices=8, precision="bf16", accumulate=2, **options).plan().steps[-1]
    assert row.why.startswith(f"{parts} of weights, gradients and optimizer state"), row.why


@pytest.mark.parametrize(
    ("optimizer", "transforms", "what", "why"),
    [
        ("adamw", [EMA()], "18.2 GB", r"3.23 GB of weights, .* and averages, and .* take 103 GB"),
        ("schedulefree_adamw", [], "14.9 GB", r"6.46 GB of weights, .* take 103 GB .* each rank copies 12.9 GB"),
    ],
)
def test_the_memory_of_a_rank_with_averages(
    toy: Toy, optimizer: str, transforms: list[Transform], what: str, why: str
) -> None:
    """One more copy of the weights, which Schedule-Free makes for checkpoints only."""
    pipeline = toy.pipeline(SevenBillion, batch_size=8).optimize(optimizer, lr=1e-4, schedule="constant")
    sharded = pipeline.transform(*transforms).distribute("fsdp", devices=8, precision="bf16")
    row = sharded.plan().steps[-1]
    assert row.what == f"memory of a rank: {what} and activations"
    assert re.search(why, row.why), row.why


def decay_of_matrices(parameters: Any) -> torch.optim.Optimizer:
    matrices = [each for each in parameters if each.ndim > 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}])


def fails(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [each for each in parameters if each.missing]}])


@pytest.mark.parametrize(("optimizer", "rows"), [(decay_of_matrices, 1), (fails, 0)])
def test_the_memory_of_a_rank_with_an_optimizer_factory(toy: Toy, optimizer: Any, rows: int) -> None:
    """It gets parameters, as from a strategy; the plan of one that fails here has no row."""
    pipeline = toy.pipeline(plain_model).optimize(optimizer, schedule="constant")
    found = [
        row for row in pipeline.distribute("fsdp", devices=2, device="cpu").plan().steps if "memory of" in row.what
    ]
    assert len(found) == rows


def test_the_memory_of_a_rank_with_gyro_dropout(toy: Toy) -> None:
    pipeline = toy.pipeline(lambda: nn.Sequential(nn.Dropout(0.5), plain_model())).transform(GyroDropout())
    assert "memory of a rank" in pipeline.distribute("fsdp", devices=2, device="cpu").plan().steps[-1].what


def test_no_memory_of_a_model_that_needs_values(toy: Toy) -> None:
    def values() -> nn.Module:
        model = plain_model()
        assert next(model.parameters()).sum().item() != 0
        return model

    for pipeline in (toy.pipeline(values), toy.pipeline(plain_model).distribute("ddp", devices=2)):
        assert not any("memory of a rank" in what for what in steps(pipeline))
    sharded = toy.pipeline(values).distribute("fsdp", devices=2, device="cpu")
    assert not any("memory of a rank" in what for what in steps(sharded))


def test_the_command_prints_no_plan_of_what_is_refused(toy: Toy, tmp_path: Path) -> None:
    """Nor is a folder left of it."""
    (tmp_path / "file").write_text("mine")
    other = write_toy(tmp_path / "other.beton", 40, 0, "abdc")
    train, values = ["train", "cifar10-quickstart"], [*toy_values(toy), "--out", str(tmp_path / "run")]
    resizing = 'transforms=[{"name": "ProgressiveResizing"}]'
    here = values[: values.index("--train")]
    commands = (
        [*train, *values, resizing, "--logger", "csv"],
        [*train, *(v if v != "epochs=2" else "epochs=1" for v in values), resizing],
        [*train, *here, "--train", "no.beton"],
        [*train, *here, "--train", toy.train, "--val", str(other)],
        [*train, *toy_values(toy), "--out", str(tmp_path / "file" / "run")],
        [*train, *toy_values(toy), "--logger", "csv"],
        [*train, *(v.replace(f"classes={CLASSES}", "classes=9") for v in toy_values(toy))],
        ["ledger", "cifar10-quickstart", *here, "--train", "no.beton", "--out", str(tmp_path / "run2")],
    )
    ends = [call(*command) for command in commands]
    assert ends[0].code == 0, ends[0].err
    assert re.match("(Caution.*\n.*\n)?Plan\n", ends[0].out)
    messages = (
        "none would have full size", "no.beton does not exist", "Class 2 is 'c' in", "is a file", "Pass fit(out=…)",
        f"has {CLASSES} classes. Build it", "no.beton does not exist",
    )  # fmt: skip
    for end, message in zip(ends[1:], messages, strict=True):
        assert message in end.line  # one line on stderr, and nothing on stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "file", "other.beton", "other.beton.json", "run",
    ]  # fmt: skip
