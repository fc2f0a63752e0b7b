"""`/metrics`: figures of the daemon and of HTTP, in Prometheus' text format or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from openrl.server.measure import HttpMetrics
from openrl.server.requests import bare_daemon


class _Read(Collector):
    """Figures that are read already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def metrics(request: Request) -> Response:
    http: HttpMetrics = request.app.state.http_metrics
    registry = CollectorRegistry()
    registry.register(_Read([*await bare_daemon(request).metrics.read(), *http.collect()]))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
