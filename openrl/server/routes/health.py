"""Liveness and readiness, for whoever watches the server: no key, and nothing told beyond states."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import RETRY_AFTER_SECONDS, json_response
from openrl.server.requests import bare_daemon


async def healthz(request: Request) -> Response:
    """Alive: the event loop turns. A server that answers this need not be restarted."""
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Ready: work is taken and can be done. 503 with the reasons if not."""
    found = await bare_daemon(request).health.readiness()
    status = 503 if found.reasons else 200
    headers = {"retry-after": str(RETRY_AFTER_SECONDS[503])} if found.reasons else {}
    word = "not ready" if found.reasons else "ready"
    return json_response({"status": word, "reasons": found.reasons, "models": found.models}, status, headers)
