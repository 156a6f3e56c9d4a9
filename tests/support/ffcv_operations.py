"""FFCV's operations, and some of a user's own. Its import compiles for seconds, so tests import this when they run."""

from typing import Any

from drivetrain.loaders.decode.ffcv_modules import ffcv_module

ffcv_module("ffcv.transforms")  # importing it in any other way changes thread counts
from ffcv.pipeline.allocation_query import AllocationQuery  # noqa: E402
from ffcv.pipeline.operation import Operation  # noqa: E402
from ffcv.transforms import (  # noqa: E402
    Cutout,
    ImageMixup,
    Poison,
    RandomBrightness,
    RandomHorizontalFlip,
    RandomTranslate,
    ToTensor,
)

__all__ = [
    "Cutout", "Halves", "ImageMixup", "Invert", "Poison", "RaisesAtDark", "RandomBrightness", "RandomHorizontalFlip",
    "RandomTranslate", "ToTensor",
]  # fmt: skip
SIDE = 12


class Invert(Operation):  # type: ignore[misc]
    """An operation of a user's own."""

    def generate_code(self) -> Any:
        def invert(images: Any, target: Any) -> Any:
            for k in range(len(images)):
                target[k] = 255 - images[k]
            return target

        return invert

    def declare_state_and_memory(self, state: Any) -> Any:
        return state, AllocationQuery(state.shape, state.dtype)


class RaisesAtDark(Invert):
    def generate_code(self) -> Any:
        def code(images: Any, *_: Any) -> Any:
            if images[0, 0, 0, 0] == 7:
                raise ValueError("too dark")
            return images

        return code


class Halves(Invert):
    def declare_state_and_memory(self, state: Any) -> Any:
        state.shape = (SIDE // 2, SIDE // 2, 3)
        return state, None
