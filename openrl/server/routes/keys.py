"""Our own: API keys of a running server, for `openrl keys`."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from openrl.keys.key import Quotas, describe, scopes_of
from openrl.server.errors import json_response
from openrl.server.requests import bare_daemon, read_json


@dataclass(frozen=True, slots=True)
class NewKeyBody:
    """`expires_at` is in seconds since the epoch."""

    owner: str
    scopes: list[str]
    expires_at: float | None = None
    note: str = ""
    runs: int | None = None
    tokens_per_day: int | None = None
    checkpoint_bytes: int | None = None


async def list_keys(request: Request) -> Response:
    return json_response({"keys": [describe(key) for key in bare_daemon(request).keys.ring.all()]})


async def create_key(request: Request) -> Response:
    """The one time that the key itself is told."""
    body = await read_json(request, NewKeyBody)
    quotas = Quotas(body.runs, body.tokens_per_day, body.checkpoint_bytes)
    keys = bare_daemon(request).keys
    text, key = await keys.create(body.owner, scopes_of(body.scopes), quotas, body.expires_at, body.note)
    return json_response({"api_key": text, **describe(key)})


async def revoke_key(request: Request) -> Response:
    """Idempotent."""
    return json_response(describe(await bare_daemon(request).keys.revoke(request.path_params["key"])))
