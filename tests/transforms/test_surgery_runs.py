"""Every surgery in use: compiled, trained, with hooks, in half precision, from meta weights, and all combined."""

import copy
import pickle
import warnings

import pytest
import surgery_models as models
import torch
import torch.nn.functional as F
from drivetrain.transforms import BlurPool, StochasticDepth, Transform, WeightStandardization
from surgery_cases import EXCITE, FACTORIZE, GHOST, Factory, cases, cases_at_length, made, same_numbers
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.long
@cases_at_length
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # dynamo, where it resumes after a break
def test_compiles_whole(transform: Transform, factory: Factory, count: int) -> None:
    torch._dynamo.reset()
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    safe = type(transform).compile_safe
    for train in (True, False):
        compiled = torch.compile(model.train(train), backend="eager", fullgraph=safe)
        torch.manual_seed(3)
        state = copy.deepcopy(model.state_dict())
        found = compiled(models.images())
        model.load_state_dict(state)
        torch.manual_seed(3)
        if safe:
            torch.testing.assert_close(found, model(models.images()))
        else:
            assert found.isfinite().all()


@pytest.mark.long
@cases
def test_trains(transform: Transform, factory: Factory, count: int) -> None:
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    x, labels = models.images(10), torch.arange(10) % 5
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses


@cases
def test_hooks_dtype_and_frozen_weights_stay(transform: Transform, factory: Factory, count: int) -> None:
    model = made(factory).requires_grad_(False).bfloat16()
    plain = copy.deepcopy(model)
    report = transform.apply(plain)
    seen: list[nn.Module] = []
    changed = [model.get_submodule(name) for name in report.changed]
    for module in changed:
        module.register_forward_hook(lambda module, *_: seen.append(module))
    transform.apply(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".se." in name or ".value." in name for name in learning)
    out = model(models.images().bfloat16())
    assert out.dtype == torch.bfloat16
    assert {id(module) for module in seen} == {id(module) for module in changed}
    assert len(changed) == count


@cases
def test_meta_weights_then_to_empty(transform: Transform, factory: Factory, count: int) -> None:
    """The way large models are built under FSDP: nothing but the weights may need to be filled in."""
    reference = made(factory)
    transform.apply(reference)
    with torch.device("meta"):
        model = factory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(transform.apply(model).changed) == count
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    same_numbers(model, reference)


# ---- together ----

ORDER = [FACTORIZE, BlurPool(), WeightStandardization(), EXCITE, GHOST, StochasticDepth()]


def test_the_declared_order_loses_nothing() -> None:
    """Each surgery finds, after those it declares to follow, all that it would find alone; Composer's do not."""
    model = made(models.resnet)
    alone = {type(t).__name__: len(t.apply(made(models.resnet)).changed) for t in ORDER}
    together = {type(t).__name__: len(t.apply(model).changed) for t in ORDER}
    assert together == alone | {"WeightStandardization": alone["WeightStandardization"] + 8}, "both factors"
    for index, transform in enumerate(ORDER):
        names = {type(t).__name__ for t in ORDER[:index]}
        assert set(type(transform).after) <= names


def test_the_other_order_is_said() -> None:
    model = made(models.resnet)
    WeightStandardization().apply(model)
    report = BlurPool().apply(model)
    assert report.changed == ("3",), "the max-pool"
    assert all("StandardizedConv2d is a subclass" in why for _, why in report.skipped)


def test_all_together() -> None:
    torch._dynamo.reset()
    weights = made(models.resnet).state_dict()
    before, after = made(models.resnet), models.resnet()
    for model in (before, after):
        torch.manual_seed(1)
        for transform in ORDER:
            transform.apply(model)
    state = weights
    for transform in ORDER:
        state = transform.from_plain(state, after)
    after.load_state_dict(state)
    same_numbers(before, after)
    torch.compile(after.train(), backend="eager", fullgraph=True)(models.images()).sum().backward()
    pickle.loads(pickle.dumps(after))
    for transform in reversed(ORDER):
        state = transform.to_plain(state, after)
    assert {name for name in state if ".se." not in name} == set(weights)
    assert all(state[name].shape == weights[name].shape for name in weights)
