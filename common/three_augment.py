"""DeiT III's ThreeAugment of one Pillow image; the native loader draws from the same distribution."""

from typing import Any

RADII = (0.1, 2.0)
"""Least and greatest standard deviation of the Gaussian blur, in pixels: DeiT's."""


def three_augment(color_jitter: float, image: Any) -> Any:
    """Return a Pillow image (a tensor becomes one), changed, with random numbers from torch's global generator."""
    import torch  # here: the options of loaders are checked without it
    from PIL import ImageFilter
    from torchvision.transforms import v2

    change = v2.functional
    if isinstance(image, torch.Tensor):
        image = change.to_pil_image(image)
    chosen = int(torch.randint(3, ()))
    if chosen == 0:
        image = change.rgb_to_grayscale(image, 3)
    elif chosen == 1:
        image = change.solarize(image, 128)
    else:
        image = image.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(*RADII).item()))
    return v2.ColorJitter(color_jitter, color_jitter, color_jitter)(image)
