"""RandAugment, TrivialAugment, AugMix and ThreeAugment in both loaders: each operation, and the distribution of the
draws, compared with torchvision's and Pillow's."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.loaders.decode.draws import GAUSSIAN_BLUR, NAMES, Drawn, draw_policy, magnitudes, sample_keys
from drivetrain.loaders.decode.policies import POLICIES, torchvision_policy
from loader_pictures import load, picture
from native_pixels import load_pictures
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

SIDE = 24
LOADERS = [FFCVLoader, TorchLoader]
EACH = [{"name": name} for name in POLICIES]
GEOMETRY = NAMES[1:6]
NONE = np.empty((1, 0))


def torchvisions(image: Any, name: str, magnitude: float, interpolation: InterpolationMode) -> Any:
    """What `v2.RandAugment` and its kin do for an operation, by torchvision's public functions."""
    how: dict[str, Any] = {"interpolation": interpolation}
    still = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    slope = math.degrees(math.atan(magnitude))
    functions = {
        "Identity": lambda: image,
        "ShearX": lambda: F.affine(image, **still | how | {"shear": [slope, 0.0], "center": [0, 0]}),
        "ShearY": lambda: F.affine(image, **still | how | {"shear": [0.0, slope], "center": [0, 0]}),
        "TranslateX": lambda: F.affine(image, **still | how | {"translate": [int(magnitude), 0]}),
        "TranslateY": lambda: F.affine(image, **still | how | {"translate": [0, int(magnitude)]}),
        "Rotate": lambda: F.rotate(image, magnitude, **how),
        "Brightness": lambda: F.adjust_brightness(image, 1.0 + magnitude),
        "Color": lambda: F.adjust_saturation(image, 1.0 + magnitude),
        "Contrast": lambda: F.adjust_contrast(image, 1.0 + magnitude),
        "Sharpness": lambda: F.adjust_sharpness(image, 1.0 + magnitude),
        "Posterize": lambda: F.posterize(image, int(magnitude)),
        "Solarize": lambda: F.solarize(image, 255.0 * magnitude),
        "AutoContrast": lambda: F.autocontrast(image),
        "Equalize": lambda: F.equalize(image),
    }
    return functions[name]()


def ours(image: NDArray[np.uint8], *steps: tuple[str, float]) -> NDArray[np.uint8]:
    operations = [[[NAMES.index(name) for name, _ in steps]]]
    found: NDArray[np.uint8] = load_pictures(
        [image], policy=(operations, [[[magnitude for _, magnitude in steps]]], NONE)
    )[0]
    return found


def cases(policy: str, side: int) -> list[tuple[str, float]]:
    """Every operation of a policy with every magnitude and sign."""
    table = magnitudes(policy, (side, side), 10 if policy == "aug_mix" else 31)
    found = []
    for name, levels in zip(NAMES, table, strict=True):
        signs = (1, -1) if 0 < NAMES.index(name) < NAMES.index("Posterize") else (1,)
        found += [(name, sign * level) for level in np.unique(levels).tolist() for sign in signs]
    return found


def odd_pictures(side: int) -> list[NDArray[np.uint8]]:
    """Waves, noise, few levels, one level, and a channel that is black."""
    rng = np.random.default_rng(side)
    noise = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    few = rng.choice(np.array([7, 8, 200], np.uint8), (side, side, 3))
    without = noise.copy()
    without[..., 1] = 0
    return [picture(3, side, side), noise, few, np.full((side, side, 3), 90, np.uint8), without]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["rand_augment", "trivial_augment"])
@pytest.mark.parametrize("side", [1, 17, *(pytest.param(side, marks=pytest.mark.slow) for side in (2, 32, 224))])
def test_each_operation_is_torchvisions_on_pillow_images_bit_for_bit(policy: str, side: int) -> None:
    for image in odd_pictures(side)[: 2 if side == 224 else 5]:
        for name, magnitude in cases(policy, side):
            found = ours(image, (name, magnitude))
            expected = torchvisions(Image.fromarray(image), name, magnitude, InterpolationMode.NEAREST)
            assert np.array_equal(found, np.asarray(expected)), (name, magnitude)


def test_other_angles_and_slopes_are_bit_for_bit_too() -> None:
    """Any number of bins: what no table above holds."""
    rng = np.random.default_rng(1)
    image = odd_pictures(61)[1]
    for name in GEOMETRY:
        for magnitude in rng.uniform(-1, 1, 100) * (140 if name == "Rotate" else 31 if "Tr" in name else 1):
            found = ours(image, (name, magnitude))
            expected = torchvisions(Image.fromarray(image), name, magnitude, InterpolationMode.NEAREST)
            assert np.array_equal(found, np.asarray(expected)), (name, magnitude)


def test_operations_follow_one_another() -> None:
    image = odd_pictures(40)[0]
    steps = [("Rotate", 12.0), ("Sharpness", 0.7), ("Equalize", 0.0), ("ShearX", -0.2), ("Color", -0.6)]
    expected = Image.fromarray(image)
    for name, magnitude in steps:
        expected = torchvisions(expected, name, magnitude, InterpolationMode.NEAREST)
    assert np.array_equal(ours(image, *steps), np.asarray(expected))


# How far an operation may be from torchvision's on tensors, which AugMix uses, in levels: its grays are cut off
# where Pillow's are rounded, and its sums and places are in float32. Not listed: not at all.
TENSOR_LEVELS = {
    "ShearX": 1,
    "ShearY": 1,
    "Rotate": 1,
    "Color": 1,
    "Contrast": 1,
    "Sharpness": 1,
    "AutoContrast": 1,
}


@pytest.mark.parametrize("side", [17, 64])
def test_each_operation_of_aug_mix_is_torchvisions_on_tensors_within_one_level(side: int) -> None:
    for image in odd_pictures(side):
        tensor = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        for name, magnitude in cases("aug_mix", side):
            policy = [[[NAMES.index(name)]]], [[[magnitude]]], [[0.0, 1.0]]
            found = load_pictures([image], policy=policy)
            expected = torchvisions(tensor, name, magnitude, InterpolationMode.BILINEAR)
            off = np.abs(found[0].astype(int) - expected.permute(1, 2, 0).numpy().astype(int)).max()
            assert off <= TENSOR_LEVELS.get(name, 0), (name, magnitude, off)


def test_aug_mix_mixes_as_torchvision_does() -> None:
    """Its arithmetic with operations that are the same in both: float32 sums, cut off."""
    image = odd_pictures(32)[0]
    keys = sample_keys(0, 0, np.arange(50))
    weights = draw_policy({"name": "aug_mix"}, keys, (32, 32)).weights
    steps = [("Posterize", 2.0), ("Solarize", 0.4), ("Equalize", 0.0)]
    operations = [[[NAMES.index(name)] for name, _ in steps]]
    for row in weights:
        policy = operations, [[[magnitude] for _, magnitude in steps]], row[None]
        found = load_pictures([image], policy=policy)
        tensor = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        mix = float(row[0]) * tensor
        for weight, (name, magnitude) in zip(row[1:], steps, strict=True):
            mix += float(weight) * torchvisions(tensor, name, magnitude, InterpolationMode.BILINEAR)
        assert np.array_equal(found[0], mix.to(torch.uint8).permute(1, 2, 0).numpy())


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1500 times the same picture: whatever differs was drawn."""
    path = tmp_path_factory.mktemp("policies") / "same.beton"
    images = np.repeat(picture(5, SIDE, SIDE)[None], 1500, axis=0)
    convert((images, np.zeros(len(images), int)), path)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [pytest.param(one, marks=pytest.mark.slow if one["name"] == "aug_mix" else ()) for one in EACH],
    ids=str,
)
def test_both_loaders_change_pictures_alike(policy: dict[str, Any], same: Path) -> None:
    """Mean and spread, over the samples, of how far the pixels move, and of each image's own mean and contrast."""
    whole: dict[str, Any] = {"crop": "padded", "padding": 0, "flip": False, "policy": policy}
    plain = torch.from_numpy(picture(5, SIDE, SIDE)).permute(2, 0, 1).float()
    statistics = []
    for kind in LOADERS:
        images = load(kind, same, **whole).float()
        moved = (images - plain).abs().mean((1, 2, 3))
        statistics.append(torch.stack([moved, images.mean((1, 2, 3)), images.std((1, 2, 3))], dim=1))
    one, other = statistics
    spread = (one.var(0) + other.var(0)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 4.5 * spread / math.sqrt(len(one))).all()
    ratio = one.std(0) / other.std(0)
    assert ((ratio - 1).abs() < 0.2).all(), ratio
    tenths = torch.linspace(0.1, 0.9, 9)
    for k in range(3):
        limits = other[:, k].quantile(tenths)
        shares = [(values[:, k][:, None] <= limits + 1e-3).float().mean(0) for values in statistics]
        assert (shares[0] - shares[1]).abs().max() < 4.5 * math.sqrt(0.5 / len(one))


@pytest.mark.process
@pytest.mark.parametrize(
    ("policy", "kind", "workers"),
    [
        *((policy, FFCVLoader, 1) for policy in EACH),
        (EACH[0], TorchLoader, 0),
        *(pytest.param(policy, TorchLoader, 1, marks=pytest.mark.slow) for policy in EACH),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else getattr(value, "__name__", str(value)),
)
def test_pixels_are_functions_of_seed_epoch_and_sample(
    kind: Any, policy: dict[str, Any], workers: int, photos: Path
) -> None:
    first = load(kind, photos, policy=policy)
    assert torch.equal(first, load(kind, photos, policy=policy, batch_size=5))
    part = load(kind, photos, policy=policy, indices=[4, 11], batch_size=2)
    assert torch.equal(part, first[[4, 11]])
    assert not torch.equal(first, load(kind, photos, policy=policy, seed=1))
    with kind(photos, batch_size=18, image_size=SIDE, workers=workers, order="sequential", dtype=torch.uint8,
              policy=policy) as loader:  # fmt: skip
        epochs = [next(iter(loader))[0] for _ in range(2)]
    assert torch.equal(epochs[0], first)
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("kind", LOADERS)
def test_in_training_only_and_only_when_asked(kind: Any, photos: Path) -> None:
    evaluated = load(kind, photos, train=False)
    assert torch.equal(evaluated, load(kind, photos, train=False, policy={"name": "trivial_augment"}))
    assert torch.equal(load(kind, photos), load(kind, photos, policy=None))
    assert not torch.equal(load(kind, photos), load(kind, photos, policy={"name": "trivial_augment"}))


def test_a_policy_changes_neither_crops_nor_cut_out_squares(photos: Path) -> None:
    """Its draws are its own: with a policy that does nothing but brighten, all else stays where it was."""
    with_square = load(FFCVLoader, photos, cutout=6, mean=(0.1, 0.5, 0.9))
    both = load(FFCVLoader, photos, cutout=6, mean=(0.1, 0.5, 0.9), policy={"name": "rand_augment"})
    color = torch.tensor([26, 128, 230], dtype=torch.uint8).view(3, 1, 1)
    squares = (with_square == color).all(1)
    assert (both == color).all(1)[squares].all()


@pytest.mark.parametrize("kind", LOADERS)
def test_the_size_changes_between_epochs(kind: Any, photos: Path) -> None:
    """Translations are shares of the image's side, so a new size needs other magnitudes."""
    workers = 0 if kind is TorchLoader else 1
    options: dict[str, Any] = {"batch_size": 6, "workers": workers, "policy": {"name": "rand_augment"}}
    with kind(photos, image_size=16, seed=2, **options) as loader:
        loader.set_image_size(40)
        loader.set_epoch(1)
        changed = next(iter(loader))[0]
    with kind(photos, image_size=40, seed=2, **options) as loader:
        loader.set_epoch(1)
        assert torch.equal(next(iter(loader))[0], changed)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("rand_augment", "policy='rand_augment' must be a dict with a name"),
        ({"magnitude": 9}, "must be a dict with a name"),
        ({"name": "randaugment"}, "policy\\['name'\\]='randaugment' is unknown. Did you mean 'rand_augment'"),
        ({"name": 3}, "policy\\['name'\\]=3 is unknown. Known: aug_mix, rand_augment"),
        ({"name": "rand_augment", "magnitud": 9}, "\\['magnitud'\\]: rand_augment has no such option. Did you mean"),
        ({"name": "trivial_augment", "magnitude": 9}, "\\['magnitude'\\]: trivial_augment has no such option"),
        ({"name": "rand_augment", "magnitude": 31}, "\\['magnitude'\\]=31 must be below num_magnitude_bins=31"),
        ({"name": "rand_augment", "magnitude": -1}, "\\['magnitude'\\]=-1 must be an integer from 0 to"),
        ({"name": "rand_augment", "num_ops": 1.5}, "\\['num_ops'\\]=1.5 must be an integer from 1 to 32"),
        ({"name": "rand_augment", "num_ops": True}, "\\['num_ops'\\]=True must be an integer"),
        ({"name": "trivial_augment", "num_magnitude_bins": 1}, "=1 must be an integer from 2 to"),
        ({"name": "aug_mix", "severity": 11}, "\\['severity'\\]=11 must be an integer from 1 to 10"),
        ({"name": "aug_mix", "depth": 0}, "\\['depth'\\]=0 must be -1"),
        ({"name": "aug_mix", "alpha": float("nan")}, "\\['alpha'\\]=nan must be a number from 0.01 to 100"),
        ({"name": "aug_mix", "mixture_width": 3}, "\\['mixture_width'\\]: aug_mix has no such option. Known: alpha"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be(kind: Any, photos: Path, policy: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        kind(photos, batch_size=4, image_size=SIDE, policy=policy)


def test_a_policy_survives_json(photos: Path) -> None:
    policy = {"name": "aug_mix", "severity": 4, "width": 2, "depth": 1, "alpha": 0.5}
    there_and_back = json.loads(json.dumps(policy))
    assert torch.equal(load(FFCVLoader, photos, policy=policy), load(FFCVLoader, photos, policy=there_and_back))


def torchvisions_draws(policy: dict[str, Any], count: int, side: int) -> NDArray[np.float64]:
    """`(operations, 2)`: number and magnitude of each operation that torchvision draws for `count` images."""
    found = []
    transform = torchvision_policy(policy)

    class Recorded(type(transform)):  # type: ignore[misc]
        """Draws as its base does, and writes the operations down in place of doing them."""

        def _apply_image_or_video_transform(self, image: Any, name: str, magnitude: float, **_: Any) -> Any:
            found.append((NAMES.index(name), magnitude))
            return image

    transform.__class__ = Recorded
    torch.manual_seed(0)
    image = Image.new("RGB", (side, side))
    for _ in range(count):
        transform(image)
    return np.array(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        *EACH[:3],
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in (
                {"name": "rand_augment", "num_ops": 3, "magnitude": 20},
                {"name": "trivial_augment", "num_magnitude_bins": 11},
                {"name": "aug_mix", "severity": 10, "width": 2, "depth": 4},
            )
        ),
    ],
    ids=str,
)
def test_operations_are_drawn_as_torchvision_draws_them(policy: dict[str, Any]) -> None:
    """The same magnitudes of each operation and no others, each (operation, magnitude) about as often."""
    count, side = 2000 if policy["name"] == "aug_mix" else 6000, 48
    theirs = torchvisions_draws(policy, count, side)
    keys = sample_keys(3, 1, np.arange(count))
    drawn = draw_policy(policy, keys, (side, side))
    mine = np.stack([drawn.operations.ravel(), drawn.magnitudes.ravel()], axis=1)
    if policy["name"] == "aug_mix":  # there Identity only says that a chain has ended
        mine = mine[mine[:, 0] > 0]
    assert abs(len(mine) - len(theirs)) < 5 * math.sqrt(len(theirs))
    theirs[:, 1] += 0.0  # -0.0 is 0.0
    mine[:, 1] += 0.0
    pairs, numbers = np.unique(np.concatenate([theirs, mine]), axis=0, return_inverse=True)
    one, other = (np.bincount(part, minlength=len(pairs)) for part in np.split(numbers.ravel(), [len(theirs)]))
    # Two samples of one distribution: (a - b)² / (a + b) sums to χ² with as many degrees of freedom as pairs.
    distance = ((one - other) ** 2 / (one + other)).sum()
    assert distance < len(pairs) + 5 * math.sqrt(2 * len(pairs)), (distance, len(pairs))
    frequent = (one + other) > 40
    assert (np.minimum(one, other)[frequent] > 0).all()
    assert (drawn.magnitudes[drawn.operations == 0] == 0).all()


@pytest.mark.parametrize(("alpha", "width"), [(1.0, 3), (0.3, 2), (5.0, 4), (0.01, 3), (1.0, 1)])
def test_aug_mix_weighs_as_torchvision_does(alpha: float, width: int) -> None:
    """Mean, spread and distribution of the image's own weight and of each chain's; all of them sum to 1."""
    count = 20000
    keys = sample_keys(1, 2, np.arange(count))
    found = draw_policy({"name": "aug_mix", "alpha": alpha, "width": width}, keys, (16, 16)).weights
    torch.manual_seed(0)
    share = torch._sample_dirichlet(torch.full((count, 2), alpha)).numpy()
    within = torch._sample_dirichlet(torch.full((count, width), alpha)).numpy()
    expected = np.concatenate([share[:, :1], share[:, 1:] * within], axis=1)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    for k in range(width + 1):
        assert abs(found[:, k].mean() - expected[:, k].mean()) < 5 / math.sqrt(count)
        assert abs(found[:, k].std() - expected[:, k].std()) < 5 / math.sqrt(count)
        tenths = np.arange(0.1, 1, 0.1)
        below = (found[:, k][:, None] <= tenths).mean(0), (expected[:, k][:, None] <= tenths).mean(0)
        np.testing.assert_allclose(*below, atol=4 * math.sqrt(0.5 / count))
    correlations = [np.corrcoef(weights[:, 0], weights[:, 1])[0, 1] for weights in (found, expected)]
    assert abs(correlations[0] - correlations[1]) < 0.03


def test_the_blur_is_pillows_bit_for_bit() -> None:
    """With every standard deviation of ThreeAugment, also of images that are smaller than its reach."""
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (1, 9), (9, 1), (2, 3), (17, 31), (64, 48)):
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for sigma in [0.0, 0.1, 1.41, 1.42, 2.0, *rng.uniform(0.1, 2, 40).tolist()]:
            found = load_pictures([image], policy=([[[GAUSSIAN_BLUR]]], [[[sigma]]], NONE))[0]
            expected = Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma))
            assert np.array_equal(found, np.asarray(expected)), (height, width, sigma)


def deits(image: NDArray[np.uint8], drawn: Drawn) -> NDArray[np.uint8]:
    """DeiT III's `new_data_aug_generator` with these draws, by torchvision's and Pillow's functions."""
    (first, *jitters), (strength, *factors) = drawn.operations[0, 0].tolist(), drawn.magnitudes[0, 0].tolist()
    result = Image.fromarray(image)
    if first == NAMES.index("Color"):
        result = F.to_grayscale(result, 3)
    elif first == NAMES.index("Solarize"):
        result = F.solarize(result, 128)
    else:
        result = result.filter(ImageFilter.GaussianBlur(strength))
    for operation, factor in zip(jitters, factors, strict=True):
        name = {"Brightness": "brightness", "Contrast": "contrast", "Color": "saturation"}[NAMES[operation]]
        result = getattr(F, f"adjust_{name}")(result, 1 + factor)
    return np.asarray(result)


@pytest.mark.parametrize("side", [1, 17, 32])
def test_three_augment_is_deits_bit_for_bit(side: int) -> None:
    for number, image in enumerate(odd_pictures(side)):
        for sample in range(40):
            drawn = draw_policy({"name": "three_augment"}, sample_keys(number, 0, np.array([sample])), (side, side))
            found = load_pictures([image], policy=(drawn.operations, drawn.magnitudes, NONE))[0]
            assert np.array_equal(found, deits(image, drawn)), (number, sample)


def test_three_augment_draws_each_as_often_and_every_order() -> None:
    drawn = draw_policy({"name": "three_augment", "color_jitter": 0.2}, sample_keys(0, 0, np.arange(6000)), (8, 8))
    first, orders = drawn.operations[:, 0, 0], drawn.operations[:, 0, 1:]
    strength, changes = drawn.magnitudes[:, 0, 0], drawn.magnitudes[:, 0, 1:]
    names, counts = np.unique(first, return_counts=True)
    assert names.tolist() == sorted([NAMES.index("Color"), NAMES.index("Solarize"), GAUSSIAN_BLUR])
    assert (np.abs(counts - 2000) < 5 * math.sqrt(6000 * 2 / 9)).all()
    radii = strength[first == GAUSSIAN_BLUR]
    np.testing.assert_allclose(np.quantile(radii, [0, 0.5, 1]), [0.1, 1.05, 2.0], atol=0.1)
    kinds, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(kinds) == 6
    assert (np.abs(counts - 1000) < 5 * math.sqrt(6000 * 5 / 36)).all()
    np.testing.assert_allclose(np.quantile(changes, [0, 0.5, 1], axis=0), [[-0.2] * 3, [0] * 3, [0.2] * 3], atol=0.01)
