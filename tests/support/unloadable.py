"""An object that no process can unpickle. A separate module, so that a rank that fails to does not import torch."""


class Unloadable:
    """Pickles, and raises when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_load, ()


def refuse_to_load() -> None:
    raise ValueError("this object cannot be loaded")
