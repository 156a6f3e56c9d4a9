"""An object store that speaks S3: moto's server, behind a proxy that can be slow, hold a request back, or go away."""

import os
import re
import socket
import socketserver
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from unittest import mock

import boto3
import s3fs
from moto.moto_server.werkzeug_app import MotoRequestHandler
from moto.server import ThreadedMotoServer

SECRET = "a-very-secret-key"


@cache
def moto() -> tuple[str, int]:
    """Start moto's server, once for all stores of this process, since it takes half a second to end; return where."""
    MotoRequestHandler.disable_nagle_algorithm = True
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server.get_host_and_port()


def send_at_once(connection: socket.socket) -> None:
    """Without waiting 40 ms for the other side to confirm what was sent before."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Store:
    """A store with the bucket `bucket`."""

    def __init__(self) -> None:
        self.requests: list[str] = []  # the first line of each
        self.delay = 0.0  # seconds before each part of a request is passed on
        self.gone = False  # whether connections are closed at once
        self.hold: str | None = None  # requests whose first line matches are not passed on
        self.held = threading.Event()  # set when there is one
        host, port = moto()
        self._address = f"http://{host}:{port}"
        # Without this, a run is resumed from another test's checkpoint.
        reset = urllib.request.Request(f"{self._address}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()
        self._proxy = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._proxy.daemon_threads = True
        self._proxy.block_on_close = False
        self._thread = threading.Thread(target=self._proxy.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "a-key-id", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def names(self, prefix: str) -> list[str]:
        """The names of the objects whose names begin with `prefix`, without it."""
        client = boto3.client("s3", endpoint_url=self._address)
        found = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        return [each["Key"].removeprefix(prefix) for each in found]

    def remove(self, name: str) -> None:
        boto3.client("s3", endpoint_url=self._address).delete_object(Bucket="bucket", Key=name)

    def close(self) -> None:
        self.gone = True
        self._proxy.shutdown()
        self._proxy.server_close()
        self._thread.join()

    def _handler(self) -> type[socketserver.BaseRequestHandler]:
        store = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                if store.gone:
                    return
                with socket.create_connection(moto()) as server, suppress(OSError):
                    for connection in (self.request, server):
                        send_at_once(connection)
                    threading.Thread(target=self.answer, args=(server,), daemon=True).start()
                    while (data := self.request.recv(1 << 16)) and not store.gone:
                        line = data.partition(b"\r\n")[0].decode(errors="replace")
                        if line.endswith("HTTP/1.1"):
                            store.requests.append(line)
                        while store.hold is not None and re.search(store.hold, line) and not store.gone:
                            store.held.set()
                            time.sleep(0.01)
                        time.sleep(store.delay)
                        server.sendall(data)

            def answer(self, server: socket.socket) -> None:
                with suppress(OSError):
                    while (data := server.recv(1 << 16)) and not store.gone:
                        self.request.sendall(data)
                with suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)

        return Handler


@contextmanager
def object_store() -> Iterator[Store]:
    """A store, whose endpoint and credentials are in the environment inside the block."""
    with closing(Store()) as store, mock.patch.dict(os.environ, store.environment):
        s3fs.S3FileSystem.clear_instance_cache()
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield store
    s3fs.S3FileSystem.clear_instance_cache()
