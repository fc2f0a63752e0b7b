"""The server itself: flags for clients, capabilities, telemetry, status."""

from __future__ import annotations

import logging
import time
from collections import Counter
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response
from openrl.server.middleware import is_loopback
from openrl.server.requests import bare_daemon, daemon_of, query_number, read_json, settings_of
from openrl.wire import replies
from openrl.wire.messages import TelemetryBody

log = logging.getLogger("openrl.telemetry")

_LANES_SECONDS = 60.0


async def root(request: Request) -> Response:
    """For a person who opens the address in a browser."""
    return json_response(
        {
            "name": "openrl",
            "version": version("openrl"),
            "hint": "This address speaks the Tinker training API under /api/v1; set TINKER_BASE_URL to it.",
        }
    )


async def status(request: Request) -> Response:
    """What `openrl status` shows."""
    return json_response(daemon_of(request).status())


async def device_lanes(request: Request) -> Response:
    """What each model's device did after `since` (Unix seconds; default: the last minute), as far as it is remembered.

    `spans` are in order and never overlap: `kind` is train, sample or other, from `start` to `end`, in which the device
    worked for `seconds` in so many `turns`, the longest of `longest` seconds; `rows` is the most sequences drawn, or
    runs trained, together; `sessions` says how many of the seconds each session had.
    """
    since = query_number(request, "since", time.time() - _LANES_SECONDS)
    return json_response(bare_daemon(request).overview.device_lanes(since))


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
