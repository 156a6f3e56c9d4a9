"""A served model: the answers are those of `predict`, and what is too large, too slow or no picture is refused."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import segmentation_jobs as segmentation
import uvicorn
from command_line import ENVIRONMENT, call
from drivetrain import PlanError
from drivetrain.pipeline import FitResult, load_run, serve_app
from drivetrain.pipeline.apps.serve import _bound, _impatient
from loader_pictures import PNG, file_bytes, jpeg_bytes, picture, png_chunk
from PIL import Image
from pipeline_data import Sleepy, Toy

MOST, BIG = 50_000, 1_000_000  # bytes and pixels
PICTURE, JPEG = picture(4, 40, 50), jpeg_bytes(picture(3, 90, 70))


def png(width: int, height: int) -> bytes:
    """Return a small file that claims this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"")


@contextmanager
def serving(app: Any, seconds: float = 0.6) -> Iterator[str]:
    """The address of the application, on a real port."""
    listener = _bound("127.0.0.1", 0)
    listener.listen()
    config = uvicorn.Config(app, http=_impatient(seconds), ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def fetch(address: str, data: Any = None, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(address, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as got:
            return got.status, got.headers, got.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "<b>run"
    toy.named().fit(epochs=1, out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def result(run: Path) -> FitResult:
    return load_run(run)


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(serve_app(run, max_bytes=MOST, max_pixels=BIG, timeout=0.6, max_in_flight=64)) as found:
        yield found


def test_the_run_of_the_working_directory_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    with serving(serve_app(".")) as address:
        assert json.loads(fetch(f"{address}/health")[2])["run"] == run.name


def without_name(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "image"}


@pytest.mark.parametrize("data", [JPEG, *(file_bytes(PICTURE, kind) for kind in ("PNG", "WEBP", "TIFF"))], ids=len)
def test_answers_are_those_of_predict(data: bytes, address: str, result: FitResult) -> None:
    status, headers, body = fetch(f"{address}/predict", data)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == without_name(result.predict(data)[0])


def test_many_at_once_and_the_page(address: str, result: FitResult) -> None:
    files = [jpeg_bytes(picture(seed, 40, 30)) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        rows = [*pool.map(lambda data: json.loads(fetch(f"{address}/predict", data)[2]), files)]
    assert rows == [without_name(result.predict(data)[0]) for data in files]
    status, headers, page = fetch(f"{address}/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<h1>&lt;b&gt;run</h1>" in page
    assert b"http" not in page  # nothing from elsewhere
    about = json.loads(fetch(f"{address}/health")[2])
    assert (about["status"], about["task"], about["classes"]) == ("ok", "Classification", [*"abcd"])


def chunks(size: int) -> Iterator[bytes]:
    yield from (b"x" * 1000 for _ in range(size // 1000))


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"x" * (MOST + 1), 413, "more than 50,000 bytes.*--max-bytes"),
        (chunks(3 * MOST), 413, "more than 50,000 bytes"),
        (png(50_000, 60_000), 413, "Send a smaller"),
        (png(1001, 1000), 413, "1001 × 1000 pixels; at most 1,000,000"),
        (b"no picture", 400, "10 bytes are not an image.*curl --data-binary"),
        (JPEG[: len(JPEG) // 2], 400, "cannot be read as an image"),
        (png(90, 70), 400, "cannot be read as an image"),
        (file_bytes(PICTURE, "EPS"), 415, "format EPS are not read. Send one of JPEG"),
        (b"", 400, "The body is empty"),
    ],
    ids=["large", "chunked", "bomb", "pixels", "text", "truncated", "empty png", "eps", "empty"],
)  # fmt: skip
def test_what_is_refused(data: Any, status: int, words: str, address: str) -> None:
    got, _, body = fetch(f"{address}/predict", data, **{"Content-Type": "image/x"})
    assert got == status, body
    assert re.search(words, json.loads(body)["error"]), body


def test_other_addresses_and_forms(address: str) -> None:
    for path, data, kind, status, words in (
        ("/predict", None, "", 405, "POST /predict"), ("/nowhere", None, "", 404, "There are GET /"),
        ("/predict", JPEG, "multipart/form-data; boundary=x", 415, "curl --data-binary"),
    ):  # fmt: skip
        got, _, body = fetch(f"{address}{path}", data, **({"Content-Type": kind} if kind else {}))
        assert got == status
        assert words in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (b"POST /pre", b""),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nxx", b"HTTP/1.1 408"),
    ],
)
def test_slow_clients_are_not_waited_for(begin: bytes, answer: bytes, address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(begin)
        since = time.monotonic()
        assert b"".join(iter(lambda: slow.recv(4096), b"")).startswith(answer)
    assert 0.4 < time.monotonic() - since < 15


def test_busy_and_slow_predictions(run: Path) -> None:
    result = load_run(run)
    result.model = Sleepy(1.0)
    with serving(serve_app(result, timeout=0.3, max_in_flight=2)) as address, ThreadPoolExecutor(3) as pool:
        ends = [*pool.map(lambda _: fetch(f"{address}/predict", JPEG), range(3))]
        assert [(status, headers["retry-after"] in "15") for status, headers, _ in ends] == [(503, True)] * 3
        assert sum(b"the most at once" in body for *_, body in ends) == 1
        assert fetch(f"{address}/health")[0] == 200  # while the model computes


def test_masks(tmp_path: Path) -> None:
    result = segmentation.pipeline_of(segmentation.write(tmp_path)).fit(epochs=1, progress=False)
    data = jpeg_bytes(segmentation.scene(5)[0])
    (tmp_path / "x.jpg").write_bytes(data)
    (row,) = result.predict(tmp_path / "x.jpg", out=tmp_path / "masks")
    with serving(serve_app(result)) as address:
        body = fetch(f"{address}/predict", data, Accept="image/png")[2]
        answer = json.loads(fetch(f"{address}/predict", data)[2])
    assert body == Path(row["mask"]).read_bytes()
    mask = np.asarray(Image.open(io.BytesIO(body)))
    assert answer["pixels"] == {name: int((mask == k).sum()) for k, name in enumerate(segmentation.CLASSES)}
    assert answer["mask"].startswith("data:image/png;base64,")
    named = segmentation.CLASSES[:1]  # fewer than the task has
    result.history.facts["inputs"]["classes"] = list(named)
    with serving(serve_app(result)) as address:
        pixels = json.loads(fetch(f"{address}/predict", data)[2])["pixels"]
    assert (named[0] in pixels, sum(pixels.values())) == (True, (mask < 255).sum())


@pytest.mark.process
def test_the_command_ends_at_sigterm(run: Path, started: list[subprocess.Popen[str]]) -> None:
    command = [sys.executable, "-m", "drivetrain", "serve", str(run), "--port", "0"]
    started.append(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    )
    assert started[0].stdout is not None
    line = started[0].stdout.readline()
    address = line.split(": ")[1].split(" (")[0]
    assert fetch(f"{address}/predict", JPEG)[0] == 200
    os.kill(started[0].pid, signal.SIGTERM)
    assert started[0].communicate(timeout=60) == ("", "")
    assert started[0].returncode == 0


def test_what_cannot_be_served(run: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"max_bytes=0 must be"):
        serve_app(run, max_bytes=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Port {port} of 127.0.0.1 cannot be opened" in call("serve", str(run), "--port", port).line
    assert "has no finished epoch" in call("serve", str(tmp_path), "--port", "0").line


def test_a_host_that_cannot_be_a_name() -> None:
    assert "Port 0 of a..b cannot be opened" in call("serve", "runs/none", "--host", "a..b", "--port", "0").line
