"""Methods and surgeries compared with the numbers of Composer, wherever Composer has a defined result."""

import copy
import functools
import importlib.util
import math
import warnings
from pathlib import Path
from types import ModuleType

import composer_reference
import pytest
import surgery_models as models
import torch
import torch.nn.functional as F
import torchvision
from drivetrain import transforms as t
from drivetrain.transforms.alibi import distance_bias, slopes
from drivetrain.transforms.binary_cross_entropy import binary_cross_entropy
from drivetrain.transforms.common.draws import draw_beta
from drivetrain.transforms.cutmix import area, box_around, paste
from drivetrain.transforms.cutout import inside
from drivetrain.transforms.gyro_dropout import GyroDropoutLayer
from drivetrain.transforms.label_smoothing import smooth_targets
from drivetrain.transforms.selective_backprop import choose
from surgery_models import small
from torch import nn

IMAGES = torch.randn(8, 3, 20, 24, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 4, 3, 3, 2, 1, 0, 2])
HOT = F.one_hot(LABELS, 5).float()


def module(name: str) -> ModuleType:
    return composer_reference.load(f"composer.algorithms.{name}.{name}")


def context(seed: int = 0, **options) -> t.BatchContext:
    return t.BatchContext(generator=torch.Generator().manual_seed(seed), classes=5, **options)


@pytest.mark.parametrize("seed", range(3))
def test_mixup(composer: ModuleType, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = draw_beta(0.2, generator)
    share, partner = min(z, 1 - z), torch.randperm(8, generator=generator)
    images, other, _ = composer.mixup_batch(IMAGES, HOT, mixing=share, indices=partner)
    ours, targets = t.MixUp().batch(IMAGES, LABELS, context(seed))
    torch.testing.assert_close(ours, images)
    torch.testing.assert_close(targets, (1 - share) * HOT + share * other)


def test_cutmix(composer: ModuleType) -> None:
    theirs = module("cutmix")
    for kept in (0.0, 0.1, 0.5, 0.9, 1.0):
        for y, x in ((0, 0), (10, 12), (19, 23), (3, 20)):
            # Composer calls the first image dimension x, and orders the box by corners.
            y1, x1, y2, x2 = theirs._rand_bbox(20, 24, kept, cx=y, cy=x)
            box = box_around(y, x, 20, 24, kept)
            assert box == (y1, y2, x1, x2)
            partner = torch.randperm(8)
            images, _, rest, _ = composer.cutmix_batch(IMAGES, LABELS, bbox=(y1, x1, y2, x2), indices=partner)
            assert torch.equal(paste(IMAGES, partner, box), images)
            assert 1 - area(box) / 480 == pytest.approx(rest)


def test_cutmix_as_a_whole(composer: ModuleType) -> None:
    """The box is read off the images: Composer's with it and with our partners has our targets."""
    generator = torch.Generator().manual_seed(4)
    kept = draw_beta(1.0, generator)
    y, x = (int(torch.randint(n, (), generator=generator)) for n in (20, 24))
    partner = torch.randperm(8, generator=generator)
    top, bottom, left, right = box_around(y, x, 20, 24, kept)
    images, other, rest, _ = composer.cutmix_batch(IMAGES, HOT, bbox=(top, left, bottom, right), indices=partner)
    ours, targets = t.CutMix().batch(IMAGES, LABELS, context(4))
    assert torch.equal(ours, images)
    torch.testing.assert_close(targets, rest * HOT + (1 - rest) * other)


@pytest.mark.parametrize("side", [1, 2, 7, 10, 20])
def test_cutout_squares(side: int) -> None:
    theirs = module("cutout")
    for y, x in ((0, 0), (10, 12), (19, 23), (3, 20)):
        mask = theirs._generate_mask(torch.ones(20, 24), 24, 20, x, y, side)
        assert torch.equal(inside(torch.tensor([[y]]), torch.tensor([[x]]), 20, 24, side)[0], mask == 0)


@pytest.mark.parametrize("shares", [(0.15, 0.15), (0.0, 0.5), (0.3, 0.9)])
def test_colout(composer: ModuleType, shares: tuple[float, float]) -> None:
    torch.manual_seed(3)
    expected = composer.colout_batch(IMAGES, *shares)
    assert torch.equal(t.ColOut(*shares).batch(IMAGES, LABELS, context(3))[0], expected)


def state(steps: int):
    """A real state of Composer's trainer."""
    core, device = (
        composer_reference.load("composer.core"),
        composer_reference.load("composer.devices").DeviceCPU(),
    )
    return core.State(nn.Linear(1, 1), rank_zero_seed=0, run_name="r", device=device, max_duration=f"{steps}ba")


@pytest.mark.parametrize("options", [
    {}, {"initial_scale": 0.6, "delay": 0.2, "finetune": 0.2}, {"size_increment": 7}, {"delay": 0.0, "finetune": 0.0},
])  # fmt: skip
def test_progressive_resizing_schedule(options: dict[str, float]) -> None:
    theirs, timestamp = module("progressive_resizing"), composer_reference.load("composer.core").Timestamp
    algorithm = theirs.ProgressiveResizing(
        **{name + "_fraction" * (name in ("delay", "finetune")): value for name, value in options.items()}
    )
    trainer = state(200)
    for done in range(0, 200, 3):
        trainer.timestamp = timestamp(batch=done)
        trainer.batch = (torch.zeros(1, 1, 224, 224), LABELS[:1])
        algorithm.apply(None, trainer)
        assert t.ProgressiveResizing(**options).size(224, done / 200) == trainer.batch[0].shape[3]


def test_sequence_lengths() -> None:
    theirs, core = module("seq_length_warmup"), composer_reference.load("composer.core")
    options = {"duration": 0.3, "min_seq_length": 8, "max_seq_length": 88, "step_size": 8}
    logger = composer_reference.load("composer.loggers").Logger(trainer := state(1000))
    trainer.set_dataloader([0], "train")
    algorithm = theirs.SeqLengthWarmup(**options)
    algorithm._activated = True  # its rehearsal of the longest batch, for memory, wants a transformers model
    for done in range(0, 1000, 7):
        trainer.timestamp = core.Timestamp(batch=done)
        trainer.batch = {"input_ids": torch.arange(200).view(2, 100)}
        algorithm.apply(core.Event.AFTER_DATALOADER, trainer, logger)
        given = t.BatchContext(generator=torch.Generator(), progress=done / 1000)
        ours, _ = t.SeqLengthWarmup(**options).batch(torch.arange(200).view(2, 100), torch.zeros(2), given)
        assert torch.equal(ours, trainer.batch["input_ids"]), done


@pytest.mark.parametrize("truncate", [True, False])
def test_set_batch_sequence_length(composer: ModuleType, truncate: bool) -> None:
    tokens = torch.arange(60).view(3, 20)
    theirs = composer.set_batch_sequence_length({"input_ids": tokens, "labels": tokens + 1}, 7, truncate)
    method = t.SeqLengthWarmup(min_seq_length=7, max_seq_length=20, truncate=truncate)
    ours = method.batch(tokens, tokens + 1, context())
    assert torch.equal(ours[0], theirs["input_ids"])
    assert torch.equal(ours[1], theirs["labels"])


@pytest.mark.long
def test_selection(composer: ModuleType) -> None:
    """The times are the same; the draws, of another generator, are as often the same images."""
    should = module("selective_backprop").should_selective_backprop
    for interrupt in (0, 2, 3):
        for progress in (0.0, 0.49, 0.5, 0.7, 0.9, 1.0):
            for step in range(7):
                expected = should(progress, step, interrupt=interrupt)
                assert t.SelectiveBackprop(interrupt=interrupt).selects(progress, step) == expected
    losses = torch.tensor([0.3, 2.0, 0.1, 1.0, 0.7, 5.0, 0.2, 4.0])
    generator = torch.Generator().manual_seed(0)
    ours = torch.cat([choose(losses, 0.4, generator) for _ in range(3000)]).bincount(minlength=8) / 3000
    numbers = torch.arange(8)
    loss = lambda logits, targets, reduction="mean": losses  # noqa: ARG005, E731
    theirs = torch.cat([
        composer.select_using_loss(numbers, numbers, lambda x: x, loss, keep=0.4)[0] for _ in range(3000)
    ]).bincount(minlength=8) / 3000  # fmt: skip
    assert ours.sum() == pytest.approx(3)
    assert theirs.sum() == pytest.approx(3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Other weights, and other statistics."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter))
    model(IMAGES)


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours.state_dict()[name], value, msg=name)


def test_ema(composer: ModuleType) -> None:
    model = small()
    averaged = copy.deepcopy(model)
    session = t.EMA(half_life=4, update_every=2).session(model)
    smoothing = module("ema").EMA(half_life="4ba", update_interval="2ba").smoothing
    for step in range(1, 9):
        move(model)
        session.after_step(0.5)
        if step % 2 == 0:
            composer.compute_ema(model, averaged, smoothing=smoothing)
    counter = model[1].num_batches_tracked.item()
    session.finish()
    assert_same_state(model, averaged)
    assert model[1].num_batches_tracked.item() == counter


def test_swa_is_torchs_averaged_model() -> None:
    """What Composer's SWA keeps, and the statistics with it, which Composer leaves at their first values."""
    model = small()
    session, theirs = t.SWA(start=0, end=1).session(model), None
    for _ in range(5):
        move(model)
        session.after_step(0.5)
        theirs = theirs or torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        theirs.update_parameters(model)
    session.finish()
    assert_same_state(model, theirs.module)


@pytest.mark.parametrize("interval", [1, 3])
def test_sam(interval: int) -> None:
    sam, ours, theirs = t.SAM(rho=0.5, interval=interval), small(), small()
    factory = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer, reference = factory(ours.parameters()), factory(theirs.parameters())
    wrapped = module("sam").SAMOptimizer(reference, rho=0.5, interval=interval)

    def gradients(model: nn.Module, opt: torch.optim.Optimizer, **_: object) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(IMAGES), LABELS)
        loss.backward()
        return loss

    for step in range(6):
        gradients(ours, optimizer)
        if sam.applies(step):
            restore = sam.perturb(ours.parameters())
            gradients(ours, optimizer)
            restore()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped.step(functools.partial(gradients, theirs, reference))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("by", "threshold"), [("norm", 0.1), ("value", 0.01), ("adaptive", 0.01)])
def test_gradient_clipping(composer: ModuleType, by: str, threshold: float) -> None:
    ours = small()
    nn.init.normal_(ours[1].bias)  # a bias of 0 is where Composer is wrong
    F.cross_entropy(ours(IMAGES), LABELS).backward()
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        b.grad = a.grad.clone()
    before = [parameter.grad.clone() for parameter in ours.parameters()]
    t.GradientClipping(by, threshold).clip(ours.parameters())
    composer.apply_gradient_clipping(theirs, by, threshold, fsdp_enabled=False)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert any(not torch.equal(p.grad, old) for p, old in zip(ours.parameters(), before, strict=True))


def test_binary_cross_entropy() -> None:
    """Composer's is given the logits of a model whose bias starts where its recipes start it."""
    theirs_with_logits = composer_reference.load("composer.loss").binary_cross_entropy_with_logits
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10, requires_grad=True), torch.randint(10, (8,))
    for targets in (labels, torch.randn(8, 10).softmax(1)):
        ours = binary_cross_entropy(logits, targets)
        theirs = theirs_with_logits(logits - math.log(10), targets)
        torch.testing.assert_close(ours, theirs)
        (gradient,), (expected,) = (torch.autograd.grad(loss, logits) for loss in (ours, theirs))
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.08, 0.5])
def test_smooth_labels(composer: ModuleType, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10), torch.randint(10, (8,))
    for targets in (labels, torch.randn(8, 10).softmax(1)):
        ours, theirs = (f(logits, targets, smoothing) for f in (smooth_targets, composer.smooth_labels))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def plain_name(name: str) -> str:
    for theirs, ours in (
        (".conv.", "."),
        ("se.pool_and_mlp.2", "se.down"),
        ("se.pool_and_mlp.4", "se.up"),
        (".batchnorm.", "."),
        (".parametrizations.weight.original", ".weight"),
        (".module0.", ".down."),
        (".module1.", ".up."),
    ):
        name = name.replace(theirs, ours)
    return name


def assert_same(ours: nn.Module, theirs: nn.Module, count: int = 8) -> None:
    """Outputs, gradients and buffers agree, after their weights have become ours."""
    ours.load_state_dict({plain_name(n): v for n, v in theirs.state_dict().items()}, strict=True)
    x = models.images(count)
    out, reference = ours(x), theirs(x)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    reference.square().sum().backward()
    grads = {plain_name(name): parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-3, msg=name)
    buffers = {plain_name(name): buffer for name, buffer in theirs.named_buffers()}
    torch.testing.assert_close(dict(ours.named_buffers()), buffers, rtol=1e-4, atol=1e-6)


def pair(model: nn.Module, train: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # so that evaluation depends on them
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.train(train), copy.deepcopy(model).train(train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("latent", [8, 0.25])
def test_squeeze_excite(composer: ModuleType, train: bool, latent: float) -> None:
    ours, theirs = pair(models.resnet(), train)
    assert t.SqueezeExcite(latent, 32).apply(ours).changed
    composer.apply_squeeze_excite(theirs, latent_channels=latent, min_channels=32)
    assert_same(ours, theirs)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("count", [4, 6, 7, 9])
def test_ghost_batch_norm(composer: ModuleType, train: bool, count: int) -> None:
    ours, theirs = pair(models.bottlenecks(), train)
    t.GhostBatchNorm(4).apply(ours)
    composer.apply_ghost_batchnorm(theirs, ghost_batch_size=4)
    assert_same(ours, theirs, count)


@pytest.mark.parametrize("factory", [models.resnet, models.convnext])
def test_weight_standardization(composer: ModuleType, factory) -> None:
    ours, theirs = pair(factory(), False)
    t.WeightStandardization().apply(ours)
    composer.apply_weight_standardization(theirs)
    assert_same(ours, theirs)


def test_factorize_splits_the_same_modules_at_the_same_ranks(composer: ModuleType) -> None:
    options = {"min_channels": 16, "latent_channels": 0.25, "min_features": 16, "latent_features": 8}
    # Not torchvision's ViT: Composer factorises its out_proj, whose weight nn.MultiheadAttention reads, and fails.
    for factory in (models.resnet, models.bottlenecks, models.convnext, models.timm_vit):
        ours, theirs = pair(factory(), False)
        assert t.Factorize(**options).apply(ours).changed
        composer.apply_factorization(theirs, **options)
        shapes = {plain_name(name): value.shape for name, value in theirs.state_dict().items()}
        found = {name: value.shape for name, value in ours.state_dict().items()}
        extra = set(shapes) - set(found)
        assert all(name.endswith("up.bias") for name in extra), "a bias for a convolution that had none"
        assert found == {name: shape for name, shape in shapes.items() if name not in extra}
        state = {plain_name(name): value for name, value in theirs.state_dict().items()}
        for name in extra:
            state.pop(name).zero_()
        ours.load_state_dict(state)
        torch.testing.assert_close(ours(models.images()), theirs(models.images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize("distribution", ["linear", "uniform"])
def test_stochastic_depth(composer: ModuleType, method: str, distribution: str) -> None:
    ours, theirs = pair(models.bottlenecks(), False)
    t.StochasticDepth(method, 0.4, distribution).apply(ours)  # type: ignore[arg-type]
    composer.apply_stochastic_depth(theirs, "ResNetBottleneck", method, 0.4, distribution)
    for place in ("4", "5"):
        block, reference = ours.get_submodule(place), theirs.get_submodule(place)
        assert block.drop_branch.p == pytest.approx(float(reference.drop_rate))
        for parameter in (block.bn3.weight, block.bn3.bias):  # the documented change of scale
            parameter.data *= 1 - block.drop_branch.p
    torch.testing.assert_close(ours(models.images()), theirs(models.images()))


def test_stochastic_depth_in_training(composer: ModuleType) -> None:
    """Both give the block with its branch or without, and nothing else."""
    ours, theirs = pair(models.bottlenecks())
    t.StochasticDepth("block", 0.5, "uniform").apply(ours)
    composer.apply_stochastic_depth(theirs, "ResNetBottleneck", "block", 0.5, "uniform")
    block, reference = ours.get_submodule("4"), theirs.get_submodule("4")
    for parameter in (block.bn3.weight, block.bn3.bias):
        parameter.data *= 0.5
    x = torch.rand(4, 16, 8, 8)
    found = [{round(module(x).mean().item(), 4) for _ in range(24)} for module in (block, reference)]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_low_precision_norms_without_autocast(composer: ModuleType) -> None:
    from composer.core import Precision

    ours, theirs = pair(models.vit(), False)
    t.LowPrecisionLayerNorm().apply(ours)
    composer.apply_low_precision_layernorm(theirs, Precision.AMP_BF16)
    assert_same(ours, theirs)
    ours, theirs = pair(models.Mixed(), False)
    t.LowPrecisionGroupNorm().apply(ours)
    composer.apply_low_precision_groupnorm(theirs, Precision.AMP_BF16)
    torch.testing.assert_close(ours(models.images()), theirs(models.images()))


@pytest.mark.usefixtures("composer")
def test_gyro_dropout() -> None:
    from composer.algorithms.gyro_dropout import GyroDropoutLayer as Theirs

    transform = t.GyroDropout(p=0.25, sigma=16, tau=4, total_steps=100)
    model = nn.Sequential(nn.Dropout(0.1))
    transform.apply(model)
    ours = model[0]
    theirs = Theirs(iters_per_epoch=10, max_epoch=10, p=0.25, sigma=16, tau=4)
    x = torch.rand(8, 12)
    reference = theirs(x)
    assert isinstance(ours, GyroDropoutLayer)
    assert ours.hold == theirs.iter_num
    ours(x)
    ours.masks = theirs.selected_masks.bool()
    torch.testing.assert_close(ours(x), reference)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.usefixtures("composer")
def test_alibi_in_one_dimension() -> None:
    """Composer imports this file only with `transformers`, which it does not need."""
    import composer.algorithms.alibi as package

    file = Path(package.__file__).parent / "attention_surgery_functions" / "utils.py"
    spec = importlib.util.spec_from_file_location("composer_alibi_utils", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    for heads in range(1, 17):
        expected = torch.tensor(theirs._get_alibi_head_slopes(heads))
        torch.testing.assert_close(slopes(heads, torch.device("cpu")), expected)
        reference = theirs.register_alibi(nn.Linear(1, 1), heads, 9, causal=False).alibi
        torch.testing.assert_close(distance_bias(heads, (1, 9), 0, torch.zeros(1)), reference)


@pytest.mark.usefixtures("composer")
def test_gated_linear_units() -> None:
    from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput

    model = models.timm_vit().eval()
    t.GatedLinearUnits().apply(model)
    ours = model.get_submodule("blocks.0.mlp")
    nn.init.normal_(ours.value.weight)
    theirs = BERTGatedFFOutput(24, 96, 0.0, nn.GELU(), 1e-5, True, True)
    theirs.layernorm = nn.Identity()
    for name, source in (("gated_layer", ours.fc1), ("non_gated_layer", ours.value), ("wo", ours.fc2)):
        getattr(theirs, name).load_state_dict(source.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(x), theirs(x, torch.zeros(())))


@pytest.mark.parametrize(("start", "level"), [(0.5, 1.0), (0.0, 0.7), (0.3, 0.0)])
def test_layer_freezing(composer: ModuleType, start: float, level: float) -> None:
    ours, theirs = pair(models.resnet())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for progress in (0.0, 0.2, 0.5, 0.61, 0.9, 1.0):
        t.LayerFreezing(start, level).freeze(ours, progress)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            composer.freeze_layers(theirs, optimizer, progress, start, level)
        found, expected = ([n for n, p in m.named_parameters() if not p.requires_grad] for m in (ours, theirs))
        assert found == expected


@pytest.mark.parametrize(("options", "train"), [
    ({}, True),
    ({}, False),
    ({"blur_first": False}, True),
    ({"replace_maxpools": False, "min_channels": 3}, False),
])  # fmt: skip
def test_blurpool(composer: ModuleType, options: dict[str, bool | int], train: bool) -> None:
    torch.manual_seed(0)
    ours = torchvision.models.resnet18(num_classes=5)
    theirs = copy.deepcopy(ours)
    t.BlurPool(**options).apply(ours)  # type: ignore[arg-type]
    composer.apply_blurpool(theirs, **options)
    ours.train(train)
    theirs.train(train)
    x = torch.randn(4, 3, 32, 32)
    out, reference = ours(x), theirs(x)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    out.square().sum().backward()
    reference.square().sum().backward()
    expected = {name.replace(".conv.", "."): parameter for name, parameter in theirs.named_parameters()}
    assert set(expected) == set(dict(ours.named_parameters()))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5, msg=name)
