"""Sessions: one SDK client's life."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, read_json
from openrl.types import SessionId
from openrl.wire.messages import CreateSessionBody, FinishReason, FinishSessionBody, SessionBody


async def create_session(request: Request) -> Response:
    body = await read_json(request, CreateSessionBody)
    session = await daemon_of(request).create_session(body.to_new(), request.headers.get("x-idempotency-key"))
    return json_response({"type": "create_session", "session_id": session})


async def session_heartbeat(request: Request) -> Response:
    """410 once the session is finished: the SDK's loop then ends quietly."""
    body = await read_json(request, SessionBody)
    await daemon_of(request).heartbeat(SessionId(body.session_id))
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    body = await read_json(request, FinishSessionBody)
    reason = (body.reason or FinishReason()).type
    await daemon_of(request).finish_session(SessionId(request.path_params["session"]), reason, body.detail)
    return json_response({})
