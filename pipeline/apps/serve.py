"""A trained model behind HTTP: `POST /predict` with limits of time, size and number, `GET /health`, and a page."""

from __future__ import annotations

import asyncio
import base64
import html
import io
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ...common.checks import check_number
from ...common.errors import CheckpointError, DataError, PlanError, require
from ...common.signals import handled
from ...common.storage.json_files import finite
from ...strategies.devices import pick_device
from ..runs.checkpoints.remote import run_name
from ..runs.prediction import listed, predicted
from ..runs.predictions import UNSEEN, mask_of
from ..runs.result import FitResult, load_run
from ..tasks.standard import Segmentation
from ..tasks.task import names_of
from ..training.build import plain_torch
from .page import PAGE, POLICY

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST, PORT = "127.0.0.1", 8000
MAX_BYTES = 20 * 2**20  # the largest photographs of telephones have about 15 MB
MAX_PIXELS = 64_000_000  # those have 50 million; decoded, this takes about 0.6 GB
TIMEOUT = 30.0
MAX_IN_FLIGHT = 16  # with MAX_BYTES, 320 MB of pictures that wait
STARTUP_SECONDS = 300.0
CONNECTIONS = 256
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
"""Formats of pictures, by Pillow's names. Others are refused, because Pillow runs a program to decode some of them."""
SEND = "Send the bytes of one image file as the body: curl --data-binary @cat.jpg URL"


def serve_app(
    run: str | Path | FitResult, *, device: str | None = None, max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS, timeout: float = TIMEOUT, max_in_flight: int = MAX_IN_FLIGHT,
    trust_code: bool = False,
) -> Starlette:  # fmt: skip
    """Return an ASGI application that predicts with a trained model; `drivetrain serve` runs it with uvicorn.

    `POST /predict` takes an image file as its body and answers what `FitResult.predict` returns for it, as JSON, but
    for `image`. For `Segmentation`, the answer has `pixels`, their number by class in the image's own size, and `mask`,
    a PNG file as a `data:` address; with `Accept: image/png`, it is that file. `GET /health` answers what is served,
    `GET /` is a page in which one drops a picture. An error is `{"error": …}`, with its reason and remedy: 400 (not an
    image, or a damaged one), 408 (sent too slowly), 413 (too large), 415 (a form, or a format that is not read), 503
    with `Retry-After` (busy, or the prediction took too long).

    There is one model, and one thread that decodes and predicts, one image after another; the event loop stays free.
    Nothing of a request is kept. There is neither a password nor TLS: put a reverse proxy in front of it on a network.

    Args:
        run: the folder of a run, or its address, or a result. A run's recipe may name a module, which is imported:
            serve only runs that you trust.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, to which the model is moved. Default None: the GPU if there is one.
        max_bytes: largest body, in bytes. Default 20 MiB: the photographs of telephones.
        max_pixels: most pixels of an image, read from its header: a small file cannot claim memory. Default 64 million.
        timeout: seconds that a client may take to send an image, and that its prediction may take, the time in the
            queue included. Default 30.
        max_in_flight: requests that are received, wait or are computed at once; the next one gets 503. Default 16.
        trust_code: as `load_run` takes it.

    Raises:
        MissingExtra: without starlette (`pip install 'drivetrain[serve]'`).
        CheckpointError, RecipeError, DataError: if the run cannot be loaded, see `load_run`.
        PlanError: for a limit that is not positive.

    Example::

        >>> app = serve_app("runs/photos", max_bytes=2**20)
        >>> [route.path for route in app.routes]
        ['/', '/health', '/predict']
        >>> # site = Starlette(routes=[Mount("/pets", app)]), or: uvicorn.run(app)
    """
    require("starlette.applications", "serve", "serve a model")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    for name, value in (("max_bytes", max_bytes), ("max_pixels", max_pixels), ("max_in_flight", max_in_flight)):
        check_number(name, value, PlanError, "[1, inf)")
    check_number("timeout", timeout, PlanError, "(0, inf)")
    result = run if isinstance(run, FitResult) else load_run(run, trust_code=trust_code)
    model = _Model(result, "model" if result is run else run_name(str(run)), device, max_pixels)
    pool = ThreadPoolExecutor(1, "drivetrain-serve")
    slots = threading.BoundedSemaphore(int(max_in_flight))
    page = PAGE.replace("{name}", html.escape(model.name))

    async def index(_: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", **model.about})

    async def predict(request: Request) -> Response:
        if not slots.acquire(blocking=False):
            raise HTTPException(
                503, f"{max_in_flight} requests are in work, the most at once. Send it again after a second.",
                {"Retry-After": "1"},
            )  # fmt: skip
        try:
            data = await _body(request, max_bytes, timeout)
            job = pool.submit(model.answer, data, png="image/png" in request.headers.get("accept", ""))
        except BaseException:
            slots.release()
            raise
        job.add_done_callback(lambda _: slots.release())  # not at the time limit: a thread cannot be stopped
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), timeout)
        except TimeoutError:
            raise HTTPException(
                503, f"The prediction was not there after {timeout:g} s. Send it again, or a smaller image.",
                {"Retry-After": "5"},
            ) from None  # fmt: skip

    return Starlette(
        routes=[Route("/", index), Route("/health", health), Route("/predict", predict, methods=["POST"])],
        exception_handlers={HTTPException: _refuse, Exception: _fail},
    )


async def _refuse(request: Request, error: Any) -> Response:
    """Answer an HTTPException."""
    from starlette.responses import JSONResponse

    text = error.detail
    if error.status_code in (404, 405):
        text = f"{request.method} {request.url.path}: {text}. There are GET /, GET /health and POST /predict."
    return JSONResponse({"error": text}, error.status_code, error.headers)


async def _fail(_: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    text = f"The prediction failed: {type(error).__name__}. The log of the server has the reason."
    return JSONResponse({"error": text}, 500)


class _Model:
    """One model on one device, for one thread."""

    def __init__(self, result: FitResult, name: str, device: str | None, max_pixels: int) -> None:
        place = pick_device(device)
        result.model.to(place)
        self.result, self.task, self.inputs = result, result.task, result.inputs
        self.name, self.max_pixels = name, max_pixels
        self.about = {
            "run": self.name, "task": type(self.task).__name__, "classes": list(self.inputs.classes),
            "device": str(place),
        }  # fmt: skip

    @plain_torch()
    def answer(self, data: bytes, *, png: bool) -> Response:
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse
        from starlette.responses import Response as Plain

        self._check(data)
        try:
            (found,) = predicted(self.result, listed(data, self.inputs.channels), 1, "raise", False)
        except DataError as error:
            raise HTTPException(400, f"{error} {SEND}") from error
        if not isinstance(self.task, Segmentation):
            row = found.row(self.task, self.inputs)
            return JSONResponse(finite({name: value for name, value in row.items() if name != "image"}))
        mask, file = mask_of(found, self.inputs), io.BytesIO()
        mask.save(file, format="PNG")
        if png:
            return Plain(file.getvalue(), media_type="image/png")
        counts = np.bincount(np.asarray(mask).ravel(), minlength=UNSEEN + 1)[:UNSEEN]
        known = names_of(len(self.inputs.classes), self.inputs.classes)
        number = int(counts.nonzero()[0].max(initial=0)) + 1
        names = (*known, *map(str, range(len(known), number)))  # the task may have more classes than names
        named = zip(names, counts.tolist(), strict=False)
        pixels = sorted(named, key=lambda each: -each[1])
        picture = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        return JSONResponse({"pixels": dict(pixels), "mask": picture})

    def _check(self, data: bytes) -> None:
        """Refuse a picture by its header, as Pillow reads it: before memory is taken for its pixels."""
        from starlette.exceptions import HTTPException

        try:
            with Image.open(io.BytesIO(data)) as image:
                (width, height), kind = image.size, image.format
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise HTTPException(413, f"{error} Send a smaller image.") from error
        except Exception as error:  # damaged files make Pillow's readers raise many types
            raise HTTPException(
                400, f"The {len(data):,} bytes are not an image that Pillow can read. {SEND}"
            ) from error
        if kind not in FORMATS:
            raise HTTPException(415, f"Images of the format {kind} are not read. Send one of {', '.join(FORMATS)}.")
        if width * height > self.max_pixels:
            text = f"The image has {width} × {height} pixels; at most {self.max_pixels:,} are read."
            raise HTTPException(413, f"{text} Send a smaller one.")


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """Return the body of a request, of which never more than `most` bytes are in memory."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    length, kind = request.headers.get("content-length", "0"), request.headers.get("content-type", "")
    declared, parts, size = int(length) if length.isdigit() else 0, list[bytes](), 0
    if kind.startswith("multipart/"):
        raise HTTPException(415, f"This is a form (curl -F). {SEND}", {"Connection": "close"})
    try:
        async with asyncio.timeout(seconds):
            # Somewhat more is read and dropped: most clients read the answer only after they have sent all.
            if declared <= 4 * most:
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif size > 4 * most:
                        break
    except TimeoutError:
        raise HTTPException(
            408, f"{size:,} bytes arrived within {seconds:g} s. Send a smaller image, or raise --timeout.",
            {"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise HTTPException(400, "The connection ended before the image did.") from None
    if max(size, declared) > most:
        raise HTTPException(
            413, f"The image has more than {most:,} bytes. Send a smaller one, or raise --max-bytes.",
            {"Connection": "close"},
        )  # fmt: skip
    if not size:
        raise HTTPException(400, f"The body is empty. {SEND}")
    return b"".join(parts)


def serve(
    run: str | Path, *, host: str = HOST, port: int = PORT, device: str | None = None, max_bytes: int = MAX_BYTES,
    timeout: float = TIMEOUT, trust_code: bool = False,
) -> None:  # fmt: skip
    """Serve `serve_app(run)` with uvicorn, until SIGINT (Ctrl-C) or SIGTERM; requests in work are finished.

    Args:
        host: address to listen at. Default 127.0.0.1: this machine only, because there is no password.
        port: port, of 0 a free one. Default 8000.
        device, max_bytes, timeout, trust_code: as `serve_app` takes them.

    Raises:
        PlanError: if the port cannot be opened.
        CheckpointError: if the run is not loaded within five minutes.
    """
    uvicorn = require("uvicorn", "serve", "serve a model")
    check_number("port", port, PlanError, "[0, 65535]")
    with closing(_bound(host, port)) as listener:
        app = _in_time(run, device=device, max_bytes=max_bytes, timeout=timeout, trust_code=trust_code)
        config = uvicorn.Config(
            app, http=_impatient(timeout), ws="none", lifespan="off", log_config=None, access_log=False,
            limit_concurrency=CONNECTIONS, server_header=False,
            timeout_graceful_shutdown=int(2 * timeout) + 1,  # to receive an image, and to predict it
        )  # fmt: skip
        listener.listen()  # so that who reads the next line can connect
        shown = f"[{host}]" if ":" in host else host
        print(f"{run}: http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
        # uvicorn repeats a signal when it has ended; here nothing is left to do then.
        with handled((signal.SIGINT, signal.SIGTERM), lambda *_: None):
            uvicorn.Server(config).run(sockets=[listener])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: of what cannot be a host's name, such as a..b
        raise PlanError(
            f"Port {port} of {host} cannot be opened: {getattr(error, 'strerror', None) or error}. Pass another --port "
            "(0: a free one), or the --host of this machine."
        ) from error
    return listener


def _in_time(run: str | Path, **options: Any) -> Any:
    """Return the application, unless a store or a file system does not answer."""
    found: list[Any] = []

    def load() -> None:
        try:
            found.append(serve_app(run, **options))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(STARTUP_SECONDS)
    if not found:
        raise CheckpointError(f"{run} was not loaded within {STARTUP_SECONDS:g} s. Copy it to this machine first.")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _impatient(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which also closes connections whose next request does not begin in time: it has no
    limit for the headers."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_request()

        def _await_request(self) -> None:
            before = self.cycle

            def end() -> None:
                if self.cycle is before and (before is None or before.response_complete):
                    self.transport.close()

            self.loop.call_later(seconds, end)

    return Impatient
