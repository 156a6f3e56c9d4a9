"""PatchDropout: the paper's draw, on the models of torchvision, timm and transformers, and exact after a resume."""

import copy
from pathlib import Path

import hf_folders
import pytest
import surgery_models as models
import torch
from drivetrain import PlanError
from drivetrain.pipeline import Checkpoints
from drivetrain.transforms import ALiBi, GyroDropout, NothingChanged, PatchDropout
from pipeline_data import SIDE, Toy, numbers
from torch import Tensor, nn
from torchvision.models import VisionTransformer


def reference(vit: VisionTransformer, images: Tensor, keep: float, order: Tensor) -> Tensor:
    """The paper, one image at a time: positions, the first K patches of a random order, blocks."""
    logits = []
    for image, ranks in zip(images, order, strict=True):
        patches = vit.conv_proj(image[None]).flatten(2).transpose(1, 2)
        tokens = torch.cat([vit.class_token, patches], 1) + vit.encoder.pos_embedding
        kept = sorted(ranks.tolist()[: int(keep * patches.shape[1])])
        tokens = torch.stack([tokens[0, 0], *(tokens[0, 1 + number] for number in kept)])[None]
        logits.append(vit.heads(vit.encoder.ln(vit.encoder.layers(tokens))[:, 0]))
    return torch.cat(logits)


@pytest.mark.parametrize("keep", [0.3, 0.5, 1.0])
def test_outputs_and_gradients_are_those_of_the_papers_formula(keep: float) -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5)
    nn.init.normal_(vit.heads.head.weight)
    plain, images = copy.deepcopy(vit.double()), models.images(6).double()
    assert PatchDropout(keep).apply(vit).changed == ("encoder.dropout",)
    torch.manual_seed(1)
    order = torch.randn(6, 16).argsort(1)
    torch.manual_seed(1)
    outs = vit(images), reference(plain, images, keep, order)
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(vit.get_parameter(name).grad, parameter.grad)
    torch.testing.assert_close(vit.eval()(images), plain.eval()(images), rtol=0, atol=0)


def test_a_whole_number_of_patches_is_not_rounded_down() -> None:
    """In binary, 0.29 of 100 patches are slightly less than 29, which timm keeps, too."""
    vit = VisionTransformer(20, 2, 1, 3, 24, 48, num_classes=5)
    PatchDropout(0.29).apply(vit)
    assert vit.encoder.dropout(torch.zeros(2, 1 + 100, 24)).shape == (2, 1 + 29, 24)


def test_timms_models_compute_as_timms_own_option() -> None:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    for registers in (0, 2):
        name, more = "vit_tiny_patch16_224", options | {"reg_tokens": registers}
        theirs, ours = models.timm_model(name, patch_drop_rate=0.25, **more), models.timm_model(name, **more)
        ours.load_state_dict(theirs.state_dict())
        assert PatchDropout(0.75).apply(ours).changed == ("patch_drop",)
        outs = []
        for model in (ours, theirs):
            torch.manual_seed(1)
            outs.append(model(models.images()))
        torch.testing.assert_close(*outs, rtol=0, atol=0)
        with pytest.warns(NothingChanged, match="PatchDropout may drop patches already"):
            PatchDropout().apply(theirs)
    distilled = models.timm_model("deit_tiny_distilled_patch16_224", **options)
    PatchDropout().apply(distilled)
    assert distilled.patch_drop.prefix == 2, "timm's own may drop the distillation token"


@pytest.mark.long
def test_models_of_transformers_keep_their_prefix() -> None:
    import transformers

    for kind, prefix in (("ViT", 1), ("DeiT", 2)):
        config = getattr(transformers, f"{kind}Config")(**hf_folders.config("vit").to_dict())
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        (name,) = PatchDropout(0.5).apply(model).changed
        layer = model.get_submodule(name)
        assert (layer.prefix, layer.p) == (prefix, config.hidden_dropout_prob)
        seen: list[Tensor] = []
        layer.register_forward_hook(lambda _, inputs, out, seen=seen: seen.extend((inputs[0], out)))
        assert model.train()(torch.randn(3, 3, 16, 16)).logits.isfinite().all()
        assert seen[1].shape[1] == prefix + 8
        assert torch.equal(seen[0][:, :prefix], seen[1][:, :prefix])


def test_every_patch_is_drawn_equally_often_and_never_twice() -> None:
    torch.manual_seed(0)
    vit = models.timm_model("vit_tiny_patch16_224", embed_dim=24, depth=1, num_heads=3, reg_tokens=1)
    PatchDropout(0.5).apply(vit)
    layer, counts = vit.patch_drop, torch.zeros(12)
    tokens = torch.arange(12.0).expand(400, 12)[:, :, None]
    for row in layer(tokens)[:, :, 0].int():
        assert row[:2].tolist() == [0, 1]
        assert len({*row.tolist()}) == 7
        counts[row] += 1
    assert (counts[2:] / 400 - 0.5).abs().max() < 0.1
    assert torch.equal(layer.eval()(tokens), tokens)
    layer.train().keep = 0.01
    assert layer(tokens).shape[1] == 3, "at least one patch stays"


def small_vit() -> nn.Module:
    return VisionTransformer(SIDE, 4, 2, 2, 16, 32, dropout=0.1, num_classes=4)


@pytest.mark.long
def test_a_resumed_run_draws_the_same(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(small_vit).transform(PatchDropout(0.25))
    saved = Checkpoints(every_steps=3, keep=100)
    whole = pipeline.fit(epochs=2, progress=False, out=tmp_path, checkpoints=saved)
    (place,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.name.endswith(f"{3:08}"))
    assert numbers(pipeline.fit(epochs=2, progress=False, resume=place)) == numbers(whole)


def test_with_alibi_it_is_refused(toy: Toy) -> None:
    """A quarter of the patches would be a square grid, whose distances are wrong."""
    for order in ((ALiBi(), PatchDropout()), (PatchDropout(), ALiBi())):
        with pytest.raises(PlanError, match=r"PatchDropout does not work with ALiBi.*Leave one of the two out"):
            toy.pipeline(small_vit).transform(*order).plan()
    for first, second in ((ALiBi(), PatchDropout()), (PatchDropout(), ALiBi())):
        for factory in (models.vit, models.timm_vit):
            model = factory()
            first.apply(model)
            with pytest.warns(NothingChanged, match="grid of patches"):
                second.apply(model)


def test_gyro_dropout_leaves_it_its_place_whichever_is_given_first(toy: Toy) -> None:
    """Both take the dropout before the first block, and GyroDropout also those in the blocks."""
    for order in ((GyroDropout(), PatchDropout()), (PatchDropout(), GyroDropout())):
        with toy.pipeline(small_vit).transform(*order).build() as built:
            changed = {report.transform: report.changed for report in built.reports}
        assert changed["PatchDropout"] == ("encoder.dropout",), order
        assert changed["GyroDropout"], order
        assert "encoder.dropout" not in changed["GyroDropout"], order
