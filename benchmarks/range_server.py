"""Serve a folder over HTTP with ranges, as an object store at a distance: `cluster.py` and `streams.py` start it. Its
subfolders are buckets for clients of S3, which it answers to GET and HEAD of objects without looking at signatures.

    python benchmarks/range_server.py FOLDER [--latency 0.02] [--rate 125e6]

Prints its port, for each line of standard input the bytes of files that it has sent so far, and ends with it. Each
answer begins after the latency, and all answers together send no more than `--rate` bytes per second (0: no limit).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

CHUNK = 1 << 16  # bytes that are sent at a time


class Line:
    """The line that all answers share: bytes leave one after the other.

    Args:
        rate: bytes per second; 0 for no limit.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()
        self.sent = 0

    def send(self, size: int) -> None:
        """Wait until so many bytes would have been sent."""
        with self._lock:
            self.sent += size
            if not self._rate:
                return
            self._free = max(self._free, time.perf_counter()) + size / self._rate
            pause = self._free - time.perf_counter()
        if pause > 0:
            time.sleep(pause)


def handler(folder: Path, latency: float, line: Line) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests for the files of a folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            time.sleep(latency)
            path = (folder / unquote(self.path.partition("?")[0]).lstrip("/")).resolve()
            if not (path.is_relative_to(folder) and path.is_file()):
                self.send_error(404)
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            self.send_header("Content-Length", str(end - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if body:
                self._send(path, start, end)

        def _send(self, path: Path, start: int, end: int) -> None:
            with path.open("rb") as file:
                for position in range(start, end, CHUNK):
                    data = os.pread(file.fileno(), min(CHUNK, end - position), position)
                    line.send(len(data))
                    self.wfile.write(data)

    return Handler


class Store:
    """This script, running in a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = f"http://127.0.0.1:{self._number()}"

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def sent(self) -> int:
        """Return the bytes of files that it has sent so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._number()


@contextmanager
def serving(folder: Path, latency: float, rate: float) -> Iterator[Store]:
    """Serve a folder in a process of its own inside the block."""
    command = [sys.executable, __file__, str(folder), "--latency", f"{latency}", "--rate", f"{rate}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Store(process)  # it ends with its standard input, which leaving the block closes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second")
    options = parser.parse_args()
    line = Line(options.rate)
    served = handler(options.folder.resolve(), options.latency, line)
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        for _ in sys.stdin:
            print(line.sent, flush=True)
        server.shutdown()


if __name__ == "__main__":
    main()
