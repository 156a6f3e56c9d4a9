"""BatchNorm statistics of weights that no training step has used."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...common.model_state import train_mode
from ...loaders.epochs import EpochLoader
from ...strategies import Engine
from ...strategies.devices import current_device, wait_for
from ..tasks.means import LossFunction
from ..tasks.nests import pair
from ..tasks.task import model_inputs
from .loop import forward

BATCHES = 16


def calibrate(
    engine: Engine,
    make_loader: Callable[[], AbstractContextManager[EpochLoader]],
    loss: LossFunction,
    epoch: int,
) -> None:
    """Set BatchNorm's running statistics to the mean over the first `BATCHES` training batches of an epoch, which
    depend on the seed and the epoch only, so that a resumed run has the same. Without BatchNorm, do nothing. Nothing
    else of the model changes, not its mode either, and no random numbers are drawn."""
    modes = [(module, module.training) for module in engine.model.modules()]
    train_mode(engine.model)
    modules = engine.plain_model.modules()
    norms = [each for each in modules if isinstance(each, _BatchNorm) and each.training and each.track_running_stats]
    try:
        if norms:
            _measure(engine, make_loader, loss, epoch, norms)
    finally:
        for module, training in modes:
            module.training = training


def _measure(
    engine: Engine,
    make_loader: Callable[[], AbstractContextManager[EpochLoader]],
    loss: LossFunction,
    epoch: int,
    norms: list[_BatchNorm],
) -> None:
    momenta = [norm.momentum for norm in norms]
    engine.model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the cumulative mean
    try:
        with torch.no_grad(), make_loader() as loader, current_device(engine.device):
            loader.set_epoch(epoch)
            for _, (images, targets) in zip(range(BATCHES), map(pair, loader), strict=False):
                if len(images):
                    with engine.forward_context():
                        forward(engine.plain_model, images, **model_inputs(loss, targets))
        # The caller may change weights that are on the CPU (`fsdp_cpu_offload`), which these forwards still copy.
        wait_for(engine.device)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
