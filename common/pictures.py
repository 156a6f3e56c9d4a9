"""Matplotlib figures as files and in notebooks, the same for everything that has `show()`."""

import base64
import html
import io
from pathlib import Path
from typing import Any

from .errors import DataError
from .storage.files import atomic_file

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture; DataError unless its suffix is that of one."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} must end in .png, .svg or .pdf.")
    return path


def drawn(figure: Any, suffix: str = ".png", **options: Any) -> bytes:
    """Return a figure in the format of a suffix; `options` are those of `savefig`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], **options)
    return buffer.getvalue()


def save_picture(figure: Any, path: Path, dpi: int = 110) -> Path:
    """Write a figure whole or not at all, in the format of the path's suffix."""
    content = drawn(figure, path.suffix, dpi=dpi)
    with atomic_file(path) as file:
        file.write(content)
    return path


def image_tag(png: bytes, about: str) -> str:
    """Return an `<img>` that contains the picture; `about` describes it to those who do not see it."""
    return f'<img alt="{html.escape(about)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
