"""`Pipeline.summary` and `drivetrain plan --summary`, against plain computations."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call
from drivetrain import Contrastive, Pipeline
from drivetrain.transforms import BlurPool
from pipeline_data import CLASSES, Toy, batch_norm_model
from torch import nn


def half_frozen() -> nn.Module:
    model = batch_norm_model()
    model[:2].requires_grad_(False)
    return model


def kept(model: nn.Module, images: torch.Tensor) -> int:
    """Bytes that a real forward keeps for the backward, each storage once."""
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in storages.values())


def test_figures_and_nothing_changed() -> None:
    model, images = half_frozen(), torch.randn(16, 3, 16, 16)
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    start = Pipeline(model).load("absent.beton", batch_size=32, image_size=16).distribute("single", accumulate=2)
    summary = start.summary()
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert [row.name for row in summary.modules] == ["0", "1", "5"], "those with anything"
    assert (summary.parameters, summary.trained) == (216 + 16 + 516, 516)
    assert [row.flops for row in summary.modules] == [2 * 216 * 256, 0, 2 * 128 * CLASSES]
    assert summary.flops == 2 * 216 * 256 + 2 * 512
    assert (summary.microbatch, summary.image_size, summary.precision) == (16, (16, 16), "fp32")
    model.train()
    model[1].eval()
    assert summary.activation_bytes == kept(model, images)
    half = start.distribute("single", accumulate=2, precision="bf16").summary().activation_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert half == kept(model, images)
    text = str(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert "Frozen: 0, 1 (1 BatchNorm layer in evaluation mode)." in text
    assert "<td style='text-align:left" in summary._repr_html_()
    excited = start.transform(BlurPool(replace_convs=False)).summary()
    assert excited.parameters == summary.parameters


class Refuses(nn.Linear):
    def forward(self, images: torch.Tensor, prompt: Any) -> torch.Tensor: ...


class Looks(nn.Linear):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1)[:, :3]) * (2 if images.sum() > 0 else 1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Refuses, "missing 1 required .*: 'prompt'"), (Looks, "depends on the values of tensors")],
)
def test_a_model_that_refuses_has_parameters(make: Callable[..., nn.Module], reason: str) -> None:
    pipeline = Pipeline(make, in_features=3, out_features=4)
    summary = pipeline.load("a.beton", batch_size=4, image_size=8).summary()
    assert re.search(reason, summary.unknown)
    assert (summary.parameters, summary.flops, summary.activation_bytes) == (16, None, None)
    assert "not known" in " ".join(str(summary).split())


def test_lazy_layers_and_views() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(4))
    loaded = Pipeline(model).load("a.beton", batch_size=4, image_size=4)
    assert [row.parameters for row in loaded.summary().modules] == [56, 36]


def test_a_microbatch_is_what_a_rank_computes_at_a_time() -> None:
    """Of a batch over all ranks; each view of an image is one."""
    start = Pipeline(batch_norm_model).load("absent.beton", batch_size=32, image_size=16)
    assert start.distribute("ddp", devices=2, device="cpu", accumulate=2).summary().microbatch == 8
    views = start.load("absent.beton", batch_size=32, image_size=16, views=3).task(Contrastive())
    assert views.distribute("ddp", devices=2, device="cpu").summary().microbatch == 48


def test_the_command(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    given = {"model": "cifar_resnet", "train": toy.train, "batch_size": 16, "image_size": 16}
    path.write_text(json.dumps(given))
    end = call("plan", str(path), "--summary")
    assert (end.code, end.err) == (0, "")
    assert end.out.startswith("Plan\n")
    assert "total" in end.out
    assert "\nModel\n" not in call("plan", str(path)).out
