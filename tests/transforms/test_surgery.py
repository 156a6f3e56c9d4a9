"""Properties of every surgery: names, weights, copies, and a second application."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import surgery_models as models
import torch
from drivetrain import transforms as t
from drivetrain.common.errors import PlanError
from surgery_cases import CASES, EXCITE, FACTORIZE, cases, made, same_numbers
from torch import nn


def test_every_surgery_is_here() -> None:
    surgeries = {name for name, cls in t.TRANSFORMS.items() if cls.kind == "surgery"}
    assert surgeries - {"BlurPool"} == {type(transform).__name__ for transform, _, _ in CASES.values()}


@cases
@pytest.mark.parametrize("train", [True, False])
def test_what_changes_and_what_stays(
    transform: t.Transform, factory: Callable[[], nn.Module], count: int, train: bool
) -> None:
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
def test_twice_is_once(transform: t.Transform, factory: Callable[[], nn.Module], count: int) -> None:
    model = made(factory)
    transform.apply(model)
    state, text = copy.deepcopy(model.state_dict()), str(model)
    report = transform.apply(model)
    assert report.changed == ()
    assert report.notes == (f"{count} module(s) were already changed and are left as they are.",)
    assert str(model) == text
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.long
@cases
def test_copies(transform: t.Transform, factory: Callable[[], nn.Module], count: int) -> None:
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ]
    again = made(factory)
    transform.apply(again)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    again.load_state_dict(model.state_dict())
    for other in (*copies, again):
        same_numbers(other, model)
    for other in copies:
        assert transform.apply(other).changed == ()
        other.train()(models.images()).sum().backward()


@cases
def test_weights_before_or_after(
    transform: t.Transform, factory: Callable[[], nn.Module], count: int
) -> None:
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
def test_round_trip(transform: t.Transform, factory: Callable[[], nn.Module], count: int) -> None:
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    plain = transform.to_plain(model.state_dict(), model)
    other = factory()
    transform.apply(other)
    other.load_state_dict(transform.from_plain(plain, other))
    same_numbers(model, other, rtol=1e-4, atol=1e-5)


ADDS = ("SqueezeExcite", "GatedLinearUnits")
exported = pytest.mark.parametrize(
    ("transform", "factory", "count"),
    [case for case in CASES.values() if type(case[0]).__name__ not in (*ADDS, "ALiBi")],
    ids=[name for name in CASES if not name.startswith((*ADDS, "ALiBi"))],
)


@exported
def test_a_plain_model_gives_the_same_output(
    transform: t.Transform, factory: Callable[[], nn.Module], count: int
) -> None:
    model = made(factory)
    assert len(transform.apply(model).changed) == count
    plain = factory()
    plain.load_state_dict(transform.to_plain(model.state_dict(), model))
    same_numbers(model, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("transform", "factory"), [(EXCITE, models.resnet), (t.GatedLinearUnits(), models.vit)]
)
def test_what_a_plain_model_cannot_express_keeps_its_names(
    transform: t.Transform, factory: Callable[[], nn.Module]
) -> None:
    model = made(factory)
    transform.apply(model)
    missing, unexpected = factory().load_state_dict(
        transform.to_plain(model.state_dict(), model), strict=False
    )
    assert missing == []
    assert unexpected
    assert all(".se." in name or ".value." in name for name in unexpected)


@pytest.mark.parametrize("transform", {type(case[0]): case[0] for case in CASES.values()}.values(), ids=repr)
def test_nothing_to_change_warns(transform: t.Transform) -> None:
    with pytest.warns(t.NothingChanged, match="it looks for .*; Sequential is made of 1 ReLU") as caught:
        report = transform.apply(nn.Sequential(nn.ReLU()))
    assert report.changed == ()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("cls", "options"), [
    (t.SqueezeExcite, {"latent_channels": 0}), (t.SqueezeExcite, {"latent_channels": 2.5}),
    (t.SqueezeExcite, {"min_channels": -1}), (t.GhostBatchNorm, {"ghost_batch_size": 0}),
    (t.WeightStandardization, {"n_last_layers_ignore": True}), (t.Factorize, {"latent_features": -0.5}),
    (t.Factorize, {"factorize_convs": 1}), (t.Factorize, {"min_features": "8"}),
    (t.StochasticDepth, {"method": "batch"}), (t.StochasticDepth, {"drop_rate": 1.0}),
    (t.StochasticDepth, {"distribution": "even"}), (t.GyroDropout, {"p": 1.0}), (t.GyroDropout, {"tau": 0}),
    (t.GyroDropout, {"total_steps": 0}),
])  # fmt: skip
def test_bad_options(cls: type[t.Transform], options: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        cls(**options)


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
