"""`logger="otel"`: the metrics of a run, as a server of OTLP receives them from OpenTelemetry's SDK."""

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from drivetrain import MissingExtra
from drivetrain.pipeline.telemetry.otel import OpenTelemetryLogger
from drivetrain.pipeline.telemetry.rank_times import RankTimes
from pipeline_data import BATCH, TRAIN, Toy

STEPS = TRAIN // BATCH


class Server:
    """Takes the newest value of each gauge, by name and rank."""

    def __init__(self) -> None:
        self.gauges: dict[tuple[str, int | None], float] = {}
        self.resource: dict[str, str] = {}
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taker.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.resource = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_metrics:
                assert scope.scope.name == "drivetrain"
                for metric in scope.metrics:
                    for point in metric.gauge.data_points:
                        ranks = [one.value.int_value for one in point.attributes if one.key == "rank"]
                        self.gauges[metric.name, ranks[0] if ranks else None] = point.as_double

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Server()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.address)
    yield made
    made.close()


def test_a_run(toy: Toy, tmp_path: Path, server: Server) -> None:
    from opentelemetry import metrics

    provider, threads = metrics.get_meter_provider(), threading.active_count()
    history = (
        toy.pipeline().fit(epochs=2, out=tmp_path, logger="otel", log_every=1, progress=False, checkpoints=None).history
    )
    last = history.epochs[-1]
    expected = {
        "step": 2 * STEPS, "epoch": 2, "loss": last.loss, "val_loss": last.val_loss, "top1": last.metrics["top1"],
        "step.loss": history.steps[-1].loss, "step.lr": history.steps[-1].lr,
    }  # fmt: skip
    assert {name: server.gauges[f"drivetrain.{name}", None] for name in expected} == expected
    assert server.resource["service.name"] == "drivetrain"
    assert server.resource["drivetrain.run"] == str(tmp_path)
    assert metrics.get_meter_provider() is provider
    assert threading.active_count() <= threads


def test_values_arrive_while_the_run_continues(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    logger = OpenTelemetryLogger(None, 0)
    try:
        logger.ranks = [RankTimes(0.3, 0.1, 0.0, 1e9), RankTimes(0.3, 0.3, 0.2, 2e9)]
        logger.log({"norm/layer 1": 2.0}, 7)
        for _ in range(100):
            if server.gauges.get(("drivetrain.step", None)) == 7:
                break
            threading.Event().wait(0.05)
        assert server.gauges["drivetrain.norm.layer_1", None] == 2.0
        assert server.gauges["drivetrain.rank.own_seconds", 1] == 0.3
        assert server.gauges["drivetrain.rank.memory_bytes", 0] == 1e9
        assert server.resource["service.name"] == "mine"
        assert "drivetrain.run" not in server.resource
    finally:
        logger.close()


def test_names_that_differ_only_in_characters_that_are_not_allowed(server: Server) -> None:
    logger = OpenTelemetryLogger(None, 0)
    for step in (1, 2):
        logger.log({"f1 a": step, "f1_a": 10 * step}, step)
    logger.close()
    assert (server.gauges["drivetrain.f1_a", None], server.gauges["drivetrain.f1_a_2", None]) == (2, 20)


def test_a_server_that_is_away_does_not_end_the_run(
    toy: Toy, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address.replace("127.0.0.1", "127.0.0.2"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with caplog.at_level(logging.WARNING):
        assert len(toy.pipeline().fit(epochs=1, logger="otel", progress=False).history.epochs) == 1
    assert any(record.name.startswith("opentelemetry") for record in caplog.records)


def test_without_the_extra(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(MissingExtra, match=r"Install it with: pip install 'drivetrain\[otel\]'"):
        toy.pipeline().fit(epochs=1, logger="otel", progress=False)
