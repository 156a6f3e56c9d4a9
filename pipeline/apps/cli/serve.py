"""`drivetrain serve`: a trained model behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import Command, Place, argument, option, trust_code


@click.command(cls=Command)
@argument("run", "Folder or address of a finished run (train --out).", Place())
@option(
    "--host ADDRESS",
    "Address to listen at. The default is this machine only, because there is no password; 0.0.0.0 is every network.",
    default="127.0.0.1",
)
@option("--port N", "Port; 0 is a free one.", int, default=8000)
@option("--device DEVICE", "cpu, cuda or cuda:N. Default: the GPU if there is one.")
@option("--max-bytes N", "Largest image file, in bytes.", int, default=20 * 2**20)
@option("--timeout SECONDS", "Most seconds to receive an image, and again to predict it.", float, default=30.0)
@trust_code
def serve(run: Path | str, **options: Any) -> None:
    """Serve a trained model over HTTP, with a page to try it.

    POST /predict takes an image file as its body and answers what predict returns, as JSON. GET / is a page in which
    one drops a picture, GET /health answers what is served. Ctrl-C and SIGTERM end it after the requests in work.

    \b
    curl --data-binary @cat.jpg http://127.0.0.1:8000/predict
    """
    from ...recipes.files import modules_of
    from ..serve import serve

    with modules_of():
        serve(run, **options)
