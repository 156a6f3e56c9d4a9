"""The table of transforms: names, options, and conversion to recipes and back."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import torch.nn.functional as F
from drivetrain import transforms
from drivetrain import transforms as t
from drivetrain.common.errors import PlanError

SAMPLES = [
    *(cls() for cls in t.TRANSFORMS.values()),
    t.BlurPool(replace_maxpools=False, min_channels=3),
    t.Factorize(latent_channels=64, factorize_linears=False),
    t.LabelSmoothing(0.2),
    t.LayerFreezing(0.0, 0.5),
    t.RandAugment(magnitude=12),
    t.TrivialAugment(9),
    t.AugMix(width=2, alpha=0.5),
    t.StochasticDepth("sample", 0.1, "uniform"),
]


@pytest.mark.parametrize("transform", SAMPLES, ids=repr)
def test_there_and_back_through_json(transform: t.Transform) -> None:
    text = json.dumps(t.to_dict(transform))
    assert t.get(**json.loads(text)) == transform
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert hash(transform) == hash(t.get(**json.loads(text)))


def test_the_form_in_a_recipe() -> None:
    assert t.to_dict(t.LabelSmoothing(0.08)) == {"name": "LabelSmoothing", "smoothing": 0.08}
    assert t.get("ChannelsLast") == t.ChannelsLast()


def test_every_transform_file_is_in_the_table() -> None:
    """A file that defines a Transform, but that `__init__.py` does not import, could not be named."""
    texts = [path.read_text() for path in Path(transforms.__file__).parent.rglob("*.py")]
    classes = r"^class ([A-Z]\w*)\((?:Transform|_Policy)\)"
    defined = {name for text in texts for name in re.findall(classes, text, re.MULTILINE)}
    assert defined == set(t.TRANSFORMS)


@pytest.mark.parametrize("cls", t.TRANSFORMS.values(), ids=t.TRANSFORMS)
def test_each_declares_itself(cls: type[t.Transform]) -> None:
    assert cls.kind in get_args(t.Kind)
    assert cls.source
    assert "Source: " in cls.__doc__
    assert set(cls.after) <= set(t.TRANSFORMS)
    assert set(cls.unsafe_with) <= {"ddp", "fsdp", "deepspeed", "deepspeed_stage_3", "fairscale"}
    translates = cls.from_plain is not t.Transform.from_plain
    assert translates or not cls.renames, f"{cls.__name__} renames and cannot translate"
    for field in dataclasses.fields(cls):
        assert f"{field.name}: " in cls.__doc__, f"{cls.__name__}.{field.name} is not documented"
        assert field.default is not dataclasses.MISSING
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        cls().anything = 1  # type: ignore[attr-defined]


def test_transforms_that_do_not_touch_the_loss_return_it() -> None:
    assert t.BlurPool().loss(F.cross_entropy) is F.cross_entropy


@pytest.mark.parametrize(("name", "near"), [
    ("blurpool", "BlurPool"), ("BlurPol", "BlurPool"), ("channels_last", "ChannelsLast"),
    ("labelsmoothing", "LabelSmoothing"),
])  # fmt: skip
def test_unknown_name(name: str, near: str) -> None:
    with pytest.raises(PlanError, match=f"No transform is named '{name}'. Did you mean '{near}'") as caught:
        t.get(name)
    assert f"Known: {', '.join(sorted(t.TRANSFORMS))}." in str(caught.value)


def test_unknown_option() -> None:
    with pytest.raises(PlanError, match=r"BlurPool has no option 'min_chanels'\. Did you mean 'min_ch"):
        t.get("BlurPool", min_chanels=3)
    with pytest.raises(PlanError, match=r"ChannelsLast has no option 'kind'\. It has no options"):
        t.get("ChannelsLast", kind="loss")
    with pytest.raises(PlanError, match="No transform is named 3"):
        t.get(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="smoothing=2"):
        t.get("LabelSmoothing", smoothing=2)


def test_a_transform_of_ones_own_has_no_name_in_a_recipe() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(t.Transform):
        kind: ClassVar = "surgery"
        source: ClassVar[str] = "this test"

    with pytest.raises(PlanError, match="Own cannot be imported by name"):
        t.to_dict(Own())


def test_the_declared_order_has_no_circle() -> None:
    waiting, placed = dict(t.TRANSFORMS), set[str]()
    while waiting:
        ready = [name for name, cls in waiting.items() if set(cls.after) <= placed]
        assert ready, f"{sorted(waiting)} must each follow another"
        placed.update(ready)
        waiting = {name: cls for name, cls in waiting.items() if name not in ready}


def test_declared_facts() -> None:
    """The values that a plan relies on; their proofs are in test_surgery_runs.py and its neighbours."""
    assert {n for n, cls in t.TRANSFORMS.items() if not cls.compile_safe} == {"GyroDropout"}
    assert {n for n, cls in t.TRANSFORMS.items() if cls.renames} == {
        "Factorize",
        "GatedLinearUnits",
        "SqueezeExcite",
    }
    assert {n for n, cls in t.TRANSFORMS.items() if cls.unused_parameters} == {"LayerFreezing"}
    assert {n: cls.unsafe_with for n, cls in t.TRANSFORMS.items() if cls.unsafe_with} == {
        "EMA": ("deepspeed_stage_3",),
        "GradientClipping": ("deepspeed", "fairscale"),
        "LayerFreezing": t.LayerFreezing.unsafe_with,
        "Lookahead": ("deepspeed",),
        "SAM": ("deepspeed", "fairscale"),
        "StochasticDepth": ("fairscale",),
        "SWA": ("deepspeed",),
    }
    assert {n for n, cls in t.TRANSFORMS.items() if cls.kind == "schedule"} == {"LayerFreezing"}


def test_the_catalogue_lists_all_and_what_each_declares() -> None:
    rows = {row.transform: row for row in t.catalogue()}
    assert set(rows) == set(t.TRANSFORMS)
    for name, row in rows.items():
        cls = t.TRANSFORMS[name]
        assert (row.kind, row.source) == (cls.kind, cls.source)
        assert (row.renames == "yes") == cls.renames
        assert row.fsdp == ("no" if "fsdp" in cls.unsafe_with else "yes")
        finer = "stages 1, 2" if "deepspeed_stage_3" in cls.unsafe_with else "yes"
        assert row.deepspeed == ("no" if "deepspeed" in cls.unsafe_with else finer)
    assert rows["GyroDropout"].compiles == "no"
    assert rows["BlurPool"].compiles == "yes"
    assert rows["MixUp"].compiles == ""
    assert rows["LayerFreezing"].ddp == "find_unused_parameters"
    assert rows["LayerFreezing"].deepspeed == "no"
    assert "smoothing=0.1" in rows["LabelSmoothing"].defaults
    assert json.loads(json.dumps(t.catalogue().to_dict()))[0]["transform"] in t.TRANSFORMS
    assert "WeightStandardization" in repr(t.catalogue())
    assert t.catalogue()._repr_html_().count("<tr>") == len(t.TRANSFORMS) + 1
