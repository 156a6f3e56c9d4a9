"""Which modules are sharded as units, for common models. Nothing is computed."""

from collections import Counter

import fsdp_models
import pytest
import timm
import torch
import torchvision
from drivetrain.strategies.common.blocks import LARGE, find_blocks
from torch import nn


def count(model: nn.Module) -> dict[str, int]:
    return dict(Counter(type(block).__name__ for block in find_blocks(model)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", {"BasicBlock": 8}),
        ("resnet50", {"Bottleneck": 16}),
        ("vit_b_16", {"EncoderBlock": 12}),
        ("swin_t", {"SwinTransformerBlock": 12, "PatchMerging": 3}),
        ("convnext_tiny", {"CNBlock": 18, "Sequential": 3}),
        ("vgg16", {"Conv2d": 6, "Linear": 3}),
        ("densenet121", {"_DenseLayer": 58, "_Transition": 3}),
    ],
)
def test_torchvision(name: str, expected: dict[str, int]) -> None:
    with torch.device("meta"):
        assert count(torchvision.models.get_model(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_base_patch16_224", {"Block": 12}),
        ("resnet50d", {"Bottleneck": 16}),
        # A stage holds blocks that are large themselves, in all but the first two stages.
        ("swin_tiny_patch4_window7_224", {"SwinTransformerStage": 4, "SwinTransformerBlock": 8}),
    ],
)
def test_timm(name: str, expected: dict[str, int]) -> None:
    with torch.device("meta"):
        assert count(timm.create_model(name)) == expected


def test_inner_blocks_come_first() -> None:
    with torch.device("meta"):
        found = find_blocks(timm.create_model("swin_tiny_patch4_window7_224"))
    for index, block in enumerate(found):
        assert not set(found[index + 1 :]) & set(block.modules())


def test_blocks_at_the_top_of_a_model_are_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.TransformerEncoderLayer(4, 1, 4)
            self.up = nn.TransformerEncoderLayer(4, 1, 4)
            self.head = nn.Linear(4, 2)

    net = Net()
    assert find_blocks(net) == [net.down, net.up]


def test_a_block_that_shares_a_weight_with_the_rest_is_none() -> None:
    model = fsdp_models.Tied()
    assert find_blocks(model) == list(model.blocks)[1:]


def test_a_single_layer_and_a_plain_stack_have_none() -> None:
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_a_large_layer_counts_only_where_it_is_sure_to_be_called() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(LARGE, 1)

    with torch.device("meta"):
        assert find_blocks(Reads()) == []
        assert count(nn.Sequential(nn.Linear(LARGE, 1), nn.Linear(1, 1))) == {"Linear": 1}
