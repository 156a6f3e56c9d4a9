"""Files that tests of the loaders only read, made once."""

from pathlib import Path

import pytest
from loader_pictures import jpeg_beton, raw_beton


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files of several sizes in three classes, 18 of them; they are next to it, in `photos-images`."""
    return jpeg_beton(tmp_path_factory.mktemp("photos") / "photos.beton")


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 raw pictures of 12 × 12 pixels, whose labels number them."""
    return raw_beton(tmp_path_factory.mktemp("numbered") / "numbered.beton", 23)
