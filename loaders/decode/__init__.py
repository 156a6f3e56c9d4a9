"""From bytes to batches of pixels: decoding, sampling and augmentation."""
