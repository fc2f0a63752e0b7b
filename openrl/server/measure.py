"""Counts and times HTTP requests by class of route and status, for a Prometheus scraper."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrl.server.middleware import CLIENT_CLOSED

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class HttpMetrics:
    """The figures, in a registry of their own: two apps in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "openrl_http_requests", "Answered requests.", ("route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "openrl_http_request_seconds",
            "Time from a request's head to the end of its answer. Class futures waits for work: up to 30 s.",
            ("route",),
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def add(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


class Measure:
    """Measures everything that passes, refusals included."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.add(route_class(scope.get("endpoint")), status, time.perf_counter() - started)


def route_class(endpoint: Any) -> str:
    """The name of the module that answered ("training", "futures"): there are few, whatever paths are asked for.
    "refused" for what reached no route: a bad key, an unknown path."""
    module: str = getattr(endpoint, "__module__", "")
    package, _, name = module.rpartition(".")
    return name if package == "openrl.server.routes" else "refused"
