"""Every surgery: names, weights, copies, a second application; compiled, trained, wrapped, and all combined."""

import copy
import io
import pickle

import pytest
import surgery_models as models
import torch
import torch.nn.functional as F
from drivetrain import transforms as t
from drivetrain.common.errors import PlanError
from drivetrain.strategies.common.meta import fake_tensors
from drivetrain.transforms import BlurPool, StochasticDepth, WeightStandardization
from surgery_cases import (
    CASES,
    EXCITE,
    FACTORIZE,
    GHOST,
    Factory,
    cases,
    cases_at_length,
    first_cases,
    made,
    same_numbers,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("one_thread")


def changed(transform: t.Transform, factory: Factory, count: int) -> nn.Module:
    """A model after the surgery."""
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    return model


EACH = {type(transform): transform for transform, _, _ in CASES.values()}.values()
ORDER = [FACTORIZE, BlurPool(), WeightStandardization(), EXCITE, GHOST, StochasticDepth()]


def test_every_surgery_is_here() -> None:
    surgeries = {name for name, cls in t.TRANSFORMS.items() if cls.kind == "surgery"}
    assert surgeries == {type(transform).__name__ for transform in EACH}


@cases
@pytest.mark.parametrize("train", [True, False])
def test_what_changes_and_what_stays(transform: t.Transform, factory: Factory, count: int, train: bool) -> None:
    model = made(factory).train(train)
    before = dict(model.named_parameters())
    names, buffers = set(model.state_dict()), [name for name, _ in model.named_buffers()]
    shape = model(models.images()).shape
    report = transform.apply(model)

    assert report.transform == type(transform).__name__
    assert len(report.changed) == count, report
    assert all(module.training is train for module in model.modules())
    assert [name for name, _ in model.named_buffers()] == buffers
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before if name in after), "an optimizer would be stale"
    assert (set(model.state_dict()) == names) is not type(transform).renames
    out = model(models.images())
    assert out.shape == shape
    assert out.isfinite().all()


@cases
def test_twice_is_once(transform: t.Transform, factory: Factory, count: int) -> None:
    model = changed(transform, factory, count)
    state, text = copy.deepcopy(model.state_dict()), str(model)
    report = transform.apply(model)
    assert report.changed == ()
    assert report.notes == (f"{count} module(s) were already changed and are left as they are.",)
    assert str(model) == text
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.long
@cases_at_length
def test_copies(transform: t.Transform, factory: Factory, count: int) -> None:
    model, again = (changed(transform, factory, count) for _ in range(2))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    again.load_state_dict(model.state_dict())
    for other in (*copies, again):
        same_numbers(other, model)
    for other in copies:
        assert transform.apply(other).changed == ()
        other.train()(models.images()).sum().backward()


@cases
def test_weights_before_or_after(transform: t.Transform, factory: Factory, count: int) -> None:
    """Plain weights give the same model whether they are loaded before the surgery or, translated, after it."""
    weights = made(factory).state_dict()
    before, after = factory(), factory()
    before.load_state_dict(weights)
    torch.manual_seed(1)
    assert len(transform.apply(before).changed) == count
    torch.manual_seed(1)
    transform.apply(after)
    translated = transform.from_plain(weights, after)
    after.load_state_dict(translated)
    same_numbers(before, after)
    assert set(transform.from_plain(translated, after)) == set(translated), "not translated twice"
    assert all(translated[name] is weights[name] for name in ("head.bias",) if name in weights)


@cases
def test_round_trip(transform: t.Transform, factory: Factory, count: int) -> None:
    model = changed(transform, factory, count)
    plain = transform.to_plain(model.state_dict(), model)
    other = factory()
    transform.apply(other)
    other.load_state_dict(transform.from_plain(plain, other))
    same_numbers(model, other, rtol=1e-4, atol=1e-5)


BEYOND = ("SqueezeExcite", "GatedLinearUnits", "ALiBi", "BlurPool")
"""What a plain model cannot express."""
EXPORTED = {name: case for name, case in CASES.items() if not name.startswith(BEYOND)}


@pytest.mark.parametrize(("transform", "factory", "count"), EXPORTED.values(), ids=EXPORTED)
def test_a_plain_model_gives_the_same_output(transform: t.Transform, factory: Factory, count: int) -> None:
    model = changed(transform, factory, count)
    plain = factory()
    plain.load_state_dict(transform.to_plain(model.state_dict(), model))
    same_numbers(model, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("transform", "factory"), [(EXCITE, models.resnet), (t.GatedLinearUnits(), models.vit)])
def test_what_a_plain_model_cannot_express_keeps_its_names(transform: t.Transform, factory: Factory) -> None:
    model = made(factory)
    transform.apply(model)
    plain = transform.to_plain(model.state_dict(), model)
    missing, unexpected = factory().load_state_dict(plain, strict=False)
    assert missing == []
    assert unexpected
    assert all(".se." in name or ".value." in name for name in unexpected)


@pytest.mark.parametrize("transform", EACH, ids=repr)
def test_nothing_to_change_warns(transform: t.Transform) -> None:
    with pytest.warns(t.NothingChanged, match="it looks for .*; Sequential is made of 1 ReLU") as caught:
        report = transform.apply(nn.Sequential(nn.ReLU()))
    assert report.changed == ()
    assert caught[0].filename == __file__


def test_subclasses_and_patched_modules_are_left_alone() -> None:
    class Own(nn.Conv2d):
        pass

    conv = nn.Conv2d(16, 16, 3)
    conv.forward = lambda x: x  # type: ignore[method-assign]
    for transform in (EXCITE, FACTORIZE, t.WeightStandardization()):
        with pytest.warns(t.NothingChanged):
            report = transform.apply(nn.Sequential(Own(16, 16, 3), conv))
        assert "subclass of Conv2d" in report.skipped[0][1]
        assert "replaced on the instance" in report.skipped[1][1]


# ---- Under FSDP2 and DDP, in one process ----


@pytest.mark.long
@cases_at_length
@pytest.mark.usefixtures("one_process_group")
# Plain models give both: the stride of a depthwise convolution's gradient, and the permuted output of a norm.
@pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_sharded_around_each_changed_module(transform: t.Transform, factory: Factory, count: int) -> None:
    """FSDP2 around the changed modules, DDP around the model: outputs and gradients are those of the model. Composer's
    BlurConv2d fails here: it calls the inner forward, past the hooks that gather weights."""
    reference = made(factory)
    report = transform.apply(reference)
    model, replica = copy.deepcopy(reference), DistributedDataParallel(copy.deepcopy(reference))
    mesh = init_device_mesh("cpu", (1,))
    assert len(report.changed) == count
    for name in report.changed:
        if any(True for _ in model.get_submodule(name).parameters()):
            fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    outs = []
    for each in (reference, model, replica):
        torch.manual_seed(7)
        outs.append(each(models.images()))
        outs[-1].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(outs[2], outs[0])
    for name, parameter in model.named_parameters():
        found = None if parameter.grad is None else parameter.grad.full_tensor()
        torch.testing.assert_close(found, expected[name], msg=name)
    for name, parameter in replica.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("transform", [each for each in EACH if not isinstance(each, t.BlurPool)], ids=repr)
def test_a_model_that_is_wrapped_already_is_refused(transform: t.Transform) -> None:
    """Composer's SqueezeExcite runs, and its new weights are never synchronized."""
    with pytest.raises(PlanError, match=f"{type(transform).__name__}: the model is already wrapped in DDP"):
        transform.apply(DistributedDataParallel(models.resnet()))
    model = models.resnet()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PlanError, match=f"{type(transform).__name__}: '0.weight' is already sharded"):
        transform.apply(model)


def check_compiled(model: nn.Module, safe: bool = True) -> None:
    """Its output is the model's, and has gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=safe)
    torch.manual_seed(3)
    state = copy.deepcopy(model.state_dict())
    found = compiled(models.images())
    found.sum().backward()
    model.load_state_dict(state)
    torch.manual_seed(3)
    assert found.isfinite().all()
    if safe:
        torch.testing.assert_close(found, model(models.images()))


@pytest.mark.long
@first_cases(but=[type(transform) for transform in ORDER])  # which are compiled together
# dynamo, where it resumes after a break
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiles_whole(transform: t.Transform, factory: Factory, count: int, train: bool) -> None:
    check_compiled(changed(transform, factory, count).train(train), type(transform).compile_safe)


@pytest.mark.long
@cases_at_length
def test_trains(transform: t.Transform, factory: Factory, count: int) -> None:
    model = changed(transform, factory, count)
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
def test_hooks_dtype_and_frozen_weights_stay(transform: t.Transform, factory: Factory, count: int) -> None:
    model = made(factory).requires_grad_(False).bfloat16()
    report = transform.apply(copy.deepcopy(model))
    seen: list[nn.Module] = []
    places = [model.get_submodule(name) for name in report.changed]
    for module in places:
        module.register_forward_hook(lambda module, *_: seen.append(module))
    transform.apply(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".se." in name or ".value." in name for name in learning)
    assert model(models.images().bfloat16()).dtype == torch.bfloat16
    assert {*map(id, seen)} == {*map(id, places)}
    assert len(places) == count


@cases
def test_meta_weights_then_to_empty(transform: t.Transform, factory: Factory, count: int) -> None:
    """The way large models are built under FSDP: nothing but the weights may need to be filled in."""
    reference = changed(transform, factory, count)
    with torch.device("meta"):
        model = factory()
    assert len(transform.apply(model).changed) == count
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    same_numbers(model, reference)


@pytest.mark.parametrize("name", ["GyroDropout-vit", "StochasticDepth-resnet"])
def test_methods_that_draw_let_shapes_pass(name: str) -> None:
    """As those of a model on the meta device before training; nothing without values stays in the layers."""
    transform, factory, _ = CASES[name]
    with torch.device("meta"):
        model = factory()
        transform.apply(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    own, images = fake_tensors(model, mode), models.images()
    with torch.no_grad(), mode:
        shapes = torch.func.functional_call(model.train(), own, images).shape
    assert model.to_empty(device="cpu")(images).shape == shapes


@cases
def test_a_surgery_for_models_on_meta_leaves_values_alone(transform: t.Transform, factory: Factory, count: int) -> None:
    """In-place changes, which a meta tensor would not keep, count up its version. New layers are as constructors leave
    them."""
    model = made(factory)
    before = {id(each): each._version for each in model.parameters()}
    held = list(model.parameters())
    assert len(transform.apply(model).changed) == count
    fresh = nn.Linear(2, 2).weight._version
    versions = {each._version == before.get(id(each), fresh) for each in model.parameters()}
    untouched = versions == {True} and {id(each) for each in held} <= {id(each) for each in model.parameters()}
    assert transform.on_meta == untouched


# ---- together ----


def test_the_declared_order_loses_nothing() -> None:
    """Each surgery finds, after those it declares to follow, all that it would find alone; Composer's do not."""
    model = made(models.resnet)
    alone = {type(one).__name__: len(one.apply(made(models.resnet)).changed) for one in ORDER}
    together = {type(one).__name__: len(one.apply(model).changed) for one in ORDER}
    assert together == alone | {"WeightStandardization": alone["WeightStandardization"] + 8}, "both factors"
    for index, transform in enumerate(ORDER):
        names = {type(one).__name__ for one in ORDER[:index]}
        assert set(type(transform).after) <= names


def test_the_other_order_is_said() -> None:
    model = made(models.resnet)
    WeightStandardization().apply(model)
    report = BlurPool().apply(model)
    assert report.changed == ("3",), "the max-pool"
    assert all("StandardizedConv2d is a subclass" in why for _, why in report.skipped)


def test_all_together() -> None:
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
    check_compiled(after.train())
    pickle.loads(pickle.dumps(after))
    for transform in reversed(ORDER):
        state = transform.to_plain(state, after)
    assert {name for name in state if ".se." not in name} == set(weights)
    assert all(state[name].shape == weights[name].shape for name in weights)
