"""LayerFreezing alone: the schedule, what it freezes, and its effect on optimizers and wrappers."""

import copy
from contextlib import nullcontext

import pytest
import surgery_models as models
import torch
from drivetrain.common.errors import PlanError
from drivetrain.transforms import LayerFreezing, SqueezeExcite
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def frozen(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def test_the_schedule() -> None:
    levels = [LayerFreezing(0.5, 0.8).level(progress) for progress in (0.0, 0.5, 0.75, 1.0)]
    assert levels == pytest.approx([0.0, 0.0, 0.4, 0.8])


def test_the_first_layers_freeze_and_the_last_never() -> None:
    model = models.resnet()
    layers = [name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    transform, seen = LayerFreezing(freeze_start=0.0), []
    for progress in (0.0, 0.25, 0.5, 1.0):
        report = transform.freeze(model, progress)
        seen += report.changed
        assert f"{len(seen)} of {len(layers)} layers are frozen" in report.notes[0]
        assert seen == layers[: len(seen)]
    assert seen == layers[:-1]
    assert transform.freeze(model, 1.0).changed == ()
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning == ["9.weight", "9.bias"]


def test_what_the_last_layer_shares_with_others_is_never_frozen() -> None:
    """Else nothing would be left to train."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[3].weight = model[0].weight
    LayerFreezing(0.0).freeze(model, 1.0)
    assert frozen(model) == ["0.bias", "2.weight", "2.bias"]
    model(torch.ones(2, 4)).sum().backward()


def test_no_state() -> None:
    one, other = models.resnet(), models.resnet()
    for progress in (0.6, 0.7, 0.8):
        LayerFreezing().freeze(one, progress)
    LayerFreezing().freeze(other, 0.8)
    assert frozen(one) == frozen(other)


def test_parameters_beside_children_freeze_too() -> None:
    """Composer never freezes a class token, nor anything that has both weights and children."""
    model = models.vit()
    LayerFreezing(0.0).freeze(model, 0.5)
    assert {"class_token", "encoder.pos_embedding"} <= set(frozen(model))
    resnet = models.resnet()
    SqueezeExcite(min_channels=16).apply(resnet)
    LayerFreezing(0.0).freeze(resnet, 1.0)
    assert len(frozen(resnet)) == len(list(resnet.parameters())) - 2


@pytest.mark.parametrize("options", [{"momentum": 0.9, "weight_decay": 0.1}, {}])
def test_an_optimizer_leaves_frozen_weights_alone(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = models.resnet()
    cls = torch.optim.SGD if options else torch.optim.AdamW
    optimizer = cls(model.parameters(), lr=0.01, **options)

    def step() -> None:
        model(models.images()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # momentum is there
    model(models.images()).square().sum().backward()  # and gradients are waiting
    LayerFreezing(0.0, 0.5).freeze(model, 1.0)
    before = copy.deepcopy(dict(model.named_parameters()))
    step()
    step()
    names = frozen(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in names), name


@pytest.mark.parametrize(
    ("freezing", "epochs"),
    [
        (LayerFreezing(), 2),
        (LayerFreezing(0.0), 1),
        (LayerFreezing(0.75), 4),
    ],
)
def test_too_few_epochs_for_any_layer_to_freeze(freezing: LayerFreezing, epochs: int) -> None:
    """The last epoch starts at freeze_start, or before it."""
    with pytest.raises(PlanError, match=f"with epochs={epochs} none would freeze"):
        freezing.check_epochs(epochs, 16)
    freezing.check_epochs(epochs + 1, 16)
    LayerFreezing(freezing.freeze_start, freeze_level=0.0).check_epochs(epochs, 16)


@pytest.mark.parametrize("progress", [-0.1, 1.1])
def test_progress_out_of_range(progress: float) -> None:
    with pytest.raises(PlanError, match=f"progress={progress}"):
        LayerFreezing().freeze(nn.Linear(1, 1), progress)


@pytest.mark.usefixtures("one_process_group")
def test_under_ddp_it_needs_the_search_for_unused_parameters() -> None:
    for search in (True, False):
        model = DistributedDataParallel(models.resnet(), find_unused_parameters=search)
        model(models.images()).sum().backward()
        LayerFreezing(0.0).freeze(model.module, 0.5)
        model(models.images()).sum().backward()
        if search:
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        with nullcontext() if search else pytest.raises(RuntimeError, match="unused parameter detection"):
            model(models.images())
    assert LayerFreezing.unused_parameters


@pytest.mark.usefixtures("one_process_group")
def test_fsdp2_reads_requires_grad_at_every_forward() -> None:
    torch.manual_seed(0)
    model = models.resnet()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    for block in list(model.children())[4:7]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for progress in (0.0, 0.4, 0.9):
        for each in (model, reference):
            each.zero_grad()
            LayerFreezing(0.0).freeze(each, progress)
            each(models.images()).square().sum().backward()
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            if expected[name].grad is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad)
