"""The policies of augmentation as transforms: alone, in the plan, and in training with either loader."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import PlanError
from drivetrain import transforms as t
from drivetrain.loaders.decode.policies import complete
from ledgers import in_process
from PIL import Image
from pipeline_data import Toy
from torchvision.transforms import v2

POLICIES = [t.RandAugment, t.TrivialAugment, t.AugMix, t.ThreeAugment]


@pytest.mark.parametrize("cls", POLICIES)
def test_the_loaders_take_what_it_says_with_the_same_defaults(cls: Any) -> None:
    policy = cls().loader_settings["policy"]
    name, options = complete({"name": policy["name"]})
    assert policy == {"name": name, **options}
    assert [field.name for field in dataclasses.fields(cls)] == list(options)


@pytest.mark.parametrize(
    ("transform", "theirs"),
    [
        (t.RandAugment(3, 12, 21), v2.RandAugment(num_ops=3, magnitude=12, num_magnitude_bins=21)),
        (t.TrivialAugment(11), v2.TrivialAugmentWide(num_magnitude_bins=11)),
        (t.AugMix(5, 2, 4, 0.5), v2.AugMix(severity=5, mixture_width=2, chain_depth=4, alpha=0.5)),
    ],
    ids=["RandAugment", "TrivialAugment", "AugMix"],
)
def test_alone_it_is_torchvisions(transform: Any, theirs: Any) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    for seed in range(20):
        torch.manual_seed(seed)
        found = transform.image(Image.fromarray(noise))
        torch.manual_seed(seed)
        assert np.array_equal(np.asarray(found), np.asarray(theirs(Image.fromarray(noise))))


def test_it_stands_in_the_plan_after_loading(toy: Toy) -> None:
    every = [t.LabelSmoothing(), t.BlurPool(), t.RandAugment(), t.ChannelsLast()]
    steps = toy.pipeline().transform(*every).plan().steps
    names = [step.what.split("(")[0].split()[0] for step in steps][:5]
    assert names == ["load", "RandAugment", "build", "BlurPool", "ChannelsLast"]
    assert "evaluation uses the images unchanged" in steps[1].why


def test_two_policies_are_refused(toy: Toy) -> None:
    both = "both set the loader's policy"
    with pytest.raises(PlanError, match=rf"RandAugment.* and AugMix.* {both}.* Leave one"):
        toy.pipeline().transform(t.RandAugment(), t.AugMix()).plan()
    loaded = toy.pipeline(policy={"name": "trivial_augment"})
    loaded.plan()
    with pytest.raises(PlanError, match=rf"\.load\(policy=…\) and TrivialAugment.* {both}"):
        loaded.transform(t.TrivialAugment()).plan()
    with pytest.raises(PlanError, match=r"TrivialAugment appears 2 times"):
        toy.pipeline().transform(t.TrivialAugment(), t.TrivialAugment(9))


LOADERS = pytest.mark.parametrize("make", [Toy.pipeline, in_process], ids=["ffcv", "torch"])


@LOADERS
@pytest.mark.parametrize("transform", [cls() for cls in POLICIES], ids=lambda t: type(t).__name__)
def test_training_images_are_changed_and_evaluation_images_are_not(toy: Toy, make: Any, transform: t.Transform) -> None:
    pipeline = make(toy)
    with pipeline.build() as plain, pipeline.transform(transform).build() as augmented:
        assert augmented.reports == ()
        assert not torch.equal(next(iter(plain.train))[0], next(iter(augmented.train))[0])
        for one, other in zip(plain.val, augmented.val, strict=True):
            assert torch.equal(one[0], other[0])
