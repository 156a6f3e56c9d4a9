"""An HTTP server of a folder, with ranges, which can be slow, stop within an answer, fail, or ignore ranges."""

import os
import re
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer:
    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.requests: list[tuple[str, int, int]] = []  # path, first byte and length; of a whole file, -1
        self.fail = 0  # requests to answer with status 503 before the next good one
        self.cut = 0  # range requests to answer with half of their bytes
        self.delay = 0.0  # seconds before each answer
        self.ranges, self._gone = True, False  # whether it knows ranges
        self.tags = True  # whether it sends entity tags
        self.key: str | None = None  # the Authorization that it wants
        self.missing = 404  # the status for what is not there
        self._server = ThreadingHTTPServer((host, 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    @property
    def bytes(self) -> int:
        """How many bytes of ranges were asked for."""
        return sum(size for _, _, size in self.requests if size > 0)

    def close(self) -> None:
        """Stop, and answer nothing more on connections that are open."""
        self._gone = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # with it, each answer waits 40 ms for the client to confirm its headers

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_HEAD(self) -> None:
                server.answer(self, body=False)

            def do_GET(self) -> None:
                server.answer(self, body=True)

        return Handler

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        if self._gone:
            to.close_connection = True
            return
        time.sleep(self.delay)
        file = self.folder / to.path.lstrip("/")
        if self.fail > 0:
            self.fail -= 1
            to.send_error(503)
        elif self.key not in (None, to.headers.get("Authorization")):
            to.send_error(401)
        elif not file.is_file():
            to.send_error(self.missing)
        elif to.headers.get("If-Match", _tag(file)) != _tag(file):
            to.send_error(412)
        else:
            self._send(to, file, body)

    def _send(self, to: BaseHTTPRequestHandler, file: Path, body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", to.headers.get("Range", ""))
        with file.open("rb") as opened:
            whole = os.fstat(opened.fileno()).st_size
            start, end = 0, whole
            if asked and self.ranges:
                start, end = int(asked[1]), min(int(asked[2]) + 1, whole)
            data = os.pread(opened.fileno(), max(end - start, 0), start)
        to.send_response(206 if asked and self.ranges else 200)
        if self.tags:
            to.send_header("ETag", _tag(file))
        to.send_header("Content-Length", str(end - start))
        if asked and self.ranges:
            to.send_header("Content-Range", f"bytes {start}-{end - 1}/{whole}")
        to.end_headers()
        if not body:
            return
        self.requests.append((file.name, start, end - start if asked else -1))
        if asked and self.cut > 0:
            self.cut -= 1
            to.close_connection = True
            data = data[: len(data) // 2]
        to.wfile.write(data)


def _tag(file: Path) -> str:
    return f'"{file.stat().st_mtime_ns:x}"'


def serving(folder: Path) -> closing[RangeServer]:
    return closing(RangeServer(folder))
