"""Model factories by name, and small networks for CIFAR."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy import exports

if TYPE_CHECKING:
    from .cifar import airbench_net as airbench_net
    from .cifar import cifar_resnet as cifar_resnet
    from .factories import model_factory as model_factory

__getattr__, __dir__, __all__ = exports(__name__, __file__)
