"""Every transform of the catalogue on the GPU, compared with the CPU. New ones are included automatically."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_device
import pytest
import surgery_models
import torch
import torch.nn.functional as F
from drivetrain.transforms import CHANGES_MODEL, TRANSFORMS, BatchContext, Transform
from gpu_device import Device
from pipeline_data import Toy, batch_norm_model, numbers, write_toy
from surgery_cases import CASES
from surgery_models import images
from torch import nn

pytestmark = [*gpu_device.MARKS, pytest.mark.filterwarnings("ignore::drivetrain.transforms.NothingChanged")]
DRAWS_ON_DEVICE = {"GyroDropout", "PatchDropout", "StochasticDepth"}
"""Their random numbers in training are the device's own, which are not the CPU's."""
SHORT = {"InfoBatch": {"anneal": 0.0}, "LayerFreezing": {"freeze_start": 0.2}}
"""Options for a training of two epochs."""
OF_TOKENS = {"SeqLengthWarmup"}
"""For sequences of tokens, which no pipeline of images has."""
TOKENS = torch.arange(16 * 32).reshape(16, 32)
MODELS = [surgery_models.resnet, surgery_models.vit, surgery_models.Mixed, surgery_models.convnext]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # sums are in another order


@pytest.fixture(autouse=True)
def convolutions_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN computes them in TF32 by default, of whose 10 bits such tolerances leave little."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def all_of(*kinds: str) -> Any:
    names = [name for name, cls in TRANSFORMS.items() if cls.kind in kinds]
    return pytest.mark.parametrize("name", names)


def named(name: str) -> tuple[Transform, Callable[[], nn.Module]]:
    """A transform as the tests of surgeries have it, else as it is by default; with a model that it changes."""
    given = [case[:2] for case in CASES.values() if type(case[0]).__name__ == name]
    for transform, factory in given or [(TRANSFORMS[name](), factory) for factory in MODELS]:
        if transform.apply(factory()).changed:
            return transform, factory
    raise AssertionError(f"no model here is changed by {name}: add one to MODELS or support/surgery_cases.py")


def test_every_kind_is_tested_here() -> None:
    """Without a device: what the parametrised tests go through is the whole catalogue."""
    tested = {*CHANGES_MODEL, "batch", "loss", "optimizer", "loop", "image", "evaluation", "schedule"}
    assert {cls.kind for cls in TRANSFORMS.values()} <= tested


@all_of(*CHANGES_MODEL)
def test_a_surgery_computes_the_same(device: Device, name: str) -> None:
    transform, factory = named(name)
    torch.manual_seed(0)
    model = factory()
    assert transform.apply(model).changed
    transform.begin(model, 10)
    moved = copy.deepcopy(model).to(device.name)
    found, expected = [], []
    for one, at, results in ((model, "cpu", expected), (moved, device.name, found)):
        outputs = one.eval()(images().to(at))
        outputs.square().mean().backward()
        results += [outputs.detach(), *(p.grad for p in one.parameters() if p.grad is not None)]
    device.holds(*found)
    assert len(found) > 1
    for one, other in zip(found, expected, strict=True):
        # Standardized weights make some numbers as large as 1e12: those near 0 then differ by more than they are.
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-3 * max(1.0, other.abs().max().item()))


@all_of("batch")
def test_a_batch_method_makes_the_same_batch(device: Device, name: str) -> None:
    torch.manual_seed(0)
    transform, model = TRANSFORMS[name](), batch_norm_model()
    labels = torch.arange(16) % 4
    results = []
    for at in ("cpu", device.name):
        here = copy.deepcopy(model).to(at).eval()
        context = BatchContext(
            torch.Generator().manual_seed(3), progress=0.5, classes=4, model=here, loss=F.cross_entropy,
            step=2,
        )  # fmt: skip
        inputs = TOKENS if name in OF_TOKENS else images(16)[..., :16, :16]
        batch = transform.batch(inputs.to(at), labels.to(at), context)
        assert {tensor.device.type for tensor in batch} == {at}
        results.append(batch)
    for cpu, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved.cpu(), cpu, **CLOSE)


@all_of("loss")
@pytest.mark.parametrize("soft", [False, True])
def test_a_loss_has_the_same_value_and_gradient(device: Device, name: str, soft: bool) -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 4
    targets = F.one_hot(labels, 4).float() * 0.7 + 0.075 if soft else labels
    results = []
    for at in ("cpu", device.name):
        here = logits.to(at).detach().clone().requires_grad_()
        value = TRANSFORMS[name]().loss(F.cross_entropy)(here, targets.to(at))
        value.backward()
        assert here.grad.device.type == at
        results.append((value.detach().cpu(), here.grad.cpu()))
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@all_of("loop")
def test_a_session_averages_the_same_weights(device: Device, name: str) -> None:
    """The same weights, step by step, in both models: what the session makes of them must agree."""
    transform, results = TRANSFORMS[name](), []
    for at in ("cpu", device.name):
        torch.manual_seed(0)
        model = batch_norm_model().to(at)
        session = transform.session(model)
        noise = torch.Generator().manual_seed(1)
        for step in range(1, 13):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=noise).to(at)
            session.after_step(step / 12)
        with session.evaluating():
            seen = {key: value.cpu().clone() for key, value in model.state_dict().items()}
        session.finish()
        assert {parameter.device.type for parameter in model.parameters()} == {at}
        results.append((seen, {key: value.cpu() for key, value in model.state_dict().items()}))
    for cpu, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved, cpu, **CLOSE)


class Five(Toy):
    """Images of 32 pixels and five classes, which the models of the surgeries are for."""

    def __init__(self, folder: Path) -> None:
        self.train = str(write_toy(folder / "train.beton", 64, 1, classes="abcde", side=32))
        self.val = str(write_toy(folder / "val.beton", 32, 2, classes="abcde", side=32))


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Five:
    return Five(tmp_path_factory.mktemp("five"))


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - OF_TOKENS))
def test_a_training_with_it_agrees_with_the_cpu(device: Device, toy: Toy, five: Five, name: str) -> None:
    """Through the whole pipeline, evaluation included: whatever kind it is, and whatever the plan adds."""
    transform, factory, data = TRANSFORMS[name](**SHORT.get(name, {})), batch_norm_model, toy
    load: dict[str, Any] = {}
    if transform.kind in CHANGES_MODEL:
        transform, factory = named(name)
        data, load = five, {"image_size": 32}

    def trained(at: str) -> Any:
        pipeline = data.pipeline(factory, **load).transform(transform)
        pipeline = pipeline.optimize("sgd", lr=0.01, schedule="constant")
        return pipeline.distribute("single", device=at).fit(epochs=2, progress=False)

    found = numbers(trained(device.name))
    assert len(found) == 2
    if name in DRAWS_ON_DEVICE or factory is surgery_models.vit:  # torchvision's has dropout
        assert all(torch.isfinite(torch.tensor(line)).all() for line in found)
        return
    for (*losses, accuracy), (*cpu_losses, cpu_accuracy) in zip(found, numbers(trained("cpu")), strict=True):
        assert losses == pytest.approx(cpu_losses, rel=2e-2)
        assert accuracy == pytest.approx(cpu_accuracy, abs=0.1)
