"""`GradientNorms`: log the norms of the gradients."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ...common.checks import check_whole
from ...common.errors import PlanError, suggest
from .callback import Callback, RunOptions, RunView

By = Literal["module", "group"]


class GradientNorms(Callback):
    """Log the 2-norm of all gradients, and of those of each module or parameter group, to the run's loggers.

    The entries are `gradients/total`, and `gradients/NAME` for each child module of the model that has parameters of
    its own or below it, or `gradients/group 0`, … for each parameter group. The norms are those of the full gradients
    before clipping, under every strategy; a logging step gathers sharded ones, one parameter at a time.

    Args:
        every: optimizer steps between two entries. Positive integer. Default 100.
        by: `"module"` (default) or `"group"`.

    Raises:
        PlanError: for an invalid value.

    Example::

        >>> norms = GradientNorms(every=1)
        >>> result = pipeline.fit(epochs=1, out="runs/norms", logger="csv", callbacks=[norms], progress=False)
    """

    only_looks = True

    def __init__(self, every: int = 100, by: By = "module") -> None:
        check_whole("GradientNorms: every", every, PlanError, 1, also=" of steps")
        if by not in get_args(By):
            raise PlanError(f"GradientNorms: by={by!r} is not known.{suggest(str(by), get_args(By))}")
        self.every, self.by = every, by

    def check(self, run: RunOptions) -> None:
        if not run.logs:
            raise PlanError(
                "GradientNorms logs to the run's loggers, and there are none. Pass fit(logger='csv', out=…), or "
                "another logger."
            )

    def needs_gradients(self, step: int) -> bool:
        return step % self.every == 0

    def on_step_end(self, view: RunView) -> None:
        if not self.needs_gradients(view.step):
            return
        groups = {name: n for n, names in enumerate(view.group_names()) for name in names}
        squares: dict[str, torch.Tensor] = {}
        for name, gradient in view.named_gradients():
            wide = torch.promote_types(gradient.dtype, torch.float32)  # torch narrows neither float64 nor complex
            squared = torch.linalg.vector_norm(gradient, dtype=wide).float().square()
            owner = f"group {groups[name]}" if self.by == "group" else name.partition(".")[0]
            squares[owner] = squares[owner] + squared if owner in squares else squared
        if squares:  # a step that was skipped for its loss has no gradients
            total = torch.stack(list(squares.values())).sum().sqrt()
            norms = {f"gradients/{owner}": squared.sqrt() for owner, squared in sorted(squares.items())}
            view.log({"gradients/total": total, **norms})
