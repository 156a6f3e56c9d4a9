"""Send a run's metrics by OpenTelemetry's SDK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...common.errors import require
from ...common.version import __version__
from .rank_times import GAUGES, RankTimes

_CLOSING = 10_000  # milliseconds that the last metrics may take to be sent: a server may be unreachable


def modules() -> tuple[ModuleType, ...]:
    """Return the modules of the extra; raise MissingExtra without it."""
    names = ("sdk.metrics", "sdk.metrics.export", "sdk.resources", "exporter.otlp.proto.http.metric_exporter")
    return tuple(require(f"opentelemetry.{name}", "otel", "log to OpenTelemetry") for name in names)


class OpenTelemetryLogger:
    """Gauges `drivetrain.loss`, `drivetrain.step.loss` and so on, sent over OTLP (HTTP, protobuf) by a thread of the
    SDK, which its own variables configure: `$OTEL_EXPORTER_OTLP_ENDPOINT`, by default `http://localhost:4318`,
    `$OTEL_METRIC_EXPORT_INTERVAL`, by default 60,000 ms, `$OTEL_SERVICE_NAME`, here by default `drivetrain`. The
    resource has the run's folder (`drivetrain.run`); `ranks` have gauges with an attribute `rank`. The global provider
    is not changed. The SDK logs what it cannot send (`logging`), and the run continues."""

    def __init__(self, folder: Path | None, step: int) -> None:
        metrics, export, resources, otlp = modules()
        resource = resources.Resource.create({} if folder is None else {"drivetrain.run": str(folder)})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(resources.Resource({"service.name": "drivetrain"}))
        reader = export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())
        self._provider = metrics.MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("drivetrain", __version__)
        self._gauges: dict[str, Any] = {}  # by name
        self._taken = set[str]()  # names of gauges
        self.ranks: Sequence[RankTimes] = ()
        self.log({}, step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, "step": step}.items():
            self._set(name, value)
        for rank, times in enumerate(self.ranks):
            for name, value in zip(GAUGES, times, strict=True):
                self._set(f"rank.{name}", value, {"rank": rank})

    def _set(self, name: str, value: float, attributes: dict[str, int] | None = None) -> None:
        """Of names that differ only in characters that OpenTelemetry does not allow, later ones end in a number."""
        if name not in self._gauges:
            own = plain = f"drivetrain.{re.sub('[^a-zA-Z0-9_.-]', '_', name.replace('/', '.'))}"
            number = 2
            while own in self._taken:
                own, number = f"{plain}_{number}", number + 1
            self._taken.add(own)
            self._gauges[name] = self._meter.create_gauge(own)
        self._gauges[name].set(float(value), attributes)

    def close(self) -> None:
        self._provider.shutdown(_CLOSING)
