"""Model factories for recipes that name them as module:attribute. A module, because it is imported by name."""

from typing import Any

from pipeline_data import plain_model
from torch import nn

not_a_factory = 3
anonymous = lambda: plain_model()  # noqa: E731


def small(classes: int = 4) -> nn.Module:
    return plain_model(classes)


class Small(nn.Sequential):
    def __init__(self, classes: int = 4) -> None:
        super().__init__(plain_model(classes))

    class Inner(nn.Identity):
        pass


def made_inside() -> Any:
    def inner() -> nn.Module:
        return plain_model()

    return inner
