"""Parameter groups by patterns over parameter names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...common.errors import PlanError
from ...strategies import OptimizerFactory
from .config import OptionalGroups

WRAPPED = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_orig_mod)\.")
"""Parts of a parameter's name that wrappers of other libraries add."""


@dataclass
class GroupedFactory:
    """`factory`, called with the parameters in groups: first those that match no pattern, then one group per pattern.

    An optimizer factory gets parameters without names. Every strategy trains the parameters of the model that it was
    given, which has them under the same names, as other objects perhaps: they are looked up when it is called.

    Attributes:
        factory: the optimizer's factory, which accepts groups.
        groups: options of the optimizer by pattern.
        model: the model after surgery, which a strategy may have sharded or wrapped in place by the time of the call.
        note: after the call, a sentence with the number of parameters in each group.
    """

    factory: OptimizerFactory
    groups: Mapping[str, Mapping[str, Any]]
    model: nn.Module
    note: str = field(default="", init=False)

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            PlanError: for a pattern that matches no parameter, or none that earlier patterns have left.
        """
        names = {parameter: WRAPPED.sub("", name) for name, parameter in self.model.named_parameters()}
        matched: dict[str | None, list[nn.Parameter]] = {None: []} | {pattern: [] for pattern in self.groups}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            name = names[parameter]
            first = next((pattern for pattern in self.groups if fnmatchcase(name, pattern)), None)
            matched[first].append(parameter)
        for pattern in self.groups:
            if not matched[pattern] and not isinstance(self.groups, OptionalGroups):
                raise PlanError(self._why_empty(pattern, [names[parameter] for parameter in trained]))
        self.note = self._describe(matched)
        return self.factory(
            [{"params": chosen, **self._options(pattern)} for pattern, chosen in matched.items() if chosen]
        )

    def _options(self, pattern: str | None) -> Mapping[str, Any]:
        return {} if pattern is None else self.groups[pattern]

    def _why_empty(self, pattern: str, names: list[str]) -> str:
        taken = [name for name in names if fnmatchcase(name, pattern)]
        if taken:
            first = next(other for other in self.groups if fnmatchcase(taken[0], other))
            return (
                f"groups[{pattern!r}] is left without parameters: {first!r} comes before it and matches {taken[0]!r}. "
                "Put the more specific pattern first."
            )
        if any(fnmatchcase(name, pattern) for name, _ in self.model.named_parameters()):
            return f"groups[{pattern!r}] matches only parameters that do not require gradients. Leave it out."
        near = difflib.get_close_matches(pattern.strip("*").rstrip("."), names, n=3, cutoff=0.3) or names[-3:]
        return (
            f"groups[{pattern!r}] matches none of the {len(names)} trained parameters. Similar names: "
            f"{', '.join(near)}. Names are those of model.named_parameters() after surgery."
        )

    def _describe(self, matched: Mapping[str | None, list[nn.Parameter]]) -> str:
        parts = []
        for pattern, chosen in [*[*matched.items()][1:], (None, matched[None])]:
            if not chosen:
                continue
            options = ", ".join(f"{name}={value}" for name, value in self._options(pattern).items())
            name = "all others" if pattern is None else f"{pattern} ({options})"
            parts.append(f"{name}: {sum(p.numel() for p in chosen):,} in {len(chosen)} tensor(s)")
        return f"Parameter groups: {'; '.join(parts)}."
