"""Overlapping overrides: a dict and a value in it are both applied, in any order; setting a value twice is an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from drivetrain import Pipeline, RecipeError
from drivetrain.pipeline.recipes.presets import completed, parse_overrides


def either_way(*pairs: str) -> list[dict[str, Any]]:
    return [parse_overrides(list(order)) for order in itertools.permutations(pairs)]


@pytest.mark.parametrize(
    "overrides", either_way("optimizer.lr=0.5", 'optimizer={"name": "adamw"}', "optimizer.eps=1e-7")
)
def test_a_dict_and_values_in_it_are_both_there(overrides: dict[str, Any]) -> None:
    pipeline = Pipeline.from_recipe("baseline", **overrides)
    assert pipeline.optimization.optimizer == "adamw"
    assert pipeline.optimization.options == {"lr": 0.5, "eps": 1e-7}  # and nothing of the recipe's sgd


@pytest.mark.parametrize(
    "overrides", either_way("optimizer.lr=0.5", 'optimizer={"name": "adamw", "lr": 0.1}', "epochs=3")
)
def test_the_same_value_twice_is_an_error(overrides: dict[str, Any]) -> None:
    message = r"baseline: optimizer\.lr=0\.5 and optimizer=\{.*\} both set its lr\. Leave one of the two out"
    with pytest.raises(RecipeError, match=message):
        Pipeline.from_recipe("baseline", **overrides)


def test_so_it_is_within_a_recipe() -> None:
    values = {"model": "cifar_resnet", "train": "a.beton", "batch_size": 8, "image_size": 8}
    optimizer: dict[str, Any] = {"name": "sgd", "lr": 0.1}
    assert completed({"optimizer.momentum": 0.5, **values, "optimizer": optimizer}).values["optimizer"] == {
        **optimizer, "momentum": 0.5
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"optimizer\.lr=0\.3 and optimizer="):
        completed({"optimizer.lr": 0.3, **values, "optimizer": optimizer})
    # An override replaces what the recipe has.
    full = completed({**values, "optimizer": optimizer}, {"optimizer.lr": 0.3}).values
    assert full["optimizer"]["lr"] == 0.3


def test_a_value_of_the_command_line_has_no_key_twice() -> None:
    for text in ('{"name": "sgd", "lr": 0.1, "lr": 0.2}', '[{"name": "MixUp", "lr": 1, "lr": 2}]'):
        with pytest.raises(RecipeError, match=r"optimizer=.*the key 'lr' appears twice"):
            parse_overrides([f"optimizer={text}"])
    with pytest.raises(RecipeError, match="epochs= is given twice"):
        parse_overrides(["epochs=1", "seed=2", "epochs=1"])
