"""The augmentation policies of the loaders, by name: their options, checked, and torchvision's classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...common.checks import is_number, is_whole, plain
from ...common.errors import DataError, suggest
from ...common.three_augment import three_augment

LONGEST = 32  # operations or chains for one image


@dataclass(frozen=True)
class _Option:
    """A number from `low` to `high`, which is an integer if `whole`."""

    default: float
    low: float
    high: float
    whole: bool = True

    def allows(self, value: Any) -> bool:
        if self.whole:
            return is_whole(value, int(self.low), int(self.high))
        return is_number(value, f"[{self.low}, {self.high}]")


_BINS = _Option(31, 2, 1000)
POLICIES: dict[str, dict[str, _Option]] = {
    "rand_augment": {
        "num_ops": _Option(2, 1, LONGEST), "magnitude": _Option(9, 0, 999), "num_magnitude_bins": _BINS,
    },
    "trivial_augment": {"num_magnitude_bins": _BINS},
    "aug_mix": {
        "severity": _Option(3, 1, 10), "width": _Option(3, 1, LONGEST), "depth": _Option(-1, -1, LONGEST),
        "alpha": _Option(1.0, 0.01, 100.0, whole=False),
    },
    "three_augment": {"color_jitter": _Option(0.3, 0.0, 1.0, whole=False)},
}  # fmt: skip
"""Each policy's options; the defaults are torchvision's (`RandAugment`, `TrivialAugmentWide`, `AugMix`), and DeiT's."""
STILL = ("three_augment",)
"""Policies that move no pixels."""


def complete(policy: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and all options, with defaults, of a policy such as `{"name": "rand_augment", "num_ops": 2}`."""
    if not isinstance(policy, Mapping) or "name" not in policy:
        raise DataError(f"policy={policy!r:.80} must be a dict with a name, {{'name': 'rand_augment'}}, or None.")
    name = policy["name"]
    if not isinstance(name, str) or name not in POLICIES:
        raise DataError(f"policy['name']={name!r} is unknown.{suggest(str(name), POLICIES)}")
    known = POLICIES[name]
    options: dict[str, Any] = {option: rule.default for option, rule in known.items()}
    for option, value in policy.items():
        if option == "name":
            continue
        if option not in known:
            raise DataError(f"policy[{option!r}]: {name} has no such option.{suggest(str(option), known)}")
        rule, value = known[option], plain(value)
        if not rule.allows(value):
            kind = "an integer" if rule.whole else "a number"
            raise DataError(f"policy[{option!r}]={value!r} must be {kind} from {rule.low} to {rule.high}.")
        options[option] = value
    if options.get("depth") == 0:
        raise DataError("policy['depth']=0 must be -1 (1 to 3 operations, at random) or a positive integer.")
    if name == "rand_augment" and options["magnitude"] >= options["num_magnitude_bins"]:
        raise DataError(
            f"policy['magnitude']={options['magnitude']} must be below num_magnitude_bins="
            f"{options['num_magnitude_bins']}: it is a bin index, from 0."
        )
    return name, options


def torchvision_policy(policy: Mapping[str, Any]) -> Any:
    """Return torchvision's transform for the policy, or DeiT's, from PIL image to PIL image."""
    from torchvision.transforms import v2

    name, options = complete(policy)
    if name == "rand_augment":
        return v2.RandAugment(**options)
    if name == "trivial_augment":
        return v2.TrivialAugmentWide(**options)
    if name == "three_augment":
        return partial(three_augment, options["color_jitter"])
    options["mixture_width"], options["chain_depth"] = options.pop("width"), options.pop("depth")
    return v2.AugMix(**options)
