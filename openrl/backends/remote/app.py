"""The HTTP app in front of one remote: what is answered here, and all else passed on.

Answered here is what must not cross: whether the caller's key is good, tokens made from it, telemetry (which can hold
that key in clear, T52), and how this server itself is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from openrl.backends.remote.body import Body
from openrl.backends.remote.calls import API, Call
from openrl.backends.remote.forward import Forwarder
from openrl.backends.remote.headers import FILES
from openrl.backends.remote.keeper import Keeper
from openrl.backends.remote.link import Away, Link
from openrl.codec import decode_json
from openrl.errors import BadRequest, SettingsError
from openrl.keys.ring import Keyring
from openrl.server.access import ANY, OPEN, Endpoint, GuardedRoute, Needs
from openrl.server.app import guarded_app
from openrl.server.credentials import Credentials
from openrl.server.errors import json_response
from openrl.server.middleware import HUB
from openrl.server.routes import auth, health, service
from openrl.server.signing import Signer
from openrl.settings import ServerSettings
from openrl.version import VERSION

_STATUS_S = 3.0  # `openrl status` waits for five seconds
_METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"]
_STATUS = Call("GET", f"{API}status", f"{API}status".encode(), ())


def create_remote_app(link: Link, keeper: Keeper, settings: ServerSettings, api_key: str, secret: bytes) -> Starlette:
    """The app over a link and a keeper that someone else starts and stops."""
    ring = Keyring()
    ring.set_machine(api_key)
    credentials = Credentials(ring, secret, required=settings.auth != "off")
    forward = Forwarder(link, keeper, settings, lambda key: ring.open(key) is not None)
    return guarded_app(_routes(link, keeper, forward), settings, credentials, Signer(secret))


def _routes(link: Link, keeper: Keeper, forward: Forwarder) -> list[GuardedRoute]:
    started_at = time.time()

    async def status(_request: Request) -> Response:
        return json_response({**await remote_status(link, started_at), "remote": link_picture(link, keeper)})

    async def readyz(_request: Request) -> Response:
        state = link.state
        reasons = [] if state.connected else [f"the remote {link.name} does not answer: {state.error}"]
        word = "not ready" if reasons else "ready"
        return json_response({"status": word, "reasons": reasons, "models": {}}, 503 if reasons else 200)

    async def adopt(_request: Request) -> Response:
        raise BadRequest(
            f"a folder of this machine cannot be taken in by the remote {link.name}.", "Send it with: openrl push"
        )

    return [
        _route("/", service.root, OPEN),
        _route(f"{API}healthz", health.healthz, OPEN),
        _route(f"{API}readyz", readyz, OPEN),
        _route(f"{API}status", status, ANY),
        _route(f"{API}auth/token", auth.token, ANY, "POST"),
        _route(f"{API}auth/apikey/me", auth.show_key, ANY),
        _route(f"{API}auth/apikey/me", auth.delete_key, ANY, "DELETE"),
        _route(f"{API}telemetry", service.telemetry, ANY, "POST"),
        _route(f"{API}checkpoints/adopt", adopt, ANY, "POST"),
        GuardedRoute(API + "{rest:path}", forward.answer, methods=_METHODS, needs=ANY),
        # Nothing there is secret, or the URL holds the permission, which the remote looks at.
        GuardedRoute(HUB + "{rest:path}", forward.answer, methods=_METHODS, needs=OPEN),
        GuardedRoute(FILES + link.name + "/signed/{rest:path}", forward.answer, methods=["GET"], needs=OPEN),
    ]


def _route(path: str, endpoint: Endpoint, needs: Needs, method: str = "GET") -> GuardedRoute:
    return GuardedRoute(path, endpoint, methods=[method], needs=needs)


def link_picture(link: Link, keeper: Keeper) -> dict[str, Any]:
    """How the connection is, ready for JSON; times in seconds since the epoch."""
    state = link.state
    return {
        "name": link.name,
        "url": link.remote.url,
        "state": "connected" if state.connected else "retrying",
        "since": round(state.since, 3),
        "last_error": state.error,
        **keeper.picture,
    }


async def remote_status(link: Link, started_at: float) -> dict[str, Any]:
    """The remote's own picture of itself, or an empty one of ours if it gives none just now."""
    own: dict[str, Any] = {
        "version": VERSION,
        "uptime_s": round(time.time() - started_at, 1),
        "models": [],
        "runs": [],
        "queue": {"train": 0, "sample": 0},
    }
    if not link.state.connected:
        return own
    try:
        async with asyncio.timeout(_STATUS_S):
            reply = await link.send(_STATUS, Body(b""), _STATUS_S)
        await reply.close()
        return own | decode_json(dict[str, Any], reply.content) if reply.status == 200 else own
    except (Away, SettingsError, BadRequest, TimeoutError):
        return own
