"""SAM, GradientClipping, NoWeightDecay and TestTimeFlip: their mathematics, and short training runs."""

import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from drivetrain.common.errors import DataError, PlanError
from drivetrain.common.model_state import buffers_kept
from drivetrain.transforms import SAM, GradientClipping, NoWeightDecay, TestTimeFlip
from drivetrain.transforms.no_weight_decay import note_shape
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, AdamW

SAMPLES = torch.randn(16, 2, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 3))


def gradients(model: nn.Module) -> float:
    loss = F.cross_entropy(model(SAMPLES), LABELS)
    loss.backward()
    return loss.item()


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def parameters_with(*grads: list[float] | None, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2 if grad is None else len(grad), dtype=dtype)) for grad in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = None if grad is None else torch.tensor(grad, dtype=dtype)
    return made


def test_sam_by_hand() -> None:
    first, second, still = parameters_with([3.0, 0.0], [0.0, 4.0], None)
    restore = SAM(rho=0.5).perturb([first, second, still])
    torch.testing.assert_close(flat([first, second, still]), torch.tensor([1.3, 1.0, 1.0, 1.4, 1.0, 1.0]))
    assert first.grad.tolist() == [3, 0], "gradients are left alone"
    restore()
    assert flat([first, second, still]).tolist() == [1] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sam_restores_bit_for_bit(dtype: torch.dtype) -> None:
    model = net().to(dtype, memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before, tensors = flat(model.parameters()), list(model.parameters())
    restore = SAM(rho=0.3).perturb(iter(tensors))
    moved = flat(model.parameters()).double() - before.double()
    assert moved.norm().item() == pytest.approx(0.3, rel=0.05 if dtype == torch.bfloat16 else 1e-5)
    restore()
    assert torch.equal(flat(model.parameters()), before)
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))
    with torch.no_grad():
        tensors[0].add_(1)
    after = flat(model.parameters())
    restore()
    assert torch.equal(flat(model.parameters()), after), "restoring twice undid a step"


def test_sam_without_slope_moves_nothing() -> None:
    parameters = parameters_with([0.0, 0.0], None)
    SAM().perturb(parameters)
    assert all(parameter.tolist() == [1, 1] for parameter in parameters)


@pytest.mark.parametrize("call", [SAM().perturb, GradientClipping().clip, GradientClipping("adaptive").clip])
def test_no_gradients_at_all_are_a_mistake(call) -> None:
    for parameters in ([], parameters_with(None)):
        with pytest.raises(PlanError, match=r"no parameter has a gradient\. Call it between"):
            call(parameters)


def test_when_sam_applies() -> None:
    assert [SAM(interval=3).applies(step) for step in range(6)] == [False, False, True] * 2
    assert all(SAM().applies(step) for step in range(3))


def trained(steps: int, change: Callable[[nn.Module, int], object]) -> float:
    """The last loss over the first; `change` comes between backward and step."""
    model, losses = net(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        losses.append(gradients(model))
        change(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses[-1] / losses[0]


@pytest.mark.parametrize("sam", [SAM(), SAM(rho=0.5, interval=4)], ids=repr)
def test_a_training_with_sam(sam: SAM) -> None:
    def perturbed(model: nn.Module, step: int) -> None:
        if not sam.applies(step):
            return
        statistics = flat([model[1].running_mean, model[1].num_batches_tracked])
        restore = sam.perturb(model.parameters())
        model.zero_grad()
        with buffers_kept(model):
            gradients(model)
        restore()
        assert torch.equal(flat([model[1].running_mean, model[1].num_batches_tracked]), statistics)

    assert trained(30, perturbed) < 0.7


def test_clipping_the_norm() -> None:
    parameters = parameters_with([3.0, 0.0], [0.0, 4.0], None)
    assert GradientClipping("norm", 1.0).clip(iter(parameters)) == pytest.approx(5)
    clipped = flat(p.grad for p in parameters[:2])
    torch.testing.assert_close(clipped, torch.tensor([0.6, 0, 0, 0.8]), rtol=0, atol=1e-5)
    assert GradientClipping("norm", 9.0).clip(parameters) == pytest.approx(1, abs=1e-5)


def test_clipping_values() -> None:
    parameters = parameters_with([3.0, -0.1], [-7.0, 0.5], None)
    assert GradientClipping("value", 0.5).clip(parameters) is None
    torch.testing.assert_close(flat(p.grad for p in parameters[:2]), torch.tensor([0.5, -0.1, -0.5, 0.5]))


@pytest.mark.parametrize("others", [0, 1])
def test_clipping_values_of_complex_gradients(others: int) -> None:
    parameters = parameters_with(*[[3.0, -0.1]] * others)
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.tensor([3 - 0.2j, -0.1 + 4j, -7 - 7j])
    assert GradientClipping("value", 0.5).clip([*parameters, weight]) is None
    torch.testing.assert_close(weight.grad, torch.tensor([0.5 - 0.2j, -0.1 + 0.5j, -0.5 - 0.5j]))
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.tensor([0.5, -0.1]))


def test_adaptive_clipping_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]))
    weight.grad = torch.tensor([[0.0, 1.0], [0.0, 0.1], [0.0, 1.0]])
    assert GradientClipping("adaptive", 0.1).clip([weight]) is None
    # Norms 5, 5 and 0, which counts as 0.001; each row may have a tenth of that.
    torch.testing.assert_close(weight.grad, torch.tensor([[0.0, 0.5], [0.0, 0.1], [0.0, 1e-4]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_that_starts_at_zero_still_moves(dtype: torch.dtype) -> None:
    """In Composer, its maximum gradient norm stays 0 forever."""
    for shape in ((), (3,), (4, 3, 2, 2), (4, 3, 2)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        GradientClipping("adaptive", 0.01).clip([parameter])
        assert parameter.grad.dtype == dtype
        assert (parameter.grad > 0).all()
        parameter.grad.zero_()
        GradientClipping("adaptive", 0.01).clip([parameter])
        assert (parameter.grad == 0).all(), "a gradient of 0 stays 0"


@pytest.mark.parametrize("clipping", [
    GradientClipping(), GradientClipping("value", 0.01), GradientClipping("adaptive", 0.1),
], ids=repr)  # fmt: skip
def test_a_training_with_clipping(clipping: GradientClipping) -> None:
    assert trained(40, lambda model, _: clipping.clip(model.parameters())) < 0.8


def sgd(parameters) -> SGD:
    return SGD(parameters, lr=0.1, weight_decay=0.5)


def test_decay_of_the_weights_only() -> None:
    model = net()
    optimizer = NoWeightDecay().optimizer(sgd)(model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    decayed, free = (group["params"] for group in optimizer.param_groups)
    assert [id(p) for p in decayed] == [id(model[0].weight), id(model[5].weight)]
    assert {id(p) for p in decayed + free} == {id(p) for p in model.parameters()}
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] * (0.95 if value.dim() > 1 else 1))


def test_groups_keep_their_options() -> None:
    model = net()
    first = {"params": model[0].parameters(), "lr": 0.3}
    second = {"params": [*model[1].parameters()], "weight_decay": 0.1}
    optimizer = NoWeightDecay().optimizer(sgd)(iter([first, second, {"params": model[5].weight}]))
    found = [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert found == [(0.3, 0.5, 1), (0.3, 0.0, 1), (0.1, 0.0, 2), (0.1, 0.5, 1)]


def test_named_parameters_and_other_optimizers() -> None:
    model = net()
    factory = pickle.loads(pickle.dumps(NoWeightDecay().optimizer(functools.partial(AdamW, lr=1e-3))))
    optimizer = factory(model.named_parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "5.weight"]
    only = NoWeightDecay().optimizer(sgd)([model[0].bias])
    assert [group["weight_decay"] for group in only.param_groups] == [0]


def test_flattened_and_emptied_parameters() -> None:
    """FSDP1's flat parameter has no shape of its own; DeepSpeed's stage 3 stores the shape next to an empty tensor."""
    parameter = nn.Parameter(torch.zeros(0))
    parameter.ds_shape = torch.Size([4, 3])  # type: ignore[attr-defined]
    assert NoWeightDecay().optimizer(sgd)([parameter]).param_groups[0]["weight_decay"] == 0.5
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"FSDP1 has flattened .*note_shape.*use_orig_params=True"):
        NoWeightDecay().optimizer(sgd)([parameter])


@pytest.mark.filterwarnings("ignore:FSDP:UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.usefixtures("one_process_group")
def test_parameters_that_fsdp1_has_flattened(noted: bool) -> None:
    """FSDP1 itself; `test_lightning.py` trains with it on two ranks, whose parts are flat."""
    model = nn.Linear(4, 3)
    for parameter in model.parameters() if noted else ():
        note_shape(parameter)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with nullcontext() if noted else pytest.raises(PlanError, match="FSDP1 has flattened"):
        groups = NoWeightDecay().optimizer(sgd)(wrapped.parameters()).param_groups
        assert [group["weight_decay"] for group in groups] == [0.5, 0]


def test_flip_is_the_mean_of_two() -> None:
    model = net().eval()
    with torch.no_grad():
        logits = TestTimeFlip().predict(model, SAMPLES)
        torch.testing.assert_close(logits, (model(SAMPLES) + model(SAMPLES.flip(3))) / 2, rtol=0, atol=1e-6)
        mirrored = TestTimeFlip().predict(model, SAMPLES.flip(3))
    torch.testing.assert_close(logits, mirrored, rtol=0, atol=1e-6)


def test_flips_of_shifted_images() -> None:
    """Half the mean is the images' own, a quarter each of them moved up and left, and down and right."""

    def model(images: Tensor) -> Tensor:
        return images[:, 0, 1:3, 2:4].flatten(1)  # off the middle, so that a mirror image differs

    up_left = F.pad(SAMPLES[:, :, 1:, 1:], (0, 1, 0, 1), "reflect")
    down_right = F.pad(SAMPLES[:, :, :-1, :-1], (1, 0, 1, 0), "reflect")
    flip = TestTimeFlip()
    expected = flip.predict(model, SAMPLES) / 2
    expected += (flip.predict(model, up_left) + flip.predict(model, down_right)) / 4
    torch.testing.assert_close(TestTimeFlip(shift=1).predict(model, SAMPLES), expected)
    assert not torch.equal(expected, flip.predict(model, SAMPLES))
    with pytest.raises(DataError, match=r"shift=6.*sides larger than shift"):
        TestTimeFlip(shift=SAMPLES.shape[-1]).predict(model, SAMPLES)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_flip_keeps_formats_and_averages_in_float32(form: torch.memory_format) -> None:
    seen = []

    def model(images: Tensor) -> Tensor:
        seen.append(images)
        return images.mean((2, 3))

    images = SAMPLES.bfloat16().contiguous(memory_format=form)
    assert TestTimeFlip().predict(model, images).dtype == torch.float32
    assert TestTimeFlip(shift=2).predict(model, images.double()).dtype == torch.float64
    assert all(image.is_contiguous(memory_format=form) for image in seen)
    with pytest.raises(DataError, match=r"TestTimeFlip\(shift=0\): images of shape \(2, 6, 6\)"):
        TestTimeFlip().predict(model, images[0])
