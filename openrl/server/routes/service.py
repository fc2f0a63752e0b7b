"""The server itself: health, flags for clients, capabilities, telemetry, status."""

from __future__ import annotations

import logging
from collections import Counter
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response
from openrl.server.middleware import is_loopback
from openrl.server.requests import daemon_of, read_json, settings_of
from openrl.wire import replies
from openrl.wire.messages import TelemetryBody

log = logging.getLogger("openrl.telemetry")


async def root(request: Request) -> Response:
    """For a person who opens the address in a browser."""
    return json_response(
        {
            "name": "openrl",
            "version": version("openrl"),
            "hint": "This address speaks the Tinker training API under /api/v1; set TINKER_BASE_URL to it.",
        }
    )


async def healthz(request: Request) -> Response:
    return json_response({"status": "ok"})


async def status(request: Request) -> Response:
    """What `openrl status` shows."""
    return json_response(daemon_of(request).status())


async def client_config(request: Request) -> Response:
    """The flags (2.2), which do not depend on who asks."""
    remote = not is_loopback(settings_of(request).host)
    return json_response(replies.client_config(remote=remote, custom_losses=daemon_of(request).losses.served))


async def dynamic_config(request: Request) -> Response:
    return json_response(replies.DYNAMIC_CONFIG)


async def get_server_capabilities(request: Request) -> Response:
    daemon = daemon_of(request)
    return json_response(replies.capabilities(daemon.models(), custom_losses=daemon.losses.served))


async def telemetry(request: Request) -> Response:
    """Counts events and keeps nothing: their data can hold the user's key in clear (T52)."""
    body = await read_json(request, TelemetryBody)
    kinds = Counter(event.event if isinstance(event.event, str) else "?" for event in body.events or ())
    log.debug("telemetry: %s", ", ".join(f"{count} {kind[:40]!r}" for kind, count in sorted(kinds.items())))
    return json_response({"status": "accepted"})
