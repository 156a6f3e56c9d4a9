"""Every surgery under FSDP2 and DDP, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import surgery_models as models
import torch
from drivetrain.common.errors import PlanError
from drivetrain.transforms import Transform
from surgery_cases import CASES, cases, made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.long
@cases
@pytest.mark.usefixtures("one_process_group")
# Plain models give both: the stride of a depthwise convolution's gradient, and the permuted output of a norm.
@pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_sharded_around_each_changed_module(
    transform: Transform, factory: Callable[[], nn.Module], count: int
) -> None:
    """FSDP2 around the changed modules, DDP around the model: outputs and gradients are those of the model."""
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
@pytest.mark.parametrize("transform", {type(case[0]): case[0] for case in CASES.values()}.values(), ids=repr)
def test_a_model_that_is_wrapped_already_is_refused(transform: Transform) -> None:
    """Composer's SqueezeExcite runs, and its new weights are never synchronised."""
    with pytest.raises(PlanError, match=f"{type(transform).__name__}: the model is already wrapped in DDP"):
        transform.apply(DistributedDataParallel(models.resnet()))
    model = models.resnet()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PlanError, match=f"{type(transform).__name__}: '0.weight' is already sharded"):
        transform.apply(model)
