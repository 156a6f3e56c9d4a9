"""The mathematics of each surgery, and the edge cases in which the published versions fail."""

import copy
import math

import pytest
import surgery_models as models
import timm
import torch
import torch.nn.functional as F
from drivetrain import transforms as t
from drivetrain.common.errors import DataError, PlanError
from drivetrain.transforms.alibi import distance_bias
from drivetrain.transforms.factorize import factorize, multiply
from drivetrain.transforms.weight_standardization import standardize
from torch import nn


def operated(transform: t.Transform, module: nn.Module) -> nn.Module:
    """The module after the surgery, inside a model of its own."""
    model = nn.Sequential(module)
    assert transform.apply(model).changed
    return model


# ---- SqueezeExcite ----


def test_squeeze_excite_is_conv_times_gate() -> None:
    conv = nn.Conv2d(16, 16, 3)
    plain, x = copy.deepcopy(conv), torch.randn(2, 16, 9, 8)
    model = operated(t.SqueezeExcite(4, 16), conv)
    out = plain(x)
    gate = torch.sigmoid(conv.se.up.weight @ torch.relu(conv.se.down.weight @ out.mean((2, 3)).T)).T
    torch.testing.assert_close(model(x), out * gate[:, :, None, None])
    torch.testing.assert_close(conv(x[0]), model(x)[0], msg="without a batch")
    assert conv.se.down.weight.shape == (4, 16)


def test_squeeze_excite_after_factorize_sees_one_convolution() -> None:
    """Composer finds 13 places before Factorize and 6 after it."""
    model = models.resnet()
    t.Factorize(min_channels=16).apply(model)
    report = t.SqueezeExcite(min_channels=16).apply(model)
    assert len(report.changed) == 8
    assert not any(name.endswith(("down", "up")) for name in report.changed)


# ---- GhostBatchNorm ----


@pytest.mark.parametrize(("batch", "ghost", "groups"), [(8, 4, 2), (9, 4, 3), (3, 8, 1), (5, 2, 3)])
def test_ghost_groups_have_statistics_of_their_own(batch: int, ghost: int, groups: int) -> None:
    x = torch.randn(batch, 6, 5, 5) * torch.arange(1, batch + 1)[:, None, None, None]
    model = operated(t.GhostBatchNorm(ghost), nn.BatchNorm2d(6, affine=False))
    expected = [F.batch_norm(group, None, None, training=True) for group in x.tensor_split(groups)]
    torch.testing.assert_close(model(x), torch.cat(expected))
    assert model[0].num_batches_tracked == groups


def test_ghost_groups_differ_by_one_sample() -> None:
    """Composer's last group of 13 samples has one, of which BatchNorm1d raises an error."""
    x, model = torch.randn(13, 6), operated(t.GhostBatchNorm(4), nn.BatchNorm1d(6, affine=False))
    expected = [F.batch_norm(group, None, None, training=True) for group in x.split([4, 3, 3, 3])]
    torch.testing.assert_close(model(x), torch.cat(expected))


def test_ghost_below_its_size_works_in_evaluation_and_training() -> None:
    """Composer's raises for a last, small batch, in evaluation too."""
    bn = nn.BatchNorm1d(6)
    plain = copy.deepcopy(bn)
    model = operated(t.GhostBatchNorm(32), bn)
    x = torch.randn(5, 6)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))
    torch.testing.assert_close(bn.running_var, plain.running_var)


def test_ghost_cumulative_statistics() -> None:
    model, x = operated(t.GhostBatchNorm(4), nn.BatchNorm1d(3, momentum=None)), torch.randn(8, 3)
    model(x)
    torch.testing.assert_close(model[0].running_mean, x.mean(0))


def test_ghost_without_running_statistics() -> None:
    model = operated(t.GhostBatchNorm(2), nn.BatchNorm3d(3, track_running_stats=False))
    x = torch.randn(4, 3, 2, 2, 2)
    torch.testing.assert_close(model.eval()(x), model.train()(x))


def test_ghost_leaves_sync_batch_norm() -> None:
    with pytest.warns(t.NothingChanged, match="SyncBatchNorm computes statistics over all devices"):
        t.GhostBatchNorm().apply(nn.Sequential(nn.SyncBatchNorm(4)))


# ---- WeightStandardization ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_standardized_weights_have_mean_0_and_variance_1(dtype: torch.dtype) -> None:
    out = standardize((torch.randn(7, 4, 3, 3) * 3 + 1).to(dtype, memory_format=torch.channels_last))
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    flat = out.double().flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(7).double(), rtol=0, atol=5e-3)
    torch.testing.assert_close(flat.var(1, correction=0), torch.ones(7).double(), rtol=0, atol=1e-2)
    assert standardize(torch.ones(2, 3, 1).to(dtype)).eq(0).all()


def test_standardization_leaves_the_last_and_the_single_weights() -> None:
    model = models.resnet()
    assert len(t.WeightStandardization(n_last_layers_ignore=3).apply(model).changed) == 6
    pointwise = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv1d(4, 4, 3), nn.Conv3d(4, 4, 3))
    report = t.WeightStandardization().apply(pointwise)
    assert report.changed == ("1", "2")
    assert report.skipped == (("0", "it has one weight per output channel, which would become 0"),)


@pytest.mark.parametrize("blur_first", [True, False])
def test_standardization_keeps_blurpool_and_padding_mode(blur_first: bool) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1, padding_mode="reflect"))
    t.BlurPool(blur_first=blur_first).apply(model)
    reference = copy.deepcopy(model)
    t.WeightStandardization().apply(model)
    x = torch.randn(2, 16, 9, 9)
    reference[0].weight.data = standardize(reference[0].weight.data)
    torch.testing.assert_close(model(x), reference(x))


# ---- Factorize ----


@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (5, 9), (12, 4, 1, 1)])
def test_factors_are_the_best_of_their_rank(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    values = torch.linalg.svdvals(weight.flatten(1))
    for rank in range(1, len(values) + 1):
        down, up = factorize(weight, rank)
        error = (multiply(down, up) - weight).square().sum()
        torch.testing.assert_close(error, values[rank:].square().sum(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(down.norm(), up.norm())


def test_factorize_keeps_a_pretrained_model_where_it_is() -> None:
    """A weight of low rank is reproduced; Composer's factors are random."""
    conv = nn.Conv2d(16, 32, 3, 2, 2, 2, padding_mode="circular")
    conv.weight.data = multiply(torch.randn(4, 16, 3, 3), torch.randn(32, 4, 1, 1))
    linear = nn.Linear(32, 64, bias=False)
    linear.weight.data = torch.randn(64, 4) @ torch.randn(4, 32)
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    x = torch.randn(2, 16, 9, 9)
    expected = model(x)
    weight, bias = conv.weight.detach(), conv.bias
    report = t.Factorize(min_channels=16, min_features=32, latent_channels=4, latent_features=4).apply(model)
    assert report.changed == ("0", "3")
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(conv.weight, weight, rtol=1e-3, atol=1e-3)
    assert conv.bias is bias
    assert linear.bias is None


def test_factorize_leaves_what_would_not_gain_or_learn() -> None:
    shared = nn.Linear(32, 32)
    tied = nn.Linear(32, 32)
    tied.weight = shared.weight
    zero = nn.Linear(32, 32)
    nn.init.zeros_(zero.weight)
    layers = [nn.Linear(32, 32), nn.Conv2d(32, 32, 3, groups=2), shared, tied, zero]
    factorize = t.Factorize(min_channels=32, min_features=32, latent_features=16)
    report = factorize.apply(nn.Sequential(*layers, nn.Conv2d(32, 32, 3)))
    assert report.changed == ("5",)
    reasons = ["saves no multiplications; use at most 15", "2 groups", *["shares its weight"] * 2]
    assert all(part in why for part, (_, why) in zip(reasons, report.skipped[:4], strict=True))
    zeros = t.Factorize(min_features=32, latent_features=4).apply(nn.Sequential(zero, nn.Linear(32, 32)))
    assert zeros.skipped == (("0", "its weight is 0, and factors of 0 get no gradient"),)


@pytest.mark.parametrize("transform", [t.WeightStandardization(), t.Factorize(min_channels=32, latent_channels=4)])
def test_weights_that_are_computed_stay(transform: t.Transform) -> None:
    """A hook sets them before each forward, from a parameter of another name."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(32, 32, 3)), nn.Conv2d(32, 32, 3))
    report = transform.apply(model)
    assert report.changed == ("1",)
    assert report.skipped == (("0", "its weight is computed from another parameter, as by spectral_norm or pruning"),)


def test_factorize_inside_a_layer_that_reads_its_weights() -> None:
    """nn.TransformerEncoderLayer reads linear1.weight in its fast path."""
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    report = t.Factorize(min_features=32, latent_features=8).apply(model)
    assert report.changed == ("linear1", "linear2")
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, model(x.requires_grad_()), rtol=1e-4, atol=1e-5)


# ---- GyroDropout ----


def test_subnetworks_are_few_and_held() -> None:
    torch.manual_seed(0)
    layer = operated(t.GyroDropout(p=0.5, sigma=6, tau=3, total_steps=24), nn.Dropout(0.1))[0]
    assert layer.hold == 12
    steps = torch.stack([layer(torch.ones(7, 32)) for _ in range(48)])
    assert set(steps.unique().tolist()) == {0.0, 2.0}
    for start in range(0, 48, 12):
        assert (steps[start : start + 12] == steps[start]).all()
        assert len(steps[start].unique(dim=0)) <= 3
    assert not torch.equal(steps[0], steps[12])
    assert 3 < len(steps.flatten(0, 1).unique(dim=0)) <= 6
    assert steps.mean().item() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("shape", [(16,), (9, 16), (16, 4, 5)])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_any_shape_and_batch(shape: tuple[int, ...], batch: int) -> None:
    """Composer's fails for a batch that tau does not divide and for tokens."""
    layer = operated(t.GyroDropout(tau=4, total_steps=9999), nn.Dropout(0.1))[0]
    kept = layer(torch.ones(batch, *shape)) > 0
    feature_axis = 1 if len(shape) == 3 else -1
    lines = kept.movedim(feature_axis, -1).flatten(1, -2) if len(shape) > 1 else kept[:, None]
    assert (lines == lines[:, :1]).all(), "the same features at every place"
    assert torch.equal(layer(torch.ones(batch, *shape)) > 0, kept)


def test_short_runs_and_idle_layers() -> None:
    assert operated(t.GyroDropout(total_steps=10), nn.Dropout(0.1))[0].hold == 1
    report = t.GyroDropout().apply(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.2)))
    assert report.skipped == (("0", "p=0 has no effect"),)


def test_the_length_of_the_training_is_given_told_or_asked_for() -> None:
    given, open_ended = t.GyroDropout(sigma=4, tau=2, total_steps=40), t.GyroDropout(sigma=4, tau=2)
    model = operated(open_ended, nn.Dropout(0.1))
    assert torch.equal(model.eval()(torch.ones(4, 9)), torch.ones(4, 9))
    with pytest.raises(PlanError, match=r"length of the training.* total_steps=…, or call its begin"):
        model.train()(torch.ones(4, 9))
    open_ended.begin(model, 100)
    assert model[0].hold == 50
    model = operated(given, nn.Dropout(0.1))
    given.begin(model, 100)
    assert model[0].hold == 20


def test_ranks_with_one_seed_have_the_same_subnetworks() -> None:
    def rank() -> torch.Tensor:
        torch.manual_seed(5)
        return operated(t.GyroDropout(total_steps=9999), nn.Dropout(0.1))(torch.ones(4, 9))

    assert torch.equal(rank(), rank())


def test_gyro_dropout_leaves_the_dropout_of_attention_weights_alone() -> None:
    """Fused attention reads its p, and does not call it."""
    model = models.timm_model("test_vit", attn_drop_rate=0.1, proj_drop_rate=0.2)
    report = t.GyroDropout(total_steps=10).apply(model)
    assert model.blocks[0].attn.attn_drop.p == 0.1
    assert ("blocks.0.attn.attn_drop", "it drops attention weights, which have no features") in report.skipped
    assert "blocks.0.attn.proj_drop" in report.changed


# ---- LowPrecisionLayerNorm and LowPrecisionGroupNorm ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_under_autocast(dtype: torch.dtype) -> None:
    layer, group = nn.LayerNorm(8), nn.GroupNorm(2, 8, affine=False)
    nn.init.normal_(layer.weight)
    x = torch.randn(3, 8)
    expected = F.layer_norm(x.to(dtype), (8,), layer.weight.to(dtype), layer.bias.to(dtype), layer.eps)
    t.LowPrecisionLayerNorm().apply(layer)
    t.LowPrecisionGroupNorm().apply(group)
    with torch.autocast("cpu", dtype):
        assert torch.equal(layer(x), expected)
        assert torch.equal(group(x), F.group_norm(x, 2))  # slower in half precision on a CPU
    assert layer(x).dtype == group(x).dtype == torch.float32
    layer(x).sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_on_a_gpu(dtype: torch.dtype) -> None:
    model = models.timm_convnext().cuda()
    plain = copy.deepcopy(model)
    t.LowPrecisionLayerNorm().apply(model)
    x = models.images().cuda()
    with torch.autocast("cuda", dtype):
        assert model.stem(x).dtype == dtype
        torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    model(x).sum().backward()
    group = nn.GroupNorm(2, 8).cuda()
    t.LowPrecisionGroupNorm().apply(group)
    with torch.autocast("cuda", dtype):
        assert group(torch.randn(3, 8, 4, 4, device="cuda")).dtype == dtype


# ---- ALiBi ----


def test_distance_bias() -> None:
    bias = distance_bias(4, (3, 5), 2, torch.zeros(1))
    assert bias.shape == (1, 4, 17, 17)
    assert bias[0, :, :2].eq(0).all()
    assert bias[0, :, :, :2].eq(0).all()
    places = [(row, column) for row in range(3) for column in range(5)]
    for i, (row, column) in enumerate(places):
        for j, (other_row, other_column) in enumerate(places):
            far = math.hypot(row - other_row, column - other_column)
            assert bias[0, 1, 2 + i, 2 + j].item() == pytest.approx(-far * 2**-4, abs=1e-6)


def test_both_libraries_attend_alike() -> None:
    one, other = models.vit().eval(), models.timm_vit().eval()
    for model in (one, other):
        assert len(t.ALiBi().apply(model).changed) == 2
    theirs = one.get_submodule("encoder.layers.encoder_layer_0.self_attention")
    ours = other.get_submodule("blocks.0.attn")
    ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
    ours.proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 17, 24)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])
    ours.fused_attn = False
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert all(model(models.images()).isfinite().all() for model in (one, other))


def test_position_embeddings_are_gone_and_the_image_may_grow() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3,
        num_classes=5, dynamic_img_size=True,
    ).eval()  # fmt: skip
    assert t.ALiBi().apply(model).notes == ("pos_embed is set to 0 and frozen.",)
    assert model.pos_embed.eq(0).all()
    assert not model.pos_embed.requires_grad
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()
    # As many patches as 32×32 pixels have, and as 64×64 have, in another place each.
    for height, width, taken in ((16, 64, "4, 4"), (32, 128, "8, 8")):
        with pytest.raises(DataError, match=rf"{height}×{width} pixels have as many patches as a grid of \({taken}\)"):
            model(torch.randn(1, 3, height, width))
    with pytest.raises(DataError, match="25 tokens are not 1 plus a"):
        model(torch.randn(1, 3, 32, 48))


def test_attention_elsewhere_is_left_alone() -> None:
    with pytest.warns(t.NothingChanged, match="not inside a ViT with a known, complete grid of patches"):
        t.ALiBi().apply(nn.TransformerEncoderLayer(8, 2, batch_first=True))


# ---- GatedLinearUnits ----


def test_gating_starts_from_what_the_model_computed() -> None:
    for factory in (models.vit, models.timm_vit, models.timm_convnext):
        model = factory().eval()
        plain = copy.deepcopy(model)
        t.GatedLinearUnits().apply(model)
        torch.testing.assert_close(model(models.images()), plain(models.images()))
        model(models.images()).square().sum().backward()
        values = [parameter for name, parameter in model.named_parameters() if "value.weight" in name]
        assert values
        assert all(parameter.grad.abs().sum() > 0 for parameter in values)


def test_gating_after_factorize() -> None:
    model = models.timm_vit()
    t.Factorize(min_features=16, latent_features=4).apply(model)
    assert len(t.GatedLinearUnits().apply(model).changed) == 2
    assert type(model.blocks[0].mlp.value) is nn.Linear
    conv = timm.create_model("test_convnext", num_classes=5, conv_mlp=True)
    with pytest.warns(t.NothingChanged, match="its first layer is a Conv2d"):
        t.GatedLinearUnits().apply(conv)
