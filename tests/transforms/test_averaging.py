"""EMA and SWA: the numbers, what is averaged and what copied, evaluation, checkpoints, and training."""

import copy
import json
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain.common.errors import PlanError
from drivetrain.transforms import EMA, SWA, Lookahead, Session, Transform
from drivetrain.transforms.common.averaging import Averages
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Net(nn.Module):
    """With everything that is not a plain weight: BatchNorm, a tied weight, a mask, a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.tied = self.head
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)) * self.scale)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def values(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in named}


def fill(model: nn.Module, number: float) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(number)
        model.norm.running_mean.fill_(number)
        model.norm.num_batches_tracked.fill_(int(number))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_ema_by_hand() -> None:
    model = net()
    fill(model, 0)
    session = EMA(half_life=None, smoothing=0.75, update_every=2).session(model)
    expected = 0.0
    for step in range(1, 7):
        fill(model, step)
        session.after_step(step / 6)
        expected = expected if step % 2 else 0.75 * expected + 0.25 * step
    with session.evaluating():
        torch.testing.assert_close(model.conv.weight, torch.full_like(model.conv.weight, expected))
        torch.testing.assert_close(model.norm.running_mean, torch.full((4,), expected))
        assert model.norm.num_batches_tracked.item() == 6, "counters are copied"
        assert model.mask.tolist() == [0, -torch.inf]
        assert model.scale.tolist() == [1]
    assert model.conv.weight.unique().item() == 6


def test_lookahead_by_hand() -> None:
    model = net()
    fill(model, 0)
    session = Lookahead(2, decay=0.75).session(model)
    slow = 0.0
    for step in range(1, 6):
        fill(model, step)
        session.after_step(step / 6)
        if step % 2 == 0:
            slow = 0.75 * slow + 0.25 * step
            assert model.conv.weight.unique().item() == slow, "the weights go back"
            assert model.norm.running_mean.unique().item() == slow
            assert model.norm.num_batches_tracked.item() == step, "counters do not"
    with session.evaluating():
        assert model.conv.weight.unique().item() == slow
    assert model.conv.weight.unique().item() == 5
    session.finish()
    assert model.conv.weight.unique().item() == slow


def test_lookahead_that_grows_as_airbenchs() -> None:
    grows = Lookahead(5, decay=0.95**5, power=3)
    assert [grows.stays(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0, 0.95**5 / 8, 0.95**5])
    assert Lookahead().stays(0.0) == Lookahead().stays(1.0) == 0.5


def test_half_life() -> None:
    assert EMA().share == pytest.approx(1 - 2 ** (-1 / 1000))
    assert EMA(half_life=100, update_every=20).share == pytest.approx(1 - 2**-0.2)
    assert EMA(half_life=None, smoothing=0.99, update_every=20).share == pytest.approx(0.01)


def test_what_the_start_still_counts() -> None:
    model, options = nn.Linear(1, 1, bias=False), EMA(half_life=4, update_every=2)
    nn.init.ones_(model.weight)
    session = options.session(model)
    nn.init.zeros_(model.weight)
    for step in range(1, 8):
        session.after_step(step / 8)
        with session.evaluating():
            assert model.weight.item() == pytest.approx(options.share_of_start(step))
    assert options.share_of_start(8) == pytest.approx(0.25)


def test_swa_by_hand() -> None:
    model = net()
    session = SWA(start=0.2, end=0.8, update_every=2).session(model)
    for step in range(1, 9):
        fill(model, step)
        session.after_step(step / 10)
        if step == 5:  # counted: 2 and 4
            with session.evaluating():
                assert model.conv.weight.unique().item() == 3
                assert model.norm.running_mean.unique().item() == 3, "the statistics belong to the weights"
                assert model.norm.num_batches_tracked.item() == 4
            assert model.conv.weight.unique().item() == 5
    assert model.conv.weight.unique().item() == 5, "at the end (of 2, 4, 6, 8) the model takes the mean"
    assert model.norm.running_mean.unique().item() == 5
    fill(model, 7)
    session.after_step(0.9)
    with session.evaluating():
        assert model.conv.weight.unique().item() == 7, "from then on the model itself is trained"
    session.finish()
    assert model.conv.weight.unique().item() == 7


def test_swa_that_never_reaches_its_end_is_installed_by_finish() -> None:
    model = net()
    session = SWA(start=0.5, end=1.0).session(model)
    for step in (1, 2, 3):
        fill(model, step)
        session.after_step(step / 4)
    for _ in range(2):
        session.finish()
        assert model.conv.weight.unique().item() == 2.5


def test_swa_that_averaged_nothing_says_so() -> None:
    session = SWA().session(net())
    session.after_step(0.5)
    with pytest.warns(UserWarning, match=r"SWA\(start=0.7.* averaged nothing"):
        session.finish()


@pytest.mark.parametrize("method", [EMA(half_life=2), SWA(start=0, end=1)], ids=repr)
def test_evaluating_swaps_in_place_and_restores_bit_for_bit(method: EMA | SWA) -> None:
    model = net()
    session = method.session(model)
    session.after_step(0.1)
    fill(model, 3)
    session.after_step(0.2)
    with torch.no_grad():
        model.conv.weight.normal_()
    before, tensors = values(model), [*model.parameters(), *model.buffers()]
    pointers = [tensor.data_ptr() for tensor in tensors]
    with session.evaluating():
        assert not same(values(model), before)
        inside = [*model.parameters(), *model.buffers()]
        assert all(a is b for a, b in zip(inside, tensors, strict=True))
        assert [tensor.data_ptr() for tensor in inside] == pointers
    assert same(values(model), before)
    with pytest.raises(KeyError), session.evaluating():
        raise KeyError("a failing evaluation")
    assert same(values(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_memory_formats_stay(dtype: torch.dtype, form: torch.memory_format) -> None:
    """A bfloat16 weight of 256 moves by 1 in 1000 steps of 0.001, of which each alone is rounded away."""
    model = net(dtype).to(memory_format=form)
    fill(model, 256)
    session = EMA(half_life=None, smoothing=0.999).session(model)
    fill(model, 128)
    for _ in range(1000):
        session.after_step(0.5)
    with session.evaluating():
        assert model.conv.weight.dtype == dtype
        assert model.conv.weight.is_contiguous(memory_format=form)
        assert model.conv.weight.unique().item() == pytest.approx(128 + 128 * 0.999**1000, rel=4e-3)
    session.finish()
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_a_model_that_stands_still_is_its_own_average() -> None:
    model = net()
    session = EMA(half_life=3).session(model)
    for _ in range(50):
        session.after_step(0.5)
    before = values(model)
    with session.evaluating():
        assert same(values(model), before)


def test_a_model_that_is_moved_is_still_followed() -> None:
    """`Module.to` puts new buffers in the place of the old ones."""
    model = net()
    session = EMA(half_life=None, smoothing=0.5).session(model)
    model.double().float()
    fill(model, 8)
    session.after_step(0.5)
    with session.evaluating():
        assert model.norm.running_mean.unique().item() == 4


@pytest.mark.parametrize("method", [EMA(half_life=1), SWA(start=0, end=1)], ids=repr)
def test_compiled_code_sees_the_averages(method: EMA | SWA) -> None:
    model = net().eval()
    session = method.session(model)
    compiled = torch.compile(model, backend="aot_eager")
    images = torch.randn(2, 2, 5, 5)
    with torch.no_grad():
        own = compiled(images)
        session.after_step(0.1)
        model.head.bias.add_(4)
        session.after_step(0.2)
        with session.evaluating():
            torch.testing.assert_close(compiled(images), own + 2)
        torch.testing.assert_close(compiled(images), own + 4)


def loss_of(model: nn.Module, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, 2, 5, 5, generator=generator) + labels[:, None, None, None]
    return F.cross_entropy(model(images), labels)


def train(model: nn.Module, session: Session, steps: range, total: int = 40) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        loss = loss_of(model, 16, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.after_step((step + 1) / total)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", [EMA(5, update_every=3), SWA(0.3, 0.9, update_every=3)], ids=repr)
@pytest.mark.parametrize("pause", [5, 20, 38])
def test_a_checkpoint_goes_on_as_if_nothing_were(method: EMA | SWA, pause: int) -> None:
    whole = net()
    session = method.session(whole)
    train(whole, session, range(pause))
    saved = copy.deepcopy((whole.state_dict(), session.state_dict()))
    resumed = net()
    resumed.load_state_dict(saved[0])
    second = method.session(resumed)
    second.load_state_dict(saved[1])
    for model, follower in ((whole, session), (resumed, second)):
        train(model, follower, range(pause, 40))
        follower.finish()
    assert same(values(whole), values(resumed))
    plain = {key: value for key, value in saved[1].items() if not isinstance(value, dict)}
    assert json.loads(json.dumps(plain)) == plain


def test_averages_of_another_model_are_refused() -> None:
    state = EMA().session(net()).state_dict()
    with pytest.raises(PlanError, match=r"another model: .* in only one"):
        EMA().session(nn.Linear(4, 3)).load_state_dict(state)
    wide = net()
    wide.head = wide.tied = nn.Linear(4, 7)
    with pytest.raises(PlanError, match=r"'head.weight' has shape \(3, 4\), but the model's .* has \(7, 4\)"):
        EMA().session(wide).load_state_dict(state)


@pytest.mark.parametrize("method", [EMA(), SWA()], ids=repr)
def test_parameters_that_deepspeed_emptied(method: EMA | SWA) -> None:
    model = net()
    model.head.weight.ds_shape = torch.Size([3, 4])  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"Cannot average 'head.weight': DeepSpeed stage 3"):
        method.session(model)


def test_the_session_of_other_kinds_does_nothing() -> None:
    session, model = Session(), net()
    before = values(model)
    session.after_step(0.5)
    with session.evaluating():
        assert same(values(model), before)
    session.load_state_dict(session.state_dict())
    session.finish()
    assert session.state_dict() == {}


# ---- A few kernels for all tensors, with the same numbers as one operation per tensor ----


def layers(count: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.Module:
    torch.manual_seed(0)
    kinds = (dtypes[n % len(dtypes)] for n in range(count))
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)).to(kind) for kind in kinds))


def disturb(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            else:
                tensor.add_(1)


class Operations(TorchDispatchMode):
    """Counts the operations that would launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("detach", "view", "alias"):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [EMA(half_life=2), Lookahead(1, decay=0.3), SWA(0.0, 1.0)], ids=repr)
def test_launches_do_not_grow_with_the_model(method: Transform) -> None:
    counts = []
    for count in (1, 7):
        session = method.session(layers(count))
        session.after_step(0.1)  # SWA makes its copies
        with Operations() as operations:
            session.after_step(0.2)
        counts.append(operations.counted)
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) <= 4, counts[0]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)], ids=str
)
def test_the_numbers_are_those_of_one_tensor_after_another(dtypes: tuple[torch.dtype, ...]) -> None:
    """Bit for bit, in the averages and in the model; counters and masks are copied."""
    model = layers(4, dtypes)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    averages = Averages(model)
    expected = {
        name: value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value
        for name, value in values(model).items()
    }
    for step in range(3):
        disturb(model, step)
        averages.add(0.3)
        for name, value in values(model).items():
            if value.is_floating_point() and name != "mask":
                expected[name].lerp_(value.to(expected[name].dtype), 0.3)
            else:
                expected[name].copy_(value)
    found, own = averages.state_dict(), values(model)
    assert same({name: found[name] for name in expected}, expected)
    with averages.installed():
        assert same(values(model), {name: value.to(own[name].dtype) for name, value in expected.items()})
    assert same(values(model), own)
