"""Checks of numbers, booleans and sequences of numbers, shared by loaders and stages."""

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Checkpoints, PlanError
from drivetrain.common.checks import (
    are_numbers,
    check_flag,
    check_number,
    check_whole,
    is_flag,
    is_number,
    is_whole,
    make_plain,
    plain,
)
from drivetrain.common.errors import DataError, StrategyError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.loaders.options import LoaderOptions
from drivetrain.strategies.options import Options
from loader_pictures import make, raw_beton, raw_pictures
from pipeline_data import Toy

NEITHER: list[Any] = [True, False, None, "1", "no", [1], (), {}, 1 + 0j, b"1", np.array([1, 2]), object()]
NOT_FINITE: list[Any] = [math.inf, -math.inf, math.nan, 10**400, -(10**400)]


@pytest.mark.parametrize("value", NEITHER, ids=[repr(value)[:20] for value in NEITHER])
def test_what_is_not_a_number(value: Any) -> None:
    assert not is_whole(value)
    assert not is_number(value)
    assert not are_numbers((value, 1), 2)
    for check in (check_whole, check_number):
        with pytest.raises(DataError, match=r"^it=.* must be an? "):
            check("it", value, DataError)


@pytest.mark.parametrize("value", NOT_FINITE, ids=["inf", "-inf", "nan", "large", "-large"])
def test_what_is_not_finite_is_not_a_number(value: Any) -> None:
    assert not is_number(value)
    with pytest.raises(PlanError, match=r"must be a finite number\.$"):
        check_number("it", value, PlanError)


def test_intervals_and_ranges() -> None:
    assert [is_number(x, "(0, 1]") for x in (0, 1e-9, 1, 1.0001)] == [False, True, True, False]
    assert [is_number(x, "[0, 1)") for x in (0, 0.5, 1)] == [True, True, False]
    assert [is_whole(x, 1, 3) for x in (0, 1, 3, 4, 2.0)] == [False, True, True, False, False]
    assert are_numbers([0.5, 1], 2, "(0, 1]")
    assert not are_numbers([0.5, 1], 3)
    assert not are_numbers([0.5, math.nan], 2)
    assert not are_numbers("12", 2)
    assert [is_flag(x) for x in (True, False, 0, 1, "no", None)] == [True, True, False, False, False, False]


def test_messages_name_the_value_and_what_is_allowed() -> None:
    for check, value, bounds, also, words in (
        (check_whole, 0, (1,), ", or None", r"^it=0 must be a positive integer, or None\.$"),
        (check_whole, 101, (1, 100), "", r"^it=101 must be an integer from 1 to 100\.$"),
        (check_whole, -1, (0,), "", r"^it=-1 must be an integer, 0 or more\.$"),
        (check_number, 0, ("(0, inf)",), "", r"^it=0 must be a finite number above 0\.$"),
    ):
        with pytest.raises(StrategyError, match=words):
            check("it", value, StrategyError, *bounds, also=also)
    with pytest.raises(DataError, match=r"^flag='no' must be True or False\.$"):
        check_flag("flag", "no", DataError)


def test_other_libraries_numbers_become_pythons() -> None:
    @dataclass(frozen=True)
    class Owner:
        count: Any
        pair: Any
        flag: Any
        name: str = "x"

    owner = Owner(np.int32(3), (np.float32(0.5), 1), np.True_)
    make_plain(owner)
    assert (owner.count, owner.pair, owner.flag, owner.name) == (3, (0.5, 1), True, "x")
    assert json.dumps([owner.count, owner.pair, owner.flag]) == "[3, [0.5, 1], true]"
    assert plain(Fraction(1, 4)) == 0.25
    assert plain([np.int8(1), [np.uint64(2**63)]]) == [1, [2**63]]
    assert plain(True) is True


# The loaders


LOADING: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": True}, "batch_size=True must be a positive integer"),
    ({"image_size": True}, "image_size=True must be a positive integer"),
    ({"seed": False}, "seed=False must be an integer"),
    ({"verify": "no"}, "verify='no' must be True or False"),
    ({"verify": 0}, "verify=0 must be True or False"),
    ({"train": "yes"}, "train='yes' must be True or False"),
    ({"drop_last": 1}, "drop_last=1 must be True"),
    ({"pad_last": "false"}, "pad_last='false' must be True or False"),
    ({"flip": 1}, "flip=1 must be True, False or 'alternating'"),
    ({"std": (math.inf, 1, 1)}, "std=.* must be 3 finite numbers"),
    ({"mean": (math.nan, 0, 0)}, "mean=.* must be 3 finite numbers"),
    ({"mean": (True, 0, 0)}, "mean=.* must be 3 finite numbers"),
    ({"mean": (10**400, 0, 0)}, "mean=.* must be 3 finite numbers"),
    ({"scale": (0.1, math.nan)}, "scale=.* must be 2 finite numbers"),
    ({"ratio": (1, math.inf)}, "ratio=.* must be 2 finite numbers"),
    ({"color_jitter": (math.inf, 0, 0)}, "color_jitter=.* must be 3 finite numbers"),
    ({"eval_ratio": True}, "eval_ratio=True"),
    ({"eval_ratio": math.nan}, "eval_ratio=nan"),
    ({"workers": True}, "workers=True must be a"),
    ({"batches_ahead": True}, "batches_ahead=True must be a positive integer"),
    ({"order": ["random"]}, "order="),
    ({"policy": {"name": "aug_mix", "alpha": math.nan}}, "alpha.*=nan must be a number from"),
    ({"policy": {"name": "rand_augment", "magnitude": True}}, "magnitude.*=True must be an integer"),
]


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("checks") / "raws.beton", 6)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
@pytest.mark.parametrize(("options", "words"), LOADING, ids=[str(options)[:40] for options, _ in LOADING])
def test_both_loaders_refuse(raws: Path, kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        kind(raws, **{"batch_size": 2, "image_size": 12, **options})


def test_settings_hold_pythons_numbers() -> None:
    mean = (np.float32(0.5), 0, 1)
    settings = LoaderOptions(batch_size=np.int64(4), image_size=np.int32(8), mean=mean, verify=np.False_)  # type: ignore[arg-type]
    kept = settings.batch_size, settings.image_size, settings.mean[0], settings.verify
    assert [*map(type, kept)] == [int, int, float, bool]


def test_epochs_of_a_loader(raws: Path) -> None:
    with make(TorchLoader, raws) as loader:
        for epoch in (True, -1, 2**63, 1.0, "1", None):
            with pytest.raises(DataError, match="epoch="):
                loader.set_epoch(epoch)  # type: ignore[arg-type]
        loader.set_epoch(np.int64(3))  # type: ignore[arg-type]
        assert type(loader.state_dict()["epoch"]) is int


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_the_number_of_classes_of_vectors_and_targets(tmp_path: Path, kind: Any) -> None:
    images, labels = raw_pictures(6)
    for given, count in ((np.zeros((6, 5), dtype=np.float32), 5), (labels + 0.5, 1), (labels, 6)):
        path = tmp_path / f"{count}.beton"
        convert((images, given), path, progress=False)
        with make(kind, path) as loader:
            assert (loader.num_classes, loader.beton.files[0].num_classes) == (count, count)


# The stages


def test_options_of_a_step() -> None:
    for norm in (math.inf, math.nan, 0, -1, True, "1"):
        with pytest.raises(StrategyError, match=r"clip_norm=.* above 0, or None for no clipping"):
            Options(clip_norm=norm)  # type: ignore[arg-type]
    options = Options(clip_norm=np.float32(0.5), accumulate=np.int64(2))  # type: ignore[arg-type]
    assert (type(options.clip_norm), type(options.accumulate)) == (float, int)


def test_stages_of_a_pipeline(toy: Toy) -> None:
    pipeline = toy.pipeline()
    loaded = pipeline.load(toy.train, toy.val, batch_size=np.int64(16), image_size=np.int32(16))  # type: ignore[arg-type]
    assert (type(loaded.data.batch_size), type(loaded.data.image_size)) == (int, int)
    for values, words in (
        ({"keep": True}, "keep=True must be a positive integer"),
        ({"keep_best": "no"}, "keep_best='no' must be True or False"),
        ({"background": 0}, "background=0 must be True or False"),
        ({"every_steps": 1.5}, "every_steps=1.5 must be a positive integer, or None"),
    ):
        with pytest.raises(PlanError, match=words):
            Checkpoints(**values)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="devices=True"):
        pipeline.distribute("ddp", devices=True)
    with pytest.raises(DataError, match="verify='no'"):
        pipeline.load(toy.train, toy.val, batch_size=16, image_size=16, verify="no")


def test_torch_tensors_are_not_numbers() -> None:
    with pytest.raises(DataError, match="batch_size="):
        LoaderOptions(batch_size=torch.tensor(4), image_size=8)  # type: ignore[arg-type]
